"""What each piece of GPU work waited for: the dependencies a trace records, and those that it only suggests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from traces.capture import NONE, Capture
from traces.records import Floats, Ints


class EdgeKind(IntEnum):
    """Where an edge comes from."""

    STREAM = 0  # order on one stream
    WAIT = 1  # a recorded wait of a stream for an event
    INFERRED = 2  # work of another stream ended and this began at once


# Confidence of an inferred edge falls with the pause between the two; a wake-up across streams takes about 1-2 us.
INFERRED_WITHIN_NS = 4_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edges:
    """Rows of GPU work (``before`` -> ``after``), the kind, and how sure the edge is (1: recorded)."""

    before: Ints
    after: Ints
    kind: Ints
    confidence: Floats

    def counts(self) -> dict[str, dict[str, float]]:
        """Number and mean confidence by kind."""
        found = {}
        for kind in EdgeKind:
            mine = self.kind == kind
            mean = float(self.confidence[mine].mean()) if mine.any() else 0.0
            found[kind.name.lower()] = {"count": int(mine.sum()), "confidence": mean}
        return found


def edges_of(capture: Capture) -> Edges:
    """Dependencies between rows of GPU work on each rank.

    Stream order is certain, save where two rows of a stream overlap (programmatic dependent launch): those get
    no edge. A recorded event wait (``cuda_sync``) joins the last work before the record to the first work
    launched on the waiting stream after the wait. Where a rank records no waits, work that begins within
    4 us of the end of another stream's work, while its own stream had been idle and its launch was early, is
    taken to have waited for it, with a confidence that falls with the pause. A simulated trace records
    its waits itself; what begins as another stream's work ends waited for its SMs there.
    """
    known, waiting = capture.depends
    arrows = _columns(known, waiting, EdgeKind.WAIT, 1.0)
    parts = [_stream_edges(capture), _wait_edges(capture), arrows, coincidences(capture)]
    before, after, kind, confidence = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Edges(before=before, after=after, kind=kind, confidence=confidence)


Columns = tuple[Ints, Ints, Ints, Floats]


def _columns(
    before: list[int] | Ints, after: list[int] | Ints, kind: EdgeKind, confidence: list[float] | float
) -> Columns:
    first, second = np.asarray(before, dtype=np.int64), np.asarray(after, dtype=np.int64)
    sure = (
        np.full(len(first), confidence) if isinstance(confidence, float) else np.asarray(confidence, dtype=np.float64)
    )
    return first, second, np.full(len(first), int(kind), dtype=np.int64), sure


def stream_order(capture: Capture) -> tuple[Ints, Ints]:
    """Neighbours on one stream: (row, next row)."""
    work = capture.work
    order = np.lexsort((work.start_ns, work.stream, work.rank))
    same = (work.rank[order][1:] == work.rank[order][:-1]) & (work.stream[order][1:] == work.stream[order][:-1])
    return order[:-1][same], order[1:][same]


def _stream_edges(capture: Capture) -> Columns:
    before, after = stream_order(capture)
    follows = capture.work.start_ns[after] >= capture.work.end_ns[before]
    return _columns(before[follows], after[follows], EdgeKind.STREAM, 1.0)


def _wait_edges(capture: Capture) -> Columns:
    """Recorded waits, by the host's order of calls: launches before the record, launches after the wait."""
    work, calls, waits = capture.work, capture.calls, capture.waits
    if not len(waits):
        return _columns([], [], EdgeKind.WAIT, 1.0)
    call_at = {
        (rank, correlation): (start, thread)
        for rank, correlation, start, thread in zip(
            calls.rank.tolist(), calls.correlation.tolist(), calls.start_ns.tolist(), calls.thread.tolist(), strict=True
        )
        if correlation != NONE
    }
    launched = (
        np.where(work.launch != NONE, calls.start_ns[work.launch], np.iinfo(np.int64).max)
        if len(calls)
        else work.launch
    )
    before, after = [], []
    for number in np.flatnonzero((waits.stream != NONE) & (waits.source_stream != NONE)).tolist():
        rank = int(waits.rank[number])
        record = call_at.get((rank, int(waits.record_correlation[number])))
        wait = call_at.get((rank, int(waits.correlation[number])))
        if record is None or wait is None or waits.stream[number] == waits.source_stream[number]:
            continue
        mine = (work.rank == rank) & (work.launch != NONE)
        sources = np.flatnonzero(mine & (work.stream == waits.source_stream[number]) & (launched < record[0]))
        targets = np.flatnonzero(mine & (work.stream == waits.stream[number]) & (launched > wait[0]))
        if len(sources) and len(targets):
            source, target = int(sources[np.argmax(launched[sources])]), int(targets[np.argmin(launched[targets])])
            if work.end_ns[source] <= work.start_ns[target]:
                before.append(source)
                after.append(target)
    return _columns(before, after, EdgeKind.WAIT, 1.0)


def coincidences(capture: Capture) -> Columns:
    """Edges that only times suggest: before, after, kind, confidence."""
    work, calls = capture.work, capture.calls
    before, after = stream_order(capture)
    idle_since = np.full(len(work), np.iinfo(np.int64).min)
    idle_since[after] = work.end_ns[before]
    known = work.launch != NONE
    launched = np.where(known, (calls.start_ns + calls.dur_ns)[work.launch], idle_since) if len(calls) else idle_since
    sources: list[int] = []
    targets: list[int] = []
    sure: list[float] = []
    for rank in capture.ranks:
        rows = np.flatnonzero(work.rank == rank)
        if len(np.unique(work.stream[rows])) < 2 or (capture.waits.rank == rank).any():
            continue
        by_end = rows[np.argsort(work.end_ns[rows], kind="stable")]
        ends = work.end_ns[by_end]
        at = np.searchsorted(ends, work.start_ns[rows], side="right") - 1
        for row, place in zip(rows.tolist(), at.tolist(), strict=True):
            if place < 0:
                continue
            source = int(by_end[place])
            pause = int(work.start_ns[row] - work.end_ns[source])
            if (
                work.stream[source] != work.stream[row]
                and pause <= INFERRED_WITHIN_NS
                and work.end_ns[source] > max(idle_since[row], launched[row])
            ):
                sources.append(source)
                targets.append(row)
                sure.append(1.0 - pause / INFERRED_WITHIN_NS)
    return _columns(sources, targets, EdgeKind.INFERRED, sure)
