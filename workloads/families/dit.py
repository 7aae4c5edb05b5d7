"""Diffusion transformers: the blocks of one denoising branch, alone or with tokens spread over ranks.

Ranks share tokens outside attention. Inside, ``ulysses`` of them trade tokens for heads by all-to-alls, and groups of
those pass keys and values round a ring (the two together: arXiv 2405.07719).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from workloads.diffusion import DitSpec
from workloads.errors import WorkloadError
from workloads.families.ring import Ring, ring_kernels
from workloads.kernel_names import Elementwise
from workloads.kernels import elementwise_kernel, exchange_kernel, permute_kernel, product_kernel
from workloads.layer_passes.rounds import in_rounds
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import Exchange, KeyRounds, Permute, Placed, RankSplit, elements_of
from workloads.ops import attention
from workloads.passes import Passes
from workloads.program import Kernel, in_turn
from workloads.work import AttentionWork, DType

ELEMENT = DType.BF16.bytes
MOST_NAMED = 16  # ranks that a refusal names


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """``batch`` copies of one branch over ``tokens`` latent tokens, as one rank of its groups sees it.

    ``unfused``: the kernels of an implementation that fuses nothing, ``flash_2`` whether it attends by
    FlashAttention 2; None: the reference's fused kernels.
    """

    spec: DitSpec
    tokens: int
    batch: int = 1
    ulysses: tuple[int, ...] = (0,)
    ring: tuple[int, ...] = (0,)
    unfused: Passes | None = None
    flash_2: bool = False

    def attending(self, kernel: Kernel) -> Kernel:
        """``kernel``, an attention kernel, as this implementation runs it."""
        masked = self.spec.masks_text and not self.flash_2  # FlashAttention 2 takes no mask
        if self.unfused is None or not (self.flash_2 or masked):
            return kernel
        assert isinstance(kernel.work, AttentionWork)
        return replace(kernel, work=replace(kernel.work, engine=self.unfused.id, masked=masked))

    @property
    def ranks(self) -> int:
        """Ranks that share the tokens."""
        return len(self.ulysses) * len(self.ring)

    @property
    def split(self) -> RankSplit:
        """How attention meets the tokens of other ranks."""
        ways: dict[Literal["heads", "gathered"], tuple[int, ...]] = {"heads": self.ulysses, "gathered": self.ring}
        return RankSplit(context=tuple(way for way, ranks in ways.items() if len(ranks) > 1))

    @property
    def own(self) -> int:
        """Rows of latent tokens on a rank."""
        return self.batch * self.tokens // self.ranks

    @property
    def own_text(self) -> int:
        """Rows of text on a rank, where it attends beside the image."""
        return self.batch * self.spec.joint_text // self.ranks


def check_branch(branch: Branch) -> None:
    """Refuse degrees that do not divide tokens or heads."""
    spec, ulysses, ring = branch.spec, len(branch.ulysses), len(branch.ring)
    shared = math.gcd(branch.tokens, spec.joint_text)  # what all ranks together must divide
    if not spec.heads % ulysses and branch.tokens >= 1 and not shared % branch.ranks:
        return
    text = f" and {spec.joint_text} text tokens" if spec.joint_text else ""
    one_ring = ulysses == 1 < ring
    fits = [n for n in range(1, MOST_NAMED + 1) if not shared % (n if one_ring else n * ring)]
    fitting = ", ".join(str(n) for n in fits if one_ring or not spec.heads % n)
    raise WorkloadError(
        f"ulysses = {ulysses}, ring = {ring}: ulysses must divide the {spec.heads} heads of {spec.id}, both together "
        f"the {branch.tokens} tokens{text}: "
        + (f"use {'ring' if one_ring else 'ulysses'} = {fitting}" if fitting else "use another ring")
    )


def cross_block(branch: Branch) -> list[Kernel]:
    """Self-attention, attention to the text, feed-forward.

    Add + RMSNorm, QKV GEMM, RoPE on queries and keys, (with ranks: sort by rank, all-to-all,) attention over all
    tokens, (all-to-all, sort back,) output GEMM; add + RMSNorm, cross-attention to the text (query GEMM, key/value
    GEMM, attention, output GEMM); add + RMSNorm, GEMM, GELU, GEMM.
    """
    spec, own, width = branch.spec, branch.own, branch.spec.d_model
    return in_turn(
        [
            _norm("add_rmsnorm_attn", own, width),
            product_kernel("qkv_gemm", own, 3 * width, width),
            _rope(own, spec),
        ],
        joint_attention(branch),
        [
            product_kernel("o_gemm", own, width, width),
            _norm("add_rmsnorm_text", own, width),
            product_kernel("q_text_gemm", own, width, width),
            product_kernel("kv_text_gemm", branch.batch * spec.text_tokens, 2 * width, width),
            flash("cross_attention", own // branch.batch, spec.text_tokens, spec.heads, spec.head_dim, branch.batch),
            product_kernel("o_text_gemm", own, width, width),
            _norm("add_rmsnorm_ff", own, width),
            *_feed(own, spec),
        ],
    )


def double_block(branch: Branch) -> list[Kernel]:
    """Image and text with weights of their own, attending together (FLUX.1, HunyuanVideo)."""
    spec, width = branch.spec, branch.spec.d_model
    before, after = [], []
    for name, rows in (("image", branch.own), ("text", branch.own_text)):
        before += [
            product_kernel(f"modulation_{name}_gemm", branch.batch, 6 * width, width),
            _norm(f"add_norm_{name}", rows, width),
            product_kernel(f"qkv_{name}_gemm", rows, 3 * width, width),
            _rope(rows, spec),
        ]
        after += [
            product_kernel(f"o_{name}_gemm", rows, width, width),
            _norm(f"add_norm_ff_{name}", rows, width),
            *_feed(rows, spec),
        ]
    return in_turn(before, joint_attention(branch), after)


def single_block(branch: Branch) -> list[Kernel]:
    """Attention and feed-forward side by side on image and text, one GEMM into both and one out of both."""
    spec, width = branch.spec, branch.spec.d_model
    rows = branch.own + branch.own_text
    return in_turn(
        [
            product_kernel("modulation_gemm", branch.batch, 3 * width, width),
            _norm("add_norm", rows, width),
            product_kernel("qkv_up_gemm", rows, 3 * width + spec.d_ff, width),
            _rope(rows, spec),
        ],
        joint_attention(branch),
        [
            elementwise_kernel("gelu", Elementwise.GELU, rows, spec.d_ff, 2 * rows * spec.d_ff * ELEMENT),
            product_kernel("o_down_gemm", rows, width, width + spec.d_ff),
        ],
    )


def joint_attention(branch: Branch) -> list[Kernel]:
    """Attention over all tokens of the branch, of which ranks hold some: the shard pass says what they exchange.

    ``after`` counts from the first kernel.
    """
    nodes = in_rounds(shard((attention(),), branch.split, returns=False))
    made = in_turn(*(_attention_part(node, branch) for node in nodes))
    return [branch.attending(one) if isinstance(one.work, AttentionWork) else one for one in made]


def _attention_part(node: Placed, branch: Branch) -> list[Kernel]:
    spec, rows = branch.spec, branch.own + branch.own_text
    heads, tokens = spec.heads // len(branch.ulysses), branch.tokens + spec.joint_text
    own = {"b": 1, "s": rows, "K": spec.heads, "r": 1, "h": spec.head_dim}
    match node:
        case Permute():
            return [permute_kernel(node.name, rows, elements_of(node.axes, own) // rows)]
        case Exchange():
            return [exchange_kernel(node.name, branch.ulysses, node.elements(own), node.op)]
        case KeyRounds():
            ring = Ring(
                layout="contiguous",
                ranks=branch.ring,
                block=tokens // len(branch.ring),
                q_heads=heads,
                kv_heads=heads,
                head_dim=spec.head_dim,
                batch=branch.batch,
                causal=False,
                merges=True,
                gather=node.gather,
            )
            return ring_kernels(ring, 0, first=(-1,))
    return [flash(node.name, tokens, tokens, heads, spec.head_dim, branch.batch)]


def _feed(rows: int, spec: DitSpec) -> list[Kernel]:
    return [
        product_kernel("up_gemm", rows, spec.d_ff, spec.d_model),
        elementwise_kernel("gelu", Elementwise.GELU, rows, spec.d_ff, 2 * rows * spec.d_ff * ELEMENT),
        product_kernel("down_gemm", rows, spec.d_model, spec.d_ff),
    ]


def _rope(rows: int, spec: DitSpec) -> Kernel:
    width = 2 * spec.d_model
    moved = 2 * rows * width * ELEMENT
    return elementwise_kernel("rope", Elementwise.ROPE, rows, width, moved, blocks=rows * 2 * spec.heads)


def _norm(name: str, rows: int, width: int) -> Kernel:
    return elementwise_kernel(name, Elementwise.ADD_RMSNORM, rows, width, 4 * rows * width * ELEMENT)


def flash(name: str, queries: int, keys: int, heads: int, head_dim: int, batch: int = 1) -> Kernel:
    """Attention without a mask."""
    work = AttentionWork(
        batch=batch, q_len=queries, kv_len=keys, q_heads=heads, kv_heads=heads, head_dim=head_dim, causal=False
    )
    moved = ELEMENT * batch * heads * head_dim * 2 * (queries + keys)
    return Kernel(name=name, work=work, flops=work.flops, bytes_moved=float(moved))
