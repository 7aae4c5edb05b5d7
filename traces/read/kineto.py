"""PyTorch-profiler (Kineto) traces, and every Chrome trace that follows its columns, ours included."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from traces.capture import NONE, Category, CollectiveArgs
from traces.read.events import Reading, read_events
from traces.read.stream import open_trace

Loose = int | float | str | None


class Args(msgspec.Struct, rename={
    "external_id": "External id", "operation": "Collective name", "elements_in": "In msg nelems",
    "elements_out": "Out msg nelems", "group_size": "Group size", "group": "Process Group Name",
    "ranks": "Process Group Ranks", "sequence": "Seq", "moved_bytes": "bytes"
}):  # fmt: skip
    """The arguments that are used; all others are skipped unparsed."""

    stream: Loose = None
    device: Loose = None
    correlation: Loose = None
    operation: Loose = None
    elements_in: Loose = None
    elements_out: Loose = None
    group_size: Loose = None
    group: Loose = None
    ranks: Loose | list[Loose] = None
    dtype: Loose = None
    sequence: Loose = None
    moved_bytes: Loose = None
    grid: list[Loose] | Loose = None
    block: list[Loose] | Loose = None
    energy_j: Loose = None
    blocks: Loose = None
    family: Loose = None
    op: Loose = None
    buffer_bytes: Loose = None
    cuda_sync_kind: Loose = None
    wait_on_stream: Loose = None
    wait_on_cuda_event_record_corr_id: Loose = None


class Event(msgspec.Struct):
    """One event; values may be of the wrong type, which is mended and counted, but not of a nested one."""

    ph: str | None = None
    cat: str | None = None
    name: Loose = None
    pid: Loose = None
    tid: Loose = None
    ts: msgspec.Raw = msgspec.Raw(b"null")  # as written: a float of epoch microseconds would lose nanoseconds
    dur: msgspec.Raw = msgspec.Raw(b"null")
    args: Args | Loose | list[Any] = None


WORK = {
    "kernel": Category.KERNEL, "gpu_memcpy": Category.MEMCPY, "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET, "memset": Category.MEMSET,
}  # fmt: skip
CALLS = {"cuda_runtime", "cuda_driver", "runtime", "driver"}
ANNOTATIONS = {"user_annotation": 0, "gpu_user_annotation": 1, "layer": 1, "phase": 1}


@dataclass(slots=True)
class Rows:
    """Columns in the making, as rows; times in nanoseconds of the file's own clock."""

    names: dict[str, int] = field(default_factory=dict)
    collectives: dict[CollectiveArgs, int] = field(default_factory=dict)
    work: list[tuple[Any, ...]] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    waits: list[tuple[Any, ...]] = field(default_factory=list)
    annotations: list[tuple[Any, ...]] = field(default_factory=list)

    def name(self, text: Loose) -> int:
        """Index of a name."""
        return self.names.setdefault(text if isinstance(text, str) else str(text), len(self.names))


@dataclass(slots=True)
class FileRows:
    """One file: its rows, and what was learnt on the way."""

    rows: Rows
    reading: Reading


def read_file(path: Path) -> FileRows:
    """Rows of one Kineto or Chrome trace (.json, .json.gz, by content and not by name).

    Raises :class:`TraceError` with file, line and remedy where it cannot be read.
    """
    reading, rows = Reading(path=path), Rows()
    with open_trace(path, reading) as stream:
        for events in read_events(stream, reading, Event):
            for event in events:
                _take(event, rows, reading)
    return FileRows(rows=rows, reading=reading)


def _take(event: Event, rows: Rows, reading: Reading) -> None:
    """One event into the table of its category."""
    if event.ph != "X" or event.cat is None:
        return
    category = event.cat.lower()
    if (work := WORK.get(category)) is not None:
        _take_work(event, work, rows, reading)
    elif category in CALLS:
        if (times := _times(event, reading)) is not None:
            correlation = _whole(event.args.correlation) if isinstance(event.args, Args) else NONE
            rows.calls.append((rows.name(event.name), _whole(event.tid), *times, correlation))
    elif category in ANNOTATIONS:
        if (times := _times(event, reading)) is not None:
            lane = _stream(event.tid)
            rows.annotations.append((rows.name(event.name), _whole(event.pid), lane, ANNOTATIONS[category], *times))
    elif category == "cuda_sync" and isinstance(event.args, Args) and (times := _times(event, reading)) is not None:
        a = event.args
        kind = a.cuda_sync_kind if a.cuda_sync_kind is not None else event.name
        source, record = _whole(a.wait_on_stream), _whole(a.wait_on_cuda_event_record_corr_id)
        device = _whole(a.device if a.device is not None else event.pid)
        rows.waits.append((rows.name(kind), device, _whole(a.stream), source, record, _whole(a.correlation), *times))


