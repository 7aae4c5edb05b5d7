"""``wattline compare``: a real step beside its prediction, kernel by kernel."""

from __future__ import annotations

import csv
import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from sim import simulate
from sim.cli import main
from sim.compare.compare import Comparison, compare_trace, lay_beside
from sim.compare.report import headline
from sim.scenario.spec import Scenario
from traces.classify import classify
from traces.own_time import own_time
from traces.read.load import read_trace
from traces.steps import period_of, steps_of

TRACES = Path(__file__).parents[1] / "records"
DECODE = TRACES / "h100-sxm-80gb/traces/llama3-8b-decode-4x544.rank0.json.gz"
OF_DECODE = {"model": "llama3-8b", "phase": "decode", "batch": 4, "seq_len": 544}
CHUNKED = TRACES / "h200-sxm-141gb/traces/chunks"
FLAGS = ["--model", "llama3-8b", "--phase", "decode", "--batch", "4", "--seq-len", "544"]


@pytest.fixture(scope="module")
def decode() -> Comparison:
    return compare_trace([DECODE], Scenario.of(**OF_DECODE))


def _sums_hold(found: Comparison) -> None:
    for real, of_lines, of_pairs in (
        (found.real, [line.real_us for line in found.lines], [pair.real_us for pair in found.pairs]),
        (found.predicted, [line.predicted_us for line in found.lines], [pair.predicted_us for pair in found.pairs]),
    ):
        assert sum(of_lines) == pytest.approx(real.step_us, rel=1e-9)
        assert sum(of_pairs) + sum(real.long_pauses()) == pytest.approx(real.step_us, rel=1e-9)
    shares = [found.share(line) for line in found.lines]
    assert sum(share for share in shares if share is not None) == pytest.approx(1.0, rel=1e-6)


def test_lines_and_pairs_sum_to_both_steps(decode: Comparison) -> None:
    _sums_hold(decode)
    assert decode.predicted.step_us == pytest.approx(decode.run.latency_s * 1e6, rel=1e-9)
    assert decode.real.step_us == pytest.approx(6521.4, abs=0.1)


def test_every_kernel_of_a_reference_step_meets_its_own(decode: Comparison) -> None:
    names = {
        "qkv_gemm": "nvjet", "o_gemm": "nvjet", "gate_up_gemm": "nvjet", "down_gemm": "nvjet", "rope": "_rope",
        "silu_mul": "_silu_mul", "add_rmsnorm_attn": "_add_rms", "copy_k": "copy_kernel", "attention": "sdpa",
    }  # fmt: skip
    for pair in decode.pairs:
        if pair.predicted is not None and pair.predicted.name in names:
            assert pair.real is not None and names[pair.predicted.name] in pair.real.name
    layers = [int(pair.layer.split()[1]) for pair in decode.pairs if pair.layer.startswith("layer")]
    assert layers == sorted(layers) and set(layers) == set(range(32))


def test_chunked_overlap_on_two_streams_sums_and_meets_too() -> None:
    name = "llama3-70b-prefill-1x512-tp4-overlap_chunks4-comm_ctas8.rank{}.json.gz"
    scenario = Scenario.of(
        model="llama3-70b", gpu="h200", tp=4, layers=4, lm_head=False, sequence_parallel=True, seq_len=512,
        overlap_chunks=4, comm_ctas=8,
    )  # fmt: skip
    found = compare_trace([CHUNKED / name.format(rank) for rank in (0, 1)], scenario, rank=1)
    _sums_hold(found)
    gathered = next(line for line in found.lines if line.kernel == "all_gather_ff")
    assert (gathered.real_count, gathered.predicted_count) == (16, 16)
    assert gathered.real_names == ("ncclDevKernel_AllGather_RING_LL",)


def test_a_simulated_step_beside_itself_has_no_error(tmp_path: Path) -> None:
    run = simulate(**OF_DECODE)
    capture = read_trace(run.to_chrome(tmp_path / "run.json"))
    found = lay_beside(run, capture, classify(capture), 0)
    assert found.error == pytest.approx(0.0, abs=2e-4)  # the pause before the first kernel is in no trace
    assert all(pair.real is not None and pair.predicted is not None for pair in found.pairs)
    assert headline(found).startswith("the step is")


