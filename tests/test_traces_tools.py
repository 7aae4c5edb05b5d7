"""Traces of other tools: read, or refused with the command that converts them."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from sim import simulate
from sim.replay.inspect import inspect_trace
from sim.replay.inspect_report import as_document
from sim.scenario.spec import Scenario
from traces.capture import Capture
from traces.classify import class_of
from traces.errors import TraceError
from traces.read.load import read_trace
from traces.write.chakra import Node, NodeKind, NodeType, write_chakra

Row = tuple[str, int, int, int, int]  # name, device or rank, stream, start and duration (ns)


def rows(capture: Capture) -> list[Row]:
    """What ran, from the first kernel on."""
    work = capture.work
    columns = (work.rank, work.stream, work.start_ns - work.start_ns.min(), work.dur_ns)
    names = [capture.names[name] for name in work.name.tolist()]
    return list(zip(names, *(column.tolist() for column in columns), strict=True))


def test_rocprof_writes_a_process_a_gpu(tmp_path: Path) -> None:
    """rocprof v1: times as text, copies and HIP calls in processes of their own."""
    kernel = {"ph": "X", "tid": 3, "name": "Cijk_Alik_Bljk_BBS_BH_MT256x256x64", "args": {"BeginNs": "1"}}
    events = [
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "CPU HIP API"}},
        {"ph": "M", "pid": 6, "name": "process_name", "args": {"name": "GPU0"}},
        {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "GPU1"}},
        {"ph": "X", "pid": 2, "tid": 9, "name": "hipLaunchKernel", "ts": "990", "dur": "5", "args": {}},
        kernel | {"pid": 6, "ts": "1000", "dur": "50"},
        kernel | {"pid": 7, "ts": "1010.5", "dur": "40.25"},
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert rows(read_trace(path)) == [
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x64", 0, 3, 0, 50_000),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x64", 1, 3, 10_500, 40_250),
    ]


def test_of_xla_the_streams_are_read_and_not_the_operations_again(tmp_path: Path) -> None:
    """What ``jax.profiler`` writes: streams, and the same time once more by operation."""
    threads = {13: "Stream #13(Compute)", 14: "Stream #14(NCCL)", 99: "XLA Ops"}
    events = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}}]
    events += [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in threads.items()
    ]
    for tid, name, ts in ((13, "gemm_fusion_dot_34", 0), (99, "gemm_fusion_dot.34", 0), (14, "ncclDevKernel_X", 60)):
        args = {"correlation_id": str(tid)}
        events.append({"ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": 60, "name": name, "args": args})
    events.append({"ph": "X", "pid": 1, "tid": 13, "ts": 130, "dur": 2, "name": "MemcpyD2D", "args": {}})
    path = tmp_path / "host.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}).encode()))
    capture = read_trace(path)
    assert rows(capture) == [
        ("gemm_fusion_dot_34", 0, 13, 0, 60_000),
        ("ncclDevKernel_X", 0, 14, 60_000, 60_000),
        ("MemcpyD2D", 0, 13, 130_000, 2_000),
    ]
    assert capture.work.category.tolist() == [0, 0, 1]
    assert capture.work.correlation.tolist() == [13, 14, -1]


def test_a_tpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.trace.json"
    process = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:TPU:0"}}
    path.write_text(json.dumps({"traceEvents": [process]}))
    with pytest.raises(TraceError, match="of a TPU: only GPUs are read"):
        read_trace(path)


ROCPROFV3 = {
    "rocprofiler-sdk-tool": [
        {
            "metadata": {"pid": 1},
            "agents": [
                {"id": {"handle": 1}, "type": 1, "product_name": "AMD EPYC"},
                {"id": {"handle": 22}, "type": 2, "product_name": "AMD Instinct MI300X", "cu_count": 304},
                {"id": {"handle": 23}, "type": 2, "product_name": "AMD Instinct MI300X", "cu_count": 304},
            ],
            "kernel_symbols": [{"kernel_id": 5, "formatted_kernel_name": "void gemm<1>(float*)"}],
            "strings": {"buffer_records": [{"kind": "NONE"}, {"operations": ["none", "hipLaunchKernel"]}]},
            "buffer_records": {
                "kernel_dispatch": [
                    {
                        "kind": 11, "operation": 2, "thread_id": 77, "correlation_id": {"internal": 4, "external": 0},
                        "start_timestamp": 1_000_000_000_000_123, "end_timestamp": 1_000_000_000_050_000,
                        "dispatch_info": {
                            "agent_id": {"handle": 23}, "queue_id": {"handle": 2}, "kernel_id": 5, "dispatch_id": 1,
                            "workgroup_size": {"x": 256, "y": 1, "z": 1}, "grid_size": {"x": 77_824, "y": 2, "z": 1},
                        },
                    }
                ],
                "memory_copy": [
                    {
                        "operation": 2,
                        "start_timestamp": 1_000_000_000_060_000, "end_timestamp": 1_000_000_000_070_000,
                        "src_agent_id": {"handle": 1}, "dst_agent_id": {"handle": 23}, "bytes": 4096,
                        "stream_id": {"handle": 0},
                    }
                ],
                "hip_api": [
                    {
                        "kind": 1, "operation": 1, "thread_id": 77, "correlation_id": {"internal": 4},
                        "start_timestamp": 1_000_000_000_000_000, "end_timestamp": 1_000_000_000_000_100,
                    }
                ],
            },
        }
    ]
}  # fmt: skip


def test_json_of_rocprofv3_has_kernels_copies_and_the_calls_that_launched_them(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(ROCPROFV3))
    capture = read_trace(path)
    assert rows(capture) == [("void gemm<1>(float*)", 0, 2, 0, 49_877), ("Memcpy HtoD", 0, 0, 59_877, 10_000)]
    work = capture.work
    assert (work.blocks[0], work.threads[0], work.moved_bytes[1]) == (608, 256, 4096)
    assert capture.names[capture.calls.name[work.launch[0]]] == "hipLaunchKernel"
    assert capture.metadata[0]["deviceProperties"][0] == {"name": "AMD Instinct MI300X", "numSms": 304}


@pytest.mark.parametrize(
    ("header", "cells"),
    [
        (
            "Kind,Agent_Id,Queue_Id,Stream_Id,Thread_Id,Dispatch_Id,Kernel_Id,Kernel_Name,Correlation_Id,"
            "Start_Timestamp,End_Timestamp,Workgroup_Size_X,Workgroup_Size_Y,Workgroup_Size_Z,"
            "Grid_Size_X,Grid_Size_Y,Grid_Size_Z",
            '"KERNEL_DISPATCH","Agent 4",1,7,3,{n},5,"void gemm<1, 2>(float*)",{n},{start},{end},256,1,1,1024,2,1',
        ),
        (
            '"Index","KernelName","gpu-id","queue-id","queue-index","pid","tid","grd","wgr","BeginNs","EndNs"',
            '{n},"void gemm<1, 2>(float*) [clone .kd]",4,7,0,1,1,2048,256,{start},{end}',
        ),
        (
            "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),Bytes (MB),"
            "SrcMemKd,DstMemKd,Device,Ctx,GreenCtx,Strm,Name",
            '{start},{dur},{n},4,2,1,256,1,1,32,0.0,,,,NVIDIA H100 80GB HBM3 (0),1,,7,"void gemm<1, 2>(float*)"',
        ),
    ],
    ids=["rocprofv3", "rocprof", "nsys stats"],
)
def test_tables_of_kernels(tmp_path: Path, header: str, cells: str) -> None:
    path = tmp_path / "kernels.csv"
    lines = [
        cells.format(n=n, start=10**15 + start, end=10**15 + start + 2_001, dur=2_001)
        for n, start in ((1, 0), (2, 5_000))
    ]
    path.write_text("\n".join([header, *lines]) + "\n")
    capture = read_trace(path)
    assert rows(capture) == [
        ("void gemm<1, 2>(float*)", 0, 7, 0, 2_001),
        ("void gemm<1, 2>(float*)", 0, 7, 5_000, 2_001),
    ]
    assert capture.work.threads.tolist() == [256, 256]
    assert capture.work.blocks.tolist() == [8, 8]
    path.write_text("\n".join([header, lines[0] + ",1"]) + "\n")
    with pytest.raises(TraceError, match=r"kernels.csv:2: \d+ cells, the header has \d+: export it again"):
        read_trace(path)


def database(path: Path, tables: Sequence[str]) -> Path:
    """A SQLite file with those tables, empty."""
    with closing(sqlite3.connect(path)) as made:
        for table in tables:
            made.execute(f"create table {table} (id integer)")
        made.commit()
    return path


@pytest.mark.parametrize(
    ("tables", "remedy"),
    [
        (["rocpd_kernel_dispatch_0001", "rocpd_string_0001"], "rocpd convert -i t.db --output-format csv"),
        (["rocpd_op", "rocpd_api", "rocpd_string"], "python3 rpd2tracing.py t.db t.json"),
        (["StringIds", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"], "nsys profile --cuda-graph-trace=node"),
        (["anything"], "export it with nsys export --type sqlite"),
    ],
)
def test_databases_of_other_tools_are_refused_with_their_command(
    tmp_path: Path, tables: list[str], remedy: str
) -> None:
    with pytest.raises(TraceError, match=remedy.replace("(", r"\(")):
        read_trace(database(tmp_path / "t.db", tables))


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("r.nsys-rep", b"\x00\x01", "nsys export --type sqlite r.nsys-rep"),
        ("r.ncu-rep", b"\x00\x01", "take the timeline with nsys profile"),
        ("h.xplane.pb", b"\x0a\x01", "give the .trace.json.gz that jax.profiler.start_trace writes beside it"),
        (
            "e.json",
            b'{"Type":79,"CudaEvent":{"startNs":"1000","endNs":"3000","kernel":{"shortName":"12"}}}\n',
            "nsys export --type sqlite REPORT.nsys-rep",
        ),
        ("e.json", b'{"data":["[Unknown]","[Max depth]"]}\n', "nsys export --type sqlite REPORT.nsys-rep"),
        (
            "et.json",
            b'{\n  "schema": "1.1.1-chakra.0.0.4", "pid": 1, "time": "x", "start_ts": 1,\n  "nodes": [{"id": 1}]}',
            "export_chrome_trace of the same steps",
        ),
        ("s.csv", b"Time (%),Total Time (ns),Instances,Name\n50.0,1000,2,k\n", "nsys stats --report cuda_gpu_trace"),
        ("s.csv", b'"Name","Calls","TotalDurationNs"\n"k",3,3000\n', "rocprofv3 --kernel-trace"),
        ("w.0.et", b"\x00", "give the profiler's trace that it was made of"),
        (
            "v3.json",
            b'{"rocprofiler-sdk-tool": [{"metadata": {}, "agents": [], "buffer_records": {"kernel_dispatch": []}}]}',
            "profile with rocprofv3 --kernel-trace",
        ),
        ("k.csv", b"Start (ns),Duration (ns),Strm,Name\n", "profile with nsys profile --trace=cuda"),
    ],
)
def test_what_is_no_timeline_is_refused_with_the_way_to_one(
    tmp_path: Path, name: str, content: bytes, remedy: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=remedy):
        read_trace(path)


def test_a_chakra_trace_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("google.protobuf")
    node = Node(id=0, kind=NodeKind(name="gemm", type=NodeType.COMPUTE), after=(), start_us=0, duration_us=5)
    with pytest.raises(TraceError, match="a Chakra execution trace: nodes, no timeline"):
        read_trace(write_chakra([node], tmp_path / "run.0.et"))


def test_a_folder_of_chakra_traces_is_refused_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "comm_groups.json").write_text("{}")
    (tmp_path / "wattline.0.et").write_bytes(b"\x00")
    for given in (tmp_path, sorted(tmp_path.iterdir())):
        with pytest.raises(TraceError, match=r"wattline.0.et': a Chakra execution trace"):
            read_trace(given)


def test_a_chakra_trace_as_json_is_refused(tmp_path: Path) -> None:
    """As chakra_jsonizer writes it."""
    path = tmp_path / "chakra.json"
    path.write_text('{"version": "0.0.4"}\n{"id": "1", "name": "mm", "type": "COMP_NODE", "durationMicros": "5"}\n')
    with pytest.raises(TraceError, match="a Chakra execution trace: nodes, no timeline"):
        read_trace(path)


def test_both_of_our_formats_say_the_same(tmp_path: Path) -> None:
    """Perfetto's keeps joules to the last digit, Chrome JSON six."""
    pytest.importorskip("perfetto")
    run = simulate(Scenario.of(model="llama3-8b", gpu="h100-sxm-80gb", tp=2, phase="prefill", seq_len=512, layers=2))
    said = []
    for name in ("run.pftrace.gz", "run.json"):
        document = as_document(inspect_trace((run.to_chrome(tmp_path / name),)))
        joules = [document.pop("energy_j"), *(row.pop("energy_j") for row in document["by_class"])]
        said.append((document | {"sources": []}, joules))
    assert said[0][0] == said[1][0]
    assert said[0][1] == pytest.approx(said[1][1], rel=1e-5)
    assert (
        read_trace(tmp_path / "run.pftrace.gz").depends.shape[1] == read_trace(tmp_path / "run.json").depends.shape[1]
    )


def test_another_tools_perfetto_trace_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("perfetto")
    path = tmp_path / "other.pftrace"
    path.write_bytes(b"\x0a\x02\x50\x01")  # one packet, of sequence 1
    with pytest.raises(TraceError, match="a Perfetto trace of another tool"):
        read_trace(path)


def test_an_operation_of_xla_is_known_by_its_name() -> None:
    names = ("all-reduce-start.3", "gemm_fusion_dot_34", "loop_add_fusion", "input_reduce_fusion.2")
    assert [class_of(name) for name in names] == ["communication", "gemm", "elementwise", "elementwise"]
