"""Low-rank adapters of a serving engine (LoRA): skinny products over rows sorted by adapter, in Triton.

Grids and tiles are vLLM 0.24's (``get_lora_op_configs`` of vllm/lora/ops/triton_ops/utils.py, ``lora_shrink_op.py``,
``lora_expand_op.py``): blocks for every tile of all rows, for each adapter that the server has room for and for none.
Those of an adapter without rows in the tile read that and leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.residency import hbm_share
from hardware.laws.terms import KernelTerms

# vLLM's tiles: rows and columns on the way down, whose depth is cut in 64 for steps of fewer than 128 tokens, else in
# 8; rows on the way up, and columns of one slice, or of each of several.
DOWN_ROWS, DOWN_COLUMNS, UP_ROWS, UP_COLUMNS, UP_SLICE_COLUMNS = 32, 16, 64, 128, 64
FEW_TOKENS, FEW_SPLITS, MANY_SPLITS = 128, 64, 8
# Of a tile's depth that a block loads at a time, and by how many such it goes where tokens are few.
STEP, FEW_STEPS = 32, 8
# Blocks of four warps that an SM holds: 16 by its threads; on the way down of few tokens 4 by shared memory (two stages
# of 48 rows of 512 bytes); on the way up some 6 by registers (80 a thread), 4 of several slices under a mask (128).
RESIDENT, FEW_RESIDENT, UP_RESIDENT, MASKED_RESIDENT = 16, 4, 6, 4
# Blocks of slots that nobody asks for come last and start where blocks of the last wave end, all through it: half of it
# hides them.
HIDDEN_WAVE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSizes:
    """``rows`` tokens through ``distinct`` adapters of ``slices`` matrices of ``rank``: from an input of ``width``, or
    (``up``) to outputs of ``width`` in all, ``widest`` of one slice. ``row_bytes`` a row reads and writes. ``slots``:
    adapters that the server has room for (None: blocks are launched for rows only). Splits and blocks go by all
    ``tokens`` of the step, those that ask for none included (None: ``rows``).
    """

    rows: int
    distinct: int
    slices: int
    rank: int
    width: int
    up: bool
    row_bytes: float
    widest: int | None = None
    slots: int | None = None
    tokens: int | None = None

    @property
    def law(self) -> str:
        """The name of the kernel's law: with several slices it reads through a table of pointers, of whose alignment
        Triton knows nothing, and loads number by number."""
        return ("up" if self.up else "down") + ("_slices" if self.slices > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCoefficients:
    """Fitted on rows of one of the kernels; rates at the maximum clock.

    The launcher starts a block in ``block_launch_s``. One of a slot that nobody asks for leaves its place on an SM
    after ``leave_cycles``, of an adapter without rows in the tile after ``tile_leave_cycles``, and takes
    ``leave_energy_j``. One with rows takes ``wait_cycles``, for each turn of its loop ``wait_cycles_per_turn`` and for
    each step of its depth ``wait_cycles_per_step``; it keeps the others on its SM waiting for ``busy_cycles`` and
    ``busy_cycles_per_step`` of these, ``masked`` times as long where a rank is no whole number of steps, whose loads
    are masked (on the way up). It takes ``block_energy_j`` and ``step_energy_j`` a step, whatever its rows, and these
    ``flop_energy_j``. ``carried``: from another GPU's rows.
    """

    floor_s: float
    block_launch_s: float
    leave_cycles: float
    tile_leave_cycles: float
    leave_energy_j: float
    wait_cycles: float
    wait_cycles_per_turn: float
    wait_cycles_per_step: float
    busy_cycles: float
    busy_cycles_per_step: float
    masked: float
    hbm_bytes_per_s: float
    sharpness: float
    block_energy_j: float
    step_energy_j: float
    flop_energy_j: float
    hbm_byte_energy_j: float
    sm_power_w: float
    carried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterGrid:
    """Blocks with rows and all that are launched; turns of each one's loop, and steps of its depth that these are;
    whether loads are masked; blocks that an SM holds at a time; launched blocks of slots that nobody asks for."""

    blocks: int
    launched: int
    turns: int
    steps: int
    masked: bool
    resident: int
    unasked: int


@lru_cache(maxsize=65536)
def adapter_grid(sizes: AdapterSizes) -> AdapterGrid:
    """The grid of one kernel. Every adapter has rows in a tile of its own at least; more than that is not known of how
    many each has.

    >>> adapter_grid(AdapterSizes(rows=64, distinct=8, slices=1, rank=16, width=4096, up=False, row_bytes=1, slots=8))
    AdapterGrid(blocks=512, launched=1152, turns=1, steps=8, masked=False, resident=4, unasked=128)
    """
    rows, rank, width, slices = sizes.rows, sizes.rank, sizes.width, sizes.slices
    tokens = max(rows, sizes.tokens or 0)
    if sizes.up:
        tall, wide, splits = UP_ROWS, UP_SLICE_COLUMNS if slices > 1 else UP_COLUMNS, 1
        widest = sizes.widest or -(-width // slices)
        columns, offered = max(-(-width // wide), slices), slices * -(-widest // wide)
        turns = steps = -(-rank // STEP)
        resident = MASKED_RESIDENT if slices > 1 and rank % STEP else UP_RESIDENT
    else:
        few = tokens < FEW_TOKENS
        tall, splits, deep = DOWN_ROWS, FEW_SPLITS if few else MANY_SPLITS, STEP * (FEW_STEPS if few else 1)
        columns = offered = slices * -(-rank // DOWN_COLUMNS)
        turns = -(-width // (splits * deep))
        steps = turns * deep // STEP
        resident = FEW_RESIDENT if few else RESIDENT
    blocks = max(sizes.distinct, -(-rows // tall)) * columns * splits
    tiles = -(-tokens // tall)
    slot = 0 if sizes.slots is None else tiles * offered * splits
    unasked = slot * (max(sizes.slots or 0, sizes.distinct) + 1 - sizes.distinct)
    launched = max(blocks, slot * sizes.distinct) + unasked
    masked = sizes.up and rank % STEP > 0
    return AdapterGrid(
        blocks=blocks, launched=launched, unasked=unasked, turns=turns, steps=steps, masked=masked, resident=resident
    )


@lru_cache(maxsize=65536)
def adapter_base_terms(c: AdapterCoefficients, sizes: AdapterSizes, gpu: GpuSpec) -> KernelTerms:
    """Terms of one of the kernels before correction: adapters come from HBM once, rows where they leave L2.

    More rows that keep the splits of the depth, more adapters or slots never make it quicker; nor does more rank, but
    where its loads are no longer masked.
    """
    rows, rank, width = sizes.rows, sizes.rank, sizes.width
    grid = adapter_grid(sizes)
    busy = (c.busy_cycles + c.busy_cycles_per_step * grid.steps) * (c.masked if grid.masked else 1.0)
    wait = c.wait_cycles + c.wait_cycles_per_turn * grid.turns + c.wait_cycles_per_step * grid.steps
    weights = 2.0 * sizes.distinct * rank * width * (1 if sizes.up else sizes.slices)
    activations = rows * sizes.row_bytes
    hbm_bytes = weights + hbm_share(activations, gpu.l2_bytes) * activations
    flops = 2.0 * rows * rank * width * (1 if sizes.up else sizes.slices)
    return KernelTerms(
        floor_s=c.floor_s + _empty_s(c, grid, gpu, wait=wait, busy=busy, hbm_s=hbm_bytes / c.hbm_bytes_per_s),
        blocks=grid.blocks,
        cycles_per_block=busy,
        tail_cycles=wait,
        quantised=False,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=c.hbm_bytes_per_s,
        sharpness=c.sharpness,
        core_energy_j=grid.blocks * (c.block_energy_j + c.step_energy_j * grid.steps)
        + c.leave_energy_j * (grid.launched - grid.blocks)
        + c.flop_energy_j * flops,
        hbm_energy_j=c.hbm_byte_energy_j * hbm_bytes,
        sm_power_w=c.sm_power_w,
    )


def _empty_s(
    c: AdapterCoefficients, grid: AdapterGrid, gpu: GpuSpec, *, wait: float, busy: float, hbm_s: float
) -> float:
    """Seconds of blocks without rows, as fast as they start and places are free: those between blocks with rows, and
    of the last ones what the last wave does not hide."""
    resident = float(grid.resident * gpu.sms)
    start_s, start_tile_s = (
        max(c.block_launch_s, leave / gpu.max_clock_hz / resident) for leave in (c.leave_cycles, c.tile_leave_cycles)
    )
    tiles = grid.launched - grid.unasked - grid.blocks
    first = min(grid.blocks, gpu.sms)  # with rows; more start while these run
    last_s, between_s = start_s * (grid.unasked + first), max(start_tile_s, start_s) * tiles
    cycles = wait + busy * max(min(grid.blocks, resident) / gpu.sms, 1.0)
    wave_s = max(cycles / gpu.max_clock_hz, hbm_s * min(resident / grid.blocks, 1.0))
    return between_s + max(last_s - HIDDEN_WAVE * wave_s, 0.0)


def adapter_features(sizes: AdapterSizes) -> tuple[float, ...]:
    """Correction coordinates (log2): adapters, rows of each, rank, and width."""
    each = max(sizes.rows / sizes.distinct, 1.0)
    return (math.log2(sizes.distinct), math.log2(each), math.log2(sizes.rank), math.log2(sizes.width))
