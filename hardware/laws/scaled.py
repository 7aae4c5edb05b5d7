"""Products of 8-bit numbers with scales as a serving engine launches them: CUTLASS, one tile by the number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hardware.gpu import GpuSpec
from hardware.laws.gemm import COMMON_TILES, GemmCoefficients, Tiles, gemm_base_terms
from hardware.laws.sizes import GemmSizes
from hardware.laws.terms import KernelTerms


@dataclass(frozen=True, slots=True)
class ScaledTile:
    """A block's part of the result: ``columns`` of n by ``rows`` of m; blocks come in steps of ``row_step`` rows."""

    columns: int
    rows: int
    row_step: int


# Rows up to which vLLM 0.24 launches each kernel on Hopper, for a scale a token and more than 1,280 columns (its
# scaled_mm_sm90_fp8_dispatch.cuh; names and grids in records/h200-sxm-141gb/vllm/traces agree). Above 64 rows two tiles
# of neighbouring rows are one cluster. Fewer columns than that are taken by 64 alike.
_FEW_ROWS = ((16, ScaledTile(64, 16, 16)), (64, ScaledTile(64, 64, 64)), (128, ScaledTile(128, 64, 128)))
_MANY_ROWS, _LARGE = ScaledTile(128, 128, 256), ScaledTile(128, 256, 512)
_LARGE_ROWS, _LARGE_DEPTH = 8192, 6144


def scaled_tile(m: int, k: int) -> ScaledTile:
    """The tile that vLLM chooses for ``m`` rows of depth ``k`` with a scale a token.

    >>> scaled_tile(32, 4096)
    ScaledTile(columns=64, rows=64, row_step=64)
    """
    if m >= _LARGE_ROWS and k >= _LARGE_DEPTH:
        return _LARGE
    return next((tile for most, tile in _FEW_ROWS if m <= most), _MANY_ROWS)


def scaled_rows(m: int, k: int, scales: str) -> int:
    """Rows that the kernel works on: ``m`` filled up to whole tiles, or to whole pairs of them.

    >>> [scaled_rows(m, 4096, "token") for m in (1, 17, 65, 192, 257)]
    [16, 64, 128, 256, 512]
    >>> [scaled_rows(m, 4096, "block") for m in (1, 64, 65, 192, 257)]
    [64, 64, 128, 256, 512]
    """
    step = scaled_tile(m, k).row_step if scales == "token" else 64 if m <= 64 else 128 if m <= 128 else 256
    return -(-m // step) * step


def scaled_base_terms(c: GemmCoefficients, gpu: GpuSpec, *, m: int, n: int, k: int, scales: str) -> KernelTerms:
    """Uncorrected terms of an 8-bit product: time of the rows padded to its kernel's, energy of its own rows.

    With a scale a token: one tile, whose blocks of a column stream its weights. Blocks that find no SM start as soon
    as one is free, so that weights come at the memory's rate but for what few blocks can ask of it.
    """
    sizes = GemmSizes(m=m, n=n, k=k, dtype="fp8_e4m3")
    padded = replace(sizes, m=scaled_rows(m, k, scales))
    if scales != "token":
        own, taken = (gemm_base_terms(c, of, gpu, COMMON_TILES) for of in (sizes, padded))
        return replace(taken, core_energy_j=own.core_energy_j, hbm_energy_j=own.hbm_energy_j)
    tile = scaled_tile(m, k)
    library = _only(tile)
    own, taken = (gemm_base_terms(c, of, gpu, library) for of in (sizes, padded))
    streams = min(math.ceil(n / tile.columns), gpu.sms)
    rate = min(c.hbm_bytes_per_s, streams * c.hbm_bytes_per_s_per_sm)
    return replace(
        taken,
        hbm_bytes_per_s=rate,
        hbm_bytes_per_s_per_sm=max(c.hbm_bytes_per_s_per_sm, rate / min(taken.blocks, gpu.sms)),
        core_energy_j=own.core_energy_j,
        hbm_energy_j=own.hbm_energy_j,
    )


@lru_cache(maxsize=8)
def _only(tile: ScaledTile) -> Tiles:
    return Tiles(a=np.array([tile.columns]), b=np.array([tile.rows]), s=np.array([1]), cycles=1.0)


def scaled_features(m: int, n: int, k: int, scales: str) -> tuple[float, ...]:
    """Correction coordinates (log2): the sides, m up to the largest that was measured.

    Rows of one kernel that fill no tile count as the tile: they take as long.
    """
    if scales == "token" and m > _FEW_ROWS[0][0]:
        m = scaled_rows(m, k, scales)
    return (math.log2(min(m, 8192)), math.log2(n), math.log2(k))
