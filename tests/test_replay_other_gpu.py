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
PAGE = (Path(__file__).parent.parent / "docs" / "replay.md").read_text(encoding="utf-8")
H100, H200 = "h100-sxm-80gb", "h200-sxm-141gb"


def length_ms(capture: Capture, steps: int | None) -> float:
    """Of one of ``steps`` steps on the rank that is longest; None: the median graph of a server's decode."""
    work = capture.work
    if steps is None:
        groups = [work.graph == one for one in np.unique(work.graph[work.graph != NONE])]
        return float(np.median([work.end_ns[rows].max() - work.start_ns[rows].min() for rows in groups])) / 1e6
    of_rank = [work.rank == rank for rank in capture.ranks]
    return float(max(work.end_ns[rows].max() - work.start_ns[rows].min() for rows in of_rank)) / 1e6 / steps


def served(gpu: str, name: str) -> tuple[list[Path], int | None]:
    """A server's trace and the steps in it."""
    steps = {"llama3-8b.1": 2 if gpu == "h100" else 3, "qwen3-30b-a3b.2": 3 if gpu == "h100" else 4}
    return [VLLM / f"{gpu}_{name}.json.gz"], steps.get(name)


def recorded(gpu: str, name: str, ranks: int = 1) -> list[Path]:
    return [RECORDED / gpu / f"traces/{name}.rank{rank}.json.gz" for rank in range(ranks)]


# Of each pair: its name on the page, the trace and its steps, the other GPU, and that GPU's trace and steps, or the
# step's milliseconds there (records/*/validation; the H100's first records).
PAIRS = [
    *(
        (f"vLLM, {model}, {here} to {there}", *served(a, name), gpu, served(b, name))
        for model, name in (
            ("Llama-3 8B, decode", "llama3-8b.0"),
            ("Llama-3 8B, prefill", "llama3-8b.1"),
            ("Qwen3 30B-A3B, prefill", "qwen3-30b-a3b.2"),
        )
        for here, a, there, b, gpu in (
            ("H100", "h100", "H200", "h200", H200), ("H100", "h100", "H200 (2)", "h200x4", H200),
            ("H200", "h200", "H100", "h100", H100), ("H200 (2)", "h200x4", "H100", "h100", H100),
        )
    ),
    ("Llama-3 70B, decode, TP 2, H200 to H100", recorded(H200, "llama3-70b-decode-32x2048-tp2", 2), 2, H100, 3.578),
    ("Qwen3 30B-A3B, decode, H100 to H200", recorded(H100, "qwen3-30b-a3b-decode-16x1500"), 2, H200, 8.871),
    ("Llama-3 70B, prefill, TP 2, H200 to H100", recorded(H200, "llama3-70b-prefill-1x4096-tp2", 2), 2, H100, 52.035),
    ("Llama-3 70B, prefill, TP 4 in 2 chunks, H200 to H100",
     recorded(H200, "chunks/llama3-70b-prefill-1x2048-tp4-overlap_chunks2-comm_ctas8", 2), 2, H100, 8.476),
    ("Llama-3 70B, prefill, H100 to H200", recorded(H100, "llama3-70b-prefill-1x3000"), 2, H200, 65.997),
    ("Llama-3 8B in FP8, prefill, H100 to H200", recorded(H100, "llama3-8b-prefill-2x1500-fp8_e4m3"), 2, H200, 43.132),
    ("Qwen3 30B-A3B, prefill, H100 to H200", recorded(H100, "qwen3-30b-a3b-prefill-1x3000"), 2, H200, 30.092),
]  # fmt: skip


@pytest.mark.skipif(not VLLM.is_dir(), reason=f"needs the traces of real servers ({VLLM}; set WATTLINE_SHARED)")
@pytest.mark.parametrize(("pair", "files", "steps", "gpu", "there"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_a_real_trace_on_the_other_gpu_is_within_8_percent(
    pair: str, files: list[Path], steps: int | None, gpu: str, there: float | tuple[list[Path], int | None]
) -> None:
    """Against what was measured there, as docs/replay.md has it."""
    replayed_ms = length_ms(replay_trace(files, Changes(gpu=gpu)).simulated.capture, steps)
    measured_ms = there if isinstance(there, float) else length_ms(read_trace(there[0]), there[1])
    here_ms = length_ms(read_trace(files), steps)
    assert replayed_ms == pytest.approx(measured_ms, rel=0.08)
    off = f"{replayed_ms / measured_ms - 1:+.1%}".replace("%", " %")
    assert f"| {pair} | {here_ms:.2f} | {measured_ms:.2f} | {replayed_ms:.2f} | {off} |" in PAGE


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
