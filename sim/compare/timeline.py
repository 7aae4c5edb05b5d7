"""The real step over the simulated one in one file: a group of processes each, beginning at one moment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from sim.compare.compare import Comparison
from sim.result.trace import to_trace
from traces.classify import COMMUNICATION
from traces.records import Lane, SpanKind, Spans, Trace
from traces.write.by_name import write_trace

SIMULATED = 1000  # process numbers of the simulated GPUs begin here


def write_both(comparison: Comparison, path: Path) -> Path:
    """Write both timelines, in the format that the name asks for.

    Raises :class:`TraceError` where ``path`` cannot be written.
    """
    return write_trace(_joined(_real(comparison), _simulated(comparison)), path)


def _real(comparison: Comparison) -> Trace:
    """The step on every rank of the trace; kernels that overlap on a stream (by design of the engine) are cut there."""
    work, names, classes = comparison.capture.work, comparison.capture.names, comparison.classes
    begin, end = comparison.step.begin_ns, comparison.step.end_ns
    rows = np.flatnonzero((work.start_ns >= begin) & (work.start_ns < end))
    rows = rows[np.lexsort((work.start_ns[rows], work.stream[rows], work.rank[rows]))]
    partner = {row: pair for pair in comparison.pairs if pair.real is not None for row in pair.real.rows}
    lanes: dict[tuple[int, int], int] = {}
    kinds: dict[tuple[str, str, str], int] = {}
    lane, kind = [], []
    for row in rows.tolist():
        lane.append(lanes.setdefault((int(work.rank[row]), int(work.stream[row])), len(lanes)))
        pair = partner.get(row)
        predicted = "" if pair is None or pair.predicted is None else pair.predicted.name
        key = (names[work.name[row]], classes.labels[classes.index[row]], predicted)
        kind.append(kinds.setdefault(key, len(kinds)))
    start, stop = work.start_ns[rows] - begin, (work.start_ns + work.dur_ns)[rows] - begin
    same = np.append(np.diff(lane) == 0, False)
    stop = np.where(same, np.minimum(stop, np.append(start[1:], 0)), stop)
    return Trace(
        processes={rank: f"real, rank {rank}" for rank in sorted({rank for rank, _ in lanes})},
        lanes=[Lane(pid=rank, tid=stream, name=f"stream {stream}", order=stream) for rank, stream in lanes],
        kinds=[
            SpanKind(
                name=name,
                category="kernel",
                args={"class": cls, "predicted as": predicted or "nothing"},
                communication=cls == COMMUNICATION,
            )
            for name, cls, predicted in kinds
        ],
        spans=Spans(
            lane=np.array(lane, dtype=np.int64),
            kind=np.array(kind, dtype=np.int64),
            start_ps=start * 1000,
            end_ps=stop * 1000,
            energy_j=np.full(len(rows), np.nan),
        ),
        metadata={"schemaVersion": 1, "traceName": "wattline compare"},
    )


def _simulated(comparison: Comparison) -> Trace:
    """The run, under process numbers of its own."""
    trace = to_trace(comparison.run)
    return replace(
        trace,
        processes={SIMULATED + pid: f"simulated, {name}" for pid, name in trace.processes.items()},
        lanes=[replace(lane, pid=SIMULATED + lane.pid) for lane in trace.lanes],
        counters=[replace(counter, pid=SIMULATED + counter.pid) for counter in trace.counters],
    )


def _joined(first: Trace, second: Trace) -> Trace:
    """Both as one trace: the first above."""
    shift = len(first.spans.lane)
    return Trace(
        processes={**first.processes, **second.processes},
        lanes=[*first.lanes, *second.lanes],
        kinds=[*first.kinds, *second.kinds],
        spans=Spans(
            lane=np.concatenate([first.spans.lane, second.spans.lane + len(first.lanes)]),
            kind=np.concatenate([first.spans.kind, second.spans.kind + len(first.kinds)]),
            start_ps=np.concatenate([first.spans.start_ps, second.spans.start_ps]),
            end_ps=np.concatenate([first.spans.end_ps, second.spans.end_ps]),
            energy_j=np.concatenate([first.spans.energy_j, second.spans.energy_j]),
        ),
        counters=[*first.counters, *second.counters],
        flows=[*first.flows, *((a + shift, b + shift) for a, b in second.flows)],
        metadata={**second.metadata, **first.metadata},
    )
