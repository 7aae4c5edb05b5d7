"""What every writer asks of a trace, and what it leaves out of counters."""

from __future__ import annotations

import numpy as np

from traces.errors import TraceError
from traces.lint import overlaps, to_ns
from traces.records import Counter, Floats, Ints, Trace

ID_LIMIT = 2**32  # Perfetto folds larger process and thread numbers into one row


def check_trace(trace: Trace) -> None:
    """Refuse, by name, everything that Perfetto would drop, misplace or hang on."""
    spans = trace.spans
    _check_lanes(trace)
    if len({len(getattr(spans, column)) for column in spans.__slots__}) > 1:
        raise TraceError("span columns differ in length: give every span all five values")
    for column, table in (("lane", trace.lanes), ("kind", trace.kinds)):
        index = getattr(spans, column)
        if len(index) and not (index.min() >= 0 and index.max() < len(table)):
            raise TraceError(f"a span's {column} is outside the {len(table)} {column}s of the trace")
    if len(spans.start_ps) and (spans.start_ps.min() < 0 or (spans.end_ps < spans.start_ps).any()):
        raise TraceError("a span starts before 0 or ends before it starts: times must be non-negative and ordered")
    if np.isinf(spans.energy_j).any():
        raise TraceError("a span's energy_j is infinite: give joules, or NaN to leave them out")
    count, first = overlaps(spans)
    if count:
        lane = trace.lanes[int(spans.lane[first])]
        kind = trace.kinds[int(spans.kind[first])]
        raise TraceError(
            f"{count} spans overlap on one lane, the first '{kind.name}' on lane '{lane.name}' of "
            f"'{trace.processes[lane.pid]}': give each concurrent queue a lane of its own"
        )
    for counter in trace.counters:
        if counter.pid not in trace.processes:
            raise TraceError(f"counter '{counter.name}' belongs to process {counter.pid}, which is not in the trace")
        if not np.isfinite(counter.value).all():
            raise TraceError(f"counter '{counter.name}' holds a value that is not finite: Perfetto would hang on it")
        if len(counter.time_ps) and (counter.time_ps[0] < 0 or (np.diff(counter.time_ps) < 0).any()):
            raise TraceError(f"counter '{counter.name}' goes back in time: sort its steps, from 0 on")
    for pair in trace.flows:
        if not all(0 <= index < len(spans.lane) for index in pair):
            raise TraceError(f"flow {pair} names a span outside the {len(spans.lane)} of the trace")
        if any(trace.lanes[int(spans.lane[index])].asynchronous for index in pair):
            raise TraceError(f"flow {pair} names a span of an asynchronous lane: arrows lead from thread to thread")


def _check_lanes(trace: Trace) -> None:
    seen: set[tuple[int, int]] = set()
    for lane in trace.lanes:
        if lane.pid not in trace.processes:
            raise TraceError(f"lane '{lane.name}' belongs to process {lane.pid}, which is not in the trace")
        if not (0 <= lane.pid < ID_LIMIT and 0 <= lane.tid < ID_LIMIT):
            raise TraceError(f"lane '{lane.name}': pid {lane.pid}, tid {lane.tid}: both must be in 0..2^32-1")
        if (lane.pid, lane.tid) in seen:
            raise TraceError(f"lane '{lane.name}': pid {lane.pid}, tid {lane.tid} is taken by another lane")
        seen.add((lane.pid, lane.tid))


def changes(counter: Counter) -> tuple[Ints, Floats]:
    """Times (ns) and values of ``counter`` where it changes: the last value at a nanosecond holds."""
    time = to_ns(counter.time_ps)
    last = np.append(time[1:] != time[:-1], True)
    time, value = time[last], np.round(counter.value[last], 6)
    changed = np.append(True, value[1:] != value[:-1])
    return time[changed], value[changed]
