"""Files of one run, of any format, into one :class:`Capture` on one clock."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from inputs.collector import collector_paused
from traces.capture import (
    NONE,
    Annotations,
    Capture,
    CollectiveArgs,
    Finding,
    GpuWork,
    HostCalls,
    MatrixProduct,
    Stated,
    Waits,
    distinct,
)
from traces.errors import TraceError
from traces.overruns import clipped
from traces.read.own import arrows_of, samples_of
from traces.read.remedies import REMEDIES
from traces.read.rows import FileRows, Rows, column_of, leave_out_far, packed
from traces.read.tools import check_name, how_to_record, read_any
from traces.read.values import TIME_LIMIT_NS
from traces.records import Floats, Ints

SUFFIXES = (".json", ".json.gz", ".sqlite", ".pftrace", ".pftrace.gz", "_kernel_trace.csv")
RANK_LIMIT = 1 << 31
EPOCH_NS = 10**18  # 2001: a smaller time counts from somewhere else than 1970


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What to read: milliseconds after the first GPU work, ranks, and categories (kernel, memcpy, memset)."""

    start_ms: float | None = None
    end_ms: float | None = None
    ranks: tuple[int, ...] | None = None
    categories: tuple[int, ...] | None = None


def read_trace(paths: Path | Sequence[Path], window: Window | None = None) -> Capture:
    """Read one file, a folder of one file a rank, or several files, on one clock.

    Ranks come from ``distributedInfo``, else from file names (``rank3.json.gz``), else from their order; a
    file with several GPUs gives each a rank. Files are aligned by ``baseTimeNanoseconds``. What was mended is
    in ``findings``. Raises :class:`TraceError` with file, line and remedy.
    """
    files = _files(paths)
    with collector_paused():  # of millions of events, none is part of a cycle
        parts = [read_any(path) for path in files]
    for part in parts:
        leave_out_far(part)
    if not any(len(block[0]) for part in parts for block in part.rows.work):
        if lost := sum(part.reading.mended.get("time-missing-or-not-finite", (0, ""))[0] for part in parts):
            raise TraceError(
                f"trace '{files[0]}': no GPU work with a time in it: {lost} events were left out: ts and dur must be "
                "finite numbers of microseconds"
            )
        remedy = how_to_record(files[0])
        raise TraceError(
            f"trace '{files[0]}': no GPU work in it (no event of category kernel, gpu_memcpy or gpu_memset): "
            f"profile with {remedy}"
        )
    bases = _bases(parts)
    ranks = _ranks(parts)
    absolute = [base + _first_ns(part) > EPOCH_NS for part, base in zip(parts, bases, strict=True)]
    known = _Known()
    names, collectives, matrices, stated = known.names, known.collectives, known.matrices, known.stated
    tables = [_tables(part, base, rank, known) for part, base, rank in zip(parts, bases, ranks, strict=True)]
    # A column at a time: what is joined or put in order makes room for the next.
    work, calls, waits, annotations = (
        _joined(list(kind)) for kind in zip(*(table[:4] for table in tables), strict=True)
    )
    energy_j = np.concatenate([t[4] for t in tables])
    origin = int(min(table[2].min() for table in (work, calls, waits, annotations) if len(table[2])))
    order = np.lexsort((work[2], work[0]))
    energy_j = energy_j[order]
    _put_in_order(work, order)
    _put_in_order(calls, np.lexsort((calls[2], calls[0])))
    launch = _launches(work[0], work[5], calls[0], calls[5])
    capture = Capture(
        names=list(names),
        work=GpuWork(
            rank=work[0], name=work[1], start_ns=work[2] - origin, dur_ns=work[3], category=work[4],
            correlation=work[5], stream=work[6], collective=work[7], moved_bytes=work[8], blocks=work[9],
            threads=work[10], family=work[11], matrix=work[12], stated=work[13], launch=launch, energy_j=energy_j,
            graph=_graphs(launch, calls[1], list(names)),
        ),
        calls=HostCalls(
            rank=calls[0], name=calls[1], start_ns=calls[2] - origin, dur_ns=calls[3], thread=calls[4],
            correlation=calls[5],
        ),
        waits=Waits(
            rank=waits[0], kind=waits[1], start_ns=waits[2] - origin, dur_ns=waits[3], stream=waits[4],
            source_stream=waits[5], record_correlation=waits[6], correlation=waits[7],
        ),
        annotations=Annotations(
            rank=annotations[0], name=annotations[1], start_ns=annotations[2] - origin, dur_ns=annotations[3],
            lane=annotations[4], on_gpu=annotations[5],
        ),
        collectives=list(collectives),
        matrices=list(matrices),
        stated=list(stated),
        origin_ns=origin,
        sources=[str(path) for path in files],
        metadata={min(r.values(), default=0): part.reading.metadata for part, r in zip(parts, ranks, strict=True)},
        findings=_findings(parts, absolute, work[5], launch, len(calls[0])),
        depends=arrows_of(parts, bases, ranks, np.stack([work[0], work[2], work[6]])),
        samples=samples_of(parts, bases, ranks, origin),
    )  # fmt: skip
    capture = clipped(capture)
    return capture if window is None else within(capture, window)


