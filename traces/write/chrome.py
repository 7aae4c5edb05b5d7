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
from traces.records import Counter, Lane, Trace

CHUNK = 16384  # events formatted at a time
GZIP_LEVEL = 1  # level 6 takes three times as long for a sixth less
ID_LIMIT = 2**32  # Perfetto folds larger process and thread numbers into one row
HOST_PID = 1_000_000  # the host thread that launches on GPU n is shown as process HOST_PID + n


def write_chrome(trace: Trace, path: Path, *, launches: bool = False) -> Path:
    """Write ``trace`` to ``path`` (gzip when it ends in .gz); equal traces give equal bytes.

    ``launches`` adds what Holistic Trace Analysis pairs kernels by: a ``cudaLaunchKernel`` event for each
    kernel (the host is not simulated: it takes 1 ns and runs one kernel ahead) and ``correlation`` and
    ``device`` arguments, and names communication as NCCL does; to read such files without losing kernels
    below a microsecond, set ``HTA_DISABLE_NS_ROUNDING=1``.

    Raises :class:`TraceError` when spans of a lane overlap, a value is not finite, a reference points
    nowhere, or the path cannot be written; in every case no file is left behind.

    >>> import tempfile
    >>> import numpy as np
    >>> from traces.records import Lane, SpanKind, Spans
    >>> spans = Spans(
    ...     lane=np.array([0]), kind=np.array([0]), start_ps=np.array([0]), end_ps=np.array([1_500]),
    ...     energy_j=np.array([0.25]),
    ... )
    >>> lanes, kinds = [Lane(pid=0, tid=7, name="stream 7", order=7)], [SpanKind(name="gemm", category="kernel")]
    >>> trace = Trace(processes={0: "GPU 0"}, lanes=lanes, kinds=kinds, spans=spans)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = write_chrome(trace, Path(folder) / "one.json").read_text()
    >>> json.loads(text)["traceEvents"][-1]["args"]
    {'energy_j': 0.25}
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
                    for text in _pieces(trace, launches):
                        out.write(text.encode())
            else:
                for text in _pieces(trace, launches):
                    raw.write(text.encode())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except (OSError, zlib.error) as error:
        Path(temporary).unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot write trace '{path}': {reason}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _check(trace: Trace) -> None:
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


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TraceError(f"{what} cannot be written as JSON: {error}") from None


def _pieces(trace: Trace, launches: bool) -> Iterator[str]:
    # distributedInfo first: readers take the first "rank" of the file, found by a regular expression that
    # wants a space after the colon, so this one object keeps json's default separators.
    rank = json.dumps(dict(trace.metadata.get("distributedInfo", {"rank": 0})), allow_nan=False)
    rest = {key: value for key, value in trace.metadata.items() if key != "distributedInfo"}
    tail = _json(rest | {"displayTimeUnit": "ns"}, "metadata")[1:-1]
    yield f'{{"distributedInfo": {rank},{tail},"traceEvents":[\n'
    yield ",\n".join(_names(trace, launches))
    yield from _span_text(trace, launches)
    if launches:
        yield from _launch_text(trace)
    yield from _flow_text(trace)
    for counter in trace.counters:
        yield from _counter_text(counter)
    yield "\n]}\n"


def _names(trace: Trace, launches: bool) -> Iterator[str]:
    def meta(name: str, pid: int, tid: int | None, /, **args: Any) -> str:
        thread = {} if tid is None else {"tid": tid}
        return _json({"ph": "M", "name": name, "pid": pid} | thread | {"args": args}, f"{name} of process {pid}")

    for order, (pid, name) in enumerate(trace.processes.items()):
        yield meta("process_name", pid, None, name=name)
        yield meta("process_sort_index", pid, None, sort_index=order)
        if launches:
            yield meta("process_name", HOST_PID + pid, None, name=f"host of {name}")
    for lane in trace.lanes:
        yield meta("thread_name", lane.pid, lane.tid, name=lane.name)
        yield meta("thread_sort_index", lane.pid, lane.tid, sort_index=lane.order)


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def _span_text(trace: Trace, launches: bool) -> Iterator[str]:
    spans = trace.spans
    # Readers that pair launches know communication by the names of NCCL's kernels alone.
    names = [f"ncclDevKernel_{kind.name}" if launches and kind.communication else kind.name for kind in trace.kinds]
    heads = [
        _json({"ph": "X", "name": name, "cat": kind.category}, "span name")[:-1]
        for name, kind in zip(names, trace.kinds, strict=True)
    ]
    where = [f',"pid":{lane.pid},"tid":{lane.tid},"ts":' for lane in trace.lanes]
    args = [_json(dict(kind.args), f"arguments of '{kind.name}'")[1:-1] for kind in trace.kinds]
    # Text after the duration, without joules (even) and up to them (odd).
    tails: list[str] = []
    for text in args:
        tails += [f',"args":{{{text}', f',"args":{{{text}{"," if text else ""}"energy_j":']
    starts = [f",\n{head}{place}" for head in heads for place in where]
    points = [f".{ns:03d}" for ns in range(1000)]
    durations = [f'{point},"dur":' for point in points]

    has_energy = ~np.isnan(spans.energy_j)
    start_ns = to_ns(spans.start_ps)
    dur_ns = to_ns(spans.end_ps) - start_ns
    start_code = spans.kind * len(trace.lanes) + spans.lane
    tail_code = spans.kind * 2 + has_energy
    energy_j = np.where(has_energy, spans.energy_j, 0.0)
    extra = _correlations(trace) if launches else None

    def ending(tail: int, dur: int, joules: float) -> str:
        energy = f"{joules:.6g}" if tail & 1 else ""
        return f"{dur // 1000}{points[dur % 1000]}{tails[tail]}{energy}"

    endings: dict[tuple[int, int, float], str] = {}
    for begin in range(0, len(start_ns), CHUNK):
        part = slice(begin, begin + CHUNK)
        whole, rest = np.divmod(start_ns[part], 1000)
        keys = zip(tail_code[part].tolist(), dur_ns[part].tolist(), energy_j[part].tolist(), strict=True)
        if len(np.unique(energy_j[part])) * 4 < len(whole):  # repeated layers: most endings come again
            endings.clear()
            texts = [endings.get(key) or endings.setdefault(key, ending(*key)) for key in keys]
        else:
            texts = [ending(*key) for key in keys]
        if extra is not None:
            texts = [text + more for text, more in zip(texts, extra[part], strict=True)]
        rows = zip(start_code[part].tolist(), whole.tolist(), rest.tolist(), texts, strict=True)
        yield "".join([f"{starts[code]}{us}{durations[ns]}{text}}}}}" for code, us, ns, text in rows])


def _kernels(trace: Trace) -> list[bool]:
    is_kernel = np.array([kind.category == "kernel" for kind in trace.kinds], dtype=bool)
    return list(is_kernel[trace.spans.kind].tolist())


def _correlations(trace: Trace) -> list[str]:
    """Arguments that tie each kernel to its launch; other spans get none."""
    device = [trace.lanes[lane].pid for lane in trace.spans.lane.tolist()]
    comma = [bool(kind.args) for kind in trace.kinds]
    energy = (~np.isnan(trace.spans.energy_j)).tolist()
    return [
        f'{"," if comma[kind] or joules else ""}"device":{pid},"correlation":{number}' if kernel else ""
        for number, (kernel, pid, kind, joules) in enumerate(
            zip(_kernels(trace), device, trace.spans.kind.tolist(), energy, strict=True), start=1
        )
    ]


def _launch_text(trace: Trace) -> Iterator[str]:
    """A launch for every kernel, one ahead: issued as the kernel before it on its lane starts."""
    start = to_ns(trace.spans.start_ps).tolist()
    lanes = [trace.lanes[lane] for lane in trace.spans.lane.tolist()]
    kernels = np.flatnonzero(_kernels(trace)).tolist()
    issued: dict[int, int] = {}
    previous: dict[Lane, int] = {}
    for index in sorted(kernels, key=start.__getitem__):
        issued[index] = previous.get(lanes[index], 0)
        previous[lanes[index]] = start[index]
    yield "".join(
        [
            f',\n{{"ph":"X","name":"cudaLaunchKernel","cat":"cuda_runtime","pid":{HOST_PID + lanes[index].pid},'
            f'"tid":{lanes[index].tid},"ts":{_us(issued[index])},"dur":{_us(min(1, start[index] - issued[index]))},'
            f'"args":{{"correlation":{index + 1}}}}}'
            for index in kernels
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
        common = f'"name":"depends","cat":"flow","id":{number}'
        parts.append(
            f',\n{{"ph":"s",{common},"pid":{origin.pid},"tid":{origin.tid},"ts":{_us(leave)}}}'
            f',\n{{"ph":"f","bp":"e",{common},"pid":{target.pid},"tid":{target.tid},'
            f'"ts":{_us(int(start[after]))}}}'
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
    head = _json({"ph": "C", "name": counter.name, "pid": counter.pid}, "counter name")[:-1]
    for begin in range(0, len(time), CHUNK):
        yield "".join(
            [
                f',\n{head},"ts":{ts // 1000}.{ts % 1000:03d},"args":{{"value":{number:.10g}}}}}'
                for ts, number in zip(
                    time[begin : begin + CHUNK].tolist(), value[begin : begin + CHUNK].tolist(), strict=True
                )
            ]
        )
