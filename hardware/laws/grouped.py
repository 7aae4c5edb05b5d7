"""Grouped GEMM: one persistent kernel over the experts that were hit, its tiles padded expert by expert."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.residency import hbm_share
from hardware.laws.sizes import GroupedSizes
from hardware.laws.terms import KernelTerms

# Tiles differ in their waiting times: a call ends half a tile after the even share, on average.
LAST_TILE = 0.5
# Blocks come in pairs along the rows (clusters of two), so that an expert's rows are padded to a pair's.
CLUSTER = 2
# With more rows an expert than this on average, experts without rows counted too, the larger tiles run.
SMALL_ROWS = 128
# The law goes linearly from one kernel to the other within so many rows of the change (docs/laws.md, experts.jsonl).
CHANGES_WITHIN = 4.0
# Largest share of the tensor cores' rate of any tile: large tiles on Hopper, measured (16 of 17.8 cycles a k).
TENSOR_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCoefficients:
    """Floor of a call; cycles in which a block turns to another expert; cycles of a tile of the kernel of few rows an
    expert (64 x 128, per k) and of that of many (128 x 256, fixed and per k); streaming rates; energies.
    ``empty_saves``: the share of those cycles that a tile of few rows is spared for rows that it lacks, where its
    expert's weights are in L2 already from the expert's first tile. First tiles take as long with any rows.

    Tiles and the choice between the kernels are those of PyTorch's grouped_mm on Hopper (CUTLASS, ATen's GroupMM.cu).
    """

    floor_s: float
    switch_cycles: float
    small_tile_cycles_per_k: float
    empty_saves: float
    large_tile_cycles: float
    large_tile_cycles_per_k: float
    hbm_bytes_per_s: float
    hbm_bytes_per_s_per_sm: float
    sharpness: float
    flop_energy_j: float
    padded_flop_energy_j: float
    sm_power_w: float
    hbm_byte_energy_j: float


def large_share(sizes: GroupedSizes) -> float:
    """Share of the kernel for many rows an expert, from 0 to 1 about the change."""
    beyond = (sizes.rows / sizes.experts - SMALL_ROWS - 1 + CHANGES_WITHIN) / (2 * CHANGES_WITHIN)
    return min(max(beyond, 0.0), 1.0) if sizes.n > SMALL_ROWS else 0.0


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of one kernel: ``pairs`` along the rows, ``tall`` by ``wide`` elements, and the cycles of one."""

    pairs: float
    tall: int
    wide: int
    n: int
    cycles: float

    @property
    def count(self) -> float:
        return max(1.0, self.pairs * math.ceil(self.n / self.wide)) * CLUSTER

    @property
    def elements(self) -> float:
        return self.count * self.tall * self.wide

    def rounds(self, sms: int) -> float:
        return max(self.count / sms, 1.0)

    def last(self, sms: int) -> float:
        return LAST_TILE * min(self.rounds(sms) - 1.0, 1.0) * self.cycles


@lru_cache(maxsize=65536)
def grouped_base_terms(coefficients: GroupedCoefficients, sizes: GroupedSizes, gpu: GpuSpec) -> KernelTerms:
    """Terms of one grouped GEMM of 16-bit operands before correction.

    Weights of the experts hit come from HBM, activations too where they do not stay in L2. A block meets each expert
    once at most: its first rounds mostly turn to another one with every tile.
    """
    c, flops_per_cycle = coefficients, TENSOR_SHARE * gpu.tensor_flops_per_cycle_per_sm("bf16")
    rows, distinct, n, k, sms = sizes.rows, sizes.distinct, sizes.n, sizes.k, gpu.sms
    empty = max(sizes.tiles128 - distinct - sizes.rows_beyond128 / 128, 0.0) / max(sizes.tiles128, 1.0)
    small_per_k = max(c.small_tile_cycles_per_k, 2.0 * 64 * 128 / flops_per_cycle)
    large_per_k = max(c.large_tile_cycles_per_k, 2.0 * 128 * 256 / flops_per_cycle)
    few = _Tiles(sizes.tiles128, 64, 128, n, small_per_k * k * (1.0 - c.empty_saves * empty))
    many = _Tiles(sizes.tiles256, 128, 256, n, c.large_tile_cycles + large_per_k * k)
    share = large_share(sizes)

    def mean(of_few: float, of_many: float) -> float:
        return (1.0 - share) * of_few + share * of_many

    blocks = round(mean(few.count, many.count))
    activations = float(2 * rows * (n + k))
    hbm_bytes = 2.0 * sizes.weights + hbm_share(activations, gpu.l2_bytes) * activations
    padded = 2.0 * mean(few.elements, many.elements) * k
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=blocks,
        cycles_per_block=mean(few.count * few.cycles, many.count * many.cycles) / blocks,
        tail_cycles=mean(*(c.switch_cycles * min(t.rounds(sms), distinct) + t.last(sms) for t in (few, many))),
        quantised=False,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=c.hbm_bytes_per_s,
        hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm,
        sharpness=c.sharpness,
        core_energy_j=c.flop_energy_j * 2.0 * rows * n * k + c.padded_flop_energy_j * padded,
        hbm_energy_j=c.hbm_byte_energy_j * hbm_bytes,
        sm_power_w=c.sm_power_w,
    )


def grouped_features(sizes: GroupedSizes) -> tuple[float, ...]:
    """Correction coordinates (log2): experts hit, rows of all, and k."""
    return (math.log2(max(sizes.distinct, 1)), math.log2(max(sizes.rows, 1)), math.log2(sizes.k))
