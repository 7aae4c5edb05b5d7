"""Dense GEMM: thread-block tiles, waves and split-K, with a bounded correction learnt from measured shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hardware.errors import HardwareError
from hardware.laws.residency import hbm_share
from hardware.laws.terms import KernelTerms

# Tile shapes (rows of n, columns of m) and K splits that cuBLAS's Hopper kernels use; kernel names in our own
# profiler traces show 64..512 by 8..256.
_TILE_N = np.array([64, 128, 192, 256, 320, 384])
_TILE_M = np.array([8, 16, 32, 64, 128, 192, 256])
_SPLITS = np.array([1, 2, 3, 4, 6, 8])
_A, _B, _S = (grid.ravel() for grid in np.meshgrid(_TILE_N, _TILE_M, _SPLITS, indexing="ij"))
# Registers bound a tile's accumulator: 128 x 256 and 256 x 128 are the largest that occur, narrow ones longer.
_FITS = _A * _B <= 320 * 128
_A, _B, _S = _A[_FITS], _B[_FITS], _S[_FITS]
# A library chooses a kernel without knowing the clock: shares of the maximum at which the choice must not lose much.
_CLOCKS = (1.0, 0.7, 0.45)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCoefficients:
    """Fitted on gemm rows (one dtype); rates at the maximum clock f0.

    ``efficiency`` is the share of peak tensor rate in the main loop; ``epilogue_cycles`` per tile;
    ``hbm_bytes_per_s`` and ``..._per_sm`` the streaming rates of the GPU and of one SM.
    """

    efficiency: float
    epilogue_cycles: float
    hbm_bytes_per_s: float
    hbm_bytes_per_s_per_sm: float
    l2_bytes_per_s: float
    floor_s: float
    split_reduce_s: float
    sharpness: float
    flop_energy_j: float
    padded_flop_energy_j: float
    sm_power_w: float
    hbm_byte_energy_j: float


@lru_cache(maxsize=65536)
def gemm_base_terms(
    coefficients: GemmCoefficients,
    *,
    m: int,
    n: int,
    k: int,
    element_bytes: float,
    out_bytes: int,
    flops_per_cycle_per_sm: float,
    sms: int,
    max_clock_hz: float,
    l2_bytes: float,
) -> KernelTerms:
    """Terms of ``(m x k) . (k x n)`` before correction: the tile and split that lose least at any clock, on all SMs.

    Time = floor + reduce + (compute^p + memory^p)^(1/p); compute = waves (2 a b (K/s) / (rate eta) +
    epilogue) / f; memory the slower of HBM (with the last wave's imbalance) and L2 (both tiles re-read).
    Operands that do not stay in L2 come from HBM again in every wave that needs them. Activations stay there from one
    kernel to the next with all operands (as elementwise buffers do); weights come from HBM.
    """
    c = coefficients
    a, b, s = _A, _B, _S
    k_split = k / s
    tiles = np.ceil(n / a) * np.ceil(m / b) * s
    rounds = np.ceil(tiles / sms)
    cycles = 2 * a * b * k_split / (flops_per_cycle_per_sm * c.efficiency) + c.epilogue_cycles
    imbalance = np.where(tiles >= sms, rounds * sms / tiles, 1.0)
    weights, activations = float(element_bytes * n * k), float(element_bytes * m * k + out_bytes * m * n)
    streamed = hbm_share(weights + activations, l2_bytes)
    hbm_bytes = weights + streamed * activations
    hbm_rate = np.minimum(c.hbm_bytes_per_s, np.minimum(tiles, sms) * c.hbm_bytes_per_s_per_sm) / imbalance
    hbm_s = hbm_bytes / hbm_rate
    moved_in_l2 = element_bytes * tiles * (a + b) * k_split
    reduce_s = np.where(s > 1, c.split_reduce_s + 4.0 * out_bytes * m * n * s / c.l2_bytes_per_s, 0.0)
    lost = np.zeros(len(a))
    for share in _CLOCKS:
        compute_s = rounds * cycles / (share * max_clock_hz)
        memory_s = np.maximum(hbm_s, moved_in_l2 / (share * c.l2_bytes_per_s))
        longer, shorter = np.maximum(compute_s, memory_s), np.minimum(compute_s, memory_s)
        taken_s = longer * (1 + (shorter / longer) ** c.sharpness) ** (1 / c.sharpness) + reduce_s
        lost = np.maximum(lost, taken_s / taken_s.min())
    best = int(np.argmin(lost))
    padded_flops = 2.0 * tiles[best] * a[best] * b[best] * k_split[best]
    flops = 2.0 * m * n * k
    read = element_bytes * k * _rows_read(m, n, int(a[best]), int(b[best]), sms, k * element_bytes, l2_bytes)
    moved = out_bytes * m * n + read - (1.0 - streamed) * activations
    return KernelTerms(
        floor_s=c.floor_s + float(reduce_s[best]),
        blocks=int(tiles[best]),
        cycles_per_block=float(cycles[best]),
        hbm_bytes=moved,
        hbm_bytes_per_s=float(c.hbm_bytes_per_s / imbalance[best]),
        hbm_bytes_per_s_per_sm=float(c.hbm_bytes_per_s_per_sm / imbalance[best]),
        l2_bytes=float(moved_in_l2[best]),
        l2_bytes_per_cycle=c.l2_bytes_per_s / max_clock_hz,
        sharpness=c.sharpness,
        core_energy_j=c.flop_energy_j * flops + c.padded_flop_energy_j * padded_flops,
        hbm_energy_j=c.hbm_byte_energy_j * moved,
        sm_power_w=c.sm_power_w,
    )


def _rows_read(m: int, n: int, a: int, b: int, sms: int, row_bytes: float, l2_bytes: float) -> float:
    """Rows of both operands (``k`` long) that come from HBM.

    A wave of tiles covers ``across`` by ``down`` of them, as square as it can be, and reads each row of its
    panels once. The next wave finds of the smaller operand in L2 what stays there and reads the rest again.
    """
    down = min(max(round((sms * a / b) ** 0.5), 1), -(-m // b))
    across = min(max(sms // down, 1), -(-n // a))
    rounds_down, rounds_across = -(-m // (b * down)), -(-n // (a * across))
    # Panels of n stay while the waves go down m, or the other way round, whichever reads less.
    again = float(min(n + m * rounds_across, m + n * rounds_down))
    return m + n + hbm_share(min(m, n) * row_bytes, l2_bytes) * (again - (m + n))


# How far apart 8- and 16-bit kernels of one shape lie, in length scales: near, since the library picks tiles
# for both by the same rules. Chosen by leaving one (n, k) of both out on the gemm rows alone.
_EIGHT_BIT = 0.5


def gemm_features(m: int, n: int, k: int, dtype: str) -> tuple[float, float, float, float]:
    """Where a shape lies for the correction: log2 sizes, m up to the largest that was measured, and the type."""
    eight_bit = dtype.startswith("fp8") or dtype == "int8"
    return (float(np.log2(min(m, 8192))), float(np.log2(n)), float(np.log2(k)), _EIGHT_BIT * eight_bit)


def wave_part(terms: KernelTerms, *, index: int, parts: int, sms: float) -> KernelTerms:
    """Share ``index`` of ``parts`` of a product's waves of tiles on ``sms`` SMs: whole waves, as even as they go.

    Parts run back to back as one kernel does: the first has its launch, the last its tail, and their blocks,
    bytes and joules add up to the whole. Groups of waves that signal are FlashOverlap's (arXiv 2504.19519).
    """
    waves = math.ceil(terms.blocks * terms.sms_per_block / sms - 1e-9)
    if parts > waves:
        raise HardwareError(
            f"overlap_chunks = {parts}: a product of {waves} waves of tiles has no more to signal: use at most {waves}"
        )
    per_wave = int(sms / terms.sms_per_block)
    first, last = (min(terms.blocks, per_wave * (waves * edge // parts)) for edge in (index, index + 1))
    if index == parts - 1:
        last = terms.blocks
    share = (last - first) / terms.blocks
    return replace(
        terms,
        floor_s=terms.floor_s if index == 0 else 0.0,
        tail_cycles=terms.tail_cycles if index == parts - 1 else 0.0,
        blocks=last - first,
        hbm_bytes=terms.hbm_bytes * share,
        l2_bytes=terms.l2_bytes * share,
        core_energy_j=terms.core_energy_j * share,
        hbm_energy_j=terms.hbm_energy_j * share,
    )
