"""JSON of rocprofv3 (ROCm 6.2 and later): kernel dispatches, copies and HIP calls, times in nanoseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from traces.capture import NONE, Category
from traces.errors import TraceError
from traces.read.events import Reading
from traces.read.rows import FileRows, Rows, block_of
from traces.read.stream import open_trace
from traces.read.values import product, whole

# rocprofiler_memory_copy_operation_t
COPIES = {2: "Memcpy HtoD", 3: "Memcpy DtoH", 4: "Memcpy DtoD"}
GPU_AGENT = 2  # rocprofiler_agent_type_t
EXPORT = "export it again with rocprofv3 --output-format json"


class Handle(msgspec.Struct):
    """A number in a table of its own."""

    handle: int = NONE


class Correlation(msgspec.Struct):
    """What ties a call to its work."""

    internal: int = NONE


class Dim3(msgspec.Struct):
    """Three sizes."""

    x: int = 1
    y: int = 1
    z: int = 1


class Dispatch(msgspec.Struct):
    """Which kernel ran where; the grid counts work-items."""

    agent_id: Handle = msgspec.field(default_factory=Handle)
    queue_id: Handle = msgspec.field(default_factory=Handle)
    kernel_id: int = NONE
    grid_size: Dim3 = msgspec.field(default_factory=Dim3)
    workgroup_size: Dim3 = msgspec.field(default_factory=Dim3)


class RocprofRecord(msgspec.Struct):
    """A dispatch, a copy or a call."""

    start_timestamp: int
    end_timestamp: int
    kind: int = NONE
    operation: int = NONE
    thread_id: int = NONE
    bytes: int = NONE
    correlation_id: Correlation = msgspec.field(default_factory=Correlation)
    stream_id: Handle | None = None
    dispatch_info: Dispatch = msgspec.field(default_factory=Dispatch)
    src_agent_id: Handle = msgspec.field(default_factory=Handle)
    dst_agent_id: Handle = msgspec.field(default_factory=Handle)


class Records(msgspec.Struct):
    """The tables that are read."""

    kernel_dispatch: list[RocprofRecord] = []
    memory_copy: list[RocprofRecord] = []
    hip_api: list[RocprofRecord] = []


class Agent(msgspec.Struct):
    """A processor."""

    id: Handle = msgspec.field(default_factory=Handle)
    type: int = NONE
    product_name: str = ""
    cu_count: int = NONE


class Symbol(msgspec.Struct):
    """A kernel's names."""

    kernel_id: int = NONE
    formatted_kernel_name: str = ""
    demangled_kernel_name: str = ""
    kernel_name: str = ""


class Strings(msgspec.Struct):
    """Names of calls, by kind and operation."""

    buffer_records: Any = None


class Process(msgspec.Struct):
    """One profiled process."""

    agents: list[Agent] = []
    kernel_symbols: list[Symbol] = []
    buffer_records: Records = msgspec.field(default_factory=Records)
    strings: Strings = msgspec.field(default_factory=Strings)


class File(msgspec.Struct, rename={"processes": "rocprofiler-sdk-tool"}):
    """The whole file."""

    processes: list[Process]


def read_rocprof(path: Path) -> FileRows:
    """Rows of one file.

    Raises :class:`TraceError` where it is not of that form.
    """
    reading, rows = Reading(path=path), Rows()
    with open_trace(path, reading) as stream:
        parts = []
        while part := stream.read(1 << 24):
            parts.append(part)
    try:
        file = msgspec.json.decode(b"".join(parts), type=File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(f"trace '{path}': JSON of rocprofv3, but {error}: {EXPORT}") from None
    for process in file.processes:
        _take(process, rows, reading)
    return FileRows(rows=rows, reading=reading)


def _take(process: Process, rows: Rows, reading: Reading) -> None:
    gpus = [agent for agent in process.agents if agent.type == GPU_AGENT]
    number = {agent.id.handle: place for place, agent in enumerate(gpus)}
    names = {
        one.kernel_id: one.formatted_kernel_name or one.demangled_kernel_name or one.kernel_name.removesuffix(".kd")
        for one in process.kernel_symbols
    }
    if gpus:
        devices = [{"name": gpu.product_name} | ({"numSms": gpu.cu_count} if gpu.cu_count > 0 else {}) for gpu in gpus]
        reading.metadata.setdefault("deviceProperties", devices)
    taken, calls = [], []
    for one in process.buffer_records.kernel_dispatch:
        if not _timed(one, reading):
            continue
        where, block = one.dispatch_info, one.dispatch_info.workgroup_size
        grid = where.grid_size
        sizes = [-(-items // max(1, threads)) for items, threads in zip(_three(grid), _three(block), strict=True)]
        queue = one.stream_id.handle if one.stream_id is not None else where.queue_id.handle
        taken.append(
            (rows.name(names.get(where.kernel_id, "kernel")), Category.KERNEL, number.get(where.agent_id.handle, 0),
             whole(queue), one.start_timestamp, one.end_timestamp - one.start_timestamp, one.correlation_id.internal,
             NONE, NONE, product(*sizes), product(*_three(block)), NONE, NONE)
        )  # fmt: skip
    for one in process.buffer_records.memory_copy:
        if not _timed(one, reading):
            continue
        device = number.get(one.dst_agent_id.handle, number.get(one.src_agent_id.handle, 0))
        stream = one.stream_id.handle if one.stream_id is not None else NONE
        taken.append(
            (rows.name(COPIES.get(one.operation, "Memcpy")), Category.MEMCPY, device, whole(stream),
             one.start_timestamp, one.end_timestamp - one.start_timestamp, one.correlation_id.internal, NONE,
             whole(one.bytes), NONE, NONE, NONE, NONE)
        )  # fmt: skip
    for one in process.buffer_records.hip_api:
        if _timed(one, reading):
            name = _call(process.strings.buffer_records, one.kind, one.operation)
            span_ns = one.end_timestamp - one.start_timestamp
            calls.append((rows.name(name), one.thread_id, one.start_timestamp, span_ns, one.correlation_id.internal))
    rows.work.append(block_of(taken, 13))
    rows.energy_j.append(np.full(len(taken), np.nan))
    rows.calls.append(block_of(calls, 5))


def _three(sizes: Dim3) -> tuple[int, int, int]:
    return sizes.x, sizes.y, sizes.z


def _timed(one: RocprofRecord, reading: Reading) -> bool:
    if one.end_timestamp < one.start_timestamp:
        reading.note("negative-duration", reading.path.name)
        return False
    return True


def _call(tables: Any, kind: int, operation: int) -> str:
    """Name of a call by its numbers."""
    try:
        return str(tables[kind]["operations"][operation])
    except (IndexError, KeyError, TypeError):
        return "hip call"
