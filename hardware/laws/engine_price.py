"""Sizes to terms for a serving engine's own kernels, under the laws that its GPU's profile has of them.

Where a profile has none (kernels of engines were measured on Hopper only), the nearest law of the libraries is used.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from hardware.engine_laws import EngineLaws
from hardware.gpu import GpuSpec
from hardware.laws.adapters import AdapterSizes, adapter_base_terms, adapter_features
from hardware.laws.attention import decode_base_terms, decode_features, prefill_base_terms, prefill_features
from hardware.laws.correction import corrected
from hardware.laws.decoder import (
    ConvolutionSizes,
    WideAttentionSizes,
    convolution_base_terms,
    convolution_features,
    group_norm_base_terms,
    group_norm_features,
    reordered_bytes,
    upsampled_share,
    wide_attention_base_terms,
    wide_attention_features,
)
from hardware.laws.elementwise import ElementwiseCoefficients, blocks_for, elementwise_base_terms
from hardware.laws.routed import routed_base_terms, routed_features
from hardware.laws.scaled import scaled_base_terms, scaled_features
from hardware.laws.sizes import DecodeSizes, MovedSizes, PrefillSizes, RoutedSizes
from hardware.laws.terms import KernelTerms

if TYPE_CHECKING:
    from hardware.profile import Profile

# A small kernel that the host launches by itself, with its gap: mean over those between two steps in the traces of
# vLLM's server on H100 and H200 (docs/laws.md, "Small kernels of a server").
SMALL_KERNEL_S = 4.2e-6
# The kernel that has blocks of its own for each image, and a law of its own; that which reads lines again for each
# channel.
GROUP_NORM, REORDERING, UPSAMPLING = "image_group_norm", "image_swap_copy", "image_upsample_video"
# Kernels of the libraries that stand in for the engine's on GPUs without rows of these.
_LIKE = {
    "compiled_add_rmsnorm": "add_rmsnorm", "compiled_add_rmsnorm_fp8": "add_rmsnorm", "compiled_silu_mul": "silu_mul",
    "compiled_silu_mul_fp8": "silu_mul", "quantise_token": "cast_fp8", "compiled_quantise": "cast_fp8",
    "quantise_block": "cast_fp8", "expert_act": "silu_mul",
    "expert_sum": "topk_sum", "rms_norm": "add_rmsnorm", "gelu": "gelu",
}  # fmt: skip


def stand_in(op: str) -> str:
    """The libraries' kernel nearest to an engine's; a copy of as many bytes where there is none."""
    return _LIKE.get(op, "copy")


# Sorting rows by expert, two kernels; ids of experts on other ranks, two kernels: rows of expert kernels in a chain and
# traces (docs/laws.md, "Small kernels of a server").
SORT_S, SORT_S_PER_TOKEN, MAP_S = 4.4e-6, 3.2e-9, 3.9e-6


# One kernel more in a graph's loop: rows of silu_mul of one token, 1,792 to 14,336 wide (1.16 to 1.20 us;
# records/h200-sxm-141gb/vllm/kernels.jsonl).
LAUNCH_S = 1.18e-6


def unsized_terms(op: str, count: int) -> KernelTerms | None:
    """Kernels of a launch's time only: ``count`` of them, or one over ``count`` tokens; None for other kernels.

    Of the host ``count`` microseconds.
    """
    match op:
        case "small":
            seconds = count * SMALL_KERNEL_S
        case "host":
            return KernelTerms(floor_s=1e-6 * count, blocks=1, cycles_per_block=0.0, sms_per_block=0.0)
        case "launch":
            seconds = count * LAUNCH_S
        case "sort":
            seconds = SORT_S + SORT_S_PER_TOKEN * count
        case "map":
            seconds = MAP_S
        case _:
            return None
    return KernelTerms(floor_s=seconds, blocks=1, cycles_per_block=0.0)


def moved_terms(laws: EngineLaws, gpu: GpuSpec, sizes: MovedSizes) -> KernelTerms | None:
    """A memory-bound kernel of the engine; None for one without rows."""
    if sizes.op == GROUP_NORM and laws.norm is not None:
        learnt, x = laws.learnt("norm"), group_norm_features(sizes)
        terms = group_norm_base_terms(laws.norm, gpu, sizes)
        return replace(corrected(terms, learnt.time, learnt.energy, x), extrapolated=learnt.time.above(x))
    coefficients = laws.elementwise.get(sizes.op)
    if coefficients is None:
        return None
    learnt, x = laws.learnt(f"elementwise.{sizes.op}"), moved_features(sizes)
    terms = moved_base_terms(coefficients, gpu, sizes)
    return replace(corrected(terms, learnt.time, learnt.energy, x), extrapolated=learnt.time.above(x))


def moved_base_terms(c: ElementwiseCoefficients, gpu: GpuSpec, sizes: MovedSizes) -> KernelTerms:
    """Uncorrected terms of a memory-bound kernel of an engine."""
    moved = sizes.bytes_moved
    if sizes.op == REORDERING:
        moved = reordered_bytes(moved, pixels=sizes.rows // sizes.images, l2_bytes=gpu.l2_bytes)
    if sizes.op == UPSAMPLING:
        moved *= upsampled_share(sizes.images)
    return elementwise_base_terms(c, gpu, rows=max(sizes.rows, 1), bytes_moved=moved, launched_blocks=blocks_for(moved))


def moved_features(sizes: MovedSizes) -> tuple[float, ...]:
    """Correction coordinates (log2): bytes moved for an image, and bytes a row (a block takes one)."""
    moved = max(sizes.bytes_moved, 1.0)
    return (math.log2(max(moved / sizes.images, 1.0)), math.log2(max(moved / max(sizes.rows, 1), 1.0)))


def scaled_gemm_terms(laws: EngineLaws, gpu: GpuSpec, *, m: int, n: int, k: int, scales: str) -> KernelTerms:
    """An 8-bit product whose input has a scale a token, or one for each 128 numbers of it."""
    name = "fp8_e4m3_block" if scales == "block" else "fp8_e4m3"
    learnt = laws.learnt(f"scaled.{name}")
    terms = scaled_base_terms(laws.scaled[name], gpu, m=m, n=n, k=k, scales=scales)
    return corrected(terms, learnt.time, learnt.energy, scaled_features(m, n, k, scales))


def engine_decode_terms(laws: EngineLaws, gpu: GpuSpec, sizes: DecodeSizes, kv_dtype: str) -> KernelTerms | None:
    """One query token a sequence over a paged cache; None without rows."""
    coefficients = laws.decode.get(kv_dtype)
    if coefficients is None:
        return None
    learnt = laws.learnt(f"decode.{kv_dtype}")
    terms = decode_base_terms(coefficients, sizes, gpu.sms)
    return corrected(terms, learnt.time, learnt.energy, decode_features(sizes))


def engine_prefill_terms(
    laws: EngineLaws, profile: Profile, gpu: GpuSpec, sizes: PrefillSizes, *, masked: bool
) -> KernelTerms | None:
    """The engine's attention of new tokens; ``masked``: under a mask of padded keys (None: no row tells its law)."""
    coefficients = laws.masked if masked else laws.prefill
    if coefficients is None:
        return None
    learnt = laws.learnt("masked" if masked else "prefill")
    terms = prefill_base_terms(
        coefficients,
        sizes,
        gpu,
        hbm_bytes_per_s=profile.gemm["bf16"].hbm_bytes_per_s,
        hbm_byte_energy_j=laws.decode["bf16"].hbm_byte_energy_j,
    )
    return corrected(terms, learnt.time, learnt.energy, prefill_features(sizes))


