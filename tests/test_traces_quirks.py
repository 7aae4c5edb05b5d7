"""One test a bug report: what people met in real traces (numbers as in research/traces.md, section 7)."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from sim import simulate
from sim.cli import main
from sim.scenario.spec import Scenario
from tests.perfetto_kit import losses, perfetto, rows
from tests.traces_kit import kernel, launch, write
from traces.capture import Capture
from traces.classify import classify
from traces.edges import edges_of
from traces.errors import TraceError
from traces.lint_file import lint_file, perfetto_ns
from traces.read.load import Window, read_trace
from traces.summary import summarise


def rules(capture: Capture) -> dict[str, int]:
    """Count of each finding."""
    return {finding.rule: finding.count for finding in capture.findings}


def lint(path: Path) -> dict[str, int]:
    """Count of each rule of the file linter."""
    return {finding.rule: finding.count for finding in lint_file(path)}


def dropped(path: Path) -> int:
    """Slices that the real Perfetto engine drops for overlap."""
    with perfetto(path) as processor:
        return int(dict(losses(processor)).get("slice_drop_overlapping_complete_event", 0))


def test_1_kernels_overlapping_on_a_stream_are_kept_and_counted(tmp_path: Path) -> None:
    """google/perfetto#4280: programmatic dependent launch; slices vanish from the picture."""
    events = [kernel(f"k{i}", 10 * i, 10.7, correlation=i) for i in range(40)]
    path = write(tmp_path / "pdl.json", events)
    capture = read_trace(path)
    assert len(capture.kernels) == 40
    assert not edges_of(capture).counts()["stream"]["count"]  # stream order is not strict here
    assert lint(path)["perfetto-overlap"] == dropped(path) == 20


def test_2_a_nanosecond_of_overlap_from_floats_is_found(tmp_path: Path) -> None:
    """google/perfetto#5012: 1.35 + 156.23589 reaches past 157.536."""
    events = [
        kernel("a", 1.3, 156.23589),
        kernel("b", 157.536, 1),
        kernel("c", 200.35, 156.23589),
        kernel("d", 356.585, 1),
    ]
    path = write(tmp_path / "t.json", events)
    assert lint(path).get("perfetto-overlap", 0) == dropped(path)
    assert len(read_trace(path).kernels) == 4


def test_3_64_bit_ids_are_kept_apart_and_counted(tmp_path: Path) -> None:
    """google/perfetto#522: rows collapse into one."""
    events = [kernel("a", 0, 10, stream=2**33 + 7), kernel("b", 5, 10, stream=2**34 + 9)]
    path = write(tmp_path / "t.json", events)
    assert len(summarise(read_trace(path), classify(read_trace(path))).by_stream) == 2
    assert lint(path) == {"perfetto-large-id": 2, "perfetto-overlap": dropped(path)}


@pytest.mark.parametrize("start", ["1712195495740538.125", "0.125"])
def test_4_times_are_microseconds_whatever_the_display_unit_and_exact_since_1970(tmp_path: Path, start: str) -> None:
    """google/perfetto#274, #426."""
    text = (
        json.dumps([kernel("a", 11.5, 2), kernel("b", 22.5, 2)])
        .replace("11.5", start)
        .replace("22.5", start[:-3] + "132")
    )
    capture = read_trace(write(tmp_path / "t.json", text, displayTimeUnit="ns"))
    assert np.diff(capture.work.start_ns).tolist() == [7]
    assert capture.work.dur_ns.tolist() == [2000, 2000]


def test_5_our_writer_gives_rows_an_order(tmp_path: Path) -> None:
    """google/perfetto#764: order of processes and threads."""
    run = simulate(
        Scenario.of(model="llama3-8b", gpu="h100-sxm-80gb", tp=2, phase="decode", batch=1, seq_len=64, layers=1)
    )
    document = json.loads(gzip.decompress(run.to_chrome(tmp_path / "t.json.gz").read_bytes()))
    order = [e["args"]["sort_index"] for e in document["traceEvents"] if e["name"] == "process_sort_index"]
    assert order == [0, 1]


