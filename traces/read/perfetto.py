"""Our own traces in Perfetto's format (``.pftrace``): slices, arrows and counters as the writer puts them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traces.errors import TraceError
from traces.read.events import Reading
from traces.read.own import COUNTERS
from traces.read.rows import FileRows, Rows
from traces.read.schema import OwnArgs, OwnExactEvent
from traces.read.stream import open_trace
from traces.read.tables import table_of, take_work
from traces.write.files import check_package

PACKET = b"\x0a"  # field 1 of a trace, after its length


@dataclass(slots=True)
class _Track:
    """What a track is: a process, a thread of it, or a counter."""

    pid: int
    tid: int = -1
    counter: str = ""


@dataclass(slots=True)
class _Reader:
    """State of one file."""

    reading: Reading
    tracks: dict[int, _Track] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)  # all interned names: the writer numbers them together
    open: dict[int, list[tuple[int, OwnExactEvent]]] = field(default_factory=lambda: defaultdict(list))
    events: list[OwnExactEvent] = field(default_factory=list)
    arrows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    counts: list[tuple[int, int, int, float]] = field(default_factory=list)


def read_perfetto(path: Path) -> FileRows:
    """Rows of a trace that wattline wrote.

    Raises :class:`TraceError` where the package ``perfetto`` is missing, or where the file is another tool's.
    """
    check_package("perfetto", "perfetto", path)
    reading, rows = Reading(path=path), Rows()
    reader = _Reader(reading)
    for packet in _packets(path, reading):
        if packet.HasField("track_descriptor"):
            _learn(packet.track_descriptor, reader)
        for table in ("event_names", "event_categories", "debug_annotation_names"):
            for entry in getattr(packet.interned_data, table):
                reader.texts[entry.iid] = entry.name
        for entry in packet.interned_data.debug_annotation_string_values:
            reader.texts[entry.iid] = entry.str.decode("utf-8", "replace")
        if packet.HasField("track_event"):
            _take(packet, reader)
    if not str(reading.metadata.get("traceName", "")).startswith("wattline"):
        raise TraceError(
            f"trace '{path}': a Perfetto trace of another tool: give its kernels as JSON or CSV "
            "(rocprofv3 --output-format json; torch: export_chrome_trace)"
        )
    by_category = defaultdict(list)
    for event in reader.events:
        by_category[str(event.cat)].append(event)
    for category, some in by_category.items():
        if (take := table_of(category)) is not None:
            take(list(some), category, rows, reading)
    if not rows.work:  # a served run without kernels: its steps are the GPUs' work
        take_work(
            [event for event in by_category["step"] if getattr(event.args, "steps", None)], "kernel", rows, reading
        )
    if reader.arrows:
        rows.arrows.append(np.array(reader.arrows, dtype=np.int64).T)
    if reader.counts:
        columns = np.array([count[:3] for count in reader.counts], dtype=np.int64).T
        rows.counts.append((columns, np.array([count[3] for count in reader.counts])))
    return FileRows(rows=rows, reading=reading)


def _packets(path: Path, reading: Reading) -> Iterator[Any]:
    from google.protobuf.message import DecodeError
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    kind: Any = perfetto_trace_pb2.TracePacket  # type: ignore[attr-defined,unused-ignore]
    with open_trace(path, reading) as stream:
        parts = []
        while part := stream.read(1 << 24):
            parts.append(part)
    data = memoryview(b"".join(parts))
    at = 0
    try:
        while at < len(data):
            if data[at : at + 1] != PACKET:
                raise TraceError(f"trace '{path}': byte {at} begins no packet: it is no Perfetto trace, or damaged")
            at, size, shift = at + 1, 0, 0
            while True:
                byte = data[at]
                size, at, shift = size | (byte & 127) << shift, at + 1, shift + 7
                if byte < 128:
                    break
            if at + size > len(data):
                raise IndexError
            yield kind.FromString(bytes(data[at : at + size]))
            at += size
    except (IndexError, DecodeError):
        reading.note("array-without-end")


def _learn(track: Any, reader: _Reader) -> None:
    parent = reader.tracks.get(track.parent_uuid)
    if track.HasField("process"):
        reader.tracks[track.uuid] = _Track(pid=track.process.pid)
        try:
            known = json.loads(track.description or "{}")
        except ValueError:
            known = {}
        for key, value in known.items() if isinstance(known, dict) else ():
            reader.reading.metadata.setdefault(key, value)
    elif track.HasField("thread"):
        reader.tracks[track.uuid] = _Track(pid=track.thread.pid, tid=track.thread.tid)
    elif track.HasField("counter") and parent is not None:
        name = f"{track.name} {track.counter.unit_name}".rstrip()
        reader.tracks[track.uuid] = _Track(pid=parent.pid, counter=name)


def _take(packet: Any, reader: _Reader) -> None:
    event, at_ns = packet.track_event, packet.timestamp
    track = reader.tracks.get(event.track_uuid)
    if track is None:  # a lane of requests: no GPU's
        return
    if event.type == event.TYPE_COUNTER:
        if track.counter in COUNTERS:
            reader.counts.append((COUNTERS.index(track.counter), track.pid, at_ns, event.double_counter_value))
    elif event.type == event.TYPE_SLICE_BEGIN:
        made = OwnExactEvent(
            ph="X",
            cat=reader.texts.get(event.category_iids[0]) if event.category_iids else None,
            name=reader.texts.get(event.name_iid),
            pid=track.pid,
            tid=track.tid,
            ts=_us(at_ns),
            args=msgspec.convert({reader.texts.get(n.name_iid, ""): _value(n, reader) for n in event.debug_annotations},
                                 type=OwnArgs),
        )  # fmt: skip
        reader.open[event.track_uuid].append((at_ns, made))
        reader.arrows += [(number, 0, track.pid, track.tid, at_ns) for number in event.flow_ids]
        reader.arrows += [(number, 1, track.pid, track.tid, at_ns) for number in event.terminating_flow_ids]
    elif event.type == event.TYPE_SLICE_END and reader.open[event.track_uuid]:
        since_ns, made = reader.open[event.track_uuid].pop()
        made.dur = _us(at_ns - since_ns)
        reader.events.append(made)


def _us(time_ns: int) -> msgspec.Raw:
    return msgspec.Raw(b"%d.%03d" % divmod(time_ns, 1000))


def _value(note: Any, reader: _Reader) -> Any:
    """One argument."""
    if note.dict_entries:
        return {reader.texts.get(entry.name_iid, ""): _value(entry, reader) for entry in note.dict_entries}
    if note.array_values:
        return [_value(entry, reader) for entry in note.array_values]
    match note.WhichOneof("value"):
        case "string_value_iid":
            return reader.texts.get(note.string_value_iid, "")
        case None:
            return None
        case kind:
            return getattr(note, kind)
