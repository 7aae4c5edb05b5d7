"""Low-rank adapters of a serving engine (LoRA): skinny products over rows sorted by adapter, in Triton.

No such kernel was measured. Those of the same engine's experts do the same on wider matrices
(:mod:`hardware.laws.routed`): their floor, rates and energies are used, uncorrected, with the tiles of vLLM's kernels
(``get_lora_op_configs`` of vllm/lora/ops/triton_ops/utils.py), and the result is marked extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.residency import hbm_share
from hardware.laws.routed import RoutedCoefficients
from hardware.laws.terms import KernelTerms

# vLLM's tiles: rows and columns on the way down, whose depth is cut in 64 for steps of fewer than 128 tokens, else in
# 8; rows on the way up, and the columns of all slices together.
DOWN_ROWS, DOWN_COLUMNS, UP_ROWS, UP_COLUMNS = 32, 16, 64, 128
FEW_TOKENS, FEW_SPLITS, MANY_SPLITS = 128, 64, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSizes:
    """``rows`` tokens through ``distinct`` adapters of ``slices`` matrices of ``rank``: from an input of ``width``, or
    (``up``) to outputs of ``width`` in all. ``row_bytes`` a row reads and writes.
    """

    rows: int
    distinct: int
    slices: int
    rank: int
    width: int
    up: bool
    row_bytes: float


@lru_cache(maxsize=65536)
def adapter_base_terms(c: RoutedCoefficients, sizes: AdapterSizes, gpu: GpuSpec) -> KernelTerms:
    """Terms of one of the two kernels.

    Adapters come from HBM once, rows where they leave L2. Every adapter's rows are padded to tiles, of which there are
    at most one for each adapter and one more for each tile of the other rows. Small tiles run many to an SM, so that
    its cycles before and after its loop count once. More rows, adapters or rank never make it faster.
    """
    rows, rank, width = sizes.rows, sizes.rank, sizes.width
    tall, wide = (UP_ROWS, max(64, UP_COLUMNS // sizes.slices)) if sizes.up else (DOWN_ROWS, min(rank, DOWN_COLUMNS))
    depth, columns = (rank, width) if sizes.up else (width, sizes.slices * rank)
    splits = 1 if sizes.up else FEW_SPLITS if rows < FEW_TOKENS else MANY_SPLITS
    tiles = (sizes.distinct + (rows - sizes.distinct) / tall) * -(-columns // wide)
    weights = 2.0 * sizes.distinct * rank * width * (1 if sizes.up else sizes.slices)
    activations = rows * sizes.row_bytes
    hbm_bytes = weights + hbm_share(activations, gpu.l2_bytes) * activations
    flops, padded = 2.0 * rows * columns * depth, 2.0 * tiles * tall * wide * depth
    blocks = max(1, round(tiles * splits))
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=blocks,
        cycles_per_block=c.tile_cycles_per_k * depth / splits * (tall / 128.0) * (wide / 128.0),
        tail_cycles=c.tile_cycles,
        quantised=False,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=c.hbm_bytes_per_s,
        hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm * tiles * splits / blocks,  # rounded, they would go up and down
        l2_bytes=2.0 * tiles * (tall + wide) * depth,
        l2_bytes_per_cycle=c.l2_bytes_per_s / gpu.max_clock_hz,
        sharpness=c.sharpness,
        core_energy_j=c.flop_energy_j * flops + c.padded_flop_energy_j * padded + c.core_byte_energy_j * hbm_bytes,
        hbm_energy_j=c.hbm_byte_energy_j * hbm_bytes,
        sm_power_w=c.sm_power_w,
        extrapolated=True,
    )
