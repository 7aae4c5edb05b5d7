"""Which SMs a kernel keeps from others, and in how many rounds: grids and tiles as a trace records them."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from traces.capture import NONE, Capture
from traces.classify import COMMUNICATION, Classes
from traces.records import Ints

# Kernels of these classes use up the shared memory of an SM: a block of them leaves no room for another.
WHOLE_SM = ("gemm", "attention", COMMUNICATION)
TILE = re.compile(r"nvjet_\w*?_(\d+)x(\d+)_")  # persistent GEMM of cuBLAS: columns x rows of a tile (column-major)

CLUSTER = re.compile(r"nvjet_\w*?_\d+x\d+_\d+x\d+_(\d+)x(\d+)_")  # after tile and stages: blocks of a cluster


def products_of(capture: Capture) -> tuple[NDArray[np.bool_], Ints]:
    """Which rows are persistent products of cuBLAS, and the blocks of each row that start together (1: alone)."""
    found = [TILE.search(name) is not None for name in capture.names]
    of_name = [int(match[1]) * int(match[2]) if (match := CLUSTER.search(name)) else 1 for name in capture.names]
    name = capture.work.name
    return np.array(found, dtype=bool)[name], np.array(of_name, dtype=np.int64)[name]


def rounds_of(capture: Capture, classes: Classes, sms: int) -> tuple[Ints, Ints]:
    """Blocks of each row that keep an SM each from others, on a GPU of ``sms`` SMs, and the tiles that they do.

    Matrix products, attention and communication keep an SM a block; blocks of all others are short and let anybody
    in (0). A grid larger than the GPU goes in rounds, and so do the tiles of a persistent product: its blocks are as
    many as fit, and the tiles follow from the shapes of the host's operator, where these were recorded.
    """
    work = capture.work
    keeps = np.isin(classes.index, [i for i, label in enumerate(classes.labels) if label in WHOLE_SM])
    blocks = np.where(keeps, np.clip(work.blocks, 0, sms), 0)
    return blocks, np.maximum(np.maximum(work.blocks, _tiles(capture)), blocks)


def _tiles(capture: Capture) -> Ints:
    """Tiles of persistent products, 0 where they are unknown."""
    work = capture.work
    tiles = np.zeros(len(work), dtype=np.int64)
    tile_of = [TILE.search(name) for name in capture.names]
    for row in np.flatnonzero(work.matrix != NONE).tolist():
        if (tile := tile_of[work.name[row]]) is not None:
            product = capture.matrices[work.matrix[row]]
            tiles[row] = tiles_of(tile, m=product.m, n=product.n)
    return tiles


def tiles_of(tile: re.Match[str], *, m: int, n: int) -> int:
    """Tiles of a product of ``m`` rows and ``n`` columns by a kernel whose name ``TILE`` matches.

    >>> tiles_of(TILE.search("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT"), m=8192, n=5120)
    1024
    """
    return -(-n // int(tile[1])) * -(-m // int(tile[2]))


def sms_of(capture: Capture) -> int:
    """SMs of the GPUs that the trace names, 0 if it names none."""
    for known in capture.metadata.values():
        for device in known.get("deviceProperties") or []:
            if isinstance(device, dict) and type(device.get("numSms")) is int:
                return int(device["numSms"])
    return 0
