"""Nsight Systems exports (``nsys export --type sqlite``)."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from inputs.files import check_regular
from traces.capture import NONE, Category
from traces.errors import TraceError
from traces.read.events import Reading
from traces.read.rows import FileRows, Rows, block_of
from traces.read.values import TIME_LIMIT_NS, product, whole

MAGIC = b"SQLite format 3\x00"
PREFIX = "CUPTI_ACTIVITY_KIND_"


def is_sqlite(path: Path) -> bool:
    """Whether ``path`` holds a SQLite database, by content."""
    check_regular(path, "trace", TraceError)
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise TraceError(f"cannot read trace '{path}': {error.strerror or error}") from None


def read_nsight(path: Path) -> FileRows:
    """Rows of an export; tables and columns that a version does not have are taken as empty.

    Raises :class:`TraceError` where the file is no Nsight export.
    """
    reading, rows = Reading(path=path), Rows()
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            # Text of any bytes is text; a view could go on for ever.
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            tables = {row[0] for row in database.execute("select name from sqlite_master where type = 'table'")}
            if "StringIds" not in tables:
                raise TraceError(f"trace '{path}': {_other(tables, path)}")
            if PREFIX + "KERNEL" not in tables and PREFIX + "GRAPH_TRACE" in tables:
                raise TraceError(
                    f"trace '{path}': its CUDA graphs were traced whole, without their kernels: "
                    "nsys profile --cuda-graph-trace=node"
                )
            strings = dict(database.execute("select id, value from StringIds"))
            _Export(database, tables, strings, rows, reading).take()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the words of an error may be damaged as well
        raise TraceError(f"trace '{path}': {error}: export it again with nsys export --type sqlite") from None
    return FileRows(rows=rows, reading=reading)


def _other(tables: set[str], path: Path) -> str:
    """What a SQLite file that is no Nsight export is, and how to convert it."""
    if {"rocpd_op", "rocpd_api"} <= tables:
        return f"a database of rocmProfileData: python3 rpd2tracing.py {path.name} {path.stem}.json, and read that"
    if any(name.startswith("rocpd_") for name in tables):
        return f"a database of rocprofv3: rocpd convert -i {path.name} --output-format csv, and read its kernel trace"
    return "a SQLite file without the table StringIds: export it with nsys export --type sqlite"


class _GpuRow(NamedTuple):
    """What kernels, copies and memsets have in common: times (ns), place, and the number that leads to their call."""

    start: Any
    end: Any
    device: Any
    stream: Any
    correlation: Any


AT = "start end deviceId streamId correlationId"


class _Export:
    """One open export and the rows taken from it."""

    def __init__(
        self, database: sqlite3.Connection, tables: set[str], strings: dict[Any, Any], rows: Rows, reading: Reading
    ) -> None:
        self.database, self.tables, self.strings, self.rows = database, tables, strings, rows
        self.reading = reading
        self.taken: list[tuple[int, ...]] = []

    def take(self) -> None:
        """Kernels, copies, memsets, calls, synchronisations and NVTX ranges."""
        rows = self.rows
        calls, ranges = [], []
        for *at, full, short, gx, gy, gz, bx, by, bz in self.select(
            PREFIX + "KERNEL", f"{AT} demangledName shortName gridX gridY gridZ blockX blockY blockZ"
        ):
            name = self.text(full) or self.text(short) or "kernel"
            blocks, threads = product(gx, gy, gz), product(bx, by, bz)
            self.work(Category.KERNEL, name, _GpuRow(*at), blocks=blocks, threads=threads)
        for *at, moved, kind in self.select(PREFIX + "MEMCPY", f"{AT} bytes copyKind"):
            self.work(Category.MEMCPY, COPIES.get(whole(kind), "Memcpy"), _GpuRow(*at), moved=moved)
        for *at, moved in self.select(PREFIX + "MEMSET", f"{AT} bytes"):
            self.work(Category.MEMSET, "Memset", _GpuRow(*at), moved=moved)
        for start, end, thread, name, correlation in self.select(
            PREFIX + "RUNTIME", "start end globalTid nameId correlationId"
        ):
            if self.timed(start, end):
                text = (self.text(name) or "call").split("_v")[0]  # cudaLaunchKernel_v7000
                calls.append((rows.name(text), whole(thread) & 0xFFFFFF, start, end - start, whole(correlation)))
        for start, end, thread, text, text_id in self.select("NVTX_EVENTS", "start end globalTid text textId"):
            if end is not None and self.timed(start, end):  # a mark has no end
                label = text or self.text(text_id) or "range"
                ranges.append((rows.name(label), 0, whole(thread) & 0xFFFFFF, 0, start, end - start))
        rows.work.append(block_of(self.taken, 13))
        rows.energy_j.append(np.full(len(self.taken), np.nan))
        rows.calls.append(block_of(calls, 5))
        rows.annotations.append(block_of(ranges, 6))

    def select(self, table: str, columns: str) -> list[tuple[Any, ...]]:
        """Rows of ``table``; a column that this version does not have reads as NULL."""
        if table not in self.tables:
            return []
        present = {row[1] for row in self.database.execute(f"pragma table_info({table})")}
        chosen = ", ".join(f'"{column}"' if column in present else "NULL" for column in columns.split())
        return self.database.execute(f"select {chosen} from {table} order by start").fetchall()

    def work(
        self,
        category: Category,
        name: str,
        row: _GpuRow,
        *,
        moved: Any = NONE,
        blocks: int = NONE,
        threads: int = NONE,
    ) -> None:
        """One row of GPU work."""
        start, end = row.start, row.end
        if self.timed(start, end):
            self.taken.append(
                (self.rows.name(name), category, whole(row.device), whole(row.stream), start, end - start,
                 whole(row.correlation), NONE, whole(moved), blocks, threads, NONE, NONE)
            )  # fmt: skip

    def timed(self, start: Any, end: Any) -> bool:
        """Whether a row has times that a trace can have; one that has not is counted."""
        if type(start) is not int or type(end) is not int or max(abs(start), abs(end)) >= TIME_LIMIT_NS:
            self.reading.note("time-missing-or-not-finite", self.reading.path.name)
            return False
        if end < start:
            self.reading.note("negative-duration", self.reading.path.name)
            return False
        return True

    def text(self, number: Any) -> str:
        """A string of the export; empty where it has none of that number."""
        found = self.strings.get(number)
        return "" if found is None else str(found)


COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}  # CUpti_ActivityMemcpyKind
