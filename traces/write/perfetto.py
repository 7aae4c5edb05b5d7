"""Perfetto's own format (``.pftrace``): whole nanoseconds at any size, units on counters, one scale for equal counters.

What Chrome JSON cannot say: 64-bit times stay exact, all GPUs' power is drawn on one scale, and every name stands in
the file once. Slices sit on the same processes and threads as in Chrome JSON, so that the same queries work on both;
arguments are found under ``debug.`` instead of ``args.``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from traces.errors import TraceError
from traces.lint import to_ns
from traces.records import SpanKind, Trace
from traces.write.check import changes, check_trace
from traces.write.files import check_package, write_pieces
from traces.write.protobuf import delimited

SUFFIXES = (".pftrace", ".pftrace.gz")
CHUNK = 16384  # packets in memory at a time
SEQUENCE = 1  # names are interned for one sequence of packets


def write_perfetto(trace: Trace, path: Path) -> Path:
    """Write ``trace`` to ``path`` (.pftrace, or .pftrace.gz compressed); equal traces give equal bytes.

    Raises :class:`TraceError` for what :func:`traces.write.chrome.write_chrome` refuses, and where the package
    ``perfetto`` is missing; in every case no file is left behind.
    """
    if not path.name.endswith(SUFFIXES):
        raise TraceError(f"trace file '{path}': name it .pftrace or .pftrace.gz")
    check_package("perfetto", "perfetto", path)
    check_trace(trace)
    return write_pieces(path, _pieces(trace))


def _pieces(trace: Trace) -> Iterator[bytes]:
    maker = _Maker(trace)
    yield maker.head.SerializeToString()
    for packets in (maker.slices(), *(maker.values(number) for number in range(len(trace.counters)))):
        while part := list(islice(packets, CHUNK)):
            yield b"".join(part)


def _framed(packet: Any) -> bytes:
    """``packet`` as field 1 of a trace."""
    return b"\x0a" + delimited(packet)


class _Maker:
    """Packets of one trace. Spans of one kind share a template, in which track, time and joules are set anew."""

    def __init__(self, trace: Trace) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        self.pb: Any = perfetto_trace_pb2
        self.trace = trace
        self.head = self.pb.Trace()  # names and tracks, before any event
        first = self.head.packet.add(trusted_packet_sequence_id=SEQUENCE)
        first.sequence_flags = self.pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self.interned = first.interned_data
        self.ids: dict[tuple[str, str], int] = {}
        self.uuids = count(1)
        metadata = json.dumps(dict(trace.metadata), allow_nan=False)
        process_of = {}
        for order, (pid, name) in enumerate(trace.processes.items()):
            track = self._track()
            track.process.pid, track.process.process_name, track.process.legacy_sort_index = pid, name, order
            track.description = metadata
            process_of[pid] = track.uuid
        self.lanes = []
        for lane in trace.lanes:
            track = self._track(process_of[lane.pid])
            if lane.asynchronous:
                track.name = lane.name
            else:
                track.thread.pid, track.thread.tid, track.thread.thread_name = lane.pid, lane.tid, lane.name
                track.thread.legacy_sort_index = lane.order
            self.lanes.append(track.uuid)
        self.counters = []
        for counter in trace.counters:
            track = self._track(process_of[counter.pid])
            track.name, track.counter.unit_name = counter.name, counter.unit
            track.counter.y_axis_share_key = counter.name
            self.counters.append(track.uuid)
        has_energy = ~np.isnan(trace.spans.energy_j)
        used, self.code = np.unique(2 * trace.spans.kind + has_energy, return_inverse=True)
        self.begin = [(self._begin(trace.kinds[code // 2], code % 2 > 0), code % 2 > 0) for code in used.tolist()]

    def _track(self, parent: int | None = None) -> Any:
        track = self.head.packet.add(trusted_packet_sequence_id=SEQUENCE).track_descriptor
        track.uuid = next(self.uuids)
        if parent is not None:
            track.parent_uuid = parent
        return track

    def _event(self, kind: str) -> Any:
        packet = self.pb.TracePacket(trusted_packet_sequence_id=SEQUENCE)
        packet.sequence_flags = self.pb.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.track_event.type = getattr(self.pb.TrackEvent, f"TYPE_{kind}")
        return packet

    def _begin(self, kind: SpanKind, timed: bool) -> Any:
        packet = self._event("SLICE_BEGIN")
        event = packet.track_event
        event.name_iid = self._iid("event_names", kind.name)
        event.category_iids.append(self._iid("event_categories", kind.category))
        for name, value in kind.args.items():
            self._note(event.debug_annotations.add(), name, value)
        if timed:  # last: see slices
            self._note(event.debug_annotations.add(), "energy_j", 0.0)
        return packet

    def _iid(self, table: str, name: str) -> int:
        """The number under which ``name`` is interned."""
        known = self.ids.get((table, name))
        if known is None:
            known = self.ids[table, name] = len(self.ids) + 1
            text: Any = name.encode() if table == "debug_annotation_string_values" else name
            getattr(self.interned, table).add(iid=known, **{"name" if isinstance(text, str) else "str": text})
        return known

    def _note(self, note: Any, name: str | None, value: Any) -> None:
        """Fill in one argument; lists and tables nest."""
        if name is not None:
            note.name_iid = self._iid("debug_annotation_names", name)
        match value:
            case bool():
                note.bool_value = value
            case int():
                note.int_value = value
            case float():
                note.double_value = value
            case str():
                note.string_value_iid = self._iid("debug_annotation_string_values", value)
            case Mapping():
                for key, inner in value.items():
                    self._note(note.dict_entries.add(), key, inner)
            case list() | tuple():
                for inner in value:
                    self._note(note.array_values.add(), None, inner)
            case _:
                raise TraceError(f"argument '{name}' is a {type(value).__name__}: give numbers, texts, lists or tables")

    def slices(self) -> Iterator[bytes]:
        """Begin and end of every span in order of time: on a lane, ends come first, then the longest begins."""
        spans = self.trace.spans
        start, end = to_ns(spans.start_ps), to_ns(spans.end_ps)
        nothing = np.zeros(len(start), dtype=np.int64)
        time = np.concatenate([start, end])
        turn = np.concatenate([nothing + 1, np.where(start == end, 2, 0)])
        order = np.lexsort((np.concatenate([start - end, nothing]), turn, time))
        leaving, arriving = defaultdict(list), defaultdict(list)
        for number, (before, after) in enumerate(self.trace.flows, start=1):
            leaving[before].append(number)
            arriving[after].append(number)
        ending = self._event("SLICE_END")
        for first in range(0, len(order), CHUNK):
            part = order[first : first + CHUNK]
            span = part % len(start)
            columns = (time[part], span, part < len(start), self.code[span], spans.lane[span], spans.energy_j[span])
            for time_ns, one, begins, code, lane, joules in zip(*(c.tolist() for c in columns), strict=True):
                if not begins:
                    ending.timestamp, ending.track_event.track_uuid = time_ns, self.lanes[lane]
                    yield _framed(ending)
                    continue
                packet, timed = self.begin[code]
                packet.timestamp = time_ns
                event = packet.track_event
                event.track_uuid = self.lanes[lane]
                if timed:
                    event.debug_annotations[-1].double_value = joules
                if one in leaving or one in arriving:
                    event.flow_ids[:], event.terminating_flow_ids[:] = leaving[one], arriving[one]
                    yield _framed(packet)
                    event.ClearField("flow_ids")
                    event.ClearField("terminating_flow_ids")
                else:
                    yield _framed(packet)

    def values(self, number: int) -> Iterator[bytes]:
        """The steps of one counter."""
        packet = self._event("COUNTER")
        packet.track_event.track_uuid = self.counters[number]
        if len(self.trace.counters[number].value):
            time, value = changes(self.trace.counters[number])
            for packet.timestamp, packet.track_event.double_counter_value in zip(
                time.tolist(), value.tolist(), strict=True
            ):
                yield _framed(packet)
