"""Tables of kernels, a row each: rocprofv3 and rocprof (CSV), ``nsys stats --report cuda_gpu_trace`` (CSV)."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from inputs.files import read_lines
from traces.capture import NONE, Category
from traces.errors import TraceError
from traces.read.events import Reading
from traces.read.rows import FileRows, Rows, block_of
from traces.read.values import TIME_LIMIT_NS, product, whole

NSYS = "nsys stats"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolColumns:
    """Columns of one tool: a kernel's name, when it began and ended (or how long it took, ns), where it ran."""

    tool: str
    name: str
    start: str
    end: str = ""
    duration: str = ""
    device: str = ""
    stream: tuple[str, ...] = ()
    correlation: str = ""
    grid: tuple[str, ...] = ()
    block: tuple[str, ...] = ()
    grid_in_threads: bool = True

    @property
    def needed(self) -> set[str]:
        """Columns without which there is no timeline."""
        return {self.name, self.start, self.end or self.duration}


TABLES = (
    ToolColumns(
        tool="rocprofv3", name="Kernel_Name", start="Start_Timestamp", end="End_Timestamp", device="Agent_Id",
        stream=("Stream_Id", "Queue_Id", "Queue_ID"), correlation="Correlation_Id",
        grid=("Grid_Size_X", "Grid_Size_Y", "Grid_Size_Z"),
        block=("Workgroup_Size_X", "Workgroup_Size_Y", "Workgroup_Size_Z"),
    ),
    ToolColumns(
        tool="rocprof", name="KernelName", start="BeginNs", end="EndNs", device="gpu-id", stream=("queue-id",),
        grid=("grd",), block=("wgr",),
    ),
    ToolColumns(
        tool=NSYS, name="Name", start="Start (ns)", duration="Duration (ns)", device="Device",
        stream=("Strm",), correlation="CorrId", grid=("GrdX", "GrdY", "GrdZ"), block=("BlkX", "BlkY", "BlkZ"),
        grid_in_threads=False,
    ),
)  # fmt: skip


def table_of_head(head: bytes) -> ToolColumns | None:
    """Whose table begins with the line of column names in ``head``; None: nobody's."""
    line = head.lstrip(b"\xef\xbb\xbf \r\n").split(b"\n", 1)[0].rstrip(b"\r").decode("utf-8", "replace")
    try:
        names = {name.strip() for name in next(csv.reader([line]), [])}
    except csv.Error:  # no line of a table: a return or too long a cell within it
        return None
    return next((table for table in TABLES if table.needed <= names), None)


def read_csv(path: Path, table: ToolColumns) -> FileRows:
    """Rows of a table.

    Raises :class:`TraceError` on a line with other cells than the header has.
    """
    reading, rows = Reading(path=path), Rows()
    taken = []
    devices: dict[str, int] = {}
    for line, cells in _cells(path):
        start = _ns(cells.get(table.start, ""))
        end = _ns(cells.get(table.end or table.duration, ""))
        if start is None or end is None:
            reading.note("time-missing-or-not-finite", f"{path.name}:{line}")
            continue
        dur = end - start if table.end else end
        if dur < 0:
            reading.note("negative-duration", f"{path.name}:{line}")
            continue
        device = devices.setdefault(cells.get(table.device, ""), len(devices))
        stream = next((cells[name] for name in table.stream if cells.get(name)), "")
        name = cells.get(table.name, "").removesuffix(".kd").removesuffix(" [clone .kd]") or "kernel"
        block = [cells.get(name, "") for name in table.block]
        grid = [cells.get(name, "") for name in table.grid]
        threads = product(*block)
        blocks = product(*grid)
        if table.grid_in_threads and blocks != NONE and threads > 0:
            blocks = -(-blocks // threads)
        taken.append(
            (rows.name(name), _category(name), device, whole(stream), start, dur,
             whole(cells.get(table.correlation, "")), NONE, NONE, blocks, threads, NONE, NONE)
        )  # fmt: skip
    if devices and all(re.fullmatch(r"\D*\d+|.*\(\d+\)", device) for device in devices):
        reading.metadata["deviceProperties"] = [{"name": re.sub(r" *\(\d+\)$", "", device)} for device in devices]
    rows.work.append(block_of(taken, 13))
    rows.energy_j.append(np.full(len(taken), np.nan))
    return FileRows(rows=rows, reading=reading)


def _cells(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    place = [1]

    def texts() -> Iterator[str]:
        for place[0], line in read_lines(path, "trace", TraceError):
            yield line + "\n"

    reader = csv.reader(texts())
    try:
        names = [name.strip().lstrip("\ufeff") for name in next(reader)]
        for cells in reader:
            if len(cells) != len(names):
                raise TraceError(f"{path}:{place[0]}: {len(cells)} cells, the header has {len(names)}: export it again")
            yield place[0], dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise TraceError(f"{path}:{place[0]}: not a table of kernels: {error}") from None


def _ns(text: str) -> int | None:
    """Whole nanoseconds."""
    try:
        value = round(float(text)) if not text.isdecimal() else int(text)
    except (ValueError, OverflowError):
        return None
    return value if abs(value) < TIME_LIMIT_NS else None


def _category(name: str) -> Category:
    if "memcpy" in name.lower():
        return Category.MEMCPY
    return Category.MEMSET if "memset" in name.lower() else Category.KERNEL
