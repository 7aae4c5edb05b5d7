"""Nsight Systems exports (``nsys export --type sqlite``)."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from traces.capture import NONE, Category
from traces.errors import TraceError
from traces.read.events import Reading
from traces.read.rows import FileRows, Rows
from traces.records import Ints

MAGIC = b"SQLite format 3\x00"
PREFIX = "CUPTI_ACTIVITY_KIND_"


def is_sqlite(path: Path) -> bool:
    """Whether ``path`` holds a SQLite database, by content."""
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
            tables = {
                row[0] for row in database.execute("select name from sqlite_master where type in ('table','view')")
            }
            if "StringIds" not in tables:
                raise TraceError(
                    f"trace '{path}': a SQLite file without the table StringIds: export it with nsys export"
                )
            strings = dict(database.execute("select id, value from StringIds"))
            _Export(database, tables, strings, rows).take()
    except sqlite3.Error as error:
        raise TraceError(f"trace '{path}': {error}: export it again with nsys export --type sqlite") from None
    return FileRows(rows=rows, reading=reading)


class _Export:
    """One open export and the rows taken from it."""

    def __init__(self, database: sqlite3.Connection, tables: set[str], strings: dict[int, str], rows: Rows) -> None:
        self.database, self.tables, self.strings, self.rows = database, tables, strings, rows
        self.taken: list[tuple[int, ...]] = []

    def take(self) -> None:
        """Kernels, copies, memsets, calls, synchronisations and NVTX ranges."""
        rows = self.rows
        calls, ranges = [], []
        for start, end, device, stream, correlation, full, short, gx, gy, gz, bx, by, bz in self.select(
            PREFIX + "KERNEL", "start end deviceId streamId correlationId demangledName shortName "
            "gridX gridY gridZ blockX blockY blockZ",
        ):  # fmt: skip
            name = self.strings.get(full) or self.strings.get(short) or "kernel"
            self.work(Category.KERNEL, name, device, stream, start, end, correlation,
                      blocks=_product(gx, gy, gz), threads=_product(bx, by, bz))  # fmt: skip
        for start, end, device, stream, correlation, moved, kind in self.select(
            PREFIX + "MEMCPY", "start end deviceId streamId correlationId bytes copyKind"
        ):
            name = COPIES.get(kind, "Memcpy")
            self.work(Category.MEMCPY, name, device, stream, start, end, correlation, moved=moved)
        for start, end, device, stream, correlation, moved in self.select(
            PREFIX + "MEMSET", "start end deviceId streamId correlationId bytes"
        ):
            self.work(Category.MEMSET, "Memset", device, stream, start, end, correlation, moved=moved)
        for start, end, thread, name, correlation in self.select(
            PREFIX + "RUNTIME", "start end globalTid nameId correlationId"
        ):
            text = self.strings.get(name, "call").split("_v")[0]  # cudaLaunchKernel_v7000
            calls.append((rows.name(text), _or_none(thread) & 0xFFFFFF, start, end - start, _or_none(correlation)))
        for start, end, thread, text, text_id in self.select("NVTX_EVENTS", "start end globalTid text textId"):
            if start is not None and end is not None:
                label = text or self.strings.get(text_id, "range")
                ranges.append((rows.name(label), 0, _or_none(thread) & 0xFFFFFF, 0, start, end - start))
        rows.work.append(_block(self.taken, 13))
        rows.energy_j.append(np.full(len(self.taken), np.nan))
        rows.calls.append(_block(calls, 5))
        rows.annotations.append(_block(ranges, 6))

    def select(self, table: str, columns: str) -> list[tuple[Any, ...]]:
        """Rows of ``table``; a column that this version does not have reads as NULL."""
        if table not in self.tables:
            return []
        present = {row[1] for row in self.database.execute(f"pragma table_info({table})")}
        chosen = ", ".join(f'"{one}"' if one in present else "NULL" for one in columns.split())
        return self.database.execute(f"select {chosen} from {table} order by start").fetchall()

    def work(
        self, category: Category, name: str, device: Any, stream: Any, start: Any, end: Any, correlation: Any,
        *, moved: Any = NONE, blocks: int = NONE, threads: int = NONE,
    ) -> None:  # fmt: skip
        """One row of GPU work."""
        if not isinstance(start, int) or not isinstance(end, int):
            return
        self.taken.append(
            (self.rows.name(name), category, _or_none(device), _or_none(stream), start, end - start,
             _or_none(correlation), NONE, _or_none(moved), blocks, threads, NONE, NONE)
        )  # fmt: skip


COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}  # CUpti_ActivityMemcpyKind


def _or_none(value: Any) -> int:
    return NONE if value is None else int(value)


def _product(*sizes: Any) -> int:
    return NONE if any(size is None for size in sizes) else int(sizes[0] * sizes[1] * sizes[2])


def _block(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    return np.array(rows, dtype=np.int64).T if rows else np.empty((width, 0), dtype=np.int64)
