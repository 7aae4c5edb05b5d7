"""Where the repeated step of a captured run begins and ends: an engine's decode step, a batch of a prefill."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from traces.capture import NONE, Capture
from traces.records import Ints

# A step repeats when so many of its kernels have the names of those one period before; a longer period must do better
# than a shorter one by so much to count (layers of a step nearly repeat one another).
LEAST_ALIKE, BETTER = 0.9, 0.005
# Regions that engines and the profiler put around a step.
STEP_REGION = re.compile(r"^ProfilerStep#|^execute_(?:context|model|step)|^(?:decode|prefill)_step|^step\[")
MOST_NAMES = 20_000  # kernels among which a period is looked for
CANDIDATES = 8  # places of a period where a step may begin: after its longest pauses


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceStep:
    """One step: rows of ``Capture.work`` in order of start, from ``begin_ns`` to ``end_ns`` (the next one's begin)."""

    rows: Ints
    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        """From the step's first kernel to the first of the next."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceSteps:
    """Steps of one rank that run the same kernels; ``how`` they were distinguished, ``others`` that were left out."""

    steps: Sequence[TraceStep]
    how: str
    others: int

    def median(self) -> TraceStep:
        """The step of median length (the lower one of two)."""
        return sorted(self.steps, key=lambda step: step.length_ns)[(len(self.steps) - 1) // 2]


def steps_of(capture: Capture, rank: int) -> list[TraceSteps]:
    """Ways to cut what ``rank`` ran into steps, the surest first; the last one is always the whole trace.

    Graph launches tell, else regions that engines mark on the GPU, else the period of the kernels' names, of which
    there may be several ways: where a step begins is not in the names.
    """
    rows = np.flatnonzero(capture.work.rank == rank)
    rows = rows[np.argsort(capture.work.start_ns[rows], kind="stable")]
    found = []
    for how, first in (("graph launches", _graphs(capture, rows)), ("regions", _regions(capture, rank, rows))):
        if len(first) > 1:
            found.append(_cut(capture, rows, first, how))
    if not found:
        period = period_of(capture.work.name[rows])
        if period:
            starts = _after_pauses(capture, rows, period)
            found += [_cut(capture, rows, np.arange(at, len(rows), period), "period") for at in starts]
    return [*found, _cut(capture, rows, np.zeros(1, dtype=np.int64), "whole")]


def joined(steps: TraceSteps, count: int) -> TraceSteps:
    """``steps`` with ``count`` of them in a row as one: a period may be a layer."""
    kept = []
    for at in range(0, len(steps.steps) - count + 1, count):
        group = steps.steps[at : at + count]
        if all(before.end_ns == after.begin_ns for before, after in pairwise(group)):
            rows = np.concatenate([step.rows for step in group])
            kept.append(TraceStep(rows=rows, begin_ns=group[0].begin_ns, end_ns=group[-1].end_ns))
    return TraceSteps(steps=kept, how=steps.how, others=steps.others) if kept else steps


def period_of(names: Ints) -> int:
    """Kernels after which ``names`` begin anew, 0 where they do not.

    >>> period_of(np.array([1, 2, 2, 3, 1, 2, 2, 3, 1, 2, 2, 3]))
    4
    >>> period_of(np.arange(10))
    0
    """
    names = names[:MOST_NAMES]
    count = len(names)
    best, alike = 0, LEAST_ALIKE
    for lag in range(1, count // 2 + 1):
        share = float(np.mean(names[lag:] == names[:-lag]))
        if share >= alike + (BETTER if best else 0.0):
            best, alike = lag, share
    return best


def _graphs(capture: Capture, rows: Ints) -> Ints:
    """First rows of graph launches that are most of what ran: of those with the most kernels, one a step."""
    graph = capture.work.graph[rows]
    sizes = Counter(graph[graph != NONE].tolist())
    if not sizes:
        return np.empty(0, dtype=np.int64)
    usual = max(Counter(sizes.values()).items(), key=lambda item: item[0] * item[1])[0]
    whole = [launch for launch, size in sizes.items() if 2 * size > usual]
    if sum(sizes[launch] for launch in whole) * 2 < len(rows):
        return np.empty(0, dtype=np.int64)
    return np.array(sorted(int(np.argmax(graph == launch)) for launch in whole), dtype=np.int64)


def _regions(capture: Capture, rank: int, rows: Ints) -> Ints:
    """First rows in regions of the GPU that engines or the profiler put around a step."""
    notes = capture.annotations
    mine = np.flatnonzero((notes.rank == rank) & (notes.on_gpu == 1))
    named = [row for row in mine.tolist() if STEP_REGION.search(capture.names[notes.name[row]])]
    begins = np.array(sorted({int(notes.start_ns[row]) for row in named}), dtype=np.int64)
    first = np.searchsorted(capture.work.start_ns[rows], begins)
    return np.unique(first[first < len(rows)])


def _after_pauses(capture: Capture, rows: Ints, period: int) -> list[int]:
    """Rows of the first period that follow its longest pauses, by their median over all periods."""
    work = capture.work
    start = work.start_ns[rows]
    pause = np.append(0, start[1:] - np.maximum.accumulate(work.start_ns + work.dur_ns, dtype=np.int64)[rows][:-1])
    whole = len(rows) // period
    usual = np.median(pause[: whole * period].reshape(whole, period), axis=0)
    return [int(at) for at in np.argsort(-usual, kind="stable")[:CANDIDATES]]


def _cut(capture: Capture, rows: Ints, first: Ints, how: str) -> TraceSteps:
    """Steps that begin at ``first`` and run what most of them run; the last one has no next, and counts only alone."""
    work = capture.work
    ends = np.append(first[1:], len(rows))
    steps = []
    for begin, end in zip(first.tolist(), ends.tolist(), strict=True):
        own = rows[begin:end]
        after = int(work.start_ns[rows[end]]) if end < len(rows) else int((work.start_ns + work.dur_ns)[own].max())
        steps.append(TraceStep(rows=own, begin_ns=int(work.start_ns[own[0]]), end_ns=after))
    complete = steps[:-1] if len(steps) > 1 else steps
    sizes = Counter(len(step.rows) for step in complete)
    usual = max(sizes.items(), key=lambda item: (item[1], item[0]))[0]
    alike = [step for step in complete if len(step.rows) == usual]
    return TraceSteps(steps=alike, how=how, others=len(steps) - len(alike))