def test_the_first_line_names_the_kernel_that_is_off(tmp_path: Path) -> None:
    """A file whose attention takes four times as long: the miss is attention's."""
    content = json.loads(gzip.decompress(DECODE.read_bytes()))
    shift = 0.0
    for event in sorted(content["traceEvents"], key=lambda one: one.get("ts", 0)):
        if event.get("cat") == "kernel":
            event["ts"] += shift
            if "sdpa" in event["name"]:
                shift += 3 * event["dur"]
                event["dur"] *= 4
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(content), encoding="utf-8")
    found = compare_trace([slow], Scenario.of(**OF_DECODE))
    line = headline(found)
    assert "fast" in line and "% of that is attention" in line
    assert found.worst().kernel == "attention"


def test_the_command_writes_json_rows_and_both_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, both = tmp_path / "rows.csv", tmp_path / "both.json"
    main(["compare", str(DECODE), *FLAGS, "--json", "--csv", str(rows), "--timeline", str(both)])
    document = json.loads(capsys.readouterr().out)
    lines = document["lines"]
    assert sum(line["real_us"] for line in lines) == pytest.approx(document["real_step_us"])
    assert sum(line["difference_us"] for line in lines) == pytest.approx(
        document["predicted_step_us"] - document["real_step_us"]
    )
    with rows.open(encoding="utf-8") as stream:
        table = list(csv.DictReader(stream))
    assert sum(float(row["predicted_us"]) for row in table) == pytest.approx(document["predicted_step_us"])
    events = json.loads(both.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert list(names.values()) == ["real, rank 0", "simulated, GPU 0 (h100-sxm-80gb)"]
    first = {pid: min(e["ts"] for e in events if e.get("cat") == "kernel" and e["pid"] == pid) for pid in names}
    assert all(0 <= ts < 2 for ts in first.values())  # both begin at one moment
    assert {e["args"]["predicted as"] for e in events if "silu" in e.get("name", "") and e["pid"] == 0} == {"silu_mul"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--phase", "generate", "--output-len", "4"], "phase = 'generate': a trace is compared with one step"),
        (["--rank", "3"], "rank = 3: the trace's ranks are 0: give one of them"),
        (["--window", "5"], "window = '5'"),
        (["--timeline", "both.txt"], "both.txt"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", str(DECODE), *FLAGS, *more])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1


def test_wrong_layers_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", str(DECODE), *FLAGS, "--layers", "16"])
    assert "the scenario has 16 attentions, the step of the trace 32: is --layers right?" in capsys.readouterr().out


def test_own_times_and_pauses_sum_whatever_overlaps() -> None:
    generator = np.random.default_rng(5)
    for _ in range(50):
        start = generator.uniform(0.0, 9.0, 12)
        end = start + generator.uniform(0.0, 3.0, 12)
        shared = own_time(start, end, generator.integers(0, 3, 12), 0.0, 13.0)
        assert shared.own.sum() + shared.pause.sum() + shared.after == pytest.approx(13.0)
        assert (shared.own >= 0).all() and (shared.own <= end - start + 1e-12).all()
        assert (shared.pause >= 0).all() and shared.after >= 0


def test_steps_are_found_without_graphs_or_regions() -> None:
    """Names alone: two layers and a head, five times, from somewhere within a step."""
    step = np.array([1, 2, 3, 2, 4, 1, 2, 3, 2, 4, 5, 6])
    assert period_of(np.tile(step, 5)[3:]) == len(step)
    capture = read_trace(DECODE)
    (steps, whole) = steps_of(capture, 0)
    assert (steps.how, whole.how) == ("graph launches", "whole")
    for one, other in pairwise(steps.steps):
        assert one.end_ns <= other.begin_ns


def test_a_trace_of_one_kernel_is_one_step_and_an_empty_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def written(dur: float) -> Path:
        kernel = {"ph": "X", "cat": "kernel", "name": "nvjet_gemm", "ts": 1.0, "dur": dur, "pid": 0, "tid": 7}
        path = tmp_path / f"one{dur}.json"
        kernel["args"] = {"device": 0, "stream": 7}
        path.write_text(json.dumps({"traceEvents": [kernel]}), encoding="utf-8")
        return path

    main(["compare", str(written(5.0)), *FLAGS, "--layers", "1"])
    assert "the whole trace counts as one step" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["compare", str(written(0.0)), *FLAGS, "--layers", "1"])
    assert "runs for no time" in capsys.readouterr().err
