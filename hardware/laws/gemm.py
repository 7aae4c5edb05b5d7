"""Dense GEMM: thread-block tiles, waves and split-K, with a bounded correction learnt from measured shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.residency import hbm_share
from hardware.laws.sizes import GemmSizes, element_bytes
from hardware.laws.streaming import few_sms
from hardware.laws.terms import KernelTerms

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Kernels that a library has: ``a`` columns of n by ``b`` rows of m a tile, ``s`` splits of k, and ``cycles`` of
    the tensor cores over those of a tile that fills them."""

    a: Integers
    b: Integers
    s: Integers
    cycles: float | NDArray[np.float64]

    @classmethod
    def of(cls, sides: Iterable[tuple[int, int]], uneven: float = 1.0) -> Tiles:
        """Tiles of such ``sides`` with each split; ``uneven``: cycles of those wider than 64 of no whole 64s."""
        # Registers bound a tile's accumulator: 320 x 128 and 256 x 160 are the largest that occur.
        shapes = sorted((a, b) for a, b in set(sides) if a * b <= 320 * 128)
        splits = np.array([1, 2, 3, 4, 6, 8])
        a, b = np.repeat(np.array(shapes), len(splits), axis=0).T
        whole = (np.minimum(a, b) <= 64) | ((a % 64 == 0) & (b % 64 == 0))
        return cls(a=a, b=b, s=np.tile(splits, len(shapes)), cycles=np.where(whole, 1.0, uneven))


# Tiles of common widths, as CUTLASS and the libraries of GPUs before Hopper have them.
COMMON_TILES = Tiles.of(product(range(64, 385, 64), (8, 16, 32, 64, 128, 192, 256)))
# cuBLAS on Hopper: one side is that of the tensor instruction's 64 rows, the other any multiple of 8 up to its 256
# columns (names of kernels in our profiler traces). Cycles of uneven tiles: chosen by leaving rows out (docs/laws.md).
_WHOLE, _ANY = range(64, 513, 64), range(8, 257, 8)
CUBLAS_TILES = Tiles.of([*product(_WHOLE, _ANY), *product(_ANY[7:], _WHOLE[:4])], uneven=1.03)
# Elements of the result that one SM's tile holds in a large product: 128 x 256.
_WAVE_TILE = 128 * 256
# Rows that tiles compute beyond m, on average: half a tile of 64, the least that a tensor-core instruction does.
_PADDING = 32
# Additional waves of a kernel that may divide weights more evenly; more than two are never faster.
_MORE_ROUNDS = np.arange(3.0)
# Tiles whose times are within 0.2 % count as equally fast.
_TOGETHER = 1.002
# Where columns do not fill a wave, the busy SMs use part of the bandwidth of the others: the exponent of the loss, set
# on duty rows at two clocks (docs/laws.md, "Power of a wave of few columns").
_SHORT_WAVE = 0.5


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
    coefficients: GemmCoefficients, sizes: GemmSizes, gpu: GpuSpec, library: Tiles | None = None
) -> KernelTerms:
    """Terms of one product before correction on all SMs, at no clock less for a row more; ``library`` None: cuBLAS.

    Of one tile and split: cycles = the longer of waves (2 a b (K/s) / (rate eta) + epilogue) and of L2 (both tiles
    read again), then the reduction; memory = HBM, longer where weights do not divide evenly over SMs. What rows add to
    either is never negative, whichever tile it is, nor therefore to the least of all tiles.

    Time at the maximum clock f0 is that of the fastest tile there. Its clocked part is that of the tile of fewest
    cycles, and (time^p - (cycles / f0)^p)^(1/p) is what does not follow the clock. A library has one kernel whatever
    the clock; the two tiles differ where compute and memory take about as long, and our time at lower clocks is then
    somewhat short. Activations stay in L2 from one kernel to the next with all operands (as elementwise buffers do);
    weights come from HBM.
    """
    c = coefficients
    m, n, k, sms, max_clock_hz = sizes.m, sizes.n, sizes.k, gpu.sms, gpu.max_clock_hz
    bytes_each, flops_per_cycle_per_sm = element_bytes(sizes.dtype), gpu.tensor_flops_per_cycle_per_sm(sizes.dtype)
    library = library or (CUBLAS_TILES if gpu.clusters else COMMON_TILES)
    a, b, s, p = library.a, library.b, library.s, coefficients.sharpness
    k_split = k / s
    columns = np.ceil(n / a) * s
    tiles = columns * np.ceil(m / b)
    rounds = np.ceil(tiles / sms) + _MORE_ROUNDS[:, None]
    cycles = library.cycles * (2 * a * b * k_split / (flops_per_cycle_per_sm * c.efficiency)) + c.epilogue_cycles
    through_l2_s = bytes_each * tiles * (a + b) * k_split / c.l2_bytes_per_s
    tensor_s = rounds * cycles / max_clock_hz
    clocked_s = np.maximum(tensor_s, through_l2_s)
    reduce_s = np.where(s > 1, c.split_reduce_s + 4.0 * sizes.out_bytes * m * n * s / c.l2_bytes_per_s, 0.0)
    hbm_bytes = _hbm_bytes(sizes, gpu)
    # Tiles of one column share its weights: an SM streams columns, in whole waves.
    full = np.floor(rounds * sms / columns) * columns
    rate = np.minimum(c.hbm_bytes_per_s, np.minimum(full, sms) * c.hbm_bytes_per_s_per_sm)
    few = np.where(full >= sms, (rounds * sms / full) ** _SHORT_WAVE, 1.0)
    memory_s = hbm_bytes / rate * np.where(columns >= sms, np.ceil(columns / sms) * sms / columns, few)
    longer, shorter = np.maximum(clocked_s, memory_s), np.minimum(clocked_s, memory_s)
    # A p-norm is at most 2^(1/p) of the longer: few tiles can be the fastest.
    few_tiles = np.flatnonzero(longer + reduce_s <= (longer * 2 ** (1 / p) + reduce_s).min())
    longer, shorter = longer.flat[few_tiles], shorter.flat[few_tiles]
    of = few_tiles % len(a)
    taken_s = longer * (1 + (shorter / longer) ** p) ** (1 / p) + reduce_s[of]
    # Of equally fast ones, the one on most SMs: libraries launch grids that nearly fill the GPU.
    on_sms = np.where(taken_s <= _TOGETHER * taken_s.min(), np.minimum(tiles[of], sms), 0.0)
    best = int(of[np.argmax(on_sms - taken_s / taken_s.max())])
    quickest = int((clocked_s + reduce_s).argmin())
    least_s, fewest_s = float(taken_s.min()), float((clocked_s + reduce_s).flat[quickest])
    waits_s = max(least_s * max(1.0 - (fewest_s / least_s) ** p, 0.0) ** (1 / p), hbm_bytes / c.hbm_bytes_per_s)
    active = min(float(tiles[best]), float(sms))
    flops = 2.0 * m * n * k
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=int(tiles[best]),
        cycles_per_block=fewest_s * max_clock_hz / float(rounds[0, best]),
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=hbm_bytes / waits_s,
        hbm_bytes_per_s_per_sm=max(c.hbm_bytes_per_s_per_sm, hbm_bytes / waits_s / active),
        sharpness=p,
        core_energy_j=c.flop_energy_j * flops + c.padded_flop_energy_j * (flops + 2.0 * _PADDING * n * k),
        hbm_energy_j=c.hbm_byte_energy_j * hbm_bytes,
        # Of all SMs, whichever tile it is: a product of few tiles splits them.
        sm_power_w=c.sm_power_w * sms / active,
        tensor_share=float(tensor_s.flat[quickest] / clocked_s.flat[quickest]),
        load_wait=few_sms().product_load_wait,
    )


