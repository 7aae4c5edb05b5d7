"""Memory-bound kernels: L2-resident below the cache size, HBM-bound above, some bound by block launches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hardware.gpu import GpuSpec
from hardware.laws.correction import SIZES, LawCurve
from hardware.laws.residency import hbm_share
from hardware.laws.terms import KernelTerms, time_s

# A kernel below this share of the memory's rate at all sizes is bound by its instructions, or by its few blocks.
MEMORY_BOUND_SHARE = 0.25
# Bytes that a block moves, assumed where a kernel has no known grid: how many SMs a small buffer occupies follows.
BLOCK_BYTES = 8192
# Kernels that take one block a row, whose time therefore depends on how wide rows are.
BLOCK_A_ROW = frozenset({"add_rmsnorm", "rmsnorm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementwiseCoefficients:
    """One kernel: floor, the two rates, blocks launched a second (None: never the limit), energies.

    ``footprint`` is distinct bytes over bytes moved (below one where a kernel works in place): what decides
    whether its buffers stay in L2.
    ``follows_below`` is the share of the maximum clock below which the time in HBM, or that of launching blocks,
    grows as the SM clock falls, because the SMs' own work takes longer; above it the clock has no effect.
    None, not measured: launches depend on the clock at any clock, HBM at none.
    """

    footprint: float
    floor_s: float
    l2_bytes_per_s: float
    hbm_bytes_per_s: float
    blocks_per_s: float | None
    l2_byte_energy_j: float
    hbm_byte_energy_j: float
    sm_power_w: float
    follows_below: float | None = None


def memory_bound(c: ElementwiseCoefficients, gpu: GpuSpec) -> bool:
    """Whether the kernel is bound by memory on ``gpu``, on which it was measured."""
    return c.hbm_bytes_per_s > MEMORY_BOUND_SHARE * gpu.hbm_bytes_per_s


def blocks_for(bytes_moved: float) -> int:
    """Blocks of a kernel whose grid follows its bytes.

    >>> blocks_for(100), blocks_for(1 << 20)
    (1, 128)
    """
    return max(1, int(bytes_moved // BLOCK_BYTES))


@lru_cache(maxsize=65536)
def elementwise_base_terms(
    coefficients: ElementwiseCoefficients, gpu: GpuSpec, *, rows: int, bytes_moved: float, launched_blocks: int
) -> KernelTerms:
    """Terms of one memory-bound kernel; L2 follows the clock, HBM and block launches below a clock of their own."""
    c, max_clock_hz, sms = coefficients, gpu.max_clock_hz, gpu.sms
    share = hbm_share(c.footprint * bytes_moved, gpu.l2_bytes)
    blocks = max(1, min(launched_blocks, 8 * sms) if c.blocks_per_s is None else launched_blocks)
    blocks = max(blocks, min(rows, sms))
    if c.blocks_per_s is None:
        launch_s, own_s, follows = 0.0, share * bytes_moved / c.hbm_bytes_per_s, c.follows_below or 0.0
    else:
        launch_s = own_s = blocks / c.blocks_per_s
        follows = 1.0 if c.follows_below is None else c.follows_below
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=blocks,
        cycles_per_block=follows * own_s * max_clock_hz * sms / blocks,
        launch_s=launch_s,
        quantised=False,
        shrink="fluid",
        hbm_bytes=share * bytes_moved,
        hbm_bytes_per_s=c.hbm_bytes_per_s,
        l2_bytes=(1.0 - share) * bytes_moved,
        l2_bytes_per_cycle=c.l2_bytes_per_s / max_clock_hz,
        taking_turns=True,  # hits and misses in every block
        core_energy_j=c.l2_byte_energy_j * bytes_moved,
        hbm_energy_j=c.hbm_byte_energy_j * share * bytes_moved,
        sm_power_w=c.sm_power_w,
    )


@lru_cache(maxsize=256)
def elementwise_course(coefficients: ElementwiseCoefficients, gpu: GpuSpec, *, bytes_a_block: float) -> LawCurve:
    """The law over sizes at the maximum clock; ``bytes_a_block`` counts where launches bound it."""
    seconds, joules = [], []
    for size in 2.0**SIZES:
        blocks = max(1, round(size / bytes_a_block))
        terms = elementwise_base_terms(coefficients, gpu, rows=1, bytes_moved=size, launched_blocks=blocks)
        held = float(min(terms.blocks, gpu.sms))
        alone_s = time_s(terms, sms=held, sm_clock_hz=gpu.max_clock_hz)
        seconds.append(alone_s)
        joules.append(terms.core_energy_j + terms.hbm_energy_j + terms.sm_power_w * held / gpu.sms * alone_s)
    return LawCurve(seconds=np.log(seconds), joules=np.log(joules))


# A copy that changes the order of runs of some KB keeps its SMs busy with addresses: bytes a cycle and SM from L2 and
# from HBM, and watts beyond a plain copy's; the share of the maximum clock below which the time from HBM depends on the
# clock. Set on the three permute_copy rows of gaps.jsonl and on clocks.jsonl (H100; docs/laws.md).
PERMUTE_L2_BYTES, PERMUTE_HBM_BYTES, PERMUTE_SM_POWER_W, PERMUTE_FOLLOWS_BELOW = 7.52, 5.97, 170.0, 0.835


def permuting(copy: KernelTerms, plain: ElementwiseCoefficients, gpu: GpuSpec, *, bytes_moved: float) -> KernelTerms:
    """A copy's terms for one that sorts rows by rank: bound by the instructions that it issues.

    It follows the clock at any clock where the ``plain`` copy was not measured at two clocks either. Bytes from L2
    and from HBM take turns, as in the plain copy.
    """
    share = copy.hbm_bytes / bytes_moved
    follows = 1.0 if plain.follows_below is None else PERMUTE_FOLLOWS_BELOW
    # Cycles a byte.
    from_l2, from_hbm = (1.0 - share) / (PERMUTE_L2_BYTES * gpu.sms), share / (PERMUTE_HBM_BYTES * gpu.sms)
    per_cycle = 1.0 / (from_l2 + follows * from_hbm)
    if share:
        copy = replace(copy, hbm_bytes_per_s=share * gpu.max_clock_hz / (from_l2 + from_hbm))
    return replace(
        copy,
        taking_turns=False,
        scale=1.0,
        l2_bytes=bytes_moved,
        l2_bytes_per_cycle=per_cycle,
        sm_power_w=copy.sm_power_w + PERMUTE_SM_POWER_W,
    )


def elementwise_features(op: str, bytes_moved: float, rows: int) -> tuple[float, ...]:
    """Correction coordinates (log2): bytes moved, and bytes a row where a block takes one."""
    a_row = math.log2(max(bytes_moved / rows, 1.0)) if op in BLOCK_A_ROW else 0.0
    return (math.log2(max(bytes_moved, 1.0)), a_row)