def test_6_times_as_text_are_read_and_named(tmp_path: Path) -> None:
    """Ascend/pytorch#133: absolute ts as strings."""
    events = [kernel("a", "1712195495740538.801", 3), kernel("b", "1712195495740542.003", 3)]
    capture = read_trace(write(tmp_path / "t.json", events))
    assert np.diff(capture.work.start_ns).tolist() == [3202]
    assert rules(capture)["time-as-text"] == 2


@pytest.mark.parametrize(
    ("broken", "rule", "name"),
    [
        ('"name": "f("x", "y")"', "unescaped-quote", 'f("x", "y")'),
        ('"name": "C:\\Users\\me"', "lone-backslash", "C:\\Users\\me"),
        ('"name": "k", "note": N/A', "bare-value", "k"),
        ('"name": "k", "note": -nan(ind)', "bare-value", "k"),
        ('"name": "k", "note": ', "value-left-out", "k"),
        ('"name": "k", "note": [1, 2,]', "trailing-comma", "k"),
    ],
)
def test_7_broken_json_is_mended_where_it_is_broken(tmp_path: Path, broken: str, rule: str, name: str) -> None:
    """pytorch/kineto#1459, #617, #336, #131: the whole trace was invalid."""
    good = json.dumps(kernel("good", 0, 1))
    bad = json.dumps(kernel("bad", 10, 1)).replace('"name": "bad"', broken)
    capture = read_trace(write(tmp_path / "t.json", f"[\n{good},\n{bad},\n{good}\n]"))
    assert [capture.names[i] for i in capture.work.name] == ["good", "good", name]
    (finding,) = capture.findings
    assert (finding.rule, finding.first) == (rule, "t.json:3")