def _hbm_bytes(sizes: GemmSizes, gpu: GpuSpec) -> float:
    """Bytes that come from HBM or go there.

    A wave of tiles covers a square of the result, within m and n, and reads each row of its panels once. The next wave
    hits in L2 on the resident part of the smaller operand and reads the rest again.
    """
    m, n, k, bytes_each = sizes.m, sizes.n, sizes.k, element_bytes(sizes.dtype)
    side = math.sqrt(gpu.sms * _WAVE_TILE)
    down = min(side, float(m))
    across = min(side * side / down, float(n))
    # Panels of n stay while the waves go down m, or the other way round, whichever reads less.
    again = min(n + m * max(n / across, 1.0), m + n * max(m / down, 1.0)) - (m + n)
    read_again = bytes_each * k * hbm_share(min(m, n) * k * bytes_each, gpu.l2_bytes) * again
    weights, activations = float(bytes_each * n * k), float(bytes_each * m * k + sizes.out_bytes * m * n)
    return weights + hbm_share(weights + activations, gpu.l2_bytes) * activations + read_again


# Rows of the largest product that was measured alone (gemm.jsonl); whole runs of 16,384 tokens hold beyond it.
MOST_ROWS = 8192
# How far apart 8- and 16-bit kernels of one shape lie, in length scales: near, since the library picks tiles
# for both by the same rules. Chosen by leaving one (n, k) of both out on the gemm rows alone.
_EIGHT_BIT = 0.5


def gemm_features(sizes: GemmSizes) -> tuple[float, float, float, float]:
    """Where a shape lies for the correction: log2 sizes, m up to the largest that was measured, and the type."""
    eight_bit = sizes.dtype.startswith("fp8") or sizes.dtype == "int8"
    m, n, k = (float(np.log2(side)) for side in (min(sizes.m, MOST_ROWS), sizes.n, sizes.k))
    return (m, n, k, _EIGHT_BIT * eight_bit)


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
