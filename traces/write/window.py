"""Less of a trace: a window of time, and counters averaged over equal steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traces.errors import TraceError
from traces.records import Counter, Ints, Spans, Trace


def window(trace: Trace, begin_ps: int, end_ps: int) -> Trace:
    """The part of ``trace`` from ``begin_ps`` to ``end_ps``; times stay what they were.

    Spans of kernels are kept whole when they touch the window; what encloses them is cut at its edges. Counters begin
    with the value that they have there. Arrows are kept where both ends are.
    """
    spans = trace.spans
    kept = np.flatnonzero((spans.start_ps < end_ps) & (spans.end_ps > begin_ps))
    if not len(kept):
        last_ms = float(spans.end_ps.max(initial=0)) * 1e-9
        raise TraceError(f"no kernel in the window from {begin_ps * 1e-9:g} ms on: the trace ends at {last_ms:.6g} ms")
    place = {old: new for new, old in enumerate(kept.tolist())}
    encloses = ~np.array([kind.timed for kind in trace.kinds], dtype=bool)[spans.kind[kept]]
    start, end = spans.start_ps[kept], spans.end_ps[kept]
    return replace(
        trace,
        spans=Spans(
            lane=spans.lane[kept],
            kind=spans.kind[kept],
            start_ps=np.where(encloses, np.maximum(start, begin_ps), start),
            end_ps=np.where(encloses, np.minimum(end, end_ps), end),
            energy_j=spans.energy_j[kept],
        ),
        counters=[_within(counter, begin_ps, end_ps) for counter in trace.counters],
        flows=[(place[a], place[b]) for a, b in trace.flows if a in place and b in place],
    )


def _within(counter: Counter, begin_ps: int, end_ps: int) -> Counter:
    first = max(int(np.searchsorted(counter.time_ps, begin_ps, side="right")) - 1, 0)
    last = int(np.searchsorted(counter.time_ps, end_ps))
    time = np.maximum(counter.time_ps[first:last], begin_ps)
    return replace(counter, time_ps=time, value=counter.value[first:last])


def averaged(trace: Trace, step_ps: int) -> Trace:
    """``trace`` with a value every ``step_ps`` at most in its counters: the mean over the step, the last of a total.

    The integral of a counter over whole steps stays what it was.
    """
    end_ps = int(trace.spans.end_ps.max(initial=0))
    return replace(trace, counters=[_averaged(counter, step_ps, end_ps) for counter in trace.counters])


def _averaged(counter: Counter, step_ps: int, end_ps: int) -> Counter:
    """
    >>> power = Counter(pid=0, name="power", time_ps=np.array([0, 5, 6, 12]), value=np.array([1.0, 11.0, 1.0, 3.0]))
    >>> _averaged(power, 10, 14).value.tolist()
    [2.0, 2.0]
    """
    time, value = counter.time_ps, counter.value
    if len(time) < 2 or (end_ps - time[0]) / step_ps > len(time):  # as sparse as that already
        return counter
    edges: Ints = np.append(np.arange(time[0] - time[0] % step_ps, end_ps, step_ps), end_ps)
    edges[0] = time[0]
    if counter.total:
        at = np.searchsorted(time, edges[1:], side="right") - 1
        return replace(counter, time_ps=edges[1:], value=value[at])
    so_far = np.concatenate([[0.0], np.cumsum(value * np.diff(np.append(time, max(end_ps, time[-1]))))])
    means = np.diff(np.interp(edges, np.append(time, max(end_ps, time[-1])), so_far)) / np.diff(edges)
    return replace(counter, time_ps=edges[:-1], value=means)
