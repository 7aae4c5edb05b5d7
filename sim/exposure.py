"""Where GPUs do not compute: data that moves alone, ranks that wait, and pipeline bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.engine.graph import KernelGraph

S_PER_PS = 1e-12
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Of one run: ``by_kind`` holds exposed and waiting GPU-seconds, ``working_s`` seconds of each simulated GPU.

    Exposed: data moves and nothing computes. Waiting: the rank is there, the last one is not, and nothing else
    moves. Both together are the time in which communication runs alone. A GPU works while it computes or moves
    data, the pauses between kernels included; the rest of a run is bubbles.
    """

    by_kind: dict[str, tuple[float, float]]
    working_s: list[float]


def exposure(graph: KernelGraph, op: Ints, start: Ints, end: Ints, multiplicity: Sequence[int]) -> Exposure:
    """Exposure of the spans ``op`` from ``start`` to ``end`` (ps); GPUs count as often as they stand for one."""
    gpu, cls = np.asarray(graph.op_gpu)[op], np.asarray(graph.op_class)[op]
    together = np.asarray(graph.op_collective)[op]
    moves = together >= 0
    moving = moving_ps(together, start, end)
    gap = np.array([round(c.gap_s / S_PER_PS) for c in graph.classes], dtype=np.int64)[cls]
    kind_of = np.array([str(c.describe.get("op", c.family)) for c in graph.classes], dtype=object)
    kinds = sorted(set(kind_of[cls[moves]].tolist()))
    kind = kind_of[cls]
    sums = dict.fromkeys(kinds, (0.0, 0.0))
    working: list[float] = []
    for one, times in enumerate(multiplicity):
        mine = gpu == one
        working.append(covered(np.where(moves, moving, start - gap)[mine], end[mine]) * S_PER_PS)
        begins, ends = start[mine & ~moves], end[mine & ~moves]
        length = covered(begins, ends)
        # What an earlier kind has covered is not counted again, so that the parts sum to the whole.
        for part, (first, last) in enumerate(((moving, end), (start, moving))):
            for name in kinds:
                these = mine & moves & (kind == name)
                begins, ends = np.append(begins, first[these]), np.append(ends, last[these])
                grown = covered(begins, ends)
                more = (grown - length) * S_PER_PS * times
                length = grown
                exposed_s, waiting_s = sums[name]
                sums[name] = (exposed_s + more, waiting_s) if part == 0 else (exposed_s, waiting_s + more)
    return Exposure(by_kind=sums, working_s=working)


def moving_ps(together: Ints, start: Ints, end: Ints) -> Ints:
    """When data begins to move, for each span: once the last rank of its collective (-1: none) is there.

    >>> moving_ps(np.array([0, 0, -1]), np.array([3, 5, 1]), np.array([9, 9, 9])).tolist()
    [5, 5, 1]
    """
    last = start.copy()
    tied = together >= 0
    if tied.any():
        latest = np.zeros(together.max() + 1, dtype=np.int64)
        np.maximum.at(latest, together[tied], start[tied])
        last[tied] = latest[together[tied]]
    return np.minimum(last, end)


def covered(start: Ints, end: Ints) -> int:
    """Length of the union of intervals, in their unit.

    >>> covered(np.array([0, 1, 5]), np.array([2, 3, 6]))
    4
    """
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    gaps = start[1:] - reach[:-1]
    return int(reach[-1] - start[0] - gaps[gaps > 0].sum())
