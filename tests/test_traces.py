"""The Chrome writer: exact text, what it refuses, nothing half-written, and the engine's own opinion."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.perfetto_kit import losses, perfetto, rows
from traces.errors import TraceError
from traces.lint import overlaps
from traces.records import Counter, Lane, SpanKind, Spans, Trace
from traces.write.chrome import write_chrome


def spans(*items: tuple[int, int, int], lane: int = 0) -> Spans:
    """(kind, start ps, end ps) on one lane."""
    columns = np.array(items, dtype=np.int64).reshape(-1, 3)
    return Spans(
        lane=np.full(len(columns), lane, dtype=np.int64),
        kind=columns[:, 0],
        start_ps=columns[:, 1],
        end_ps=columns[:, 2],
        energy_j=np.full(len(columns), 0.5),
    )


def trace(of: Spans, **changes: Any) -> Trace:
    fields: dict[str, Any] = {
        "processes": {0: "GPU 0"},
        "lanes": [Lane(pid=0, tid=7, name="stream 7", order=7)],
        "kinds": [
            SpanKind(name='a "quoted" gemm', category="kernel", args={"m": 1}, timed=True),
            SpanKind(name="b", category="kernel", timed=True),
        ],
        "spans": of,
    }
    return Trace(**fields | changes)


def events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_times_are_exact_nanoseconds_and_neighbours_touch(tmp_path: Path) -> None:
    # 1.2345 us and 2.4996 us fall between nanoseconds: both sides of the seam round alike
    path = write_chrome(trace(spans((0, 0, 1_234_500), (1, 1_234_500, 2_499_600))), tmp_path / "t.json")
    first, second = [e for e in events(path) if e["ph"] == "X"]
    assert (first["ts"], first["dur"]) == (0.0, 1.235)
    assert (second["ts"], second["dur"]) == (1.235, 1.265)
    assert first["name"] == 'a "quoted" gemm' and first["args"] == {"m": 1, "energy_j": 0.5}
    text = path.read_text()
    assert '"ts":1.235,"dur":1.265' in text
    assert text.index('"distributedInfo": {"rank": 0}') == 1


def test_counters_are_written_on_change_only(tmp_path: Path) -> None:
    counter = Counter(
        pid=0, name="power W", time_ps=np.array([0, 1000, 2000, 2400, 5000]), value=np.array([1.0, 1.0, 2.0, 3.0, 3.0])
    )
    path = write_chrome(trace(spans((0, 0, 10_000)), counters=[counter]), tmp_path / "t.json")
    # 2000 and 2400 ps are one nanosecond: the later value holds
    assert [(e["ts"], e["args"]["value"]) for e in events(path) if e["ph"] == "C"] == [(0.0, 1), (0.002, 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spans": spans((0, 0, 3_000_000), (1, 2_000_000, 4_000_000))},
            "1 spans overlap on one lane, the first 'b' on lane 'stream 7' of 'GPU 0': give each concurrent queue a "
            "lane of its own",
        ),
        (
            {"spans": spans((0, -1, 5))},
            "a span starts before 0 or ends before it starts: times must be non-negative and ordered",
        ),
        (
            {"counters": [Counter(pid=0, name="W", time_ps=np.array([0]), value=np.array([np.nan]))]},
            "counter 'W' holds a value that is not finite: Perfetto would hang on it",
        ),
    ],
)
def test_what_perfetto_would_lose_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        write_chrome(trace(changes.pop("spans", spans((0, 0, 1000))), **changes), tmp_path / "t.json")
    assert str(error.value) == message
    assert list(tmp_path.iterdir()) == []


def test_unwritable_places_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot write trace '.*': No such file or directory"):
        write_chrome(trace(spans((0, 0, 1000))), tmp_path / "no" / "t.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(TraceError, match="cannot write trace"):
        write_chrome(trace(spans((0, 0, 1000))), tmp_path / "folder.json")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.json"]


def test_equal_traces_give_equal_bytes(tmp_path: Path) -> None:
    written = [write_chrome(trace(spans((0, 0, 1000))), tmp_path / f"{i}.json.gz").read_bytes() for i in range(2)]
    assert written[0] == written[1]


def test_nested_spans_are_fine_partial_overlaps_are_counted() -> None:
    assert overlaps(spans((0, 0, 9_000), (1, 1_000, 2_000), (1, 2_000, 9_000))) == (0, -1)
    assert overlaps(spans((0, 0, 3_000), (1, 1_000, 4_000), (1, 5_000, 6_000))) == (1, 1)


def test_the_engine_drops_exactly_what_the_lint_counts(tmp_path: Path) -> None:
    """Written by hand past the writer's own check: the engine must lose as many slices as the lint says."""
    of = spans((0, 0, 3_000_000), (1, 2_000_000, 4_000_000), (1, 5_000_000, 6_000_000), (0, 5_500_000, 7_000_000))
    path = tmp_path / "bad.json"
    path.write_text(
        json.dumps(
            [
                {"ph": "X", "name": str(k), "pid": 1, "tid": 1, "ts": s / 1e6, "dur": (e - s) / 1e6}
                for k, s, e in zip(of.kind.tolist(), of.start_ps.tolist(), of.end_ps.tolist(), strict=True)
            ]
        )
    )
    with perfetto(path) as engine:
        lost = dict(losses(engine))
        [(kept,)] = rows(engine, "select count(*) as n from slice")
    assert (
        lost
        == {"slice_drop_overlapping_complete_event": overlaps(of)[0]}
        == {"slice_drop_overlapping_complete_event": 2}
    )
    assert kept == 2
