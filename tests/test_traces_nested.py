"""Asynchronous lanes: what nests in the trace nests in the real engine, in both formats, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.serving import ServeResult, serve
from sim.serving.trace import STAGES, to_trace, write_served
from tests.perfetto_kit import losses, perfetto, rows
from traces.errors import TraceError
from traces.lint_file import lint_file
from traces.records import Lane, SpanKind, Spans, Trace
from traces.write.by_name import write_trace
from traces.write.nested import turns

NS = 1000  # picoseconds
FOUND = (
    "select process.pid, slice.track_id, slice.name, slice.ts, slice.dur, slice.depth, "
    "coalesce(extract_arg(slice.arg_set_id, '{args}.request'), extract_arg(whole.arg_set_id, '{args}.request')) as n, "
    "extract_arg(slice.arg_set_id, '{args}.energy_j') as j from slice "
    "join process_track on slice.track_id = process_track.id join process using (upid) "
    "left join slice whole on slice.parent_id = whole.id order by slice.ts, slice.track_id, slice.depth"
)


def lives(*requests: list[tuple[str, int, int]], threads: tuple[tuple[int, int], ...] = ()) -> Trace:
    """Each request's spans (name, start ns, end ns) on a lane of its own, and spans of one thread beside them."""
    lanes = [Lane(pid=0, tid=1, name="steps", order=1)]
    lanes += [Lane(pid=1, tid=n, name="request", order=0, asynchronous=True) for n in range(len(requests))]
    names = ["step", *dict.fromkeys(name for one in requests for name, _, _ in one)]
    items = [(0, 0, begin, end) for begin, end in threads]
    items += [(n + 1, names.index(name), *times) for n, one in enumerate(requests) for name, *times in one]
    lane, kind, start, end = np.array(items, dtype=np.int64).T
    return Trace(
        processes={0: "replica 0", 1: "requests"},
        lanes=lanes,
        kinds=[SpanKind(name=name, category="request", args={"n": names.index(name)}) for name in names],
        spans=Spans(lane=lane, kind=kind, start_ps=start * NS, end_ps=end * NS, energy_j=np.full(len(lane), 0.5)),
    )


@pytest.mark.parametrize("name", ["t.json", "t.pftrace"])
def test_the_engine_nests_what_touches_is_empty_or_covers_its_whole(tmp_path: Path, name: str) -> None:
    trace = lives(
        [("request", 0, 9), ("queue", 0, 2), ("prefill", 2, 5), ("decode", 5, 9)],
        [("request", 1, 6), ("prefill", 1, 6)],
        [("request", 5, 8), ("queue", 5, 5), ("prefill", 5, 8)],
        threads=((0, 4), (4, 9)),
    )
    if name.endswith("json"):
        assert lint_file(write_trace(trace, tmp_path / name)) == []
    with perfetto(write_trace(trace, tmp_path / name)) as engine:
        assert losses(engine) == []
        lanes: dict[int, list[tuple[str, int, int, int]]] = {}
        for pid, track, what, ts, dur, depth, _, joules in rows(engine, FOUND.format(args=_args(name))):
            assert (pid, joules) == (1, 0.5)
            lanes.setdefault(track, []).append((what, ts, dur, depth))
        first, second, third = lanes.values()
        assert first == [("request", 0, 9, 0), ("queue", 0, 2, 1), ("prefill", 2, 3, 1), ("decode", 5, 4, 1)]
        assert second == [("request", 1, 5, 0), ("prefill", 1, 5, 1)]
        assert sorted(third)[1:] == [("queue", 5, 0, 2), ("request", 5, 3, 0)]
        steps = "select slice.ts, dur, thread.name as lane from slice join thread_track on track_id = thread_track.id "
        assert rows(engine, steps + "join thread using (utid)") == [(0, 4, "steps"), (4, 5, "steps")]
        assert rows(engine, "select count(*) from slice") == [(len(trace.spans.lane),)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=20))
def test_begins_and_ends_match_like_brackets(lengths: list[tuple[int, int, int]]) -> None:
    items = []
    for number, (first, second, third) in enumerate(lengths):
        at = number % 3
        edges = np.cumsum([at, first, second, third]).tolist()
        items += [
            (number % 4, edges[0], edges[3]),
            *((number % 4, a, b) for a, b in pairwise(edges)),
        ]
    items = [(number, *times) for number, (_, *times) in enumerate(items) if number % 4 == 0] + [
        (number - number % 4, *times) for number, (_, *times) in enumerate(items) if number % 4
    ]
    lane, start, end = np.array(items, dtype=np.int64).T
    stack: list[int] = []
    order = turns(lane, start, end).tolist()
    assert sorted(order) == list(range(2 * len(items)))
    times = np.concatenate([start, end])[order]
    on = np.concatenate([lane, lane])[order]
    assert ((np.diff(times) >= 0) | (np.diff(on) != 0)).all()
    for one in order:
        if one < len(items):
            stack.append(one)
        else:
            assert stack.pop() == one - len(items)
    assert not stack


def test_an_arrow_to_an_asynchronous_lane_is_refused(tmp_path: Path) -> None:
    trace = lives([("request", 0, 9)], threads=((0, 4),))
    with pytest.raises(TraceError, match=r"flow \(0, 1\) names a span of an asynchronous lane"):
        write_trace(replace(trace, flows=[(0, 1)]), tmp_path / "t.json")


@pytest.fixture(scope="module")
def run() -> ServeResult:
    """Requests that wait, on two replicas."""
    return serve(model="llama3-8b", requests=30, rate_per_s=100.0, output_tokens=20, replicas=2, max_num_seqs=6)


@pytest.mark.parametrize("name", ["served.json.gz", "served.pftrace"])
def test_every_request_is_a_track_with_its_stages(tmp_path: Path, run: ServeResult, name: str) -> None:
    with perfetto(write_served(run, tmp_path / name)) as engine:
        assert losses(engine) == []
        found = rows(engine, FOUND.format(args=_args(name)))
    requests_pid = to_trace(run).lanes[-1].pid
    assert {pid for pid, *_ in found} == {requests_pid}
    stories: dict[int, dict[str, Any]] = {}
    for _, _, what, ts, dur, depth, number, joules in found:
        assert stories.setdefault(number, {}).setdefault(what, (ts, ts + dur, joules)) == (ts, ts + dur, joules)
        assert depth == (what != "request")
    for one in run.requests.to_dict("records"):
        mine = stories.pop(one["request"])
        assert mine.pop("request") == (ns(one["arrival_s"]), ns(one["done_s"]), None)
        for stage, begin, finish in STAGES:
            if one[finish] > one[begin]:
                assert mine.pop(stage) == (ns(one[begin]), ns(one[finish]), _joules(one, stage))
        assert not mine
    assert not stories
    assert any(what == "queue" for _, _, what, *_ in found)


def ns(seconds: float) -> int:
    """Nanoseconds as the writers round them."""
    return (round(seconds * 1e12) + 500) // 1000


def _joules(request: dict[str, Any], stage: str) -> Any:
    return None if stage in ("queue", "request path") else pytest.approx(request[f"{stage}_j"], rel=1e-5)


def _args(name: str) -> str:
    return "debug" if "pftrace" in name else "args"
