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
        symbol.kernel_id: symbol.formatted_kernel_name
        or symbol.demangled_kernel_name
        or symbol.kernel_name.removesuffix(".kd")
        for symbol in process.kernel_symbols
    }
    if gpus:
        devices = [{"name": gpu.product_name} | ({"numSms": gpu.cu_count} if gpu.cu_count > 0 else {}) for gpu in gpus]
        reading.metadata.setdefault("deviceProperties", devices)
    taken, calls = [], []
    for dispatch in process.buffer_records.kernel_dispatch:
        if not _timed(dispatch, reading):
            continue
        where, block = dispatch.dispatch_info, dispatch.dispatch_info.workgroup_size
        grid = where.grid_size
        sizes = [-(-items // max(1, threads)) for items, threads in zip(_three(grid), _three(block), strict=True)]
        queue = dispatch.stream_id.handle if dispatch.stream_id is not None else where.queue_id.handle
        taken.append(
            (rows.name(names.get(where.kernel_id, "kernel")), Category.KERNEL, number.get(where.agent_id.handle, 0),
             whole(queue), dispatch.start_timestamp, dispatch.end_timestamp - dispatch.start_timestamp,
             dispatch.correlation_id.internal, NONE, NONE, product(*sizes), product(*_three(block)), NONE, NONE)
        )  # fmt: skip
    for copy in process.buffer_records.memory_copy:
        if not _timed(copy, reading):
            continue
        device = number.get(copy.dst_agent_id.handle, number.get(copy.src_agent_id.handle, 0))
        stream = copy.stream_id.handle if copy.stream_id is not None else NONE
        taken.append(
            (rows.name(COPIES.get(copy.operation, "Memcpy")), Category.MEMCPY, device, whole(stream),
             copy.start_timestamp, copy.end_timestamp - copy.start_timestamp, copy.correlation_id.internal, NONE,
             whole(copy.bytes), NONE, NONE, NONE, NONE)
        )  # fmt: skip
    for call in process.buffer_records.hip_api:
        if _timed(call, reading):
            name = _call(process.strings.buffer_records, call.kind, call.operation)
            span_ns = call.end_timestamp - call.start_timestamp
            calls.append((rows.name(name), call.thread_id, call.start_timestamp, span_ns, call.correlation_id.internal))
    rows.work.append(block_of(taken, 13))
    rows.energy_j.append(np.full(len(taken), np.nan))
    rows.calls.append(block_of(calls, 5))


def _three(sizes: Dim3) -> tuple[int, int, int]:
    return sizes.x, sizes.y, sizes.z


def _timed(record: RocprofRecord, reading: Reading) -> bool:
    if record.end_timestamp < record.start_timestamp:
        reading.note("negative-duration", reading.path.name)
        return False
    return True


def _call(tables: Any, kind: int, operation: int) -> str:
    """Name of a call by its numbers."""
    try:
        return str(tables[kind]["operations"][operation])
    except (IndexError, KeyError, TypeError):
        return "hip call"
