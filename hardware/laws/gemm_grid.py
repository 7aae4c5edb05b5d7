"""Which SMs a dense product keeps from others: the tiles that its library launches, and in how many rounds."""

from __future__ import annotations

import math
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np

from hardware.gpu import GpuSpec
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.sizes import GemmSizes
from hardware.laws.terms import KernelTerms
from hardware.scheduling import scheduling
from inputs.changed import changed

# Tiles (columns of n, rows of m) of 16-bit products with 128 rows or more in our profiler traces on Hopper, by the
# names of their kernels (records/*/traces, measurements/kineto; docs/laws.md, "Grids of products").
_TILES = np.array(
    [
        (64, 128), (80, 128), (112, 128), (128, 64), (128, 128), (128, 192), (128, 256), (168, 128), (176, 128),
        (192, 192), (256, 128), (256, 152), (256, 160), (320, 128),
    ]
)  # fmt: skip
_SPLITS = np.array([1, 2, 3, 4])
_A, _B = np.repeat(_TILES, len(_SPLITS), axis=0).T
_S = np.tile(_SPLITS, len(_TILES))
# What reading a tile's columns and rows from L2 adds to its arithmetic: large tiles read less for each product.
_READING = 5.0
# Share of the SMs that launched grids fill, and how many times the fastest tile's time one that fills them may take.
_FILLED, _ALIKE = 120 / 132, 1.09
# Fewer rows are bound by memory: blocks share the columns of the weights, whatever the rows. Of 16 grids of 4 to 32
# rows in our profiler traces (records/*/traces, measurements/kineto) 14 are those of `thin_tiles`; the law, whose tiles
# change from row to row where many end together, has 10.
LEAST_ROWS = 128
_GPC_SMS = 16  # of Hopper's GPCs, at least
_NARROW = 64  # columns of a thin product's tiles


def thin_tiles(n: int, sms: int) -> int | None:
    """Tiles of a product of few rows: columns of 64, each in two halves of k where these find SMs together.

    None where columns are more than SMs: wider tiles, which no rule that we know of says.

    >>> [thin_tiles(n, 132) for n in (4096, 6144, 8192, 14336)]
    [128, 96, 128, None]
    """
    columns = -(-n // _NARROW)
    if columns > sms:
        return None
    return 2 * columns if 2 * columns <= sms else columns


@lru_cache(maxsize=4096)
def launched_tiles(c: GemmCoefficients, sizes: GemmSizes, gpu: GpuSpec) -> int:
    """Tiles of one 16-bit product by the kernel that ends first: rounds, reading tiles from L2, split sums."""
    m, n, k, rate = sizes.m, sizes.n, sizes.k, gpu.tensor_flops_per_cycle_per_sm("bf16")
    tiles = np.ceil(n / _A) * np.ceil(m / _B) * _S
    reading = 1.0 + _READING * (_A + _B) / (_A * _B)
    cycles = 2 * _A * _B * (k / _S) / (rate * c.efficiency) * reading + c.epilogue_cycles
    compute_s = np.ceil(tiles / gpu.sms) * cycles / gpu.max_clock_hz
    read_s = 2.0 * tiles * (_A + _B) * (k / _S) / c.l2_bytes_per_s
    reduce_s = np.where(_S > 1, c.split_reduce_s + 8.0 * m * n * _S / c.l2_bytes_per_s, 0.0)
    taken_s = np.maximum(compute_s, read_s) + reduce_s
    fills = (taken_s <= _ALIKE * taken_s.min()) & (tiles >= _FILLED * gpu.sms)
    return int(tiles[np.argmin(np.where(fills, taken_s, np.inf) if fills.any() else taken_s)])


def relaunched(terms: KernelTerms, tiles: int, sms: int) -> KernelTerms:
    """``terms`` of a product that runs in so many tiles: alone on ``sms`` SMs it takes the time and joules it took.

    >>> terms = KernelTerms(floor_s=0.0, blocks=112, cycles_per_block=1000.0, sm_power_w=80.0)
    >>> again = relaunched(terms, 256, 132)
    >>> again.blocks, again.cycles_per_block, round(again.sm_power_w, 1)
    (256, 500.0, 67.9)
    """
    before, now = min(terms.blocks, sms), min(tiles, sms)
    rounds_before, rounds = -(-terms.blocks // sms), -(-tiles // sms)
    return changed(
        terms,
        blocks=tiles,
        cycles_per_block=terms.cycles_per_block * rounds_before / rounds,
        # As much arithmetic in all, in other tiles: what else a round takes is theirs to load.
        tensor_share=terms.tensor_share * min(1.0, terms.blocks * rounds / (tiles * rounds_before)),
        hbm_bytes_per_s_per_sm=terms.hbm_bytes_per_s_per_sm * before / now,
        sm_power_w=terms.sm_power_w * before / now,
    )


@lru_cache(maxsize=4096)
def rounds_on(tiles: int, blocks: int, own: int, sms: int) -> int:
    """Rounds that ``sms`` SMs need for the ``tiles`` of a grid of ``blocks`` that was made for more SMs.

    Each block has ``own`` tiles by its number, as far as they go; those that run fetch what is left. A block that finds
    no SM starts late and has its own tiles still to do: where another has just ended, or, where blocks fetch none and
    their SMs are several GPCs', when the wave before has. (Product of 256 tiles, 2048 x 4096 x 14336: 32, 16, 9, 6, 5
    and 3 rounds on 8, 16, 32, 48, 64 and 128 SMs of both cards, records/*/partitions/one_gpu.jsonl.)

    >>> [rounds_on(256, 132, 2, sms) for sms in (8, 16, 32, 48, 64, 128)], rounds_on(768, 132, 2, 128)
    ([32, 16, 9, 6, 5, 3], 7)
    """
    first = min(sms, blocks)
    pool = max(0, tiles - own * blocks)
    each = [min(own, -(-(tiles - number) // blocks)) for number in range(blocks)]
    fetched, more = divmod(pool, first)
    ends = [mine + fetched + (place < more) for place, mine in enumerate(each[:first])]
    if sms > _GPC_SMS and not pool:
        return max(ends) + sum(max(each[wave : wave + sms]) for wave in range(first, blocks, sms))
    heapify(ends)
    for mine in each[first:]:
        heapreplace(ends, ends[0] + mine)
    return max(ends)


def on_partition(terms: KernelTerms, sms: int, gpu_sms: int) -> KernelTerms:
    """``terms`` of a product on ``sms`` SMs of its own: its library makes the grid for all ``gpu_sms`` of the GPU.

    So its blocks come in rounds that its SMs are all busy in, the last ones for what few tiles are left.

    >>> terms = KernelTerms(floor_s=0.0, blocks=768, cycles_per_block=1000.0)
    >>> on_partition(terms, 128, 132).blocks // 128
    7
    """
    sms = int(min(float(sms), terms.sms_cap))
    rounds = rounds_on(terms.blocks, min(terms.blocks, gpu_sms), scheduling().own_tiles, sms)
    if rounds == 1:
        return terms
    return changed(terms, blocks=rounds * sms, sms_cap=float(sms), hbm_bytes_per_s_per_sm=math.inf)