def _take_work(event: Event, category: Category, rows: Rows, reading: Reading) -> None:
    times = _times(event, reading)
    if times is None:
        return
    a = event.args
    if not isinstance(a, Args):
        a = Args()
        reading.note("work-without-arguments")
    if times == (0, 0):
        reading.note("kernel-without-time")
        return
    if times[1] < 0:
        reading.note("negative-duration")
        return
    stream = _stream(a.stream if a.stream is not None else event.tid)
    device = _whole(a.device if a.device is not None else event.pid)
    collective = NONE
    operation = a.op if a.family == "communication" else a.operation
    if operation is not None:
        args = CollectiveArgs(
            operation=str(operation), group=_text(a.group), group_size=_whole(a.group_size),
            ranks=_text(a.ranks), dtype=_text(a.dtype), elements_in=_whole(a.elements_in),
            elements_out=_whole(a.elements_out), sequence=_whole(a.sequence),
        )  # fmt: skip
        collective = rows.collectives.setdefault(args, len(rows.collectives))
    blocks = _whole(a.blocks) if a.grid is None else _product(a.grid)
    energy_j = a.energy_j if isinstance(a.energy_j, float | int) else float("nan")
    rows.work.append(
        (
            rows.name(event.name), category, device, stream, *times, NONE if a.correlation is None else
            _whole(a.correlation), collective, _whole(a.moved_bytes if a.buffer_bytes is None else
            a.buffer_bytes), blocks, _product(a.block), NONE if a.family is None else rows.name(a.family), energy_j,
        )
    )  # fmt: skip


def _times(event: Event, reading: Reading) -> tuple[int, int] | None:
    """Start and duration in nanoseconds; None, and counted, where there is none."""
    start = _ns(event.ts, reading)
    dur = _ns(event.dur, reading)
    if start is None or dur is None:
        reading.note("time-missing-or-not-finite")
        return None
    return start, dur


def _ns(raw: msgspec.Raw, reading: Reading) -> int | None:
    """Microseconds as written to whole nanoseconds, exactly."""
    text = bytes(raw)
    whole, _, part = text.partition(b".")
    try:
        if len(part) <= 3:
            value = int(whole) * 1000
            thousandths = int(part.ljust(3, b"0")) if part else 0
            return value - thousandths if whole[:1] == b"-" else value + thousandths
        return round(Decimal(text.decode()).scaleb(3))
    except (ValueError, ArithmeticError):
        pass
    try:
        if text[:1] == b'"':
            value = round(Decimal(text[1:-1].decode().strip()).scaleb(3))
            reading.note("time-as-text")
            return value if abs(value) < 1 << 62 else None
        value = round(Decimal(text.decode()).scaleb(3))
        return value if abs(value) < 1 << 62 else None
    except (ValueError, ArithmeticError):
        return None


def _whole(value: Any) -> int:
    """An integer, however it was written; ``NONE`` where there is none."""
    if type(value) is int:
        return value if -(1 << 62) < value < 1 << 62 else value & 0xFFFFFFFFFFFF
    try:
        return int(float(value)) if abs(float(value)) < 1 << 62 else NONE
    except (TypeError, ValueError, OverflowError):
        return NONE


def _stream(value: Any) -> int:
    """7 of 7, '7' and 'stream 7' (2021)."""
    if isinstance(value, str) and (digits := re.search(r"\d+", value)) is not None:
        return int(digits.group()) & 0xFFFFFFFF
    return _whole(value)


def _product(value: Any) -> int:
    """Blocks of a grid, threads of a block."""
    return math.prod(max(1, _whole(one)) for one in value) if isinstance(value, list) and value else NONE


def _text(value: Any) -> str:
    return "" if value is None else str(value)
