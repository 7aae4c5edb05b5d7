"""Simulated kernels under the names of the libraries that run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from sim.replay.study import replay_trace
from sim.result.trace import TraceWindow, to_trace, write_timeline
from sim.scenario.spec import Scenario
from traces.classify import class_of


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "llama3-8b", "gpu": "h100-sxm-80gb", "tp": 2, "phase": "prefill", "sequence_parallel": True},
        {"model": "llama3-8b", "gpu": "h100-sxm-80gb", "phase": "prefill", "dtype": "fp8_e4m3"},
        {"model": "llama3-8b", "gpu": "a100-sxm-80gb", "tp": 2, "phase": "decode"},
        {"model": "llama3-8b", "gpu": "b200-sxm-180gb", "phase": "decode"},
        {"model": "qwen3-30b-a3b", "gpu": "mi300x-192gb", "ep": 2, "ep_mode": "all_to_all", "phase": "decode"},
        {"model": "qwen3-30b-a3b", "gpu": "h100-sxm-80gb", "phase": "decode", "stack": "vllm"},
    ],
    ids=["collectives", "fp8", "a100", "b200", "mi300x", "engine"],
)
def test_names_of_libraries_tell_the_kind_of_each_kernel(fields: dict[str, Any]) -> None:
    run = simulate(Scenario.of(batch=4, seq_len=1024, layers=2, **fields))
    ours, theirs = to_trace(run), TraceWindow(names="library").of(run)
    kernels = [pair for pair in zip(ours.kinds, theirs.kinds, strict=True) if pair[0].category == "kernel"]
    assert len(kernels) > 8
    for own, named in kernels:
        assert named.name != own.name
        assert named.args["kernel"] == own.name
        family = class_of(named.name)
        assert (family if family != "norm" else "elementwise") == own.args["family"]


def test_a_trace_with_names_of_libraries_replays_as_it_ran(tmp_path: Path) -> None:
    run = simulate(Scenario.of(model="llama3-8b", gpu="h100-sxm-80gb", tp=2, phase="prefill", seq_len=2048, layers=2))
    library = TraceWindow(names="library")
    one = write_timeline(run, tmp_path / "run.json.gz", part=library)
    for path in (one, write_timeline(run, tmp_path / "ranks", layout="hta", part=library)):
        result = replay_trace([path])
        assert any(text.startswith("nvjet_sm90") for text in result.capture.names)
        span_us = result.unchanged.ranks[0].span_us
        assert span_us == pytest.approx(result.measured[0].span_us, rel=1e-3)
        assert result.unchanged.energy_j == pytest.approx(run.energy_j, rel=0.01)
