"""PyTorch-profiler (Kineto) traces, and every Chrome trace that follows its columns, ours included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from traces.errors import TraceError
from traces.read.columns import TooCoarse
from traces.read.events import Reading, read_events
from traces.read.own import ARROW, COUNTERS
from traces.read.places import Places
from traces.read.rows import FileRows, Rows
from traces.read.schema import Event, ExactEvent, OwnExactEvent, OwnQuickEvent, QuickEvent
from traces.read.stream import open_trace
from traces.read.tables import table_of, take_arrows, take_counts, take_work


def _kinds(reading: Reading, exact: bool) -> Sequence[type[Event]]:
    """What events of the file are decoded as, in turn: fewer arguments where they are not ours, which is quicker."""
    ours = isinstance(reading.metadata.get("wattline"), dict)
    quick, sure = (OwnQuickEvent, OwnExactEvent) if ours else (QuickEvent, ExactEvent)
    return (sure,) if exact else (quick, sure)


def read_file(path: Path) -> FileRows:
    """Rows of one Kineto or Chrome trace (.json, .json.gz, by content and not by name).

    Raises :class:`TraceError` with file, line and remedy where it cannot be read.
    """
    try:
        return _read(path, exact=False)
    except TooCoarse:
        return _read(path, exact=True)


def _read(path: Path, *, exact: bool) -> FileRows:
    reading, rows = Reading(path=path), Rows()
    steps: list[Event] = []
    places = Places()
    sorts: dict[str | None, list[Event] | None] = {None: None, "step": steps}
    with open_trace(path, reading) as stream:
        for events in read_events(stream, reading, partial(_kinds, exact=exact)):
            arrows, counts, bare = [], [], []
            by_cat: defaultdict[str | None, list[Event]] = defaultdict(list)
            for event in events:
                by_cat[event.cat].append(event)
            for cat, group in by_cat.items():
                if cat not in sorts:
                    sorts[cat] = [] if cat is not None and table_of(cat.lower()) is not None else None
                mine = sorts[cat]
                if {event.ph for event in group} == {"X"}:
                    if mine is not None:
                        mine += group
                    elif cat is None and places.devices:
                        bare += group
                    continue
                for event in group:
                    if event.ph == "X":
                        if mine is not None:
                            mine.append(event)
                        elif cat is None and places.devices:
                            bare.append(event)
                    elif event.ph == "C":
                        if event.name in COUNTERS:
                            counts.append(event)
                    elif event.ph == "M":
                        places.learn(event)
                    elif event.name == ARROW and cat == "flow":
                        arrows.append(event)
            for cat, found in sorts.items():
                if cat is not None and found and found is not steps:
                    table = table_of(cat.lower())
                    assert table is not None
                    table(found, cat.lower(), rows, reading)
                    found.clear()
            if bare:
                places.take(bare, rows, reading)
            if arrows:
                take_arrows(arrows, rows, reading)
            if counts:
                take_counts(counts, rows, reading)
    if steps and not rows.work:  # a served run without kernels: its steps are the GPUs' work
        busy = [event for event in steps if getattr(event.args, "steps", None)]
        take_work(busy, "kernel", rows, reading)
    if places.tpu and not rows.work:
        raise TraceError(f"trace '{path}': of a TPU: only GPUs are read")
    return FileRows(rows=rows, reading=reading)