def test_7_what_cannot_be_mended_is_refused_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = json.dumps(kernel("good", 0, 1))
    path = write(tmp_path / "t.json", f'[\n{good},\n{{"ph": "X" ; "name" = 3}},\n{good}]')
    with pytest.raises(SystemExit) as stop:
        main(["inspect", str(path)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"{path}:3: broken JSON" in error
    assert error.count("\n") == 1


def test_8_kernels_without_time_are_left_out_and_counted(tmp_path: Path) -> None:
    """pytorch/kineto#109, #136."""
    events = [kernel("ghost", 0, 0)] * 3 + [kernel("a", 5e6, 10), kernel("b", 5e6 + 9, 10)]
    path = write(tmp_path / "t.json", events)
    capture = read_trace(path)
    assert rules(capture)["kernel-without-time"] == 3
    assert summarise(capture, classify(capture)).ranks[0].span_us == 19.0


def test_9_nanoseconds_survive(tmp_path: Path) -> None:
    """pytorch/kineto#853: durations below a microsecond were cut to 0."""
    capture = read_trace(
        write(tmp_path / "t.json", [kernel("a", 4966705133252.661, 0.288), kernel("b", 4966705133252.950, 0.032)])
    )
    assert capture.work.dur_ns.tolist() == [288, 32]
    assert np.diff(capture.work.start_ns).tolist() == [289]


def test_10_no_duration_is_negative_and_absent_ranks_launches_and_steps_are_fine(tmp_path: Path) -> None:
    """HTA#317, #16, #17, #107, #233, #290."""
    events = [kernel(f"k{i}", 0.4 + 0.3 * i, 0.3) for i in range(5)]
    capture = read_trace(write(tmp_path / "t.json", events))
    assert (capture.work.dur_ns == 300).all()
    times = summarise(capture, classify(capture)).ranks[0]
    assert (times.idle_us, times.idle_by_cause_us["unknown"]) == (0.0, 0.0)


def test_10_a_graph_launch_is_on_the_critical_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HTA#290: kernels of a cudaGraphLaunch are missing from the critical path."""
    events = [
        launch(0, 5, name="cudaGraphLaunch"),
        *(kernel("sgemm", 10 + 20 * i, 20, correlation=5) for i in range(4)),
    ]
    main(["inspect", str(write(tmp_path / "t.json", events)), "--json"])
    path = json.loads(capsys.readouterr().out)["critical_path"]
    assert path["by_class_us"] == {"gemm": 80.0}


def test_11_a_kernel_that_runs_over_its_successor_is_counted_once(tmp_path: Path) -> None:
    """AMD-AGI/TraceLens#669: totals inflated by orders of magnitude. It ended when the next of its stream began."""
    events = [kernel("stuck", 0, 10_000), *(kernel("k", 10 * i, 9) for i in range(1, 50))]
    capture = read_trace(write(tmp_path / "t.json", events))
    assert summarise(capture, classify(capture)).ranks[0].computation_us == 10 + 49 * 9
    assert rules(capture)["overrun"] == 1


def test_12_kernels_without_correlation_or_message_are_read_and_named(tmp_path: Path) -> None:
    """mlcommons/chakra#128, #178."""
    events = [launch(0, 1), kernel("a", 3, 1, correlation=1), kernel("b", 5, 1), kernel("ncclDevKernel_Generic", 7, 1)]
    capture = read_trace(write(tmp_path / "t.json", events))
    assert rules(capture)["correlation-missing"] == 2
    assert capture.work.collective.tolist() == [-1, -1, -1]
    assert summarise(capture, classify(capture)).collectives == 1


def test_13_windows_cut_what_is_too_large_to_look_at(tmp_path: Path) -> None:
    """pytorch/kineto#595, google/perfetto#1392. (Memory while reading: benchmarks/trace_read.py.)"""
    events = [kernel("k", 1000 * i, 500) for i in range(1000)]
    assert len(read_trace(write(tmp_path / "t.json", events), Window(start_ms=10, end_ms=20)).kernels) == 10


def test_14_ranks_are_aligned_and_their_pids_and_correlations_kept_apart(tmp_path: Path) -> None:
    """pytorch/pytorch#128292, #161145."""
    for rank, base in ((0, 1_790_857_026_000_000_000), (1, 1_790_857_026_000_500_000)):
        events = [launch(10, 5), kernel("ncclDevKernel_AllReduce", 20, 1000 - 500 * rank, correlation=5)]
        write(tmp_path / f"rank{rank}.json", events, baseTimeNanoseconds=base, distributedInfo={"rank": rank})
    capture = read_trace(tmp_path)
    assert capture.work.rank.tolist() == [0, 1]
    assert capture.work.start_ns.tolist() == [10_000, 510_000]
    assert capture.calls.rank[capture.work.launch].tolist() == [0, 1]
    assert [t.straggler_us for t in summarise(capture, classify(capture)).ranks] == [500.0, 0.0]


def test_15_a_simulated_graph_names_the_layer_and_shape_of_every_kernel(tmp_path: Path) -> None:
    """pytorch/pytorch#186026, vllm#45069."""
    run = simulate(Scenario.of(model="llama3-8b", gpu="h100-sxm-80gb", phase="decode", batch=1, seq_len=64, layers=2))
    document = json.loads(gzip.decompress(run.to_chrome(tmp_path / "t.json.gz").read_bytes()))
    kernels = [e for e in document["traceEvents"] if e.get("cat") == "kernel"]
    layers = [e for e in document["traceEvents"] if e.get("cat") == "layer"]
    assert all(any(key in e["args"] for key in ("m", "rows", "batch", "tokens")) for e in kernels)
    for event in kernels:
        end = event["ts"] + event["dur"] - 1e-3
        assert any(layer["ts"] <= event["ts"] and end <= layer["ts"] + layer["dur"] for layer in layers)


def test_cut_files_are_read_to_the_cut(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json", [kernel(f"k{i}", 10 * i, 5) for i in range(200)]).read_bytes()
    (tmp_path / "cut.json").write_bytes(whole[: len(whole) // 2])
    capture = read_trace(tmp_path / "cut.json")
    assert 90 <= len(capture.kernels) <= 110
    assert rules(capture)["array-without-end"] == 1
    packed = gzip.compress(whole * 50)  # a damaged archive: what comes before the damage counts
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    assert read_trace(tmp_path / "cut.json.gz").kernels.size


def test_a_time_that_is_no_number_and_text_after_the_end_are_named(tmp_path: Path) -> None:
    text = json.dumps([kernel("a", 1, 2), kernel("b", float("nan"), 2)])
    path = write(tmp_path / "t.json", text)
    path.write_text("\ufeff" + path.read_text() + '{"traceEvents": []}')
    found = rules(read_trace(path))
    assert found["time-missing-or-not-finite"] == 1
    assert found["byte-order-mark"] == 1


def test_a_trace_without_gpu_work_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no GPU work in it .*: profile with ProfilerActivity.CUDA"):
        read_trace(write(tmp_path / "t.json", [launch(0, 1)]))
    with pytest.raises(TraceError, match="holds no 'traceEvents' array: export it with export_chrome_trace"):
        (tmp_path / "n.json").write_text('{"a": 1}')
        read_trace(tmp_path / "n.json")


def test_a_trace_whose_times_are_none_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "run.json", [kernel("a", "100,5", "1,5"), kernel("b", {"us": 3}, 1.0)])
    with pytest.raises(TraceError, match="no GPU work with a time in it: 2 events were left out: ts and dur must be"):
        read_trace(path)


def test_traces_of_2021_are_read(tmp_path: Path) -> None:
    event = {
        "ph": "X", "cat": "Kernel", "name": "sgemm", "pid": 0, "tid": "stream 7", "ts": 5, "dur": 2,
        "args": {"external id": 3, "device": 0, "stream": 7, "correlation": 3, "grid": [2, 3, 4], "block": [32, 1, 1]},
    }  # fmt: skip
    call = {
        "ph": "X",
        "cat": "Runtime",
        "name": "cudaLaunchKernel",
        "pid": 9,
        "tid": 9,
        "ts": 0,
        "dur": 1,
        "args": {"correlation": 3},
    }
    capture = read_trace(write(tmp_path / "t.json", [call, event]))
    assert (capture.work.blocks.tolist(), capture.work.threads.tolist(), capture.work.launch.tolist()) == (
        [24],
        [32],
        [0],
    )


def test_an_xpu_launches_through_its_runtime_and_driver(tmp_path: Path) -> None:
    """As Kineto writes them for Intel GPUs: both calls carry the kernel's correlation, the outer one launched it."""
    work = [kernel(name, ts, 20.0, correlation=number) for name, ts, number in (("a", 100, 5), ("b", 130, 6))]
    calls = [
        {"ph": "X", "cat": f"xpu_{layer}", "name": name, "pid": 9, "tid": 9, "ts": ts, "dur": dur,
         "args": {"correlation": number}}
        for number, at in ((5, 90.0), (6, 125.0))
        for layer, name, ts, dur in (("driver", "zeCommandListAppendLaunchKernel", at + 1, 1.0),
                                     ("runtime", "urEnqueueKernelLaunch", at, 3.0))
    ]  # fmt: skip
    capture = read_trace(write(tmp_path / "xpu.json", [*work, *calls]))
    named = [capture.names[capture.calls.name[call]] for call in capture.work.launch.tolist()]
    assert named == ["urEnqueueKernelLaunch"] * 2


def test_mutated_traces_end_in_a_result_or_one_clean_line(tmp_path: Path) -> None:
    """150 here; ``benchmarks/trace_fuzz.py`` runs 2,000 by default."""
    spec = importlib.util.spec_from_file_location(
        "trace_fuzz", Path(__file__).parents[1] / "benchmarks" / "trace_fuzz.py"
    )
    assert spec is not None and spec.loader is not None
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    ends = fuzz.run(150, 3, tmp_path)
    assert min(ends["result"], ends["clean error"]) > 30


def test_times_are_read_as_the_perfetto_engine_reads_them(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    texts = []
    for digits in (1, 2, 3, 4, 6) * 20:
        base = int(random.choice([0, 10**6, 4 * 10**12, 5 * 10**12, 1_712_195_495_740_538]))
        texts.append(
            [f"{base + int(n)}.{int(random.integers(10**digits)):0{digits}d}" for n in random.integers(1000, size=2)]
        )
        texts[-1][1] = texts[-1][1][-digits - 4 :].lstrip("0.") or "1"
    events = [
        f'{{"ph":"X","name":"{i}","pid":1,"tid":{i + 2},"ts":{ts},"dur":{dur}}}' for i, (ts, dur) in enumerate(texts)
    ]
    path = write(tmp_path / "t.json", f"[{','.join(events)}]")
    with perfetto(path) as processor:
        read = {name: (ts, dur) for name, ts, dur in rows(processor, "select name, ts, dur from slice")}
    assert read == {str(i): (perfetto_ns(ts.encode()), perfetto_ns(dur.encode())) for i, (ts, dur) in enumerate(texts)}
