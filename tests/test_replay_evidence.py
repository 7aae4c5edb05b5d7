"""What a real trace's own times say: which waits there were, which ranks met, which durations lie, what is critical."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from sim import simulate
from sim.replay.changes import Changes
from sim.replay.report import as_document, print_replay
from sim.replay.study import Replayed, replay_trace
from sim.result.trace import write_timeline
from tests.traces_kit import Event, kernel, launch, write
from traces.capture import Capture
from traces.classify import classify
from traces.collectives import match_collectives, waiting_ns
from traces.critical import critical_path
from traces.edges import edges_of
from traces.read.load import read_trace

H100 = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}]
SMALL = {"grid": [64, 1, 1], "block": [128, 1, 1]}


def _call(name: str, ts: float, number: int, *, dur: float = 3, thread: int = 1) -> Event:
    event = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 99, "tid": thread, "ts": ts, "dur": dur}
    return event | {"args": {"correlation": number}}


def _ran(
    name: str, ts: float, dur: float, number: int, *, stream: int = 7, host_us: float | None = None
) -> list[Event]:
    """A kernel and its launch, ten microseconds a call."""
    at = 10.0 * number if host_us is None else host_us
    return [launch(at, number), kernel(name, ts, dur, stream=stream, correlation=number, **SMALL)]


def _miss(result: Replayed) -> float:
    return result.unchanged.ranks[0].span_us / result.measured[0].span_us - 1.0


def _edges(result: Replayed) -> set[tuple[str, str]]:
    names, work = result.capture.names, result.capture.work
    pairs = zip(result.dag.before.tolist(), result.dag.after.tolist(), strict=True)
    return {(names[work.name[a]], names[work.name[b]]) for a, b in pairs}


def test_a_wait_that_the_times_refute_is_none(tmp_path: Path) -> None:
    """The wait is launched after ten products, yet the dispatch ran beside them: 5,112 us, not 9,113."""
    events = _ran("gemm_a", 1000, 100, 1)
    for number in range(10):
        events += _ran(f"gemm_{number}", 1101.2 + 501.2 * number, 500, 2 + number)
    events += [_call("cudaStreamWaitEvent", 120, 12)]
    events += _ran("void deep_ep::internode::dispatch<false>", 1101.4, 4000, 13, stream=27)
    result = replay_trace([write(tmp_path / "t.json", events, deviceProperties=H100)])
    assert result.dag.counts["refuted"]["count"] == 1
    assert _edges(result) == {("gemm_a", "void deep_ep::internode::dispatch<false>")}  # what had just ended as it began
    assert abs(_miss(result)) < 0.005
    assert result.unchanged.ranks[0].overlap_us == pytest.approx(result.measured[0].overlap_us, rel=0.01)


def test_a_refuted_wait_with_nothing_in_its_place_is_dropped(tmp_path: Path) -> None:
    events = [*_ran("gemm", 1000, 4000, 1), _call("cudaStreamWaitEvent", 15, 2)]
    events += _ran("ncclDevKernel_AllReduce", 2000, 100, 3, stream=27)
    result = replay_trace([write(tmp_path / "t.json", events, deviceProperties=H100)])
    assert (result.dag.counts["refuted"]["count"], len(result.dag.before)) == (1, 0)


def _backward(path: Path, *, own: bool) -> Replayed:
    """A backward pass with two buckets, no record of events; ``own``: NCCL's own wait behind each launch."""
    wait = "hipStreamWaitEvent"
    events = _ran("backward_a", 1000, 1000, 1)
    events += [_call(wait, 20, 2), *_ran("ncclDevKernel_Generic_1", 2001.2, 3000, 3, stream=4)]
    events += [_call(wait, 34, 20)] if own else []
    events += _ran("backward_b", 2001.2, 1000, 4)
    events += [_call(wait, 50, 5), *_ran("ncclDevKernel_Generic_2", 5002.4, 3000, 6, stream=4)]
    events += [_call(wait, 64, 21)] if own else []
    events += [_call(wait, 70, 7), *_ran("copy_a", 5002.6, 10, 8), _call(wait, 90, 9)]
    events += _ran("multi_tensor_apply_kernel", 8003.6, 500, 10)
    return replay_trace([write(path / "t.json", events)])


