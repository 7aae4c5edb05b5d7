"""A replay under other assumptions: each does what it says, and own traces replayed as graphs meet the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardware.catalog import load_gpu
from hardware.profile import profile_for
from sim.cli import main
from sim.replay.changes import Changes, ReplayError
from sim.replay.setting import ReplayTimes
from sim.replay.study import Replayed, replay_trace
from sim.run.runner import simulate
from tests.traces_kit import OURS, Event, kernel, launch, needs_real, write
from traces.read.load import read_trace

H100 = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}]


def _step(path: Path) -> Path:
    """Two products with a collective beside the second one and a wait of the host behind them, on one H100."""
    events: list[Event] = [
        launch(0, 1), kernel("gemm_a", 10, 100, correlation=1, grid=[128, 1, 1], block=[384, 1, 1]),
        _call("cudaEventRecord", 2.5), _call("cudaStreamWaitEvent", 2.7),
        launch(3, 2), kernel("ncclDevKernel_AllReduce", 115, 40, stream=9, correlation=2, grid=[4, 1, 1]),
        launch(6, 3), kernel("gemm_b", 111, 100, correlation=3, grid=[128, 1, 1], block=[384, 1, 1]),
        _call("cudaDeviceSynchronize", 9, dur=210),
        launch(230, 4), kernel("copy", 240, 10, correlation=4),
    ]  # fmt: skip
    return write(path / "step.json", events, deviceProperties=H100)


def _call(name: str, ts: float, dur: float = 0.1) -> Event:
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 99, "tid": 1, "ts": ts, "dur": dur, "args": {}}


def _span_us(result: ReplayTimes) -> float:
    return result.ranks[0].span_us


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return _step(tmp_path)


def test_a_faster_class_moves_what_the_host_does_after_its_wait(step: Path) -> None:
    result = replay_trace([step], Changes(faster={"gemm": 2.0}))
    assert [_dur_of(result.simulated, name) for name in ("gemm_a", "gemm_b")] == [50_000, 50_000]
    # 2 x 50 us saved; the wait returns earlier by as much, and so the copy is launched earlier.
    assert _span_us(result.unchanged) - _span_us(result.simulated) == pytest.approx(100.0, abs=0.1)


def test_hidden_communication_costs_nothing_and_merged_streams_hide_nothing(step: Path) -> None:
    hidden = replay_trace([step], Changes(hide_communication=True)).simulated.ranks[0]
    assert (hidden.communication_us, hidden.exposed_us) == (0.0, 0.0)
    merged = replay_trace([step], Changes(merge_streams=True))
    assert merged.unchanged.ranks[0].overlap_us == pytest.approx(40.0)
    assert merged.simulated.ranks[0].overlap_us == 0.0
    # It was measured beside a product, and is faster alone.
    slowdown = profile_for(load_gpu("h100-sxm-80gb")).sharing.beside_slowdown
    assert merged.simulated.ranks[0].communication_us == pytest.approx(40.0 / slowdown, rel=1e-3)


@pytest.mark.parametrize(("launch_us", "alone_us"), [(20, 50.0), (200, 50.0), (990, 50.0), (1020, 70.0)])
def test_blocks_that_wait_for_a_late_rank_hold_their_sms(tmp_path: Path, launch_us: int, alone_us: float) -> None:
    """A product of 132 blocks takes two rounds beside 8 that spin for 1 ms, or move data for 50 us."""
    paths = []
    for rank, arrives_us in ((0, 5), (1, 1005)):
        events = [
            launch(arrives_us - 5, 1),
            kernel("ncclDevKernel_AllReduce", arrives_us, 1055 - arrives_us, stream=9, correlation=1, grid=[8, 1, 1]),
        ]
        if rank == 0:
            product = kernel("gemm", launch_us + 5, 100, correlation=2, grid=[132, 1, 1], block=[384, 1, 1])
            events += [launch(launch_us, 2), product]
        path = tmp_path / f"rank{rank}.json"
        paths.append(write(path, events, deviceProperties=H100, distributedInfo={"rank": rank}))
    result = replay_trace(paths, Changes(hide_communication=True))
    assert _dur_of(result.simulated, "gemm") == 1000 * alone_us


def test_a_graph_has_no_launch_gaps(step: Path) -> None:
    result = replay_trace([step], Changes(launch="graph"))
    work, pause_ns = result.simulated.capture.work, 878  # graph_gap_s of the H100 profile, 0.878 us
    lane = np.flatnonzero(work.stream == 7)
    gaps_ns = work.start_ns[lane][1:] - work.end_ns[lane][:-1]
    assert gaps_ns.tolist() == [pause_ns, pause_ns]


@pytest.mark.parametrize("gpu", ["h100", "a100-sxm-80gb"])
def test_laws_of_a_gpu_answer_clock_cap_and_another_gpu(step: Path, gpu: str) -> None:
    def under(**changes: Any) -> Replayed:
        return replay_trace([step], Changes(**changes), trace_gpu=gpu)

    clocks = [under(sm_clock_mhz=mhz) for mhz in (700.0, 1000.0, 1300.0)]
    spans = [_span_us(result.simulated) for result in clocks]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[2] * 1.05
    capped = under(power_cap_w=250.0).simulated
    assert capped.power_w is not None and capped.power_w <= 251.0
    assert _span_us(capped) > _span_us(clocks[0].unchanged)
    assert _span_us(under(gpu=gpu).simulated) == pytest.approx(_span_us(clocks[0].unchanged), rel=1e-6)


def test_energy_is_that_of_the_parts_and_grows_with_idle_time(step: Path) -> None:
    result = replay_trace([step])
    own_j = result.unchanged.capture.work.energy_j
    assert result.unchanged.energy_j is not None
    idle_j = result.unchanged.energy_j - own_j.sum()
    assert 70.0 < idle_j / (_span_us(result.unchanged) * 1e-6) < 145.0  # idle of an H100: 72 to 135 W, and warm
    assert (own_j > 0).all()


def test_a_collective_of_more_blocks_than_a_product_leaves_waits_for_its_end(step: Path) -> None:
    few, many = (replay_trace([step], Changes(ctas=ctas)).simulated.ranks[0] for ctas in (4, 32))
    assert few.overlap_us == pytest.approx(40.0)
    assert many.overlap_us == 0.0


def test_products_beside_more_blocks_take_more_rounds(tmp_path: Path) -> None:
    """128 blocks fit beside 4 of a collective on 132 SMs; beside 32 of them they take two rounds."""
    events: list[Event] = [
        launch(0, 1), kernel("ncclDevKernel_AllReduce", 5, 3000, stream=9, correlation=1, grid=[4, 1, 1]),
        launch(30, 2), kernel("gemm", 40, 100, correlation=2, grid=[128, 1, 1], block=[384, 1, 1]),
    ]  # fmt: skip
    path = write(tmp_path / "t.json", events, deviceProperties=H100)
    durations = [_dur_of(replay_trace([path], Changes(ctas=ctas)).simulated, "gemm") for ctas in (4, 32)]
    assert durations == [100_000, 200_000]


def _dur_of(outcome: ReplayTimes, name: str) -> int:
    return int(outcome.capture.work.dur_ns[outcome.capture.work.name == outcome.capture.names.index(name)][0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"faster": {"gem": 2.0}}, "faster = gem=2: no such class in the trace: did you mean 'gemm'?"),
        ({"faster": {"gemm": 0.0}}, "faster = gemm=0: give a factor above 0, like gemm=2"),
        ({"ctas": 200}, "ctas = 200: h100-sxm-80gb has 132 SMs: give at most as many"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(step: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError) as error:
        replay_trace([step], Changes(**changes))
    assert str(error.value) == message


def test_json_and_timeline_of_the_command(step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:  # before anything is read
        main(["replay", str(tmp_path / "absent.json"), "--trace", "again.txt"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith("name it .json, .json.gz, .pftrace or .pftrace.gz\n")
    out = tmp_path / "again.json.gz"
    main(["replay", str(step), "--communication-faster", "2", "--json", "--trace", str(out)])
    document = json.loads(capsys.readouterr().out)
    assert document["edges"]["inferred"] == {"count": 1, "confidence": 0.8}
    assert document["measured_span_us"] == 240.0
    again = read_trace(out)
    kernels = again.work.dur_ns[again.kernels]
    assert kernels.sum() == 100_000 + 20_000 + 100_000 + 10_000
    assert document["events_kernels"] == len(again.work) < document["simpy_events"]
    assert document["derived_kernels"] == 0
    span_ns = again.work.end_ns.max() - again.work.start_ns.min()
    assert document["simulated_span_us"] == pytest.approx(span_ns / 1e3, abs=0.01)
    with pytest.raises(SystemExit) as stop:
        main(["replay", str(step), "--faster", "gemm"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "wattline: Invalid value for '--faster': 'gemm' is no CLASS=FACTOR like gemm=1.5\n"
    )


TP = {"model": "llama3-70b", "layers": 2, "seq_len": 2048, "lm_head": False}
CHUNKS = TP | {"phase": "prefill", "sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8}
EIGHT = {"model": "llama3-8b", "layers": 2, "seq_len": 2048, "gpu": "h200"}


@needs_real
@pytest.mark.parametrize(
    ("files", "scenario"),
    [
        (["8b_decode_b32_s2048"], EIGHT | {"phase": "decode", "batch": 32}),
        (["8b_prefill_b1_s2048"], EIGHT | {"phase": "prefill", "batch": 1}),
        (["70b_tp_decode_w2_rank0"], TP | {"phase": "decode", "batch": 32, "tp": 2}),
        (["70b_tp_decode_w2_rank0", "70b_tp_decode_w2_rank1"], TP | {"phase": "decode", "batch": 32, "tp": 2}),
        (["70b_tp_decode_w4_rank1"], TP | {"phase": "decode", "batch": 32, "tp": 4}),
        (["70b_sp_chunks4_w2_rank0"], CHUNKS | {"tp": 2}),
        (["70b_sp_chunks4_w2_rank0", "70b_sp_chunks4_w2_rank1"], CHUNKS | {"tp": 2}),
        (["70b_sp_chunks4_w4_rank1"], CHUNKS | {"tp": 4}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_own_eager_traces_replayed_as_graphs_meet_the_simulated_graph(
    files: list[str], scenario: dict[str, object]
) -> None:
    """Two steps of two layers, launched from Python, against the engine's own graph of the same step: within 6 %."""
    result = replay_trace([OURS / f"kineto_llama3-{name}.json.gz" for name in files], Changes(launch="graph"))
    step_us = _span_us(result.simulated) / 2
    assert step_us == pytest.approx(simulate(**scenario).latency_s * 1e6, rel=0.06)
