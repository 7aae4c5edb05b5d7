"""Grouped GEMM: one kernel over the experts that were hit, with tiles of 128 rows padded per expert."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.laws.terms import KernelTerms

TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCoefficients:
    """Floor per call and per expert of the table; cycles of a tile (fixed and per k); streaming rates; energies."""

    floor_s: float
    expert_s: float
    tile_cycles: float
    tile_cycles_per_k: float
    hbm_bytes_per_s: float
    hbm_bytes_per_s_per_sm: float
    sharpness: float
    flop_energy_j: float
    padded_flop_energy_j: float
    sm_power_w: float
    hbm_byte_energy_j: float


@lru_cache(maxsize=65536)
def grouped_base_terms(
    coefficients: GroupedCoefficients,
    *,
    experts: int,
    rows: int,
    distinct: int,
    tiles128: int,
    n: int,
    k: int,
    element_bytes: int,
    l2_bytes: float,
) -> KernelTerms:
    """Terms of one grouped GEMM before correction. Weights of the experts hit come from HBM, activations too
    once they exceed the cache."""
    c = coefficients
    tiles = max(1, tiles128 * math.ceil(n / TILE))
    weights = float(element_bytes * distinct * n * k)
    activations = float(element_bytes * rows * (n + k))
    hbm_bytes = weights + (activations if activations > 0.8 * l2_bytes else 0.0)
    padded = 2.0 * tiles * TILE * TILE * k
    return KernelTerms(
        floor_s=c.floor_s + c.expert_s * experts,
        blocks=tiles,
        cycles_per_block=c.tile_cycles + c.tile_cycles_per_k * k,
        quantised=False,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=c.hbm_bytes_per_s,
        hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm,
        sharpness=c.sharpness,
        core_energy_j=c.flop_energy_j * 2.0 * rows * n * k + c.padded_flop_energy_j * padded,
        hbm_energy_j=c.hbm_byte_energy_j * hbm_bytes,
        sm_power_w=c.sm_power_w,
    )


def grouped_features(rows: int, distinct: int, k: int) -> tuple[float, ...]:
    """Correction coordinates (log2)."""
    return (math.log2(max(distinct, 1)), math.log2(max(rows, 1)), math.log2(k))