def convolution_terms(laws: EngineLaws, gpu: GpuSpec, sizes: ConvolutionSizes) -> KernelTerms | None:
    """A convolution with its copies and bias; None for a type without rows."""
    coefficients = laws.convolution.get(sizes.element)
    if coefficients is None:
        return None
    learnt, x = laws.learnt(f"convolution.{sizes.element}"), convolution_features(sizes)
    terms = convolution_base_terms(coefficients, gpu, sizes)
    return replace(corrected(terms, learnt.time, learnt.energy, x), extrapolated=learnt.time.above(x))


def wide_attention_terms(laws: EngineLaws, gpu: GpuSpec, sizes: PrefillSizes, element: str) -> KernelTerms | None:
    """Attention over heads wider than 256; None for a type without rows."""
    coefficients = laws.wide.get(element)
    if coefficients is None:
        return None
    learnt = laws.learnt(f"wide.{element}")
    wide = WideAttentionSizes(
        batch=sizes.batch * sizes.q_heads,
        tokens=sizes.q_len,
        keys=sizes.kv_len,
        head_dim=sizes.head_dim,
        element=element,
    )
    terms = wide_attention_base_terms(coefficients, gpu, wide)
    return corrected(terms, learnt.time, learnt.energy, wide_attention_features(sizes.q_len, sizes.kv_len))


