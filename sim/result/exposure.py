"""Where GPUs do not compute: data that moves alone, ranks that wait, and pipeline bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder

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

    ``kinds`` are the operations of its collectives, sorted, ``kind`` gives each kernel's place among them, the last
    one of kernels that are no collectives: they compute.
    """

    def __init__(self, graph: KernelGraph, multiplicity: Sequence[int]) -> None:
        self.gpus, self.multiplicity = graph.gpus, multiplicity
        self.gpu, self.collective = graph.op_gpu, graph.op_collective
        names = [str(c.describe.get("op", c.family)) for c in graph.classes]
        pauses = [round(c.gap_s / S_PER_PS) for c in graph.classes]
        moves = [collective >= 0 for collective in self.collective]
        self.kinds = sorted({names[cls] for cls, is_move in zip(graph.op_class, moves, strict=True) if is_move})
        place = {kind: place for place, kind in enumerate(self.kinds)}
        kernels = list(zip(graph.op_class, moves, strict=True))
        self.kind = [place[names[cls]] if is_move else len(place) for cls, is_move in kernels]
        # Before computing; before a collective nothing works.
        self.pause = [0 if is_move else pauses[cls] for cls, is_move in kernels]
        self.shared = [ops for ops in graph.collective_members if len(ops) > 1]  # collectives of several GPUs

    @cached_property
    def ends(self) -> SpanEnds:
        """For :func:`_overlapping`."""
        return SpanEnds(self)


class SpanEnds:
    """Of each kernel that computes its time and the pause before it, of each collective when it moves and when it
    waits: where among all begins, then all ends, theirs are.

    ``what`` opens (``change`` 1) or closes (-1) there on which GPU (``whose``): computing, each kind that moves, each
    kind that waits, a pause.
    """

    def __init__(self, kinds: SpanKinds) -> None:
        number, kind, pause = len(kinds.kinds), np.array(kinds.kind), np.array(kinds.pause)
        self.computes, self.moves = np.flatnonzero(kind == number), np.flatnonzero(kind < number)
        self.waits, self.paused = self.moves if kinds.shared else self.moves[:0], np.flatnonzero(pause > 0)
        of_kind = (1 + kind[self.moves], 1 + number + kind[self.waits])
        rows = np.concatenate((np.zeros_like(self.computes), *of_kind, np.full_like(self.paused, 2 * number + 1)))
        whose = np.array(kinds.gpu)[np.concatenate((self.computes, self.moves, self.waits, self.paused))]
        self.what, self.change, self.whose = np.tile(rows, 2), np.repeat((1, -1), len(rows)), np.tile(whose, 2)
        self.collective, self.pause = np.array(kinds.collective), pause[self.paused]
        self.places, self.multiplicity = np.arange(len(self.what)), np.array(kinds.multiplicity)


def exposure(kinds: SpanKinds, records: Recorder) -> Exposure:
    """Exposure of a run of all kernels of a graph; GPUs count as often as they stand for one."""
    alone, working = _one_by_one(kinds, records) or _overlapping(kinds, records)
    number, alone_s = len(kinds.kinds), [gpu_ps * S_PER_PS for gpu_ps in alone]
    return Exposure(
        by_kind=dict(zip(kinds.kinds, zip(alone_s[:number], alone_s[number:], strict=True), strict=True)),
        working_s=[lasts_ps * S_PER_PS for lasts_ps in working],
    )


def _one_by_one(kinds: SpanKinds, records: Recorder) -> tuple[list[int], list[int]] | None:
    """As :func:`_overlapping`, where each GPU runs one kernel after the other: lengths add up. None where they do not.

    Spans are in the order of their ends.
    """
    number, gpus, multiplicity, pauses, of = len(kinds.kinds), kinds.gpu, kinds.multiplicity, kinds.pause, kinds.kind
    before, working = [-1 for _ in multiplicity], [0 for _ in multiplicity]
    moving, waiting = [0] * (number + 1), [0] * number
    came: dict[int, tuple[int, int]] = {}
    for op, start, end in zip(records.span_op, records.span_start_ps, records.span_end_ps, strict=True):
        gpu, kind, begin = gpus[op], of[op], start - pauses[op]
        if begin < before[gpu]:
            return None
        before[gpu] = end
        working[gpu] += end - begin
        if kind < number:
            moving[kind] += (end - start) * multiplicity[gpu]
            came[op] = start, end
    for ops in kinds.shared:
        last = max([came[op][0] for op in ops])
        for op in ops:
            gpu, kind, (start, end) = gpus[op], of[op], came[op]
            waits = min(last, end) - start
            working[gpu] -= waits
            moving[kind] -= waits * multiplicity[gpu]
            waiting[kind] += waits * multiplicity[gpu]
    return moving[:number] + waiting, working


def _overlapping(kinds: SpanKinds, records: Recorder) -> tuple[list[int], list[int]]:
    """GPU-ps in which each kind is exposed, then in which it waits, and ps in which each GPU works.

    What computing, an earlier kind or, of waiting, anything that moves has covered is not counted again, so that the
    parts sum to the whole.
    """
    number, own = len(kinds.kinds), kinds.ends
    op, start, end = (
        np.frombuffer(column, dtype=np.int64)
        for column in (records.span_op, records.span_start_ps, records.span_end_ps)
    )
    begins, ends = np.empty_like(start), np.empty_like(end)
    begins[op], ends[op] = start, end
    moving = moving_ps(own.collective, begins, ends) if kinds.shared else begins
    computes, moves, waits, paused = own.computes, own.moves, own.waits, own.paused
    opens = (begins[computes], moving[moves], begins[waits], begins[paused] - own.pause)
    at = np.concatenate((*opens, ends[computes], ends[moves], moving[waits], begins[paused]))
    if kinds.gpus > 1:  # one GPU's time after the other's, so that one pass does for all
        at += (at.max() - at.min() + 1) * own.whose
    order = np.argsort(at)
    changes = np.zeros((2 * number + 3, len(at)), dtype=np.int32)
    changes[own.what[order], own.places] = own.change[order]
    changes[-1, 0] = 1  # where nothing else is open
    is_open = np.cumsum(changes, axis=1, out=changes)[:, :-1] > 0  # in place: the table is the largest here
    at, gpu = at[order], own.whose[order[:-1]]
    length, first = at[1:] - at[:-1], is_open.argmax(axis=0)
    by_first, working = np.zeros(2 * number + 3, dtype=np.int64), np.zeros(kinds.gpus, dtype=np.int64)
    np.add.at(by_first, first, length * own.multiplicity[gpu])
    np.add.at(working, gpu, length * ((first <= number) | is_open[-2]))
    return by_first[1 : 2 * number + 1].tolist(), working.tolist()


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
