"""What a served run writes: documents, tables, tracks of requests, and the kernels of a window."""

from __future__ import annotations

import json
from pathlib import Path

import fastparquet
import numpy as np
import pandas as pd
import pytest

from sim.cli import main
from sim.errors import ScenarioError
from sim.serving import serve
from sim.serving.trace import to_trace, write_served
from tests.perfetto_kit import losses, perfetto, rows


def test_the_command_prints_one_document_and_writes_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "requests.parquet"
    flags = ["--model", "llama3-8b", "--requests", "12", "--output-tokens", "5", "--slo-ttft-s", "1", "--seed", "4"]
    main(["serve", *flags, "--json", "--out", str(out), "--power", str(tmp_path / "power.csv")])
    first = json.loads(capsys.readouterr().out)
    assert first["requests"] == 12
    assert first["slo_share"] == 1.0
    assert fastparquet.ParquetFile(str(out)).to_pandas()["output_tokens"].sum() == 60
    assert pd.read_csv(tmp_path / "power.csv")["energy_j"].sum() == pytest.approx(first["energy_j"])
    main(["serve", *flags, "--json"])
    assert json.loads(capsys.readouterr().out) == first
    main(["serve", *flags])
    assert "time to first token" in capsys.readouterr().out


def test_the_trace_shows_every_request_beside_the_steps(tmp_path: Path) -> None:
    run = serve(model="llama3-8b", requests=30, rate_per_s=50.0, output_tokens=20, replicas=2)
    trace = to_trace(run)
    stages = [trace.kinds[kind].name for kind in trace.spans.kind if trace.kinds[kind].category == "request"]
    assert stages.count("decode") == stages.count("request") == 30
    steps = np.array([trace.kinds[kind].category == "step" for kind in trace.spans.kind])
    assert trace.spans.energy_j[steps].sum() == pytest.approx(run.energy_j, rel=1e-9)
    text = json.loads(write_served(run, tmp_path / "served.json").read_text())
    assert {"requests", "replica 0 (1 x h100-sxm-80gb)"} <= {
        event["args"]["name"] for event in text["traceEvents"] if event["name"] == "process_name"
    }


@pytest.mark.parametrize(("fields", "streams"), [({}, 1), ({"model": "qwen3-8b", "tp": 2, "sampling": "top_p"}, 1)])
def test_kernels_of_a_window_lie_inside_their_steps(tmp_path: Path, fields: dict[str, object], streams: int) -> None:
    spec = {
        "model": "llama3-8b",
        "requests": 12,
        "rate_per_s": 100.0,
        "output_tokens": 20,
        "stack": "paged-kv",
    } | fields
    run = serve(window=(0.05, 0.4), **spec)
    trace = to_trace(run)
    names = [trace.kinds[kind] for kind in trace.spans.kind]
    kernels = np.array([kind.category == "kernel" for kind in names])
    sampled = sum(kind.name.startswith("sample_") for kind in names)
    assert sampled == len(run.log.run_steps) >= 5
    counts = trace.metadata["served"]  # SimPy runs all kernels of these steps but the draw of tokens, a law's
    assert (counts["events_kernels"], counts["derived_kernels"]) == (kernels.sum() - sampled, sampled)
    lanes = [lane for lane in trace.lanes if lane.name.startswith("stream")]
    assert len(lanes) == streams
    for step in run.log.run_steps:
        inside = kernels & (trace.spans.start_ps >= round(step.start_s * 1e12) - 1)
        inside &= trace.spans.end_ps <= round((step.start_s + step.time_s) * 1e12) + 1
        busy_s = (trace.spans.end_ps - trace.spans.start_ps)[inside].sum() * 1e-12
        assert 0.9 * step.time_s < busy_s <= step.time_s + 1e-9  # some time goes by between kernels
    ends = np.sort(trace.spans.end_ps[kernels])
    starts = np.sort(trace.spans.start_ps[kernels])
    assert (starts[1:] >= ends[:-1] - 1).all()  # one stream: none beside another
    with perfetto(write_served(run, tmp_path / "served.json.gz")) as engine:
        assert not losses(engine)
        assert rows(engine, "select count(*) as n from slice where category = 'kernel'") == [(kernels.sum(),)]
        assert rows(engine, "select count(*) from slice where name = 'decode' and category = 'request'") == [(12,)]


def test_a_window_that_nobody_could_look_at_is_refused() -> None:
    run = serve(model="llama3-8b", requests=8, output_tokens=400, concurrency=1, window=(0.0, 100.0))
    with pytest.raises(ScenarioError, match=r"kernels: 3200 steps lie in the window, give one of at most 2000"):
        to_trace(run)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kill", "x"], "'x' is not SECOND:REPLICA: give two numbers, like 1.5:2"),
        (["--kill", "1:0.5"], "'1:0.5' is not SECOND:REPLICA"),
        (["--kernels", "1:2"], "--kernels shows kernels in a trace: give --timeline FILE too"),
        (["--timeline", "served.txt"], "trace file 'served.txt': name it .json"),
        (["--timeline", "nowhere/served.json"], "cannot write 'nowhere/served.json': no folder 'nowhere'"),
        (["--plan", "--kill", "1:0"], "--plan and --compare make tables only"),
    ],
)
def test_bad_events_are_refused_in_one_line(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--model", "llama3-8b", *flags])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("window", [(1000.0, 1001.0), (-5.0, -1.0)])
def test_a_window_without_a_step_is_refused_with_where_the_server_ends(window: tuple[float, float]) -> None:
    with pytest.raises(ScenarioError, match=r"window: no step runs from .* give other times, the server ends at "):
        serve(model="llama3-8b", requests=1, input_tokens=9, output_tokens=2, window=window)