def routed_gemm_terms(laws: EngineLaws, gpu: GpuSpec, sizes: RoutedSizes) -> KernelTerms:
    """One product over rows sorted by expert, in the tiles that the engine chooses for it on this GPU."""
    learnt = laws.learnt(f"routed.{sizes.weight_type}")
    terms = routed_base_terms(laws.routed[sizes.weight_type], sizes, gpu)
    return corrected(terms, learnt.time, learnt.energy, routed_features(sizes))


def adapter_terms(laws: EngineLaws, gpu: GpuSpec, sizes: AdapterSizes) -> KernelTerms:
    """One half of low-rank adapters; extrapolated where its own rows do not reach, or are another GPU's."""
    coefficients, learnt, x = laws.adapters[sizes.law], laws.learnt(f"adapters.{sizes.law}"), adapter_features(sizes)
    terms = corrected(adapter_base_terms(coefficients, sizes, gpu), learnt.time, learnt.energy, x)
    return replace(terms, extrapolated=terms.extrapolated or coefficients.carried)


@lru_cache(maxsize=4096)
def tile_of(engine: str, gpu: str, weights: str, experts: int, inner: int, tokens: int) -> tuple[int, int]:
    """Rows and columns of a tile of the engine's experts.

    >>> tile_of("vllm", "h100-sxm-80gb", "bf16", 128, 768, 256)
    (64, 128)
    """
    table = _tiles(engine)
    for tuned in table.get("tuned", ()):
        if (tuned["gpu"], tuned["weights"], tuned["experts"], tuned["inner"]) == (gpu, weights, experts, inner):
            _, block_m, block_n = min(tuned["tiles"], key=lambda entry: abs(entry[0] - tokens))
            return block_m, block_n
    return next((block_m, block_n) for most, block_m, block_n in table["default"][weights] if tokens <= most)


@lru_cache(maxsize=8)
def _tiles(engine: str) -> dict[str, Any]:
    return tomllib.loads((files("hardware") / "data" / "engines" / engine / "tiles.toml").read_text(encoding="utf-8"))


def engine_all_reduce_terms(
    laws: EngineLaws, library: KernelTerms, *, world: int, buffer_bytes: int
) -> KernelTerms | None:
    """The engine's own all-reduce between the sizes measured; None for a number of ranks without rows.

    Waiting power and SMs are those of the library's. Energy is from the power measured in a loop.
    """
    rows = [row for row in laws.all_reduce if row.world == world]
    if not rows:
        return None
    sizes = [row.buffer_bytes for row in rows]
    at = min(max(buffer_bytes, sizes[0]), sizes[-1])
    seconds = float(np.exp(np.interp(math.log(at), np.log(sizes), np.log([row.seconds for row in rows]))))
    watts = float(np.interp(math.log(at), np.log(sizes), [row.power_w for row in rows]))
    return replace(
        library,
        floor_s=seconds,
        moving_cycles=0.0,
        scale=1.0,
        core_energy_j=0.0,
        hbm_energy_j=0.0,
        link_energy_j=watts * seconds,
        sm_power_w=0.0,
        extrapolated=buffer_bytes > sizes[-1],
    )
