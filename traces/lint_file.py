"""What other tools would drop or misread of a trace file, exactly counted: ``wattline inspect --lint``."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traces.capture import Finding
from traces.lint import overlaps_ns
from traces.read.events import Reading, read_events
from traces.read.stream import open_trace

ID_LIMIT = 1 << 32
TIME_LIMIT_NS = 1 << 61  # beyond, a sum of times no longer fits
Loose = int | float | str | None

PERFETTO = {
    "perfetto-overlap": "Perfetto v51-v56 drops these slices, older ones misdraw them, v57 moves them to a spill row: "
    "put concurrent kernels on rows of their own",
    "perfetto-negative-time": "Perfetto drops events before time 0: shift all times",
    "perfetto-negative-duration": "Perfetto v55 drops them, v52 keeps them: write end - start",
    "perfetto-no-duration": "Perfetto drops complete events without dur",
    "perfetto-large-id": "Perfetto puts pids and tids outside 0..2^32-1 into one row: renumber them",
    "perfetto-counter-not-a-number": "Perfetto drops null counters and hangs for ever on NaN: leave them out",
    "perfetto-flow-id": "Perfetto wants integer or hexadecimal flow ids: these arrows are lost",
}


class LintEvent(msgspec.Struct):
    """What Perfetto's importer looks at."""

    ph: str | None = None
    cat: str | None = None
    pid: Loose = None
    tid: Loose = None
    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")
    id: Loose = None
    args: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(slots=True)
class _Seen:
    """Lanes, times and counted rules of one file."""

    lanes: dict[tuple[Any, Any], int] = field(default_factory=dict)
    lane: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    count: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    events: int = 0

    def note(self, rule: str) -> None:
        """One more case."""
        self.count[rule] += 1
        self.first.setdefault(rule, f"event {self.events}")


def lint_file(path: Path) -> list[Finding]:
    """Findings about one Chrome-format file, for the Perfetto engine that counts what it drops (v51 to v56).

    Raises :class:`TraceError` where the file cannot be read at all.
    """
    seen, reading = _Seen(), Reading(path=path)
    with open_trace(path, reading) as stream:
        for events in read_events(stream, reading, lambda _: (LintEvent,)):
            for event in events:
                _look(event, seen)
                seen.events += 1
    lane = np.array(seen.lane, dtype=np.int64)
    start, end = np.array(seen.start, dtype=np.int64), np.array(seen.end, dtype=np.int64)
    dropped, where = overlaps_ns(lane, start, end)
    if dropped:
        seen.count["perfetto-overlap"] = dropped
        seen.first["perfetto-overlap"] = f"event {seen.number[where]}"
    return [
        Finding(rule=rule, count=count, first=f"{path.name}: {seen.first[rule]}", remedy=PERFETTO[rule])
        for rule, count in seen.count.items()
    ]


def _look(event: LintEvent, seen: _Seen) -> None:
    for number in (event.pid, event.tid):
        if isinstance(number, int) and not 0 <= number < ID_LIMIT:
            seen.note("perfetto-large-id")
            break
    if event.ph == "X":
        _look_slice(event, seen)
    elif event.ph == "C":
        if not _counts(event.args):
            seen.note("perfetto-counter-not-a-number")
    elif event.ph in ("s", "t", "f") and not _flow_id(event.id):
        seen.note("perfetto-flow-id")


def _look_slice(event: LintEvent, seen: _Seen) -> None:
    start, dur = perfetto_ns(bytes(event.ts)), perfetto_ns(bytes(event.dur))
    if dur is None:
        seen.note("perfetto-no-duration")
    elif start is not None and start < 0:
        seen.note("perfetto-negative-time")
    elif dur < 0:
        seen.note("perfetto-negative-duration")
    elif start is not None:
        lane = _lane(event.pid, event.tid)
        seen.lane.append(seen.lanes.setdefault(lane, len(seen.lanes)))
        seen.start.append(start)
        seen.end.append(start + dur)
        seen.number.append(seen.events)


def _lane(pid: Any, tid: Any) -> tuple[Any, Any]:
    """The row that Perfetto puts a slice on: a pid that is no uint32 is 0, such a tid is its pid."""
    process = pid if isinstance(pid, str) or (isinstance(pid, int) and 0 <= pid < ID_LIMIT) else 0
    thread = tid if isinstance(tid, str) or (isinstance(tid, int) and 0 <= tid < ID_LIMIT) else process
    return process, thread


def perfetto_ns(text: bytes) -> int | None:
    """Microseconds as Perfetto reads them: whole ones exactly, others through a double, rounded half up.

    >>> perfetto_ns(b"1.3"), perfetto_ns(b'"12.345678"'), perfetto_ns(b"null")
    (1300, 12346, None)
    """
    text = text.strip(b'" ')
    try:
        return _held(int(text) * 1000)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value * 1000.0):
        return None
    if value.is_integer():  # a double without a fraction is stored as an integer, and keeps every digit
        return _held(int(value) * 1000)
    below = math.floor(value * 1000.0)
    return _held(below + (value * 1000.0 - below >= 0.5))


def _held(ns: int) -> int | None:
    return ns if abs(ns) < TIME_LIMIT_NS else None


def _counts(args: msgspec.Raw) -> bool:
    """Whether every series of a counter is a number."""
    try:
        values = msgspec.json.decode(args)
    except msgspec.DecodeError:
        return False
    if not isinstance(values, dict):
        return False
    return all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values.values())


def _flow_id(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, int):
        return True
    try:
        return isinstance(value, str) and int(value, 16) >= 0
    except ValueError:
        return False
