"""Experts of a serving engine: one product over rows sorted by expert (Triton's ``fused_moe``), in padded tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.residency import hbm_share
from hardware.laws.sizes import RoutedSizes
from hardware.laws.terms import KernelTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedCoefficients:
    """Fitted on rows of one type of weights; rates at the maximum clock.

    A block is one tile. ``tile_cycles`` it takes before and after its loop, ``tile_cycles_per_k`` for each step of k of
    a tile of 128 x 128, smaller ones in proportion; blocks that share an SM hide part of each other's latency, so that
    rounds are not whole. ``hbm_bytes_per_s_per_sm`` is the stream of an SM while few tiles run, ``l2_bytes_per_s`` what
    tiles read again. Energies as in every law.
    """

    floor_s: float
    tile_cycles: float
    tile_cycles_per_k: float
    hbm_bytes_per_s: float
    hbm_bytes_per_s_per_sm: float
    l2_bytes_per_s: float
    sharpness: float
    flop_energy_j: float
    padded_flop_energy_j: float
    core_byte_energy_j: float
    hbm_byte_energy_j: float
    sm_power_w: float


@lru_cache(maxsize=65536)
def routed_base_terms(coefficients: RoutedCoefficients, sizes: RoutedSizes, gpu: GpuSpec) -> KernelTerms:
    """Terms before correction: weights of the experts hit come from HBM once, activations where they leave L2."""
    c = coefficients
    rows, n, k, element_bytes = sizes.rows, sizes.n, sizes.k, sizes.element_bytes
    block_m, block_n = sizes.block_m, sizes.block_n
    blocks = max(1, round(sizes.tiles * math.ceil(n / block_n)))
    weights = float(element_bytes * sizes.distinct * n * k)
    activations = rows * (element_bytes * k + 2.0 * n)
    hbm_bytes = weights + hbm_share(activations, gpu.l2_bytes) * activations
    again = float(element_bytes * blocks * (block_m + block_n) * k)
    flops, padded = 2.0 * rows * n * k, 2.0 * blocks * block_m * block_n * k
    cycles = c.tile_cycles + c.tile_cycles_per_k * k * (block_m / 128.0) * (block_n / 128.0)
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=blocks,
        cycles_per_block=cycles,
        quantised=False,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=c.hbm_bytes_per_s,
        hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm,
        l2_bytes=again,
        l2_bytes_per_cycle=c.l2_bytes_per_s / gpu.max_clock_hz,
        sharpness=c.sharpness,
        core_energy_j=c.flop_energy_j * flops + c.padded_flop_energy_j * padded + c.core_byte_energy_j * hbm_bytes,
        hbm_energy_j=c.hbm_byte_energy_j * hbm_bytes,
        sm_power_w=c.sm_power_w,
    )


def routed_features(sizes: RoutedSizes) -> tuple[float, ...]:
    """Correction coordinates (log2): experts hit, rows of each, and the product's sides."""
    hit = max(sizes.distinct, 1.0)
    return (math.log2(hit), math.log2(max(sizes.rows / hit, 1.0)), math.log2(sizes.n), math.log2(sizes.k))
