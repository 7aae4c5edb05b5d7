"""What a kernel does in a layer, by its name, on either side: real engines' names and this simulator's."""

from __future__ import annotations

import re
from functools import cache

from traces.classify import COMMUNICATION, MEMORY

# The first that is found in the name decides; what fits none is known by its class alone.
ROLES = tuple(
    (role, re.compile(pattern, re.IGNORECASE))
    for role, pattern in (
        ("all_reduce", r"all_?reduce|cross_device_reduce|one_?shot|two_?shot|multimem_all_reduce"),
        ("all_gather", r"all_?gather"),
        ("reduce_scatter", r"reduce_?scatter"),
        ("all_to_all", r"all_?to_?all|dispatch|combine(?=.*(?:ep|comm))"),
        ("send", r"send_?recv|^send|^receive|ring_exchange"),
        ("norm", r"rms_?norm|layer_?norm|add_rms|rsqrt"),
        ("quantise", r"quant|cast_fp8|cast_\w*gemm|^cast"),
        ("rope", r"rope|rotary"),
        ("cache", r"reshape_and_cache|^copy_[kv]\b|store_?kv|concat_and_cache|append_?paged"),
        ("activation", r"silu|gelu|swiglu|act_and_mul|relu"),
        ("sampling", r"sampl|gumbel|argmax|penalt|bincount"),
        ("experts", r"fused_moe|grouped|group(?:ed)?_?mm|moe_gemm|^expert|^moe_(?:gate_up|down)"),
        ("route", r"moe_align|topk|gather|index_?add|permute|moe_sum|count_and_sort|index_select|scatter_"),
    )
)
# Kernels that finish what the one before began, and a cleared counter that the next product needs.
PART_OF_BEFORE = re.compile(
    r"split_?k_?reduce|reduce_splitk|lean_reduction|FwdCombine|merge_attn_states|merge_state", re.IGNORECASE
)
_TEMPLATE = re.compile(r"(?:\w*::)*(\w*(?:Fwd|Bwd|Gemm|Functor|ArgM\w+Ops|copy_kernel|index_kernel|gather)\w*)")
_WRAPPERS = {"device_kernel", "kernel", "elementwise_kernel", "vectorized_elementwise_kernel"}
_WRAPPERS |= {"unrolled_elementwise_kernel", "index_elementwise_kernel", "reduce_kernel", "GemmUniversal"}


@cache
def role_of(name: str, cls: str) -> str:
    """The role of a kernel called ``name`` of class ``cls``; "" where only the class is known.

    >>> role_of("triton_red_fused_fused_add_rms_norm_0", "norm"), role_of("add_rmsnorm_ff", "elementwise")
    ('norm', 'norm')
    >>> role_of("nvjet_sm90_tst_128x32_64x10_2x1_v_bz_TNT", "gemm")
    ''
    """
    for role, pattern in ROLES:
        if pattern.search(name):
            return role if (cls == COMMUNICATION) == (role in _COLLECTIVES) else ""
    return "norm" if cls == "norm" else ""


_COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}


def family_of(cls: str) -> str:
    """The class in the simulator's words: what is no product, attention or communication counts as elementwise."""
    return cls if cls in ("gemm", "attention", COMMUNICATION, "state_space") else "elementwise"


def precedence(cls: str) -> int:
    """Whose time a moment is where kernels run side by side: computation first, then communication, then copies."""
    return 1 if cls == COMMUNICATION else 2 if cls == MEMORY else 0


@cache
def short_name(name: str) -> str:
    """A kernel's name without its templates and arguments.

    >>> short_name("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(__nv_bf")
    'reshape_and_cache_flash_kernel'
    >>> short_name("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collective")
    'FlashAttnFwdSm90'
    """
    head = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    base = head.rsplit("::", 1)[-1].strip() or name
    if base in _WRAPPERS and (found := _TEMPLATE.search(name, len(head))):
        return found[1]
    return base
