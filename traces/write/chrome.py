"""Chrome-trace JSON that Perfetto reads without loss.

Rules (checked in the real engine): X events, and nested async ones for lanes that are no threads; integer
nanoseconds written as microseconds with three decimals, ends rounded and durations derived so that neighbours touch
and never overlap, one lane a queue, counters on change, unique integer flow ids, no NaN, and nothing half-written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.lint import to_ns
from traces.records import Counter, Ints, Spans, Trace
from traces.write.check import changes, check_trace
from traces.write.files import write_pieces
from traces.write.launches import HOST_PID, host_text, in_whole_us
from traces.write.nested import nested_text
from traces.write.text import json_text, us_text

CHUNK = 16384  # events formatted at a time


def write_chrome(trace: Trace, path: Path, *, launches: bool = False) -> Path:
    """Write ``trace`` to ``path`` (gzip when it ends in .gz); equal traces give equal bytes.

    ``launches`` adds what Holistic Trace Analysis pairs kernels by: a ``cudaLaunchKernel`` event for each kernel
    (:mod:`traces.write.launches`) and ``correlation`` and ``device`` arguments, names communication as NCCL does, and
    writes whole microseconds.

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
    if launches:
        trace = in_whole_us(trace)
    check_trace(trace)
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(f"trace file '{path}': name it .json, .json.gz, .pftrace or .pftrace.gz")
    return write_pieces(path, (text.encode() for text in _pieces(trace, launches)))


def _pieces(trace: Trace, launches: bool) -> Iterator[str]:
    # distributedInfo first: readers take the first "rank" of the file, found by a regular expression that
    # wants a space after the colon, so this one object keeps json's default separators.
    rank = json.dumps(dict(trace.metadata.get("distributedInfo", {"rank": 0})), allow_nan=False)
    rest = {key: value for key, value in trace.metadata.items() if key != "distributedInfo"}
    tail = json_text(rest | {"displayTimeUnit": "ns"}, "metadata")[1:-1]
    yield f'{{"distributedInfo": {rank},{tail},"traceEvents":[\n'
    yield ",\n".join(_names(trace, launches))
    threads = np.flatnonzero(~np.array([lane.asynchronous for lane in trace.lanes], dtype=bool)[trace.spans.lane])
    if len(threads) == len(trace.spans.lane):
        yield from _span_text(trace, launches, _correlations(trace) if launches else None)
    else:
        extra = _correlations(trace) if launches else None
        yield from _span_text(_part(trace, threads), launches, extra and [extra[index] for index in threads.tolist()])
        yield from nested_text(trace)
    if launches:
        yield from host_text(trace)
    yield from _flow_text(trace, launches)
    for counter in trace.counters:
        yield from _counter_text(counter, launches)
    yield "\n]}\n"


def _names(trace: Trace, launches: bool) -> Iterator[str]:
    def meta(name: str, pid: int, tid: int | None, /, **args: Any) -> str:
        thread = {} if tid is None else {"tid": tid}
        return json_text({"ph": "M", "name": name, "pid": pid} | thread | {"args": args}, f"{name} of process {pid}")

    for order, (pid, name) in enumerate(trace.processes.items()):
        yield meta("process_name", pid, None, name=name)
        yield meta("process_sort_index", pid, None, sort_index=order)
        if launches:
            yield meta("process_name", HOST_PID + pid, None, name=f"host of {name}")
    for lane in trace.lanes:
        if lane.asynchronous:  # the engine names its track after its first span
            continue
        yield meta("thread_name", lane.pid, lane.tid, name=lane.name)
        yield meta("thread_sort_index", lane.pid, lane.tid, sort_index=lane.order)


def _part(trace: Trace, chosen: Ints) -> Trace:
    """``trace`` with the ``chosen`` of its spans only, and no lane and kind but theirs."""
    spans = Spans(**{field.name: getattr(trace.spans, field.name)[chosen] for field in fields(Spans)})
    lanes, lane = np.unique(spans.lane, return_inverse=True)
    kinds, kind = np.unique(spans.kind, return_inverse=True)
    return replace(
        trace,
        lanes=[trace.lanes[index] for index in lanes.tolist()],
        kinds=[trace.kinds[index] for index in kinds.tolist()],
        spans=replace(spans, lane=lane, kind=kind),
    )


def _span_text(trace: Trace, launches: bool, extra: Sequence[str] | None) -> Iterator[str]:
    """Spans of threads; ``extra`` arguments come last in each."""
    spans = trace.spans
    # Readers that pair launches know communication by the names of NCCL's kernels alone.
    prefixes = ["ncclDevKernel_" if launches and kind.communication else "" for kind in trace.kinds]
    names = [
        kind.name if kind.name.startswith("nccl") else prefix + kind.name
        for prefix, kind in zip(prefixes, trace.kinds, strict=True)
    ]
    heads = [
        json_text({"ph": "X", "name": name, "cat": kind.category}, "span name")[:-1]
        for name, kind in zip(names, trace.kinds, strict=True)
    ]
    where = [f',"pid":{lane.pid},"tid":{lane.tid},"ts":' for lane in trace.lanes]
    args = [json_text(dict(kind.args), f"arguments of '{kind.name}'")[1:-1] for kind in trace.kinds]
    # Text after the duration, without joules (even) and up to them (odd).
    tails: list[str] = []
    for text in args:
        tails += [f',"args":{{{text}', f',"args":{{{text}{"," if text else ""}"energy_j":']
    starts = [f",\n{head}{place}" for head in heads for place in where]
    points = ["" if launches else f".{ns:03d}" for ns in range(1000)]  # launches: in whole microseconds
    durations = [f'{point},"dur":' for point in points]

    has_energy = ~np.isnan(spans.energy_j)
    start_ns = to_ns(spans.start_ps)
    dur_ns = to_ns(spans.end_ps) - start_ns
    start_code = spans.kind * len(trace.lanes) + spans.lane
    tail_code = spans.kind * 2 + has_energy
    energy_j = np.where(has_energy, spans.energy_j, 0.0)

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


def _flow_text(trace: Trace, whole: bool) -> Iterator[str]:
    """Arrows from the end of one span to the start of another; both halves lie inside their spans."""
    spans = trace.spans
    start, end = to_ns(spans.start_ps), to_ns(spans.end_ps)
    parts = []
    for number, (before, after) in enumerate(trace.flows, start=1):
        origin, target = trace.lanes[int(spans.lane[before])], trace.lanes[int(spans.lane[after])]
        leave = max(int(start[before]), int(end[before]) - 1)
        common = f'"name":"depends","cat":"flow","id":{number}'
        parts.append(
            f',\n{{"ph":"s",{common},"pid":{origin.pid},"tid":{origin.tid},"ts":{us_text(leave, whole=whole)}}}'
            f',\n{{"ph":"f","bp":"e",{common},"pid":{target.pid},"tid":{target.tid},'
            f'"ts":{us_text(int(start[after]), whole=whole)}}}'
        )
    yield "".join(parts)


def _counter_text(counter: Counter, whole: bool) -> Iterator[str]:
    if not len(counter.value):
        return
    time, value = changes(counter)
    name = f"{counter.name} {counter.unit}".rstrip()
    head = json_text({"ph": "C", "name": name, "pid": counter.pid}, "counter name")[:-1]
    for begin in range(0, len(time), CHUNK):
        yield "".join(
            [
                f',\n{head},"ts":{us_text(ts, whole=whole)},"args":{{"value":{number:.10g}}}}}'
                for ts, number in zip(
                    time[begin : begin + CHUNK].tolist(), value[begin : begin + CHUNK].tolist(), strict=True
                )
            ]
        )
