"""Perfetto's own format: the real engine finds in it what it finds in the Chrome JSON, and what that cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim import simulate
from sim.result.trace import TraceWindow
from tests.perfetto_kit import losses, perfetto, rows
from tests.test_traces_chrome import US, counter, one_lane, two_gpus
from traces.errors import TraceError
from traces.records import SpanKind, Trace
from traces.write.chrome import write_chrome
from traces.write.perfetto import write_perfetto

SLICES = (
    "select process.pid, thread.tid, thread.name as lane, slice.name, slice.category, slice.ts, dur, depth, "
    "extract_arg(slice.arg_set_id, '{args}.energy_j') as joules, "
    "extract_arg(slice.arg_set_id, '{args}.flops') as flops "
    "from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) "
    "join process using (upid) order by pid, tid, slice.ts, dur desc"
)
COUNTERS = (
    "select pid, replace(t.name, ' value', '') || iif(coalesce(unit, '') = '', '', ' ' || unit) as label, ts, value "
    "from counter join process_counter_track t on counter.track_id = t.id join process using (upid) "
    "order by pid, label, ts"
)
ARROWS = (
    "select a.ts as start, a.name as source, b.ts as stop, b.name as target from flow "
    "join slice a on slice_out = a.id join slice b on slice_in = b.id order by 1, 2, 3, 4"
)


def found(path: Path, args: str) -> tuple[list[tuple[Any, ...]], ...]:
    with perfetto(path) as engine:
        assert losses(engine) == []
        names = "select pid, name from process where name is not null order by pid"
        return tuple(rows(engine, sql) for sql in (SLICES.format(args=args), COUNTERS, ARROWS, names))


@pytest.mark.parametrize(
    ("fields", "cut"),
    [
        ({"model": "llama3-70b", "layers": 2, "tp": 2, "seq_len": 1024, "overlap_chunks": 2}, TraceWindow()),
        (
            {"model": "llama3-70b", "layers": 2, "tp": 2, "pp": 2, "batch": 2, "seq_len": 512},
            TraceWindow(window_ms=(0.5, 2.5), counter_ms=0.02),
        ),
    ],
)
def test_the_engine_finds_the_same_as_in_chrome_json(fields: dict[str, Any], cut: TraceWindow, tmp_path: Path) -> None:
    trace = cut.of(simulate(**fields))
    ours = found(write_perfetto(trace, tmp_path / "t.pftrace"), "debug")
    theirs = found(write_chrome(trace, tmp_path / "t.json"), "args")
    slices, counters, arrows, _ = ours
    assert len(slices) == len(trace.spans.lane)
    assert len(arrows) == len(trace.flows) > 0
    assert len(counters) > 100
    for mine, chromes in zip(ours, theirs, strict=True):
        assert len(mine) == len(chromes)
        for row, other in zip(mine, chromes, strict=True):
            for value, same in zip(row, other, strict=True):  # joules have six digits in JSON
                assert value == (pytest.approx(same, rel=1e-5) if isinstance(same, float) else same)


FAR_NS = 2**53 + 1  # no double holds it
ARGS = {"n": 2**40, "x": 0.5, "ok": True, "text": 'a "b"', "list": [[1, 2], [3]], "table": {"deep": "down"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One lane of spans that touch, nest or are empty, and a far one; a counter with a unit on each of two GPUs."""
    times = [(0, 1_300_000), (1_300_000, 157_535_600), (157_535_600, 157_900_000), (157_600_000, 157_700_000)]
    times += [(157_900_100, 157_900_200), (157_900_100, 158_000_000), (158_000_000, 158_000_000)]
    trace = replace(
        one_lane(*times, (FAR_NS * 1000, FAR_NS * 1000 + 3_000)),
        processes={0: "GPU 0", 1: "GPU 1"},
        kinds=[SpanKind(name="k", category="kernel", args=ARGS)],
        counters=[replace(counter("power", pid, (0, 700.0)), unit="W") for pid in (0, 1)],
    )
    with perfetto(write_perfetto(trace, tmp_path_factory.mktemp("engine") / "t.pftrace.gz")) as loaded:
        yield loaded


def test_spans_that_touch_nest_or_are_empty_stay_exact(engine: Any) -> None:
    assert losses(engine) == []
    assert rows(engine, "select ts, dur, depth from slice order by ts, depth") == [
        (0, 1300, 0), (1300, 156236, 0), (157536, 364, 0), (157600, 100, 1),
        (157900, 100, 0), (157900, 0, 1), (158000, 0, 0), (FAR_NS, 3, 0),
    ]  # fmt: skip


def test_counters_have_units_and_equal_ones_share_an_axis(engine: Any) -> None:
    key = "extract_arg(source_arg_set_id, 'y_axis_share_key')"
    assert rows(engine, f"select name, unit, {key} as k from counter_track") == [("power", "W", "power")] * 2


def test_arguments_of_every_kind_arrive(engine: Any) -> None:
    one = "(select arg_set_id from slice limit 1)"
    sql = f"select key, display_value as v from args where key like 'debug.%' and arg_set_id = {one} order by key"
    assert dict(rows(engine, sql)) == {
        "debug.n": str(2**40), "debug.x": "0.5", "debug.ok": "true", "debug.text": 'a "b"',
        "debug.list[0][0]": "1", "debug.list[0][1]": "2", "debug.list[1][0]": "3", "debug.table.deep": "down",
    }  # fmt: skip


def test_equal_traces_give_equal_bytes(tmp_path: Path) -> None:
    one, two = (write_perfetto(two_gpus(), tmp_path / name).read_bytes() for name in ("a.pftrace", "b.pftrace"))
    assert one == two
    assert write_perfetto(two_gpus(), tmp_path / "c.pftrace.gz").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize(
    ("trace", "name", "message"),
    [
        (one_lane((0, US)), "t.perfetto", "name it .pftrace or .pftrace.gz"),
        (one_lane((0, 2 * US), (US, 3 * US)), "t.pftrace", "1 spans overlap on one lane"),
        (one_lane((0, US)), "no/t.pftrace", "cannot write trace"),
        (
            replace(one_lane((0, US)), kinds=[SpanKind(name="k", category="c", args={"when": np.datetime64("now")})]),
            "t.pftrace",
            "argument 'when' is a datetime64",
        ),
    ],
)
def test_refusals_name_the_problem_and_leave_nothing(trace: Trace, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        write_perfetto(trace, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("traces.write.files.find_spec", lambda _: None)
    with pytest.raises(TraceError, match=r"pip install 'wattline\[formats\]'"):
        write_perfetto(two_gpus(), tmp_path / "t.pftrace")
