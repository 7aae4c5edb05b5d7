"""Holistic Trace Analysis and we say the same of a simulated trace of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from sim import simulate
from sim.replay.inspect import inspect_trace
from sim.scenario.spec import Scenario

RUNNER = Path(__file__).parents[1] / "benchmarks" / "hta_figures.py"
PYTHON = os.environ.get("WATTLINE_HTA_PYTHON") or (sys.executable if find_spec("hta") else None)


@pytest.mark.skipif(PYTHON is None, reason="needs HolisticTraceAnalysis with pandas < 3: see benchmarks/hta_figures.py")
def test_figures_agree_with_holistic_trace_analysis_within_one_percent(tmp_path: Path) -> None:
    scenario = Scenario.of(
        model="llama3-8b", gpu="h100-sxm-80gb", tp=2, phase="prefill", batch=1, seq_len=2048, layers=4,
        sequence_parallel=True, overlap_chunks=2,
    )  # fmt: skip
    folder = simulate(scenario).to_chrome(tmp_path / "ranks", layout="hta")
    runner = [str(PYTHON), str(RUNNER), str(folder)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HTA_")} | {"PYTHONPATH": ""}
    output = subprocess.run(runner, capture_output=True, text=True, check=True, env=environment).stdout
    theirs = json.loads(output.strip().splitlines()[-1])
    ours = inspect_trace((folder,))
    for row, times in zip(theirs["temporal"], ours.summary.ranks, strict=True):
        assert row["rank"] == times.rank
        assert row["idle_time(us)"] == pytest.approx(times.idle_us, rel=0.01)
        assert row["compute_time(us)"] == pytest.approx(times.computation_us, rel=0.01)
        assert row["non_compute_time(us)"] == pytest.approx(times.exposed_us, rel=0.01)
        assert row["kernel_time(us)"] == pytest.approx(times.span_us, rel=0.01)
    for row, times in zip(theirs["overlap"], ours.summary.ranks, strict=True):
        assert row["comp_comm_overlap_pctg"] == pytest.approx(100 * times.overlap_us / times.communication_us, rel=0.01)
    # HTA cuts the parts of this table to whole microseconds: shares agree, sums lose up to 1 us a part.
    busy_us = sum(times.busy_us for times in ours.summary.ranks)
    shares = {row["kernel_type"]: row["percentage"] for row in theirs["kinds"]}
    alone_us = sum(times.computation_us - times.overlap_us for times in ours.summary.ranks)
    assert shares["COMPUTATION"] == pytest.approx(100 * alone_us / busy_us, abs=1)
    exposed_us = sum(times.exposed_us for times in ours.summary.ranks)
    assert shares["COMMUNICATION"] == pytest.approx(100 * exposed_us / busy_us, abs=1)
    # Idle time a stream: what its kernels leave free between the first and the last.
    idle: Counter[tuple[int, int]] = Counter()
    for row in theirs["idle"]:
        idle[row["rank"], row["stream"]] += row["idle_time"]
    work = ours.capture.work
    for stream in ours.summary.by_stream:
        mine = (work.rank == stream.rank) & (work.stream == stream.stream)
        free_us = (work.end_ns[mine].max() - work.start_ns[mine].min()) / 1e3 - stream.busy_us
        assert idle[stream.rank, stream.stream] == pytest.approx(free_us, rel=0.01)
    assert theirs["queues"] == ours.summary.streams
    # Three layers launch the same kernels in the same order, the first one's norm has nothing to add.
    assert max(int(row["count"]) for row in theirs["sequences"]) == 3
    # HTA counts the pauses of whatever the path runs over (its KERNEL_KERNEL_DELAY), so its path is the span; ours
    # counts work alone, and waits of one stream beside work of another are neither in it nor idle.
    assert theirs["critical_path_us"] == pytest.approx(ours.summary.ranks[0].span_us, rel=0.01)
    assert 0.94 * theirs["critical_path_us"] < ours.path.length_us <= theirs["critical_path_us"]
