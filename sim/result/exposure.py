"""Where GPUs do not compute: data that moves alone, ranks that wait, and pipeline bubbles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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


class SpanKinds:
    """What exposure needs of the kernels of a graph, whatever the clock.

    ``moves`` are its collectives, of which ``kinds`` are the operations, sorted; all other kernels compute.
    """

    def __init__(self, graph: KernelGraph, multiplicity: Ints) -> None:
        self.gpus, self.multiplicity = graph.gpus, multiplicity
        self.gpu, self.collective, cls = (
            np.array(column, dtype=np.int64) for column in (graph.op_gpu, graph.op_collective, graph.op_class)
        )
        names = [str(c.describe.get("op", c.family)) for c in graph.classes]
        moves = self.collective >= 0
        gaps: Ints = np.array([round(c.gap_s / S_PER_PS) for c in graph.classes], dtype=np.int64)
        self.pause: Ints = np.where(moves, 0, gaps[cls])  # before computing; before a collective nothing works
        self.kinds = sorted({names[number] for number in set(cls[moves].tolist())})
        places = {kind: place for place, kind in enumerate(self.kinds)}
        kind_of_class = np.array([places.get(name, -1) for name in names], dtype=np.int64)
        self.moves, self.computes = np.flatnonzero(moves), np.flatnonzero(~moves)
        self.kind_of_moves: Ints = kind_of_class[cls[self.moves]]
        self.times_of_moves: Ints = multiplicity[self.gpu[self.moves]]
        self.tied = len(np.unique(self.collective[moves])) < len(self.moves)  # some collective is of several GPUs
        self.follows = np.flatnonzero(self.gpu[1:] == self.gpu[:-1]) + 1  # kernels with one before them on their GPU

    @cached_property
    def intervals(self) -> tuple[Ints, Ints, Ints]:
        """Of the ends of the intervals in :func:`_overlapping`: what opens (1) or closes (-1) there on which GPU."""
        kinds, moves, computes = len(self.kinds), self.moves, self.computes
        moving = 1 + self.kind_of_moves
        what = np.concatenate((np.zeros_like(computes), moving, moving + kinds, np.full_like(computes, 1 + 2 * kinds)))
        whose = self.gpu[np.concatenate((computes, moves, moves, computes))]
        return np.tile(what, 2), np.repeat((1, -1), len(what)), np.tile(whose, 2)


def exposure(kinds: SpanKinds, op: Ints, start: Ints, end: Ints) -> Exposure:
    """Exposure of a run whose kernels ``op``, all of the graph, ran from ``start`` to ``end`` (ps).

    GPUs count as often as they stand for one.
    """
    begins, ends = np.empty_like(start), np.empty_like(end)
    begins[op], ends[op] = start, end
    moving = moving_ps(kinds.collective, begins, ends) if kinds.tied else begins
    paused = begins - kinds.pause
    one_by_one = (paused[kinds.follows] >= ends[kinds.follows - 1]).all()
    alone, working = (_one_by_one if one_by_one else _overlapping)(kinds, begins, moving, ends, paused)
    number, alone_s = len(kinds.kinds), [total * S_PER_PS for total in alone.tolist()]
    return Exposure(
        by_kind=dict(zip(kinds.kinds, zip(alone_s[:number], alone_s[number:], strict=True), strict=True)),
        working_s=(working * S_PER_PS).tolist(),
    )


def _one_by_one(kinds: SpanKinds, begins: Ints, moving: Ints, ends: Ints, paused: Ints) -> tuple[Ints, Ints]:
    """As :func:`_overlapping`, where each GPU runs one kernel after the other: lengths add up."""
    number, moves, kind = len(kinds.kinds), kinds.moves, kinds.kind_of_moves
    alone, working = np.zeros(2 * number, dtype=np.int64), np.zeros(kinds.gpus, dtype=np.int64)
    lasts = ends - paused
    if kinds.tied:
        waits = (moving - begins)[moves]
        lasts[moves] -= waits
        np.add.at(alone, kind + number, waits * kinds.times_of_moves)
    np.add.at(alone, kind, lasts[moves] * kinds.times_of_moves)
    np.add.at(working, kinds.gpu, lasts)
    return alone, working


def _overlapping(kinds: SpanKinds, begins: Ints, moving: Ints, ends: Ints, paused: Ints) -> tuple[Ints, Ints]:
    """GPU-ps in which each kind is exposed, then in which it waits, and ps in which each GPU works.

    What computing, an earlier kind or, of waiting, anything that moves has covered is not counted again, so that the
    parts sum to the whole.
    """
    number, moves, computes = len(kinds.kinds), kinds.moves, kinds.computes
    what, change, whose = kinds.intervals
    begin = (begins[computes], moving[moves], begins[moves], paused[computes])
    at = np.concatenate((*begin, ends[computes], ends[moves], moving[moves], begins[computes]))
    at += (at.max() - at.min() + 1) * whose  # one GPU's time after the other's, so that one pass does for all
    order = np.argsort(at)
    changes = np.zeros((2 * number + 2, len(at)), dtype=np.int32)
    changes[what[order], np.arange(len(at))] = change[order]
    is_open = np.cumsum(changes, axis=1)[:, :-1] > 0
    length, gpu = np.diff(at[order]), whose[order[:-1]]
    alone, working = np.zeros(2 * number, dtype=np.int64), np.zeros(kinds.gpus, dtype=np.int64)
    works = is_open[: number + 1].any(axis=0) | is_open[-1]
    np.add.at(working, gpu[works], length[works])
    covered, times = is_open[0], kinds.multiplicity[gpu]
    for place, more in enumerate(is_open[1:-1]):
        alone[place] = (length * times)[more & ~covered].sum()
        covered = covered | more
    return alone, working


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


def covered(gpu: Ints, start: Ints, end: Ints, gpus: int) -> Ints:
    """Length of the union of each GPU's intervals, in their unit.

    >>> covered(np.array([0, 0, 0, 1]), np.array([0, 1, 5, 4]), np.array([2, 3, 6, 9]), 3).tolist()
    [4, 5, 0]
    """
    if not len(start):
        return np.zeros(gpus, dtype=np.int64)
    order = np.lexsort((start, gpu))
    gpu, start, end = gpu[order], start[order], end[order]
    after = (end.max() - start.min() + 1) * gpu  # one GPU's time after the other's, so that one pass does for all
    reach = np.maximum.accumulate(end + after)
    new = reach.copy()
    new[1:] -= np.maximum(reach[:-1], start[1:] + after[1:])
    new[0] -= start[0] + after[0]
    lengths = np.zeros(gpus, dtype=np.int64)
    np.add.at(lengths, gpu, np.maximum(new, 0))
    return lengths