@pytest.mark.parametrize("own", [False, True])
def test_the_last_wait_of_a_backward_holds_the_optimizer_back(tmp_path: Path, own: bool) -> None:
    result = _backward(tmp_path, own=own)
    assert ("ncclDevKernel_Generic_2", "multi_tensor_apply_kernel") in _edges(result)
    assert ("ncclDevKernel_Generic_1", "copy_a") in _edges(result)
    assert abs(_miss(result)) < 0.01


def test_where_no_call_about_events_was_recorded_times_tell_the_waits(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(4):
        events += _ran("gemm", 1000 + 501.2 * number, 500, 1 + number)
    events += _ran("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 3004.8, 3000, 5, stream=84)
    events += _ran("gemm_after", 6006.0, 3000, 6)
    result = replay_trace([write(tmp_path / "t.json", events, deviceProperties=H100)])
    nccl = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"
    assert _edges(result) == {("gemm", nccl), (nccl, "gemm_after")}
    assert abs(_miss(result)) < 0.001
    assert result.unchanged.power_w is not None and result.unchanged.power_w < 1010.0


def test_kernels_that_overlap_stay_within_the_fast_limit(tmp_path: Path) -> None:
    """Two products at a time would draw 1.8 kW by their own laws."""
    events = _ran("gemm", 1000, 3000, 1) + _ran("gemm", 1000, 3000, 2, stream=9)
    result = replay_trace([write(tmp_path / "t.json", events, deviceProperties=H100)])
    alone = replay_trace([write(tmp_path / "one.json", _ran("gemm", 1000, 3000, 1), deviceProperties=H100)])
    assert result.unchanged.ranks[0].span_us < 3100.0
    assert alone.unchanged.power_w is not None and alone.unchanged.power_w > 800.0
    assert result.unchanged.power_w == pytest.approx(alone.unchanged.power_w, rel=0.1)
    assert result.unchanged.power_w <= 1020.0


@pytest.mark.parametrize("pause_us", [0.0, 0.5, 2.5])
def test_the_pause_between_kernels_of_a_graph_is_the_files(tmp_path: Path, pause_us: float) -> None:
    events: list[Event] = [launch(0, 1, name="hipGraphLaunch", dur=20)]
    events += [kernel("Cijk_Alik_Bljk_BBS", 30 + (20 + pause_us) * i, 20, correlation=1) for i in range(100)]
    result = replay_trace([write(tmp_path / "t.json", events)])
    assert result.pause_ns == round(1e3 * pause_us)
    assert abs(_miss(result)) < 1e-3


def test_pauses_of_a_graph_add_up_to_those_of_the_file(tmp_path: Path) -> None:
    """Nine in ten are of 0.4 us and one of 2.4: 0.6 us on average, and a gap of 50 us is none."""
    events: list[Event] = [launch(0, 1, name="cudaGraphLaunch", dur=20)]
    at = 49.0
    for i in range(201):
        events.append(kernel("Cijk_Alik_Bljk_BBS", at, 20, correlation=1))
        at += 20 + (2.4 if i % 10 == 9 else 0.4)
    result = replay_trace([write(tmp_path / "t.json", events)])
    assert result.pause_ns == 600
    assert abs(_miss(result)) < 1e-4


@pytest.mark.parametrize(("begins_us", "replayed_us"), [(170, 149), (750, 800), (790, 800), (800, 800), (1500, 149)])
def test_a_graph_begins_with_the_return_of_its_launch_where_the_file_shows_it(
    tmp_path: Path, begins_us: float, replayed_us: float
) -> None:
    """The call lasts from 100 to 800 us; soon after its begin is 149 us. What began later yet was late for no reason
    that the file holds; behind other work nothing is known."""
    events: list[Event] = [launch(0, 1), kernel("gemm", 3.5, 10, correlation=1)]
    events += [launch(100, 2, name="cudaGraphLaunch", dur=700)]
    events += [kernel("gemm", begins_us + 21 * i, 20, correlation=2) for i in range(10)]
    result = replay_trace([write(tmp_path / "t.json", events)])
    assert result.unchanged.capture.work.start_ns[1] == round(1e3 * replayed_us)


@pytest.mark.parametrize(
    ("name", "lead_us"),
    [
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)", 0.0),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2.2),
    ],
)
def test_only_the_collectives_of_nccl_begin_later_than_other_kernels_of_a_graph(
    tmp_path: Path, name: str, lead_us: float
) -> None:
    """35 all-reduces among 70 products, 0.4 us apart; NCCL's begin 2.2 us later still (scheduling.toml)."""
    events: list[Event] = [launch(0, 1, name="cudaGraphLaunch", dur=20)]
    at = 49.0
    for i in range(105):
        at += lead_us * (i % 3 == 2)
        events.append(kernel(name if i % 3 == 2 else "nvjet_a", at, 20, correlation=1, **SMALL))
        at += 20.4
    result = replay_trace([write(tmp_path / "t.json", events, deviceProperties=H100)])
    assert result.pause_ns == 400
    assert abs(_miss(result)) < 1e-4


def test_a_graph_that_queued_behind_other_work_tells_nothing_of_its_launch(tmp_path: Path) -> None:
    events: list[Event] = [launch(0, 1), kernel("gemm", 3.5, 745.5, correlation=1)]
    events += [launch(100, 2, name="cudaGraphLaunch", dur=700)]
    events += [kernel("gemm", 750 + 21 * i, 20, correlation=2) for i in range(10)]
    result = replay_trace([write(tmp_path / "t.json", events)])
    assert result.unchanged.capture.work.start_ns[1] == 750_000


def test_work_behind_what_the_trace_has_not_begins_with_the_first_of_it(tmp_path: Path) -> None:
    """Two kernels launched milliseconds before either began: the GPU was busy with an earlier step, cut off."""
    events: list[Event] = [launch(0, 1), kernel("gemm_a", 8000, 10, correlation=1)]
    events += [launch(4000, 2), kernel("gemm_b", 8011, 10, correlation=2)]
    events += [launch(8500, 3), kernel("gemm_c", 8504, 10, correlation=3)]
    result = replay_trace([write(tmp_path / "t.json", events)])
    assert result.measured[0].span_us == 514.0
    assert result.unchanged.ranks[0].span_us == pytest.approx(514.0, abs=0.6)
    assert result.unchanged.ranks[0].idle_us == pytest.approx(484.0, abs=1.0)


def _rank(path: Path, rank: int, at: float, groups: list[list[int]] | None, **args: object) -> Path:
    """A product and an all-reduce; ``groups`` as ``pg_config`` gives them."""
    reduce = "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)"
    events = [
        launch(at + 10, 1), kernel("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", at + 20, 100, correlation=1),
        launch(at + 13, 2), kernel(reduce, at + 121, 30, correlation=2),
    ]  # fmt: skip
    events[-1]["args"] |= args
    info: dict[str, object] = {"backend": "nccl", "rank": rank, "world_size": 4}
    if groups is not None:
        info["pg_config"] = [{"pg_name": str(n), "ranks": g, "pg_size": len(g)} for n, g in enumerate(groups)]
    return write(path / f"rank{rank}.json", events, distributedInfo=info, baseTimeNanoseconds=1_700_000_000_000_000_000)


def _waited_us(capture: Capture) -> list[float]:
    collective = match_collectives(capture, classify(capture))
    return [float(one) / 1e3 for one in waiting_ns(capture, collective) if one]


@pytest.mark.parametrize("told", ["pg_config", "world and group", "nothing"])
def test_two_replicas_of_two_ranks_are_two_groups(tmp_path: Path, told: str) -> None:
    """Five milliseconds apart: their kernels do not meet, so nobody waited."""
    for rank in range(4):
        own = [0, 1] if rank < 2 else [2, 3]
        groups = {"pg_config": [own], "world and group": [[0, 1, 2, 3], own], "nothing": None}[told]
        _rank(tmp_path, rank, 5000.0 * (rank // 2), groups)
    capture = read_trace(tmp_path)
    number = match_collectives(capture, classify(capture))
    assert sorted(set(number[number >= 0].tolist())) == [0, 1]
    assert _waited_us(capture) == []
    result = replay_trace([tmp_path])
    assert [rank.span_us for rank in result.measured] == [131.0] * 4
    assert all(rank.span_us == pytest.approx(131.0, rel=0.03) for rank in result.unchanged.ranks)


def test_replicas_at_the_same_time_are_told_apart_by_their_groups(tmp_path: Path) -> None:
    for rank in range(4):
        _rank(tmp_path, rank, 10.0 * (rank // 2), [[0, 1] if rank < 2 else [2, 3]])
    assert _waited_us(read_trace(tmp_path)) == []


def test_a_stated_group_of_files_with_clocks_of_their_own_stays_one(tmp_path: Path) -> None:
    said = {
        "Collective name": "allreduce",
        "Process Group Name": "tp",
        "Process Group Ranks": "[0, 1]",
        "Group size": 2,
    }
    for rank in range(2):
        _rank(tmp_path, rank, 9e5 * rank, None, **said)
    capture = read_trace(tmp_path)
    assert match_collectives(capture, classify(capture)).max() == 0


def test_a_duration_that_runs_over_its_successors_is_cut_and_said(tmp_path: Path) -> None:
    events = [
        launch(0, 1), launch(3, 2), launch(6, 3),
        kernel("void fmha_bwd_kernel", 100, 1000, correlation=1),
        kernel("nvjet_a", 200, 90, correlation=2), kernel("nvjet_b", 300, 90, correlation=3),
    ]  # fmt: skip
    capture = read_trace(write(tmp_path / "t.json", events))
    assert capture.work.dur_ns.tolist() == [100_000, 90_000, 90_000]
    (finding,) = [one for one in capture.findings if one.rule == "overrun"]
    assert finding.first == "'void fmha_bwd_kernel' on stream 7 of rank 0"
    assert replay_trace([tmp_path / "t.json"]).unchanged.ranks[0].span_us == pytest.approx(290.0, rel=0.03)


def test_programmatic_launch_and_branches_of_a_graph_may_overlap(tmp_path: Path) -> None:
    tail = [launch(0, 1), launch(3, 2), kernel("a", 100, 50, correlation=1), kernel("b", 147, 50, correlation=2)]
    branches = [
        launch(300, 3, name="hipGraphLaunch"),
        kernel("c", 400, 50, correlation=3),
        kernel("d", 420, 50, correlation=3),
    ]
    capture = read_trace(write(tmp_path / "t.json", tail + branches))
    assert capture.work.dur_ns.tolist() == [50_000] * 4
    assert not [one for one in capture.findings if one.rule == "overrun"]


def test_launches_are_critical_only_where_the_stream_was_empty(tmp_path: Path) -> None:
    """200 products, one launched as another ends its run, the first after 100 us: the GPU never waited for the host."""
    events: list[Event] = []
    for number in range(200):
        events += _ran("nvjet_a", 200 + 21.2 * number, 20, 1 + number, host_us=100 + 21.2 * number)
    capture = read_trace(write(tmp_path / "t.json", events))
    assert critical_path(capture, classify(capture)).by_class == {"gemm": 4000.0}


def test_a_host_that_is_late_is_critical(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(10):
        events += _ran("nvjet_a", 105 + 50 * number, 20, 1 + number, host_us=100 + 50 * number)
    capture = read_trace(write(tmp_path / "t.json", events))
    assert critical_path(capture, classify(capture)).by_class == {"host": 450.0, "gemm": 20.0}


def test_a_kernel_in_the_tail_of_another_keeps_the_path_whole(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(10):
        events += _ran("nvjet_a", 200 + 18 * number, 20, 1 + number, host_us=10.0 * number)
    capture = read_trace(write(tmp_path / "t.json", events))
    assert critical_path(capture, classify(capture)).by_class == {"gemm": 182.0}


def test_a_call_within_a_blocking_call_follows_its_begin(tmp_path: Path) -> None:
    """A kernel launched 40 us into a copy that blocks for 80: the host takes 40 us to it, not the copy's end."""
    events = [_call("cudaMemcpy", 100, 1, dur=80), kernel("Memcpy DtoH", 150, 20, stream=9, correlation=1, **SMALL)]
    events += _ran("nvjet_a", 145, 400, 2, host_us=140)
    capture = read_trace(write(tmp_path / "t.json", events))
    assert critical_path(capture, classify(capture)).by_class == {"gemm": 400.0, "host": 40.0}


def test_an_edge_against_the_order_of_time_is_no_part_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products of one stream; an edge from what ended later back to the other would make a circle."""
    events = _ran("nvjet_a", 100, 140, 1) + _ran("nvjet_b", 250, 200, 2)
    capture = read_trace(write(tmp_path / "t.json", events))
    path = critical_path(capture, classify(capture))
    edges = edges_of(capture)
    assert (edges.before.tolist(), edges.after.tolist()) == ([0], [1])
    both = replace(
        edges, before=np.array([0, 1]), after=np.array([1, 0]), kind=edges.kind[[0, 0]],
        confidence=edges.confidence[[0, 0]],
    )  # fmt: skip
    monkeypatch.setattr("traces.critical.edges_of", lambda _: both)
    again = critical_path(capture, classify(capture))
    assert again.rows.tolist() == path.rows.tolist()
    assert again.by_class == path.by_class == {"gemm": 340.0}


def test_chunks_of_a_trace_whose_pauses_are_its_own(tmp_path: Path) -> None:
    """What the rules alone give is of the rows of the file, not of those that chunks make."""
    events: list[Event] = []
    for number in range(6):
        at = 1000.0 + 1500.0 * number
        events += _ran("gemm", at, 900, 1 + 2 * number, host_us=20.0 * number)
        events += _ran("ncclDevKernel_AllReduce_Sum_bf16", at + 903 + number, 500, 2 + 2 * number,
                       stream=20, host_us=20.0 * number + 10)  # fmt: skip
    path = write(tmp_path / "t.json", events, deviceProperties=H100)
    whole, cut = (replay_trace([path], Changes(chunks=chunks)) for chunks in (None, 3))
    assert cut.chunked_collectives == 6 and any(cut.taken.values())
    assert cut.by_rules is not None and cut.by_rules == whole.by_rules


def test_what_a_replay_takes_from_its_file_is_said_and_counted(tmp_path: Path) -> None:
    """Eight pairs that queue 3 us apart: their mean pause is the file's, and one pause for all is not."""
    events: list[Event] = []
    for number in range(8):
        at = 1000.0 + 200.0 * number
        events += _ran("gemm", at, 97, 1 + 2 * number, host_us=20.0 * number)
        events += _ran("copy_elementwise_kernel", at + 100, 99, 2 + 2 * number, host_us=20.0 * number + 10)
    result = replay_trace([write(tmp_path / "t.json", events, deviceProperties=H100)])
    data = as_document(result)
    assert data["taken_from_file"] == {"pauses": 15, "turns": 0, "tails": 0}
    assert data["unchanged_span_us"] == pytest.approx(data["measured_span_us"], rel=1e-3)
    assert data["by_rules_span_us"] == pytest.approx(result.by_rules[0].span_us if result.by_rules else 0.0)
    assert data["by_rules_span_us"] != pytest.approx(data["unchanged_span_us"], abs=0.5)
    console = Console(width=300, record=True, file=StringIO())
    print_replay(result, console)
    said = console.export_text()
    assert "from the file: durations of 16 pieces of work, pauses of 15; with durations, launches, waits" in said
    own = replay_trace(
        [write_timeline(simulate(model="llama3-8b", gpu="h100", layers=1, seq_len=128), tmp_path / "o.json")]
    )
    assert own.taken == {} and own.by_rules is None
