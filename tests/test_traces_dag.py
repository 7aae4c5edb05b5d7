"""Edges between streams, read off the host's calls; on real traces the measured times contradict next to none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.traces_kit import REAL, Event, kernel, launch, needs_real, write
from traces.classify import classify
from traces.dag import Dag, dag_of
from traces.host_order import ASKED_FOR, BY_ROLE, ITS_TURN, JUST_RECORDED
from traces.read.load import read_trace

CLOCK_ERROR_NS = 2_000  # traces of 2021 count whole microseconds


def _calls(text: str, streams: dict[str, int]) -> list[Event]:
    """``R`` an event record, ``W`` a wait, any other word a kernel of that name on its stream; a call every 10 us."""
    events: list[Event] = []
    for number, word in enumerate(text.split()):
        ts = 10.0 * number
        if word in "RW":
            name = {"R": "cudaEventRecord", "W": "cudaStreamWaitEvent"}[word]
            events.append({"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 9, "tid": 1, "ts": ts, "dur": 1.0})
        else:
            stream = streams[word.rstrip("0123456789")]
            events += [launch(ts, number), kernel(word, ts + 500, 1, stream=stream, correlation=number)]
    return events


def _edges(path: Path, text: str, **streams: int) -> dict[tuple[str, str], float]:
    capture = read_trace(write(path / "t.json", _calls(text, streams)))
    dag = dag_of(capture, classify(capture))
    name = [capture.names[one] for one in capture.work.name.tolist()]
    return {
        (name[a], name[b]): sure
        for a, b, sure in zip(dag.before.tolist(), dag.after.tolist(), dag.confidence.tolist(), strict=True)
    }


def test_a_collective_waits_for_what_asked_for_it_and_is_waited_for_in_turn(tmp_path: Path) -> None:
    found = _edges(tmp_path, "gemm1 R W nccl1 R gemm2 R W nccl2 R gemm3 W gemm4 W gemm5", gemm=7, nccl=20)
    assert found == {
        ("gemm1", "nccl1"): ASKED_FOR, ("gemm2", "nccl2"): ASKED_FOR,
        ("nccl1", "gemm4"): ITS_TURN, ("nccl2", "gemm5"): ITS_TURN,
    }  # fmt: skip


def test_what_nccl_records_and_awaits_by_itself_orders_nothing(tmp_path: Path) -> None:
    found = _edges(tmp_path, "gemm1 R W R W nccl1 R W R gemm2 gemm3", gemm=7, nccl=20)
    assert found == {("gemm1", "nccl1"): ASKED_FOR}


def test_a_wait_right_after_a_record_is_for_the_work_launched_last(tmp_path: Path) -> None:
    found = _edges(tmp_path, "nccl1 nccl2 R W gemm1", gemm=7, nccl=20)
    assert found == {("nccl2", "gemm1"): JUST_RECORDED}


def test_a_stream_with_nothing_outstanding_waits_by_role(tmp_path: Path) -> None:
    found = _edges(tmp_path, "gemm1 gemm2 side1 W gemm3", gemm=7, side=14)
    assert found == {("side1", "gemm3"): BY_ROLE}


def test_recorded_waits_are_taken_as_they_are(tmp_path: Path) -> None:
    events = _calls("a1 R b1 W c1", {"a": 7, "b": 7, "c": 9})
    for number, event in enumerate(event for event in events if event["cat"] == "cuda_runtime"):
        event.setdefault("args", {}).setdefault("correlation", 100 + number)
    record, wait = (event for event in events if "Event" in event["name"])
    args = {
        "stream": 9, "device": 0, "wait_on_stream": 7, "cuda_sync_kind": "Stream Wait Event",
        "wait_on_cuda_event_record_corr_id": record["args"]["correlation"], "correlation": wait["args"]["correlation"],
    }  # fmt: skip
    wait_event = {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 9, "ts": 30, "dur": 1}
    events.append(wait_event | {"args": args})
    capture = read_trace(write(tmp_path / "t.json", events))
    dag = dag_of(capture, classify(capture))
    assert dag.counts["wait"] == {"count": 1, "confidence": 1.0}
    assert capture.names[capture.work.name[dag.before[0]]] == "a1"  # not b1, which came after the record


def _contradicted(path: Path) -> tuple[Dag, int]:
    capture = read_trace(path)
    dag = dag_of(capture, classify(capture))
    early = capture.work.start_ns[dag.after] < capture.work.end_ns[dag.before] - CLOCK_ERROR_NS
    return dag, int(early.sum())


@needs_real
@pytest.mark.parametrize(
    ("part", "edges", "wrong"),
    [("8gpu_diff_control", 125, 0), ("2gpu_diff_test", 127, 0), ("nccl_args", 30, 3), ("chunks4_w2_rank0", 79, 0)],
)
def test_measured_times_contradict_next_to_no_edge(part: str, edges: int, wrong: int) -> None:
    """The guess does not use the measured times; they judge it, and what they contradict is dropped."""
    dag, contradicted = _contradicted(next(path for path in REAL if part in path.name))
    assert (len(dag.before), dag.counts["refuted"]["count"], contradicted) == (edges - wrong, wrong, 0)


@needs_real
def test_every_row_has_one_place_and_no_edge_points_back() -> None:
    dag, _ = _contradicted(next(path for path in REAL if "diff_control" in path.name))
    rows = np.concatenate(dag.queues)
    assert np.array_equal(np.sort(rows), np.arange(len(rows)))


def _graph(*kernels: tuple[str, float, float, int]) -> list[Event]:
    """Name, start, duration and stream of what one launch of a graph ran."""
    events = [launch(0, 1, name="cudaGraphLaunch", dur=30)]
    return events + [kernel(name, ts, dur, stream=stream, correlation=1) for name, ts, dur, stream in kernels]


def test_nodes_of_a_graph_wait_for_what_ended_last_before_they_began(tmp_path: Path) -> None:
    """Streams of a graph wake each other up in 1 to 7 us; a stream that goes on at once waits for nobody."""
    events = _graph(
        ("norm", 50, 10, 7), ("gather", 66, 40, 9), ("gemm_a", 61, 20, 7), ("gemm_b", 112, 30, 7), ("late", 400, 5, 11)
    )
    capture = read_trace(write(tmp_path / "t.json", events))
    dag = dag_of(capture, classify(capture))
    name = [capture.names[one] for one in capture.work.name.tolist()]
    found = {
        (name[a], name[b]): round(sure, 2) for a, b, sure in zip(dag.before, dag.after, dag.confidence, strict=True)
    }
    # half sure after 4 us: 4 / (4 + 6) twice, and 4 / (4 + 258)
    assert found == {("norm", "gather"): 0.4, ("gather", "gemm_b"): 0.4, ("gemm_b", "late"): 0.02}


def test_nobody_waits_for_a_memset_of_another_stream(tmp_path: Path) -> None:
    """It clears what the next product of its own stream counts with."""
    events = _graph(("gemm_a", 50, 10, 7), ("Memset (Device)", 62, 2, 7), ("gemm_b", 66, 20, 7), ("scatter", 66, 9, 9))
    events[2] |= {"cat": "gpu_memset"}
    capture = read_trace(write(tmp_path / "t.json", events))
    dag = dag_of(capture, classify(capture))
    name = [capture.names[one] for one in capture.work.name.tolist()]
    assert [(name[a], name[b]) for a, b in zip(dag.before, dag.after, strict=True)] == [("gemm_a", "scatter")]


def test_a_graph_launched_after_other_work_ended_does_not_wait_for_it(tmp_path: Path) -> None:
    events = [
        *_graph(("a", 50, 10, 7), ("b", 66, 10, 9)),
        launch(500, 2, name="cudaGraphLaunch", dur=30), kernel("c", 550, 10, stream=11, correlation=2),
        kernel("d", 561, 10, stream=11, correlation=2),
    ]  # fmt: skip
    capture = read_trace(write(tmp_path / "t.json", events))
    dag = dag_of(capture, classify(capture))
    assert [(int(a), int(b)) for a, b in zip(dag.before, dag.after, strict=True)] == [(0, 1)]