def within(capture: Capture, window: Window) -> Capture:
    """The work inside ``window``: rows that begin in it.

    Raises :class:`TraceError` when nothing is left.
    """
    work = capture.work
    since_ms = (work.start_ns - work.start_ns.min()) / 1e6
    mask = np.ones(len(work), dtype=bool)
    if window.start_ms is not None:
        mask &= since_ms >= window.start_ms
    if window.end_ms is not None:
        mask &= since_ms < window.end_ms
    if window.ranks is not None:
        mask &= np.isin(work.rank, window.ranks)
    if window.categories is not None:
        mask &= np.isin(work.category, window.categories)
    if not mask.any():
        if window.ranks is not None and not set(window.ranks) & set(capture.ranks):
            asked, known = (", ".join(map(str, ranks)) for ranks in (window.ranks, capture.ranks))
            raise TraceError(f"rank = {asked}: the trace has none of it: its ranks are {known}")
        last_ms = float(since_ms.max())
        raise TraceError(
            f"window {window.start_ms}..{window.end_ms} ms, ranks {window.ranks or 'all'}: no GPU work in it: "
            f"the trace covers 0..{last_ms:.3f} ms and ranks {', '.join(map(str, capture.ranks))}"
        )
    return capture.keep(mask)


def _files(paths: Path | Sequence[Path]) -> list[Path]:
    given = [paths] if isinstance(paths, Path) else list(paths)
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(path.iterdir())
            for file in (file for file in inside if file.name.endswith(".et")):
                check_name(file)
            found = [file for file in inside if file.name.endswith(SUFFIXES)]
            if not found:
                raise TraceError(f"folder '{path}': no trace in it: its files must end in {', '.join(SUFFIXES)}")
            files += sorted(found, key=_natural)
        else:
            files.append(path)
    for path in files:
        check_name(path)
    return files


def _natural(path: Path) -> list[Any]:
    """Rank 10 after rank 9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


def _bases(parts: Sequence[FileRows]) -> list[int]:
    """Nanoseconds to add to each file's times."""
    bases = []
    for part in parts:
        base = part.reading.metadata.get("baseTimeNanoseconds", 0)
        number = int(base) if str(base).isdecimal() and len(str(base)) < 20 else 0
        bases.append(number if number < TIME_LIMIT_NS else 0)
    return bases


def _ranks(parts: Sequence[FileRows]) -> list[dict[int, int]]:
    """For each file, the rank of each of its devices."""
    devices = [sorted({device for block in part.rows.work for device in distinct(block[2])}) for part in parts]
    if len(parts) == 1 and len(devices[0]) > 1:
        plain = all(0 <= device < RANK_LIMIT for device in devices[0])
        return [{device: device if plain else number for number, device in enumerate(devices[0])}]
    taken: set[int] = set()
    ranks = []
    for number, (part, mine) in enumerate(zip(parts, devices, strict=True)):
        first = _rank_of(part, number if len(parts) > 1 else 0)
        mapped = {}
        for device in mine:
            rank = first
            while rank in taken:
                rank += 1
            if rank != first and device == mine[0]:
                part.reading.note("rank-repeated", part.reading.path.name)
            taken.add(rank)
            mapped[device] = rank
        ranks.append(mapped)
    return ranks


def _rank_of(part: FileRows, number: int) -> int:
    info = part.reading.metadata.get("distributedInfo")
    if isinstance(info, dict) and type(info.get("rank")) is int and 0 <= info["rank"] < RANK_LIMIT:
        return int(info["rank"])
    found = re.search(r"rank[-_]?(\d{1,9})(?!\d)", part.reading.path.name)
    return int(found.group(1)) if found else number


@dataclass(frozen=True, slots=True)
class _Known:
    """Numbers of what rows of all files refer to."""

    names: dict[str, int] = field(default_factory=dict)
    collectives: dict[CollectiveArgs, int] = field(default_factory=dict)
    matrices: dict[MatrixProduct, int] = field(default_factory=dict)
    stated: dict[Stated, int] = field(default_factory=dict)


