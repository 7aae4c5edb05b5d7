"""Real traces: every file is read, and counted as an independent count says."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import traces.read.events
from sim import simulate
from sim.cli import main
from sim.result.trace import write_timeline
from sim.scenario.spec import Scenario
from tests.perfetto_kit import losses, perfetto
from tests.traces_kit import OURS, PUBLIC, REAL, kernel, launch, needs_real, plain, write
from traces.capture import Category, MatrixProduct
from traces.classify import COMMUNICATION, class_of, classify, load_rules
from traces.edges import edges_of
from traces.errors import TraceError
from traces.lint_file import lint_file
from traces.read.load import Window, read_trace
from traces.rounds import rounds_of
from traces.summary import summarise


@needs_real
@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}-{path.name.split('.')[0]}")
def test_every_real_file_is_read_with_the_counts_of_an_independent_reader(path: Path) -> None:
    events = [event for event in plain(path)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    capture = read_trace(path)
    summary = summarise(capture, classify(capture))
    assert summary.kernels == len(kernels)
    assert summary.streams == len({event["args"]["stream"] for event in kernels})
    assert summary.collectives == sum("nccl" in event["name"].lower() for event in kernels)
    assert np.sum(capture.work.category == Category.MEMCPY) == sum(event.get("cat") == "gpu_memcpy" for event in events)
    assert len(capture.calls) == sum(event.get("cat") in ("cuda_runtime", "cuda_driver") for event in events)
    # Durations and the span to the nanosecond, through the standard library's doubles.
    assert capture.work.dur_ns[capture.kernels].sum() == sum(round(event["dur"] * 1000) for event in kernels)
    first, last = min(e["ts"] for e in kernels), max(e["ts"] + e["dur"] for e in kernels)
    assert summary.ranks[0].span_us == pytest.approx(last - first, abs=0.6)  # a double of epoch us holds 0.25 us


@needs_real
@pytest.mark.parametrize(
    ("name", "communication_ms", "computation_ms", "overlap_ms"),
    [
        ("hta_v100_2gpu_diff_test", 251, 548, 178),
        ("hta_a100_8gpu_diff_control", 163.5, 281.3, 75.6),
        ("hta_a100_2gpu_nccl_args", 46.9, 115.7, 7.32),
    ],
)
def test_communication_computation_and_overlap_are_those_of_a_sweep_over_microseconds(
    name: str, communication_ms: float, computation_ms: float, overlap_ms: float
) -> None:
    events = [e for e in plain(PUBLIC / f"{name}.json.gz")["traceEvents"] if e.get("cat") == "kernel"]
    steps: dict[float, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:  # an independent count: how many of each sort are open at every instant
        sort = int("nccl" in event["name"])
        steps[event["ts"]][sort] += 1
        steps[event["ts"] + event["dur"]][sort] -= 1
    times = sorted(steps)
    open_now, sums = [0, 0], [0.0, 0.0, 0.0]
    for begin, end in pairwise(times):
        open_now = [a + b for a, b in zip(open_now, steps[begin], strict=True)]
        for sort, on in enumerate((open_now[0] > 0, open_now[1] > 0, min(open_now) > 0)):
            sums[sort] += (end - begin) * on
    capture = read_trace(PUBLIC / f"{name}.json.gz")
    times_us = summarise(capture, classify(capture)).ranks[0]
    assert times_us.computation_us == pytest.approx(sums[0], rel=1e-4)
    assert times_us.communication_us == pytest.approx(sums[1], rel=1e-4)
    assert times_us.overlap_us == pytest.approx(sums[2], rel=1e-3)
    # Figures noted when the files were collected (research/traces.md, section 4).
    assert times_us.communication_us / 1e3 == pytest.approx(communication_ms, rel=0.01)
    assert times_us.computation_us / 1e3 == pytest.approx(computation_ms, rel=0.01)
    assert times_us.overlap_us / 1e3 == pytest.approx(overlap_ms, rel=0.01)


@needs_real
def test_eight_ranks_read_as_one_run_share_a_clock_and_their_collectives_end_together() -> None:
    capture = read_trace(PUBLIC / "megatron_a100_tp8")
    assert capture.ranks == list(range(8))
    classes = classify(capture)
    summary = summarise(capture, classes)
    assert summary.streams == 16
    # Ranks wait in their collectives for others: up to 41 ms, yet all end within 50 us (traces.md, section 3).
    assert max(times.straggler_us for times in summary.ranks) > 41_000
    assert not summary.ranks[0].overlap_us


@needs_real
def test_a_hip_graph_is_one_launch_of_hundreds_of_kernels() -> None:
    capture = read_trace(PUBLIC / "tracelens_mi300x_sglang_decode_graph.json.gz")
    graph, count = np.unique(capture.work.graph[capture.work.graph >= 0], return_counts=True)
    assert len(graph) == 1
    assert count.tolist() == [544]
    assert capture.names[capture.calls.name[graph[0]]] == "hipGraphLaunch"
    # The call enqueues the kernels one by one while the first already run; once it is over, no gap is the host's.
    call_us = capture.calls.dur_ns[graph[0]] / 1e3
    inside = capture.keep(capture.work.graph >= 0)
    times = summarise(inside, classify(inside)).ranks[0]
    assert 0 < times.idle_by_cause_us["host"] < call_us < times.span_us


@needs_real
@pytest.mark.parametrize(
    "path",
    [
        PUBLIC / "hta_v100_ns_resolution.json.gz",
        PUBLIC / "hta_a100_8gpu_diff_control.json.gz",
        PUBLIC / "hta_v100_2gpu_diff_test.json.gz",
        PUBLIC / "hta_a100_alexnet_cuda_sync.json.gz",
        OURS / "kineto_llama3-8b_decode_b32_s2048.json.gz",
        OURS / "kineto_llama3-70b_tp_decode_w2_rank0.json.gz",
    ],
    ids=lambda path: path.name.split(".")[0],
)
def test_the_linter_counts_what_the_perfetto_engine_drops(path: Path) -> None:
    with perfetto(path) as processor:
        dropped = dict(losses(processor)).get("slice_drop_overlapping_complete_event", 0)
    counted = {finding.rule: finding.count for finding in lint_file(path)}
    assert counted.get("perfetto-overlap", 0) == dropped


@needs_real
def test_recorded_event_waits_become_edges_between_streams() -> None:
    capture = read_trace(PUBLIC / "hta_a100_event_sync_3streams.json.gz")
    edges = edges_of(capture)
    waits = [(a, b) for a, b, kind in zip(edges.before, edges.after, edges.kind, strict=True) if kind == 1]
    assert waits
    for before, after in waits:
        assert capture.work.stream[before] != capture.work.stream[after]
        assert capture.work.end_ns[before] <= capture.work.start_ns[after]
    assert edges.counts()["wait"] == {"count": len(waits), "confidence": 1.0}
    assert not edges.counts()["inferred"]["count"]  # what is recorded needs no guess


def nsight(path: Path, *, with_grid: bool = True) -> Path:
    """An export as nsys writes it; ``with_grid`` False leaves out columns that other versions lack."""
    grid = ", gridX, gridY, gridZ, blockX, blockY, blockZ" if with_grid else ""
    with sqlite3.connect(path) as base:
        base.execute("create table StringIds (id integer, value text)")
        base.executemany(
            "insert into StringIds values (?, ?)",
            [(1, "sgemm"), (2, "ncclDevKernel_AllReduce"), (3, "cudaLaunchKernel_v7000")],
        )
        base.execute(
            "create table CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, demangledName, "
            f"shortName{grid})"
        )
        size = (8, 1, 1, 128, 1, 1) if with_grid else ()
        rows = [(5_000, 9_000, 0, 7, 11, 1, 1, *size), (8_000, 12_000, 0, 20, 12, 2, 2, *size)]
        base.executemany(f"insert into CUPTI_ACTIVITY_KIND_KERNEL values ({','.join('?' * (7 + len(size)))})", rows)
        base.execute("create table CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, nameId, correlationId)")
        base.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (1000, 2000, 281474976710657, 3, 11)")
    return path


@pytest.mark.parametrize("with_grid", [True, False])
def test_an_nsight_export_of_either_version_is_read(tmp_path: Path, with_grid: bool) -> None:
    capture = read_trace(nsight(tmp_path / "run.sqlite", with_grid=with_grid))
    times = summarise(capture, classify(capture)).ranks[0]
    assert (times.communication_us, times.computation_us, times.overlap_us) == (4.0, 4.0, 1.0)
    assert capture.work.blocks.tolist() == ([8, 8] if with_grid else [-1, -1])
    assert capture.names[capture.calls.name[capture.work.launch[0]]] == "cudaLaunchKernel"


def test_other_sqlite_files_are_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as base:
        base.execute("create table t (a)")
    with pytest.raises(TraceError, match="without the table StringIds: export it with nsys export"):
        read_trace(tmp_path / "x.sqlite")


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("void dpsk::ep::internode::combine<true>(int)", COMMUNICATION),
        ("multimem_all_reduce_kernel<c10::BFloat16, 16>", COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<half, 8>", COMMUNICATION),
        ("trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport", COMMUNICATION),
        ("nvshmemi_transfer_rma_put", COMMUNICATION),
        ("one_shot_all_reduce_kernel", COMMUNICATION),
        ("two_shot_all_reduce_kernel_inplace", COMMUNICATION),
        ("ncclDevKernel_Generic", COMMUNICATION),
        ("Cijk_Alik_Bljk_BBS_BH", "gemm"),
        ("nvjet_sm90_tst_256x128", "gemm"),
        ("flash_fwd_splitkv_kernel", "attention"),
        ("paged_attention_ll4mi_QKV_mfma16_kernel", "attention"),
        ("void vllm::rms_norm_kernel<float>", "norm"),
        ("vectorized_elementwise_kernel<4, sigmoid>", "elementwise"),
        ("_scatter_gather_elementwise_kernel", "elementwise"),
        ("mystery", "other"),
    ],
)
def test_kernels_of_every_sort_are_known_by_name(name: str, cls: str) -> None:
    assert class_of(name) == cls


def test_a_users_rule_is_asked_first_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nmatch = "my_(fused|other)_gemm"\nclass = "mlp"\n')
    assert class_of("MY_fused_gemm", load_rules(rules)) == "mlp"
    rules.write_text('[[rule]]\nmatch = "("\nclass = "mlp"\n')
    with pytest.raises(TraceError, match=r"rule 1: match = '\('"):
        load_rules(rules)
    rules.write_text('[[rule]]\nmatch = "x"\n')
    with pytest.raises(TraceError, match=r"rule 1: give exactly match = .* and class = "):
        load_rules(rules)


def test_windows_cut_by_time_rank_and_category(tmp_path: Path) -> None:
    events = [kernel("a", 1_000, 5), kernel("b", 3_000, 5), kernel("c", 9_000, 5)]
    events.append(events[0] | {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 3_500})
    path = write(tmp_path / "t.json", events)
    middle = read_trace(path, Window(start_ms=1.5, end_ms=4, categories=(int(Category.KERNEL),)))
    assert [middle.names[name] for name in middle.work.name] == ["b"]
    with pytest.raises(TraceError, match=r"rank = 4: the trace has none of it: its ranks are 0"):
        read_trace(path, Window(ranks=(4,)))
    with pytest.raises(TraceError, match=r"no GPU work in it: the trace covers 0..8.000 ms and ranks 0"):
        read_trace(path, Window(start_ms=20.0))


def test_our_own_trace_reads_back_with_its_energy_and_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = simulate(
        Scenario.of(model="llama3-8b", gpu="h100-sxm-80gb", tp=2, phase="decode", batch=4, seq_len=512, layers=2)
    )
    path = run.to_chrome(tmp_path / "run.json.gz")
    main(["inspect", str(path), "--json"])
    document = json.loads(capsys.readouterr().out)
    kernels = run.kernels
    assert document["kernels"] == len(kernels)
    assert document["ranks"] == [0, 1]
    by_class = {row["class"]: row["count"] for row in document["by_class"]}
    assert by_class == Counter(kernels["family"])
    assert document["energy_j"] == pytest.approx(kernels["energy_j"].sum(), rel=1e-4)
    assert document["idle_us"] + document["computation_us"] + document["communication_us"] == pytest.approx(
        document["span_us"]
    )
    assert 0 < document["critical_path"]["length_us"] <= document["span_us"]


def test_idle_time_has_a_cause(tmp_path: Path) -> None:
    events = [
        launch(0, 1), kernel("a", 10, 10, correlation=1),
        launch(30, 2), kernel("b", 35, 10, correlation=2),  # launched while the GPU was idle: the host's 15 us
        launch(33, 3), kernel("c", 50, 10, correlation=3),  # launched long before: something else held it, 5 us
        kernel("d", 62, 10, correlation=9),  # no launch in the trace, 2 us
    ]  # fmt: skip
    capture = read_trace(write(tmp_path / "t.json", events))
    times = summarise(capture, classify(capture)).ranks[0]
    assert times.idle_by_cause_us == {"host": 15.0, "dependency": 5.0, "unknown": 2.0}
    assert times.idle_us == 22.0


def test_inspect_prints_tables_lint_and_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(
        tmp_path / "one.json",
        [kernel("sgemm", 0, 10), kernel("sgemm", 5, 10), kernel("multimem_all_reduce", 8, 4, stream=9)],
    )
    two = write(tmp_path / "two.json", [kernel("sgemm", 0, 20)])
    main(["inspect", str(one), "--lint"])
    text = capsys.readouterr().out
    assert "3 kernels, 1 of them communication, 2 streams, ranks 0" in text
    assert "perfetto-overlap: 1 (first: one.json: event 1)" in text
    assert "hta-communication-unseen: 1 (first: kernel 'multimem_all_reduce')" in text
    main(["inspect", str(one), "--diff", str(two)])
    assert "gemm kernels, us" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(one), "--window", "3"])
    assert stop.value.code == 2
    assert "window = '3': give START:END in milliseconds" in capsys.readouterr().err


def test_products_are_those_of_the_operator_and_give_the_tiles_of_a_persistent_kernel(tmp_path: Path) -> None:
    def operator(name: str, dims: list[list[int]], **args: int) -> dict[str, object]:
        about = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 9, "ts": 1, "dur": 1}
        return about | {"args": {"Input Dims": dims} | args}

    name = "nvjet_tst_128x256_64x4_1x2_h_bz_TNT"
    events = [
        operator("aten::mm", [[3000, 64], [64, 10000]], **{"External id": 5}),
        operator("aten::addmm", [[1000], [256, 64], [64, 129], []], **{"External id": 6}),
        operator("aten::mm", [[7, 7], [7, 7]]),  # no id: of no kernel, not of all without one
        operator("aten::mm", [[7, 7, 7]], **{"External id": 7}),
        *(kernel(name, 10 * i, 5, grid=[132, 1, 1], **{"External id": i}) for i in (5, 6, 7)),
        kernel(name, 90, 5, grid=[132, 1, 1]),
    ]
    capture = read_trace(write(tmp_path / "t.json", events))
    found = [capture.matrices[one] if one >= 0 else None for one in capture.work.matrix.tolist()]
    assert found == [MatrixProduct(m=3000, k=64, n=10000), MatrixProduct(m=256, k=64, n=129), None, None]
    blocks, tiles = rounds_of(capture, classify(capture), 132)
    assert blocks.tolist() == [132] * 4
    # 79 columns x 12 rows of tiles; 2 x 1 are fewer than the blocks; unknown: as many as the blocks.
    assert tiles.tolist() == [79 * 12, 132, 132, 132]


def test_kernels_of_ours_state_their_own_sizes(tmp_path: Path) -> None:
    run = simulate(model="llama3-8b", layers=1, seq_len=256, tp=2, lm_head=False)
    capture = read_trace(write_timeline(run, tmp_path / "ours.json.gz"))
    found = {
        capture.names[name]: capture.matrices[one]
        for name, one in zip(capture.work.name.tolist(), capture.work.matrix.tolist(), strict=True) if one >= 0
    }  # fmt: skip
    assert found["o_gemm"] == MatrixProduct(m=256, k=2048, n=4096)
    assert set(found) == {"qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm"}
    sizes = {(args.operation, args.elements_in, args.dtype) for args in capture.collectives}
    assert sizes == {("all_reduce", 256 * 4096 * 2, "byte")}


def test_kernels_of_others_may_use_our_names_for_anything(tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [{"ranks": [[0, 1], [2, 3]], "count": True}, {"m": {"of": 3}, "n": [1], "k": "x"}]
    events = [kernel("gemm", 10.0 * i, 5, **args) for i, args in enumerate(others)]
    capture = read_trace([write(tmp_path / "others.json", events)])
    assert len(capture.work) == 2 and not capture.findings


@pytest.mark.parametrize("block_bytes", [1 << 10, 1 << 21])
def test_what_is_read_does_not_hang_on_how_much_is_read_at_once(
    block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulate(model="llama3-8b", gpu="h100", tp=2, layers=2, seq_len=256, overlap_chunks=2)
    path = write_timeline(run, tmp_path / "run.json.gz")
    expected = read_trace(path)
    monkeypatch.setattr(traces.read.events, "BLOCK_BYTES", block_bytes)
    capture = read_trace(path)
    assert sorted(capture.names) == sorted(expected.names)
    assert (capture.collectives, capture.findings) == (expected.collectives, expected.findings)
    for table in ("work", "calls", "waits", "annotations"):
        found, wanted = (columns_of(getattr(one, table), one.names) for one in (capture, expected))
        for name, column in wanted.items():
            np.testing.assert_array_equal(found[name], column, err_msg=name)


def columns_of(table: Any, names: list[str]) -> dict[str, Any]:
    """Columns by name, numbers of names as the names."""
    columns = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    known = np.array([*names, ""])
    return {key: known[column] if key in ("name", "family", "kind") else column for key, column in columns.items()}
