"""PyTorch-profiler (Kineto) traces, and every Chrome trace that follows its columns, ours included."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traces.capture import NONE, Category, CollectiveArgs, MatrixProduct
from traces.read.events import Reading, read_events
from traces.read.own import ARROW, COUNTERS
from traces.read.rows import FileRows, Rows
from traces.read.stream import open_trace
from traces.read.values import TIME_LIMIT_NS, product, whole
from traces.records import Ints

Loose = int | float | str | None
JOULES_LIMIT = 1e12  # of one piece of work: far beyond any
MISSING = np.iinfo(np.int64).min
DOUBLE_HOLDS_NS_US = float(1 << 43)  # up to here a double of microseconds tells nanoseconds apart


class Args(msgspec.Struct, gc=False, rename={
    "external_id": "External id", "operation": "Collective name", "elements_in": "In msg nelems",
    "elements_out": "Out msg nelems", "group_size": "Group size", "group": "Process Group Name",
    "ranks": "Process Group Ranks", "sequence": "Seq", "moved_bytes": "bytes", "input_dims": "Input Dims",
    "own_ranks": "ranks"
}):  # fmt: skip
    """The arguments that are used; all others are skipped unparsed."""

    external_id: Loose = None
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
    grid: tuple[Loose, ...] | Loose = None
    block: tuple[Loose, ...] | Loose = None
    energy_j: Loose = None
    blocks: Loose = None
    family: Loose = None
    op: Loose = None
    own_ranks: Any = None  # this and the sizes below are anything in traces that are not ours
    buffer_bytes: Loose = None
    m: Any = None
    n: Any = None
    k: Any = None
    count: Any = None
    cuda_sync_kind: Loose = None
    input_dims: msgspec.Raw = msgspec.Raw(b"")  # read for the operators that matter only
    wait_on_stream: Loose = None
    wait_on_cuda_event_record_corr_id: Loose = None


class OwnArgs(Args, gc=False):
    """Those of our own traces: sizes of kernels (``STATED``), values of counters, steps of a served run."""

    value: Any = None  # of a counter
    rows: Any = None
    width: Any = None
    bytes_moved: Any = None
    batch: Any = None
    q_len: Any = None
    kv_len: Any = None
    q_heads: Any = None
    kv_heads: Any = None
    head_dim: Any = None
    v_head_dim: Any = None
    causal: Any = None
    latent: Any = None
    experts: Any = None
    distinct: Any = None
    out_dtype: Any = None
    kv_dtype: Any = None
    steps: Any = None


class Event(msgspec.Struct, gc=False):
    """One event; values may be of the wrong type, which is mended and counted, but not of a nested one."""

    ph: str | None = None
    cat: str | None = None
    name: Loose = None
    pid: Loose = None
    tid: Loose = None
    ts: msgspec.Raw = msgspec.Raw(b"null")  # as written: a float of epoch microseconds would lose nanoseconds
    dur: msgspec.Raw = msgspec.Raw(b"null")
    id: Any = None
    args: Args | Loose | list[Any] = None


class OwnEvent(Event, gc=False):
    """One event of ours."""

    args: OwnArgs | Loose | list[Any] = None


def _kind(reading: Reading) -> type[Event]:
    """What events of the file are decoded as: fewer arguments where they are not ours, which is quicker."""
    return OwnEvent if isinstance(reading.metadata.get("wattline"), dict) else Event


WORK = {
    "kernel": Category.KERNEL, "gpu_memcpy": Category.MEMCPY, "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET, "memset": Category.MEMSET,
}  # fmt: skip
CALLS = {"cuda_runtime", "cuda_driver", "runtime", "driver"}
ANNOTATIONS = {"user_annotation": 0, "gpu_user_annotation": 1, "layer": 1, "phase": 1}
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_scaled_mm": 0}  # place of the first factor among the inputs
NOTHING = Args()
STATED = (
    "family", "op", "m", "n", "k", "count", "dtype", "blocks", "rows", "width", "bytes_moved", "batch", "q_len",
    "kv_len", "q_heads", "kv_heads", "head_dim", "v_head_dim", "causal", "latent", "experts", "distinct",
    "out_dtype", "kv_dtype",
)  # fmt: skip


def read_file(path: Path) -> FileRows:
    """Rows of one Kineto or Chrome trace (.json, .json.gz, by content and not by name).

    Raises :class:`TraceError` with file, line and remedy where it cannot be read.
    """
    reading, rows = Reading(path=path), Rows()
    steps: list[Event] = []
    sorts: dict[str | None, list[Event] | None] = {None: None}
    with open_trace(path, reading) as stream:
        for events in read_events(stream, reading, _kind):
            arrows, counts = [], []
            for event in events:
                if event.ph != "X":
                    if event.name == ARROW and event.cat == "flow":
                        arrows.append(event)
                    elif event.ph == "C" and event.name in COUNTERS:
                        counts.append(event)
                else:
                    cat = event.cat
                    if cat not in sorts:
                        sorts[cat] = [] if cat is not None and _table(cat.lower()) is not None else None
                    if (mine := sorts[cat]) is not None:
                        mine.append(event)
            for cat, found in sorts.items():
                if cat is not None and found:
                    table = _table(cat.lower())
                    assert table is not None
                    table(found, cat.lower(), rows, reading)
                    found.clear()
            steps += [event for event in events if event.cat == "step" and event.ph == "X"]
            if arrows:
                _take_arrows(arrows, rows, reading)
            if counts:
                _take_counts(counts, rows, reading)
    if steps and not rows.work:  # a served run without kernels: its steps are the GPUs' work
        busy = [event for event in steps if getattr(event.args, "steps", None)]
        _take_work(busy, "kernel", rows, reading)
    return FileRows(rows=rows, reading=reading)


def _table(category: str) -> Callable[[list[Event], str, Rows, Reading], None] | None:
    """What takes events of a category; None leaves them unread."""
    if category in WORK:
        return _take_work
    if category in CALLS:
        return _take_calls
    if category in ANNOTATIONS:
        return _take_annotations
    if category == "cpu_op":
        return _take_products
    return _take_waits if category == "cuda_sync" else None


def _take_work(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:
    events, start, dur = _timed(events, reading)
    args = _args(events)
    if bare := args.count(NOTHING):
        reading.note("work-without-arguments", count=bare)
    stream = [a.stream if a.stream is not None else e.tid for a, e in zip(args, events, strict=True)]
    device = [a.device if a.device is not None else e.pid for a, e in zip(args, events, strict=True)]
    moved = [a.moved_bytes if a.buffer_bytes is None else a.buffer_bytes for a in args]
    blocks = [a.blocks if a.grid is None else _blocks(a.grid) for a in args]
    columns = [
        _names([e.name or "unnamed" for e in events], rows),
        np.full(len(events), int(WORK[category]), dtype=np.int64),
        _ints(device),
        _ints(stream, _stream),
        start,
        dur,
        _ints([a.correlation for a in args]),
        np.array(
            [_collective(a, rows) if a.operation is not None or a.family is not None else NONE for a in args],
            dtype=np.int64,
        ),
        _ints(moved),
        _ints(blocks),
        np.array([_blocks(a.block) for a in args], dtype=np.int64),
        _names([a.family for a in args], rows) if any(a.family is not None for a in args) else np.full(len(args), NONE),
        _ints([a.external_id if a.family is None else _own_work(a, rows) for a in args]),
    ]
    ghost = (start == 0) & (dur == 0)
    if ghost.any():
        reading.note("kernel-without-time", count=int(ghost.sum()))
    keep = ~ghost
    joules = [a.energy_j for a in args]
    unknown = set(map(type, joules)) == {type(None)}
    energy_j = np.full(len(args), np.nan) if unknown else np.array([_joules(one) for one in joules])
    rows.work.append(np.stack(columns)[:, keep])
    rows.energy_j.append(energy_j[keep])


def _take_calls(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:  # noqa: ARG001 - one signature
    events, start, dur = _timed(events, reading)
    correlation = _ints([a.correlation for a in _args(events)])
    name, thread = _names([e.name or "unnamed" for e in events], rows), _ints([e.tid for e in events], _stream)
    rows.calls.append(np.stack([name, thread, start, dur, correlation]))


def _take_annotations(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:
    events, start, dur = _timed(events, reading)
    name, process = _names([e.name or "unnamed" for e in events], rows), _ints([e.pid for e in events])
    lane, on_gpu = _ints([e.tid for e in events], _stream), np.full(len(events), ANNOTATIONS[category], dtype=np.int64)
    rows.annotations.append(np.stack([name, process, lane, on_gpu, start, dur]))


def _take_waits(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:  # noqa: ARG001 - one signature
    events, start, dur = _timed(events, reading)
    args = _args(events)
    kind = [a.cuda_sync_kind or e.name or "unnamed" for a, e in zip(args, events, strict=True)]
    device = [a.device if a.device is not None else e.pid for a, e in zip(args, events, strict=True)]
    columns = [
        _names(kind, rows), _ints(device), _ints([a.stream for a in args]), _ints([a.wait_on_stream for a in args]),
        _ints([a.wait_on_cuda_event_record_corr_id for a in args]), _ints([a.correlation for a in args]), start, dur,
    ]  # fmt: skip
    rows.waits.append(np.stack(columns))


def _take_products(events: list[Event], category: str, rows: Rows, reading: Reading) -> None:  # noqa: ARG001 - one signature
    """Host operators that multiply two matrices whose shapes were recorded."""
    for event in events:
        first = PRODUCTS.get(event.name) if type(event.name) is str else None
        if first is None or not isinstance(event.args, Args) or (operator := whole(event.args.external_id)) == NONE:
            continue  # without an id it would be that of all work without one
        try:
            (m, k), (_, n) = msgspec.json.decode(event.args.input_dims, type=list[list[int]])[first : first + 2]
        except (msgspec.MsgspecError, ValueError):
            continue  # shapes not recorded, or not of two matrices
        rows.products[operator] = MatrixProduct(m=m, k=k, n=n)


def _take_arrows(events: list[Event], rows: Rows, reading: Reading) -> None:
    half = np.array([int(e.ph == "f") for e in events])
    columns = [_ints([e.id for e in events]), half, _ints([e.pid for e in events]), _ints([e.tid for e in events])]
    time_ns = _ns([e.ts for e in events], reading)
    rows.arrows.append(np.stack([*columns, time_ns])[:, time_ns != MISSING])


def _take_counts(events: list[Event], rows: Rows, reading: Reading) -> None:
    value = np.array([_joules(getattr(a, "value", None)) for a in _args(events)])
    name = np.array([COUNTERS.index(str(e.name)) for e in events])
    time_ns = _ns([e.ts for e in events], reading)
    known = time_ns != MISSING
    rows.counts.append((np.stack([name, _ints([e.pid for e in events]), time_ns])[:, known], value[known]))


def _args(events: list[Event]) -> list[Args]:
    return [event.args if isinstance(event.args, Args) else NOTHING for event in events]


def _collective(a: Args, rows: Rows) -> int:
    own = a.family == "communication"  # written by wattline
    operation = a.op if own else a.operation
    if operation is None:
        return NONE
    size = len(a.own_ranks) if own and isinstance(a.own_ranks, list) else a.group_size
    args = CollectiveArgs(
        operation=str(operation), group=_text(a.group), group_size=whole(size),
        ranks=_text(a.own_ranks if own else a.ranks), dtype="byte" if own else _text(a.dtype),
        elements_in=whole(a.buffer_bytes if own else a.elements_in), elements_out=whole(a.elements_out),
        sequence=whole(a.sequence),
    )  # fmt: skip
    return rows.collectives.setdefault(args, len(rows.collectives))


def _own_work(a: Args, rows: Rows) -> int:
    """What a kernel of ours states of itself, as an operator that no host has."""
    stated = tuple((name, value) for name in STATED if isinstance(value := getattr(a, name, None), int | float | str))
    product = MatrixProduct(m=whole(a.m), k=whole(a.k), n=whole(a.n))
    plain = a.family == "gemm" and a.count in (None, 1) and min(product.m, product.k, product.n) > 0
    return rows.own_work(stated, product if plain else None)


def _names(texts: Sequence[Loose], rows: Rows) -> Ints:
    names = rows.names
    return np.array(
        [
            names.setdefault(text, len(names)) if type(text) is str else NONE if text is None else rows.name(text)
            for text in texts
        ],
        dtype=np.int64,
    )


def _timed(events: list[Event], reading: Reading) -> tuple[list[Event], Ints, Ints]:
    """Events that have times, their starts and durations in nanoseconds; the others are counted."""
    start, dur = _ns([event.ts for event in events], reading), _ns([event.dur for event in events], reading)
    unknown, backwards = (start == MISSING) | (dur == MISSING), (dur < 0) & (dur != MISSING)
    known = ~(unknown | backwards)
    if known.all():
        return events, start, dur
    for rule, mask in (("time-missing-or-not-finite", unknown), ("negative-duration", backwards & ~unknown)):
        if mask.any():
            reading.note(rule, count=int(mask.sum()))
    return [event for event, good in zip(events, known.tolist(), strict=True) if good], start[known], dur[known]


def _ns(raws: list[msgspec.Raw], reading: Reading) -> Ints:
    """Microseconds as written to whole nanoseconds, exactly; ``MISSING`` where they are none."""
    texts = [bytes(raw) for raw in raws]
    try:
        value_us = np.array(texts, dtype="S").astype(np.float64)
    except ValueError:
        value_us = np.full(len(texts), np.inf)
    plain = np.abs(value_us) < DOUBLE_HOLDS_NS_US
    value_us = np.where(plain, value_us, 0.0)
    # Whole and part on their own are exact where a double of microseconds tells nanoseconds apart.
    whole_us = np.floor(value_us)
    found = whole_us.astype(np.int64) * 1000 + np.rint((value_us - whole_us) * 1000).astype(np.int64)
    for place in np.flatnonzero(~plain).tolist():
        found[place] = _exact_ns(texts[place], reading)
    return found


def _exact_ns(text: bytes, reading: Reading) -> int:
    """One time, digit by digit."""
    try:
        exact = Decimal(text.decode().strip('" ')).scaleb(3)
        value = round(exact) if abs(exact) < TIME_LIMIT_NS else MISSING
    except (ValueError, ArithmeticError):
        return MISSING
    if text[:1] == b'"':
        reading.note("time-as-text")
    return value


def _ints(values: list[Any], one: Callable[[Any], int] = whole) -> Ints:
    """A column of integers: at once where all are integers or none is there, else one by one."""
    kinds = set(map(type, values))
    if kinds == {type(None)}:
        return np.full(len(values), NONE, dtype=np.int64)
    if kinds == {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            pass
    return np.array([one(value) for value in values], dtype=np.int64)


def _stream(value: Any) -> int:
    """7 of 7, '7' and 'stream 7' (2021)."""
    if isinstance(value, str) and (digits := re.search(r"\d+", value)) is not None:
        return int(digits.group()) & 0xFFFFFFFF
    return whole(value)


def _blocks(value: Any) -> int:
    """Blocks of a grid, threads of a block."""
    return product(*value) if type(value) is tuple else NONE


def _joules(value: Any) -> float:
    """Energy; NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, float | int) or not 0 <= value < JOULES_LIMIT:
        return math.nan
    return float(value)


def _text(value: Any) -> str:
    return "" if value is None else str(value)
