"""Sizes to terms for a serving engine's own kernels, under the laws that its GPU's profile has of them.

Where a profile has none (kernels of engines were measured on Hopper alone) the nearest of the libraries stands in.
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
    wide_attention_base_terms,
    wide_attention_features,
)
from hardware.laws.elementwise import elementwise_base_terms
from hardware.laws.gemm import COMMON_TILES, GemmCoefficients, gemm_base_terms
from hardware.laws.routed import routed_base_terms, routed_features
from hardware.laws.sizes import DecodeSizes, GemmSizes, PrefillSizes, RoutedSizes
from hardware.laws.terms import KernelTerms

if TYPE_CHECKING:
    from hardware.profile import Profile

# Blocks of the group norms that were measured, a group of one image each.
_NORM_BLOCKS = 32
# A kernel too small to have a size, with its pause: mean over the 21 to 26 between two steps in the traces of vLLM's
# server (H100, batch 32: 91 us for 21; H200, batch 32: 97 us for 24), which the host launches one by one.
SMALL_KERNEL_S = 4.2e-6
# Kernels of the libraries that stand in for the engine's on GPUs without rows of these.
_LIKE = {
    "compiled_add_rmsnorm": "add_rmsnorm", "compiled_add_rmsnorm_fp8": "add_rmsnorm", "compiled_silu_mul": "silu_mul",
    "compiled_silu_mul_fp8": "silu_mul", "quantise_token": "cast_fp8", "compiled_quantise": "cast_fp8",
    "quantise_block": "cast_fp8", "expert_act": "silu_mul",
    "expert_sum": "topk_sum", "rms_norm": "add_rmsnorm", "gelu": "gelu",
}  # fmt: skip


def stand_in(op: str) -> str:
    """The libraries' kernel that is nearest to an engine's: a copy of as many bytes where none does the same."""
    return _LIKE.get(op, "copy")


# Sorting rows by expert, two kernels: what a chain of expert kernels takes beyond its parts and their pauses (H200, 64
# to 512 tokens: 4.6 to 7.2 us; 8,192: 25), as in traces (32 tokens: 4.4 us; 8,192: 33). Ids of experts that live
# elsewhere: 3.9 us for two kernels of traces on two and four GPUs.
SORT_S, SORT_S_PER_TOKEN, MAP_S = 4.4e-6, 3.2e-9, 3.9e-6


def unsized_terms(op: str, count: int) -> KernelTerms | None:
    """Kernels that take a launch and little else: ``count`` of them, or one over ``count`` tokens; else None.

    Of the host ``count`` microseconds.
    """
    match op:
        case "small":
            seconds = count * SMALL_KERNEL_S
        case "host":
            return KernelTerms(floor_s=1e-6 * count, blocks=1, cycles_per_block=0.0, sms_per_block=0.0)
        case "sort":
            seconds = SORT_S + SORT_S_PER_TOKEN * count
        case "map":
            seconds = MAP_S
        case _:
            return None
    return KernelTerms(floor_s=seconds, blocks=1, cycles_per_block=0.0)


def engine_elementwise_terms(
    laws: EngineLaws, gpu: GpuSpec, *, op: str, rows: int, bytes_moved: float, blocks: int | None = None
) -> KernelTerms | None:
    """A memory-bound kernel of the engine; None where no row tells its law.

    ``blocks``: of one that reads with so few that each has an SM; its rows had 32 of them.
    """
    coefficients = laws.elementwise.get(op)
    if coefficients is None:
        return None
    terms = elementwise_base_terms(
        coefficients, gpu, rows=max(rows, 1), bytes_moved=bytes_moved,
        launched_blocks=max(1, int(bytes_moved // 8192)),
    )  # fmt: skip
    learnt = laws.learnt(f"elementwise.{op}")
    x = elementwise_features(bytes_moved, rows)
    terms = replace(corrected(terms, learnt.time, learnt.energy, x), extrapolated=learnt.time.above(x))
    return terms if blocks is None else replace(terms, scale=terms.scale * _NORM_BLOCKS / min(blocks, gpu.sms))


def elementwise_features(bytes_moved: float, rows: int) -> tuple[float, ...]:
    """Correction coordinates (log2): bytes moved, and bytes a row (a block takes one)."""
    moved = max(bytes_moved, 1.0)
    return (math.log2(moved), math.log2(max(moved / max(rows, 1), 1.0)))


def scaled_base_terms(c: GemmCoefficients, gpu: GpuSpec, *, m: int, n: int, k: int) -> KernelTerms:
    """Uncorrected terms of an 8-bit product: the time of the rows that its kernel works on, the joules of its own."""
    sizes = GemmSizes(m=m, n=n, k=k, dtype="fp8_e4m3")
    own, taken = (gemm_base_terms(c, of, gpu, COMMON_TILES) for of in (sizes, replace(sizes, m=scaled_rows(m))))
    return replace(taken, core_energy_j=own.core_energy_j, hbm_energy_j=own.hbm_energy_j)


def scaled_gemm_terms(laws: EngineLaws, gpu: GpuSpec, *, m: int, n: int, k: int, scales: str) -> KernelTerms:
    """An 8-bit product whose input has a scale a token, or one for each 128 numbers of it."""
    name = "fp8_e4m3_block" if scales == "block" else "fp8_e4m3"
    learnt = laws.learnt(f"scaled.{name}")
    terms = scaled_base_terms(laws.scaled[name], gpu, m=m, n=n, k=k)
    return corrected(terms, learnt.time, learnt.energy, scaled_features(m, n, k))


def scaled_rows(m: int) -> int:
    """Rows that vLLM's CUTLASS products work on: kernels of 64 and of 128 rows, and pairs of tiles of 128 beyond.

    >>> [scaled_rows(m) for m in (1, 64, 65, 192, 257)]
    [64, 64, 128, 256, 512]
    """
    return 64 if m <= 64 else 128 if m <= 128 else -(-m // 256) * 256


def scaled_features(m: int, n: int, k: int) -> tuple[float, ...]:
    """Correction coordinates (log2): the sides, m up to the largest that was measured."""
    return (math.log2(min(m, 8192)), math.log2(n), math.log2(k))


def engine_decode_terms(laws: EngineLaws, gpu: GpuSpec, sizes: DecodeSizes, kv_dtype: str) -> KernelTerms | None:
    """One query token a sequence over a paged cache; None where no row tells its law."""
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
    """A convolution with its copies and bias; None where no row tells the law of its type."""
    coefficients = laws.convolution.get(sizes.element)
    if coefficients is None:
        return None
    learnt, x = laws.learnt(f"convolution.{sizes.element}"), convolution_features(sizes)
    terms = convolution_base_terms(coefficients, gpu, sizes)
    return replace(corrected(terms, learnt.time, learnt.energy, x), extrapolated=learnt.time.above(x))


def wide_attention_terms(laws: EngineLaws, gpu: GpuSpec, sizes: PrefillSizes, element: str) -> KernelTerms | None:
    """Attention over heads wider than 256; None where no row tells the law of its type."""
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

    Waiting power and SMs are those of the library's. Joules come from the watts seen while it ran in a loop.
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
