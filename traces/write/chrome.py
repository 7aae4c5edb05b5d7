"""Chrome-trace JSON that Perfetto reads without loss.

Rules (checked in the real engine): X events only, integer nanoseconds written as microseconds with three
decimals, ends rounded and durations derived so that neighbours touch and never overlap, one lane a queue,
counters on change, unique integer flow ids, no NaN, and nothing half-written.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.lint import overlaps, to_ns
from traces.records import Counter, Trace

CHUNK = 65536  # events formatted at a time
GZIP_LEVEL = 1  # level 6 takes three times as long for a sixth less


def write_chrome(trace: Trace, path: Path) -> Path:
    """Write ``trace`` to ``path`` (gzip when it ends in .gz); equal traces give equal bytes.

    Raises :class:`TraceError` when spans of a lane overlap, a value is not finite, or the path cannot be
    written; in every case no file is left behind.
    """
    _check(trace)
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(f"trace file '{path}': name it .json or .json.gz")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise TraceError(f"cannot write trace '{path}': {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as raw:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, compresslevel=GZIP_LEVEL, mtime=0) as out:
                    for text in _pieces(trace):
                        out.write(text.encode())
            else:
                for text in _pieces(trace):
                    raw.write(text.encode())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except (OSError, zlib.error) as error:
        Path(temporary).unlink(missing_ok=True)
        raise TraceError(f"cannot write trace '{path}': {error}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _check(trace: Trace) -> None:
    spans = trace.spans
    if len(spans.start_ps) and (spans.start_ps.min() < 0 or (spans.end_ps < spans.start_ps).any()):
        raise TraceError("a span starts before 0 or ends before it starts: times must be non-negative and ordered")
    count, first = overlaps(spans)
    if count:
        lane = trace.lanes[int(spans.lane[first])]
        kind = trace.kinds[int(spans.kind[first])]
        raise TraceError(
            f"{count} spans overlap on one lane, the first '{kind.name}' on lane '{lane.name}' of "
            f"'{trace.processes[lane.pid]}': give each concurrent queue a lane of its own"
        )
    for counter in trace.counters:
        if not np.isfinite(counter.value).all():
            raise TraceError(f"counter '{counter.name}' holds a value that is not finite: Perfetto would hang on it")


def _pieces(trace: Trace) -> Iterator[str]:
    # distributedInfo first and with a space: readers find the rank with a regular expression.
    head = {"distributedInfo": {"rank": 0}, **trace.metadata, "displayTimeUnit": "ns"}
    text = json.dumps(head, allow_nan=False)
    yield text[:-1] + ', "traceEvents": [\n'
    yield ",\n".join(_names(trace))
    yield from _span_text(trace)
    yield from _flow_text(trace)
    for counter in trace.counters:
        yield from _counter_text(counter)
    yield "\n]}\n"


def _names(trace: Trace) -> Iterator[str]:
    def meta(name: str, pid: int, tid: int | None, /, **args: Any) -> str:
        event: dict[str, Any] = {"ph": "M", "name": name, "pid": pid}
        if tid is not None:
            event["tid"] = tid
        return json.dumps(event | {"args": args}, allow_nan=False)

    for order, (pid, name) in enumerate(trace.processes.items()):
        yield meta("process_name", pid, None, name=name)
        yield meta("process_sort_index", pid, None, sort_index=order)
    for lane in trace.lanes:
        yield meta("thread_name", lane.pid, lane.tid, name=lane.name)
        yield meta("thread_sort_index", lane.pid, lane.tid, sort_index=lane.order)


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _span_text(trace: Trace) -> Iterator[str]:
    spans = trace.spans
    prefixes = []
    tails = []
    for kind in trace.kinds:
        head = json.dumps({"ph": "X", "name": kind.name, "cat": kind.category}, allow_nan=False)[:-1]
        args = json.dumps(dict(kind.args), allow_nan=False)[1:-1]
        prefixes.append(f",\n{head}")
        tails.append(args + ", " if args and kind.timed else args)
    where = [f', "pid": {lane.pid}, "tid": {lane.tid}' for lane in trace.lanes]
    start, end = to_ns(spans.start_ps), to_ns(spans.end_ps)
    has_energy = np.isfinite(spans.energy_j)
    for begin in range(0, len(start), CHUNK):
        part = slice(begin, begin + CHUNK)
        joules = spans.energy_j[part].tolist()
        rows = zip(
            spans.kind[part].tolist(),
            spans.lane[part].tolist(),
            start[part].tolist(),
            (end[part] - start[part]).tolist(),
            (
                f'"energy_j": {j:.6g}' if known else ""
                for j, known in zip(joules, has_energy[part].tolist(), strict=True)
            ),
            strict=True,
        )
        yield "".join(
            [
                f'{prefixes[kind]}{where[lane]}, "ts": {ts // 1000}.{ts % 1000:03d}, '
                f'"dur": {dur // 1000}.{dur % 1000:03d}, "args": {{{tails[kind]}{joules}}}}}'
                for kind, lane, ts, dur, joules in rows
            ]
        )


def _flow_text(trace: Trace) -> Iterator[str]:
    """Arrows from the end of one span to the start of another; both halves lie inside their spans."""
    spans = trace.spans
    start, end = to_ns(spans.start_ps), to_ns(spans.end_ps)
    parts = []
    for number, (before, after) in enumerate(trace.flows, start=1):
        origin, target = trace.lanes[int(spans.lane[before])], trace.lanes[int(spans.lane[after])]
        leave = max(int(start[before]), int(end[before]) - 1)
        common = f'"name": "depends", "cat": "flow", "id": {number}'
        parts.append(
            f',\n{{"ph": "s", {common}, "pid": {origin.pid}, "tid": {origin.tid}, "ts": {_us(leave)}}}'
            f',\n{{"ph": "f", "bp": "e", {common}, "pid": {target.pid}, "tid": {target.tid}, '
            f'"ts": {_us(int(start[after]))}}}'
        )
    yield "".join(parts)


def _counter_text(counter: Counter) -> Iterator[str]:
    if not len(counter.value):
        return
    time = to_ns(counter.time_ps)
    # The last value at a nanosecond holds; equal neighbours say nothing new.
    last = np.append(time[1:] != time[:-1], True)
    time, value = time[last], np.round(counter.value[last], 6)
    changed = np.append(True, value[1:] != value[:-1])
    time, value = time[changed], value[changed]
    head = json.dumps({"ph": "C", "name": counter.name, "pid": counter.pid}, allow_nan=False)[:-1]
    for begin in range(0, len(time), CHUNK):
        yield "".join(
            [
                f',\n{head}, "ts": {ts // 1000}.{ts % 1000:03d}, "args": {{"value": {number:.10g}}}}}'
                for ts, number in zip(
                    time[begin : begin + CHUNK].tolist(), value[begin : begin + CHUNK].tolist(), strict=True
                )
            ]
        )
