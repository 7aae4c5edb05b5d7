"""Chrome traces: what is written, what is refused, and what the real Perfetto engine makes of it."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.perfetto_kit import losses, perfetto, rows
from traces.errors import TraceError
from traces.lint import overlaps
from traces.records import Counter, Lane, SpanKind, Spans, Trace
from traces.write import chrome
from traces.write.chrome import write_chrome

US = 1_000_000  # picoseconds


def spans(table: Sequence[tuple[int, int, int, int, float]]) -> Spans:
    """Spans from rows of (lane, kind, start ps, end ps, joules)."""
    lane, kind, start, end, energy = zip(*table, strict=True)
    ints = [np.array(column, dtype=np.int64) for column in (lane, kind, start, end)]
    return Spans(lane=ints[0], kind=ints[1], start_ps=ints[2], end_ps=ints[3], energy_j=np.array(energy, dtype=float))


def counter(name: str, pid: int, *steps: tuple[int, float]) -> Counter:
    times, values = zip(*steps, strict=True)
    return Counter(pid=pid, name=name, time_ps=np.array(times, dtype=np.int64), value=np.array(values, dtype=float))


def two_gpus() -> Trace:
    """A GEMM, then a collective on a stream of its own, on each of two GPUs, under a layer slice."""
    kinds = [
        SpanKind(name='gemm "q\\k"', category="kernel", args={"stream": 7, "m": 4096}),
        SpanKind(name="ncclDevKernel_AllReduce", category="kernel", args={"stream": 8}),
        SpanKind(name="layer 0", category="layer"),
    ]
    lanes = [
        Lane(pid=gpu, tid=tid, name=name, order=tid)
        for gpu in (0, 1)
        for tid, name in ((2, "layers"), (7, "stream 7"), (8, "stream 8"))
    ]
    table = []
    for gpu in (0, 1):
        table += [
            (3 * gpu + 0, 2, 0, 3 * US, math.nan),
            (3 * gpu + 1, 0, 0, 2 * US - 400, 0.5),
            (3 * gpu + 2, 1, 2 * US - 400, 3 * US, 0.25),
        ]
    return Trace(
        processes={0: "GPU 0", 1: "GPU 1"},
        lanes=lanes,
        kinds=kinds,
        spans=spans(table),
        counters=[counter("power W", gpu, (0, 700.0), (US, 700.0), (2 * US, 400.0)) for gpu in (0, 1)],
        flows=[(1, 2), (4, 5)],
        metadata={"wattline": {"seed": 1}},
    )


def one_lane(*times_ps: tuple[int, int]) -> Trace:
    kinds = [SpanKind(name="k", category="kernel", args={"stream": 7})]
    lanes = [Lane(pid=0, tid=7, name="stream 7", order=7)]
    table = spans([(0, 0, start, end, math.nan) for start, end in times_ps])
    return Trace(processes={0: "GPU 0"}, lanes=lanes, kinds=kinds, spans=table)


def written(trace: Trace, folder: Path, **options: Any) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(write_chrome(trace, folder / "t.json", **options).read_text())
    return loaded


def test_spans_are_exact_nanoseconds_in_microsecond_text(tmp_path: Path) -> None:
    text = write_chrome(two_gpus(), tmp_path / "t.json").read_text()
    # 2 us - 400 ps rounds to 2.000 us for the end of one and the start of the next: they touch.
    assert '"pid":0,"tid":7,"ts":0.000,"dur":2.000,"args":{"stream":7,"m":4096,"energy_j":0.5}}' in text
    assert '"pid":0,"tid":8,"ts":2.000,"dur":1.000,"args":{"stream":8,"energy_j":0.25}}' in text
    assert '"name":"layer 0","cat":"layer","pid":0,"tid":2,"ts":0.000,"dur":3.000,"args":{}}' in text


def test_the_rank_is_where_readers_look_for_it(tmp_path: Path) -> None:
    trace = replace(two_gpus(), metadata={"first": {"rank": 9}, "distributedInfo": {"rank": 3, "world_size": 4}})
    text = write_chrome(trace, tmp_path / "t.json").read_text()
    found = re.search(r'"rank":\s+(\d+)', text)
    assert found is not None and found.group(1) == "3"
    assert json.loads(text)["distributedInfo"] == {"rank": 3, "world_size": 4}


def test_counters_are_written_on_change_only(tmp_path: Path) -> None:
    events = written(two_gpus(), tmp_path)["traceEvents"]
    power = [(e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert power == [(0.0, 700.0), (2.0, 400.0)]


def test_of_two_counter_values_in_one_nanosecond_the_last_holds(tmp_path: Path) -> None:
    trace = replace(two_gpus(), counters=[counter("power W", 0, (0, 1.0), (5_100, 2.0), (5_200, 3.0))])
    events = written(trace, tmp_path)["traceEvents"]
    assert [(e["ts"], e["args"]["value"]) for e in events if e["ph"] == "C"] == [(0.0, 1.0), (0.005, 3.0)]


def test_launches_pair_with_their_kernels(tmp_path: Path) -> None:
    trace = two_gpus()
    kinds = [trace.kinds[0], replace(trace.kinds[1], name="all_reduce", communication=True), trace.kinds[2]]
    events = written(replace(trace, kinds=kinds), tmp_path, launches=True)["traceEvents"]
    kernels = {e["args"]["correlation"]: e for e in events if e.get("cat") == "kernel"}
    launches = {e["args"]["correlation"]: e for e in events if e["name"] == "cudaLaunchKernel"}
    assert sorted(kernels) == sorted(launches) == [2, 3, 5, 6]
    assert all(launches[n]["ts"] + launches[n]["dur"] <= kernels[n]["ts"] for n in kernels)
    assert [kernels[n]["args"]["device"] for n in sorted(kernels)] == [0, 0, 1, 1]
    assert not any("stream" in launch["args"] for launch in launches.values())  # a stream would make it a kernel
    assert {e["name"] for e in kernels.values()} == {'gemm "q\\k"', "ncclDevKernel_all_reduce"}
    (layer,) = {json.dumps(e["args"]) for e in events if e.get("cat") == "layer"}
    assert layer == "{}"


def test_launches_run_one_kernel_ahead(tmp_path: Path) -> None:
    trace = one_lane((500_000, US), (US, 2 * US), (3 * US, 4 * US))
    events = written(trace, tmp_path, launches=True)["traceEvents"]
    launches = [(e["ts"], e["dur"]) for e in events if e["name"] == "cudaLaunchKernel"]
    # In whole microseconds two begin 1 us after the start: all moves by 1 us, so that both launches fit before.
    assert [(e["ts"], e["dur"]) for e in events if e.get("cat") == "kernel"] == [(2, 0), (2, 1), (4, 1)]
    assert launches == [(0, 1), (1, 1), (2, 1)]


def test_equal_traces_give_equal_bytes(tmp_path: Path) -> None:
    one = write_chrome(two_gpus(), tmp_path / "one.json.gz").read_bytes()
    two = write_chrome(two_gpus(), tmp_path / "two.json.gz").read_bytes()
    assert one == two
    assert gzip.decompress(one) == write_chrome(two_gpus(), tmp_path / "plain.json").read_bytes()


def test_repeated_and_distinct_spans_are_formatted_alike(tmp_path: Path) -> None:
    # Chunks of repeated joules take a memoised path, chunks of distinct joules a direct one.
    many = 100
    for energy in (np.full(many, 0.125), np.arange(many) / 8, np.full(many, math.nan)):
        table = [(0, 0, n * US, n * US + 1_000 * (n % 3), energy[n]) for n in range(many)]
        trace = replace(one_lane((0, US)), spans=spans(table))
        events = [e for e in written(trace, tmp_path)["traceEvents"] if e["ph"] == "X"]
        assert [e["ts"] for e in events] == list(range(many))
        assert [e["dur"] for e in events] == [(n % 3) / 1000 for n in range(many)]
        expected = [{"stream": 7} if math.isnan(j) else {"stream": 7, "energy_j": j} for j in energy.tolist()]
        assert [e["args"] for e in events] == expected


def test_overlap_on_a_lane_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        write_chrome(one_lane((0, 2 * US), (US, 3 * US)), tmp_path / "t.json")
    assert str(error.value) == (
        "1 spans overlap on one lane, the first 'k' on lane 'stream 7' of 'GPU 0': "
        "give each concurrent queue a lane of its own"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counters": [counter("W", 0, (0, math.nan))]}, "counter 'W' holds a value that is not finite"),
        ({"counters": [counter("W", 0, (5, 1.0), (2, 1.0))]}, "counter 'W' goes back in time"),
        ({"counters": [counter("W", 9, (0, 1.0))]}, "counter 'W' belongs to process 9"),
        ({"metadata": {"cap": math.inf}}, "metadata cannot be written as JSON"),
        ({"kinds": [SpanKind(name="k", category="kernel", args={"a": math.nan})]}, "arguments of 'k' cannot"),
        ({"kinds": []}, "a span's kind is outside the 0 kinds"),
        ({"spans": spans([(0, 0, 5, 2, 0.0)])}, "a span starts before 0 or ends before it starts"),
        ({"spans": spans([(0, 0, 0, 2, math.inf)])}, "a span's energy_j is infinite"),
        ({"lanes": [Lane(pid=0, tid=2**32, name="s", order=0)]}, "lane 's': pid 0, tid 4294967296"),
        ({"lanes": [Lane(pid=0, tid=1, name="s", order=0)] * 2}, "lane 's': pid 0, tid 1 is taken"),
        ({"lanes": [Lane(pid=3, tid=1, name="s", order=0)]}, "lane 's' belongs to process 3"),
        ({"flows": [(0, 1)]}, r"flow \(0, 1\) names a span outside the 1"),
    ],
)
def test_what_perfetto_would_lose_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as error:
        write_chrome(replace(one_lane((0, US)), **change), tmp_path / "t.json")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot write trace '.*t\.json': No such file or directory$"):
        write_chrome(two_gpus(), tmp_path / "absent" / "t.json")
    (tmp_path / "t.json").mkdir()
    with pytest.raises(TraceError, match=r"cannot write trace .*: Is a directory$"):
        write_chrome(two_gpus(), tmp_path / "t.json")
    with pytest.raises(TraceError, match=r"name it \.json, \.json\.gz, \.pftrace or \.pftrace\.gz"):
        write_chrome(two_gpus(), tmp_path / "t.txt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_an_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "t.json.gz"
    before = write_chrome(two_gpus(), target).read_bytes()

    def broken(*_: Any) -> Any:
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr(chrome, "_flow_text", broken)
    with pytest.raises(KeyboardInterrupt):
        write_chrome(two_gpus(), target)
    assert target.read_bytes() == before
    assert list(tmp_path.iterdir()) == [target]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=12))
def test_lint_agrees_with_a_plain_search_on_whether_anything_overlaps(table: list[tuple[int, int, int]]) -> None:
    laid = [(lane, 0, 1_000 * start, 1_000 * (start + length), 0.0) for lane, start, length in table]

    def crosses(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
        (lane_a, start_a, length_a), (lane_b, start_b, length_b) = a, b
        return lane_a == lane_b and start_a < start_b < start_a + length_a < start_b + length_b

    count, first = overlaps(spans(laid))
    assert (count > 0) == any(crosses(a, b) for a in table for b in table)
    assert (first >= 0) == (count > 0)


def test_the_engine_sees_every_slice_lane_counter_and_flow(tmp_path: Path) -> None:
    path = write_chrome(two_gpus(), tmp_path / "t.json.gz")
    with perfetto(path) as engine:
        assert losses(engine) == []
        slices = rows(
            engine,
            "select process.pid, thread.tid, slice.name, slice.ts, dur from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
            "join process using (upid) order by pid, tid, slice.ts",
        )
        one = [(2, "layer 0", 0, 3000), (7, 'gemm "q\\k"', 0, 2000), (8, "ncclDevKernel_AllReduce", 2000, 1000)]
        assert slices == [(gpu, *row) for gpu in (0, 1) for row in one]
        assert rows(engine, "select name from thread where tid > 1 and name is not null order by name") == [
            ("layers",), ("layers",), ("stream 7",), ("stream 7",), ("stream 8",), ("stream 8",),
        ]  # fmt: skip
        names = rows(engine, "select name from process where name is not null order by pid")
        assert names == [("GPU 0",), ("GPU 1",)]
        values = rows(
            engine,
            "select pid, ts, value from counter join process_counter_track t on counter.track_id = t.id "
            "join process using (upid) order by pid, ts",
        )
        assert values == [(gpu, *step) for gpu in (0, 1) for step in ((0, 700.0), (2000, 400.0))]
        arrows = rows(
            engine,
            "select a.name as source, b.name as target from flow "
            "join slice a on slice_out = a.id join slice b on slice_in = b.id",
        )
        assert arrows == [('gemm "q\\k"', "ncclDevKernel_AllReduce")] * 2
        joules = rows(engine, "select sum(extract_arg(arg_set_id, 'args.energy_j')) as j from slice")
        assert joules == [(1.5,)]


def test_the_engine_keeps_touching_nested_and_empty_spans(tmp_path: Path) -> None:
    # 1.300 + 156.236 us ends where the next begins (google/perfetto#5012), then a child, then empty spans.
    times = [(0, 1_300_000), (1_300_000, 157_535_600), (157_535_600, 157_900_000), (157_600_000, 157_700_000)]
    times += [(157_900_100, 157_900_200), (157_900_100, 158_000_000)]
    path = write_chrome(one_lane(*times), tmp_path / "t.json")
    with perfetto(path) as engine:
        assert losses(engine) == []
        assert rows(engine, "select count(*), max(depth), min(dur) from slice") == [(6, 1, 0)]


def test_lint_counts_what_the_engine_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    start = np.sort(rng.integers(0, 400, 300)) * 1_000
    trace = one_lane(*zip(start.tolist(), (start + rng.integers(1, 4, 300) * 1_000).tolist(), strict=True))
    expected, _ = overlaps(trace.spans)
    monkeypatch.setattr(chrome, "check_trace", lambda _: None)
    path = write_chrome(trace, tmp_path / "t.json")
    with perfetto(path) as engine:
        ((kept,),) = rows(engine, "select count(*) from slice")
        if not losses(engine):
            pytest.skip("this engine spills overlapping slices to a row of their own instead of dropping them")
        assert 300 - kept == expected > 0


def test_the_engine_reads_a_launch_file_without_loss(tmp_path: Path) -> None:
    path = write_chrome(two_gpus(), tmp_path / "rank0.json.gz", launches=True)
    with perfetto(path) as engine:
        assert losses(engine) == []
        assert rows(engine, "select count(*) from slice where name = 'cudaLaunchKernel'") == [(4,)]