def _tables(
    part: FileRows, base: int, ranks: dict[int, int], known: _Known
) -> tuple[list[Ints], list[Ints], list[Ints], list[Ints], Floats]:
    """The file's rows as columns, first rank, name, start, duration; names and collectives of all files."""
    rows: Rows = part.rows
    names, collectives, matrices, stated = known.names, known.collectives, known.matrices, known.stated
    name = np.array([*(names.setdefault(text, len(names)) for text in rows.names), NONE], dtype=np.int64)
    message = np.array(
        [*(collectives.setdefault(collective, len(collectives)) for collective in rows.collectives), NONE]
    )
    host = min(ranks.values(), default=0)

    def rank_of(device: Ints) -> Ints:
        known = np.array(sorted(ranks), dtype=np.int64)
        if not len(known):
            return np.full(len(device), host)
        at = np.clip(np.searchsorted(known, device), 0, len(known) - 1)
        mapped = np.array([ranks[int(number)] for number in known], dtype=np.int64)[at]
        return np.where(known[at] == device, mapped, host)

    energy_j = np.concatenate(rows.energy_j) if rows.energy_j else np.empty(0)
    w = partial(column_of, rows.work)
    operators = w(12)
    product = {operator: matrices.setdefault(one, len(matrices)) for operator, one in rows.products.items()}
    works = {operator: stated.setdefault(work, len(stated)) for work, operator in rows.own_works.items()}
    matrix, own = (
        np.array(
            [found.get(operator, NONE) for operator in operators.tolist()] if found else np.full(len(operators), NONE)
        )
        for found in (product, works)
    )
    work = [
        rank_of(w(2)), name[w(0)], w(4) + base, w(5), w(1), w(6), w(3), message[w(7)], w(8), w(9), w(10), name[w(11)],
        matrix, own,
    ]  # fmt: skip
    rows.work.clear()
    c, s, a = partial(column_of, rows.calls), partial(column_of, rows.waits), partial(column_of, rows.annotations)
    calls = [np.full(len(c(0)), host), name[c(0)], c(2) + base, c(3), c(1), c(4)]
    rows.calls.clear()
    waits = [rank_of(s(1)), name[s(0)], s(6) + base, s(7), s(2), s(3), s(4), s(5)]
    notes = [rank_of(a(1)), name[a(0)], a(4) + base, a(5), a(2), a(3)]
    return work, calls, waits, notes, energy_j


def _joined(files: list[list[Ints]]) -> list[Ints]:
    """The columns of all files as one, taken from them one by one."""
    return packed([np.concatenate([columns.pop(0) for columns in files]) for _ in range(len(files[0]))])


def _put_in_order(columns: list[Ints], order: Ints) -> None:
    for number, column in enumerate(columns):
        if column.strides != (0,):
            columns[number] = column[order]


def _launches(rank: Ints, correlation: Ints, call_rank: Ints, call_correlation: Ints) -> Ints:
    """The call that launched each row of work: same rank, same correlation, the first such call."""
    known = np.flatnonzero(call_correlation != NONE)
    launch = np.full(len(rank), NONE, dtype=np.int64)
    if not len(known) or not len(rank):
        return launch
    # One number for (rank, correlation); correlations may be of any size, so they are numbered first.
    ids = call_correlation[known]
    if not (ids[1:] > ids[:-1]).all():  # profilers count upwards
        ids = np.unique(ids)
    place = np.clip(np.searchsorted(ids, correlation), 0, len(ids) - 1)
    key, wanted = call_rank[known] * len(ids) + np.searchsorted(ids, call_correlation[known]), rank * len(ids) + place
    keys, first = (key, np.arange(len(key))) if (key[1:] > key[:-1]).all() else np.unique(key, return_index=True)
    at = np.clip(np.searchsorted(keys, wanted), 0, len(keys) - 1)
    return np.where((keys[at] == wanted) & (ids[place] == correlation) & (correlation != NONE), known[first[at]], NONE)


def _graphs(launch: Ints, call_name: Ints, names: Sequence[str]) -> Ints:
    """The launching call where it launched a CUDA or HIP graph, else ``NONE``."""
    if not len(call_name):
        return launch
    is_graph = np.array(["graphlaunch" in name.lower() for name in names])
    return np.where((launch != NONE) & is_graph[call_name[launch]], launch, NONE)


def _first_ns(part: FileRows) -> int:
    return min((int(block[4].min()) for block in part.rows.work if len(block[4])), default=0)


def _findings(
    parts: Sequence[FileRows], absolute: Sequence[bool], correlation: Ints, launch: Ints, calls: int
) -> list[Finding]:
    total: Counter[str] = Counter()
    first: dict[str, str] = {}
    for part in parts:
        for rule, (count, place) in part.reading.mended.items():
            total[rule] += count
            first.setdefault(rule, place)
    if len(parts) > 1 and len(set(absolute)) > 1:
        total["clocks-not-aligned"], first["clocks-not-aligned"] = (
            absolute.count(False),
            parts[absolute.index(False)].reading.path.name,
        )
    for rule, mask in (
        ("correlation-missing", correlation == NONE),
        ("launch-before-window", (correlation != NONE) & (launch == NONE)),
    ):
        if calls and mask.any():
            total[rule], first[rule] = int(mask.sum()), f"GPU work number {int(np.argmax(mask))}"
    return [Finding(rule=rule, count=count, first=first[rule], remedy=REMEDIES[rule]) for rule, count in total.items()]
