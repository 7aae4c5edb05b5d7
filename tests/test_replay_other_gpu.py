"""A real decode trace on another GPU, against the graph that was measured there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sim.replay.changes import Changes
from sim.replay.study import replay_trace
from tests.test_cli import run
from tests.traces_kit import RECORDED, SHARED
from traces.capture import NONE, Capture
from traces.read.load import read_trace

VLLM = SHARED / "measurements" / "vllm" / "traces"
H100, H200 = (VLLM / f"{gpu}_llama3-8b.0.json.gz" for gpu in ("h100", "h200"))


def graph_us(capture: Capture) -> float:
    """Median length of a decode step's graph."""
    work = capture.work
    graphs = [work.graph == one for one in np.unique(work.graph[work.graph != NONE])]
    return float(np.median([work.end_ns[rows].max() - work.start_ns[rows].min() for rows in graphs])) / 1e3


@pytest.mark.skipif(not H100.is_file(), reason=f"needs the traces of real servers ({VLLM}; set WATTLINE_SHARED)")
@pytest.mark.parametrize(
    ("recorded", "gpu", "there"), [(H100, "h200-sxm-141gb", H200), (H200, "h100-sxm-80gb", H100)], ids=["h200", "h100"]
)
def test_a_decode_step_on_another_gpu_is_within_8_percent(recorded: Path, gpu: str, there: Path) -> None:
    found = replay_trace([recorded], Changes(gpu=gpu))
    measured_us = graph_us(read_trace(there))
    assert graph_us(found.simulated.capture) == pytest.approx(measured_us, rel=0.08)
    assert graph_us(read_trace(recorded)) != pytest.approx(measured_us, rel=0.2)


@pytest.mark.parametrize(
    ("here", "name", "ranks", "gpu", "measured_ms"),
    [
        ("h200-sxm-141gb", "llama3-70b-decode-32x2048-tp2", 2, "h100-sxm-80gb", 3.578),
        ("h200-sxm-141gb", "llama3-70b-prefill-1x4096-tp2", 2, "h100-sxm-80gb", 52.035),
        ("h100-sxm-80gb", "llama3-70b-prefill-1x3000", 1, "h200-sxm-141gb", 65.997),
        ("h100-sxm-80gb", "qwen3-30b-a3b-decode-16x1500", 1, "h200-sxm-141gb", 8.871),
    ],
)
def test_two_steps_on_another_gpu_are_within_8_percent(
    here: str, name: str, ranks: int, gpu: str, measured_ms: float
) -> None:
    """Graphs without shapes against the same steps measured there (records/*/validation, the H100's first records)."""
    paths = [RECORDED / here / f"traces/{name}.rank{rank}.json.gz" for rank in range(ranks)]
    found = replay_trace(paths, Changes(gpu=gpu)).simulated
    assert max(rank.span_us for rank in found.ranks) / 2e3 == pytest.approx(measured_ms, rel=0.08)


def test_a_replay_on_another_gpu_rests_on_the_laws_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of an L40S on an H20 named the L40S's laws alone, one of an L40S on an H100 was calibrated."""
    path = str(tmp_path / "run.json.gz")
    small = ["--layers", "1", "--seq-len", "64", "--regime", "cold", "--trace", path]
    assert run(["simulate", "llama3-8b", "--gpu", "l40s", *small], capsys)[0] == 0
    code, out, _ = run(["replay", path, "--gpu", "h100"], capsys)
    words = " ".join(out.split())
    assert code == 0 and "as the laws of l40s-48gb and h100-sxm-80gb (uncalibrated)" in words
    assert "no trace of l40s-48gb was ever replayed beside one of h100-sxm-80gb" in words
    found = json.loads(run(["replay", path, "--gpu", "h20", "--json"], capsys)[1])
    assert (found["gpu"], found["other_gpu"], found["status"]) == ("l40s-48gb", "h20-sxm-96gb", "uncalibrated")
    assert "error unknown" in found["expected_error"]
