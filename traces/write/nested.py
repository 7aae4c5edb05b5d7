"""Asynchronous lanes in Chrome JSON: nested async events, a begin and an end for each span, one id a lane.

The engine puts all events of one id on one track of their process and matches begins and ends by nesting: at one
nanosecond, inner spans end first, then outer ones, then the next ones begin, the longest first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from traces.lint import to_ns
from traces.records import Ints, Trace
from traces.write.text import json_text, us_text

CHUNK = 8192  # events formatted at a time


def nested_text(trace: Trace) -> Iterator[str]:
    """The spans of all asynchronous lanes, lane by lane."""
    spans = trace.spans
    mine = np.flatnonzero(np.array([lane.asynchronous for lane in trace.lanes], dtype=bool)[spans.lane])
    if not len(mine):
        return
    used = np.unique(spans.kind[mine]).tolist()
    names = {
        kind: json_text({"name": trace.kinds[kind].name, "cat": trace.kinds[kind].category}, "span") for kind in used
    }
    heads = {kind: f"{text[1:-1]}," for kind, text in names.items()}
    args = {
        kind: json_text(dict(trace.kinds[kind].args), f"arguments of '{trace.kinds[kind].name}'")[1:-1] for kind in used
    }
    start, end = to_ns(spans.start_ps[mine]), to_ns(spans.end_ps[mine])
    order = turns(spans.lane[mine], start, end)
    rows = (order % len(mine)).tolist()
    kind, lane = spans.kind[mine].tolist(), spans.lane[mine].tolist()
    joules, timed = spans.energy_j[mine].tolist(), (~np.isnan(spans.energy_j[mine])).tolist()
    begins, time = (order < len(mine)).tolist(), np.concatenate([start, end])[order].tolist()
    for first in range(0, len(rows), CHUNK):
        texts = []
        part = slice(first, first + CHUNK)
        for row, begin, ns in zip(rows[part], begins[part], time[part], strict=True):
            of = trace.lanes[lane[row]]
            where = f'"pid":{of.pid},"id2":{{"local":"{of.tid:#x}"}},"ts":{us_text(ns)}'
            if not begin:
                texts.append(f',\n{{"ph":"e",{heads[kind[row]]}{where}}}')
                continue
            values = args[kind[row]]
            if timed[row]:
                values += f'{"," if values else ""}"energy_j":{joules[row]:.6g}'
            texts.append(f',\n{{"ph":"b",{heads[kind[row]]}{where},"args":{{{values}}}}}')
        yield "".join(texts)


def turns(lane: Ints, start: Ints, end: Ints) -> Ints:
    """Begins (by their number) and ends (that plus how many there are), in order of lane and time, nesting right.

    >>> turns(np.zeros(3, dtype=np.int64), np.array([0, 0, 4]), np.array([9, 4, 9])).tolist()
    [0, 1, 4, 2, 5, 3]
    """
    number = np.arange(len(lane))
    return np.lexsort(
        (
            np.concatenate([number, -number]),
            np.concatenate([start - end, -start]),
            np.concatenate([np.ones_like(lane), np.where(start == end, 2, 0)]),
            np.concatenate([start, end]),
            np.concatenate([lane, lane]),
        )
    )
