"""Which SMs a dense product keeps from others: the tiles that its library launches, and in how many rounds."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hardware.gpu import GpuSpec
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.sizes import GemmSizes
from hardware.laws.terms import KernelTerms
from inputs.changed import changed

# Tiles (columns of n, rows of m) of 16-bit products with 128 rows or more in our profiler traces on Hopper, by the
# names of their kernels (records/*/traces, measurements/kineto): a library has tiles for most widths, so that the grid
# of a product nearly fills the GPU. 120 to 132 blocks run in every one of 46 kinds of products there, where a law that
# knows few widths leaves up to 20 of 132 SMs to a collective that in truth waits for the product's last round.
_TILES = np.array(
    [
        (64, 128), (80, 128), (112, 128), (128, 64), (128, 128), (128, 192), (128, 256), (168, 128), (176, 128),
        (192, 192), (256, 128), (256, 152), (256, 160), (320, 128),
    ]
)  # fmt: skip
_SPLITS = np.array([1, 2, 3, 4])
_A, _B = np.repeat(_TILES, len(_SPLITS), axis=0).T
_S = np.tile(_SPLITS, len(_TILES))
# What reading a tile's columns and rows from L2 adds to its arithmetic: large tiles read less for each product. With it
# 20 of the 21 products of our chunked steps (records/h200-sxm-141gb/traces/chunks, by name and grid) have their rounds.
_READING = 5.0
# All 48 products of chunked steps there have 120 to 132 of 132 blocks. Times of kernels here misjudge the one that was
# launched by up to 9 % (512 rows of n 14336): of kernels so near the quickest, one that fills the GPU as these do is.
_FILLED, _ALIKE = 120 / 132, 1.09
# Fewer rows are bound by memory: blocks share the columns of the weights, whatever the rows. Of 16 grids of 4 to 32
# rows in our profiler traces (records/*/traces, measurements/kineto) 14 are those of `thin_tiles`; the law, whose tiles
# change from row to row where many end together, has 10.
LEAST_ROWS = 128
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
        hbm_bytes_per_s_per_sm=terms.hbm_bytes_per_s_per_sm * before / now,
        sm_power_w=terms.sm_power_w * before / now,
    )
