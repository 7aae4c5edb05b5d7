"""Which tool wrote a file, by its content: how it is read, or how to convert it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from traces.errors import TraceError
from traces.read.csv_table import NSYS, read_csv, table_of_head
from traces.read.events import Reading
from traces.read.kineto import read_file
from traces.read.nsight import is_sqlite, read_nsight
from traces.read.perfetto import PACKET, read_perfetto
from traces.read.rocprof import read_rocprof
from traces.read.rows import FileRows
from traces.read.stream import open_trace

HEAD_BYTES = 1 << 16
ROCPROFV3 = re.compile(rb'^\s*\{\s*"rocprofiler-sdk-tool"\s*:')
# What is no timeline of kernels, or only after its tool has converted it: of the name, or of the first bytes.
ENDINGS = (
    ((".nsys-rep", ".qdrep", ".qdstrm"), "a report of Nsight Systems: nsys export --type sqlite {name}"),
    ((".ncu-rep",), "a report of Nsight Compute, which runs kernels one by one: take the timeline with nsys profile"),
    ((".xplane.pb",), "an XPlane of XLA: give the .trace.json.gz that jax.profiler.start_trace writes beside it"),
    ((".et",), "a Chakra execution trace: nodes, no timeline: give the profiler's trace that it was made of"),
    ((".otf2",), "an OTF2 archive: rocprofv3 --output-format json"),
)
# Tables, of which only those of some tools are timelines.
TABLES = (".csv", ".csv.gz", ".parquet")
HEADS = (
    (
        re.compile(rb'^\s*\{\s*"(?:Type|type)"\s*:|^\s*\{"data":\["\[Unknown\]"'),
        "JSON of Nsight Systems, whose names are numbers: nsys export --type sqlite REPORT.nsys-rep",
    ),
    (
        re.compile(rb'^\s*\{[^\[{]*"schema"\s*:\s*"[^"]*"[^\[{]*"nodes"\s*:|"schema"\s*:\s*"[\d.]+-chakra'),
        "an execution trace of PyTorch: operators without times on the GPU: export_chrome_trace of the same steps",
    ),
    (
        re.compile(rb"Total Time \(ns\)|TotalDurationNs"),
        "sums by kernel, no timeline: nsys stats --report cuda_gpu_trace --format csv, or rocprofv3 --kernel-trace",
    ),
    (
        re.compile(
            rb"^.\x0a.(?:\d+\.)+\d|\"type\"\s*:\s*\"(?:COMP|COMM_COLL|COMM_SEND|COMM_RECV|MEM_\w+)_NODE\"", re.DOTALL
        ),
        "a Chakra execution trace: nodes, no timeline: give the profiler's trace that it was made of",
    ),
)


def read_any(path: Path) -> FileRows:
    """Rows of one file of any tool.

    Raises :class:`TraceError` that names the command which converts it, where it is of another form.
    """
    return _reader(path)(path)


def is_chrome(path: Path) -> bool:
    """Whether the file is a Chrome trace: what other viewers open as it is."""
    return _reader(path) is read_file


def check_name(path: Path) -> None:
    """Refuse a file whose name says that it is no timeline."""
    for endings, remedy in ENDINGS:
        if path.name.endswith(endings):
            raise TraceError(f"trace '{path}': {remedy.format(name=path.name)}")


def how_to_record(path: Path) -> str:
    """What makes the tool that wrote ``path`` record the work of GPUs."""
    match _reader(path):
        case reader if reader is read_nsight or (isinstance(reader, partial) and reader.keywords["table"].tool == NSYS):
            return "nsys profile --trace=cuda"
        case reader if reader is read_rocprof or isinstance(reader, partial):
            return "rocprofv3 --kernel-trace"
        case _:
            return "ProfilerActivity.CUDA"


def _reader(path: Path) -> Callable[[Path], FileRows]:
    check_name(path)
    if is_sqlite(path):
        return read_nsight
    with open_trace(path, Reading(path=path)) as stream:
        head = stream.read(HEAD_BYTES)
    for pattern, remedy in HEADS:
        if pattern.search(head) is not None:
            raise TraceError(f"trace '{path}': {remedy}")
    if ROCPROFV3.match(head) is not None:
        return read_rocprof
    if head[:1] == PACKET and head.lstrip()[:1] not in (b"{", b"["):
        return read_perfetto
    table = table_of_head(head)
    if table is None and path.name.endswith(TABLES):
        raise TraceError(
            f"trace '{path}': a table, but not one of kernels with their times (of rocprof or nsys stats): rows of a "
            "sweep are for wattline pareto and best, records for wattline validate"
        )
    return read_file if table is None else partial(read_csv, table=table)
