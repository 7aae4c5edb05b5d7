"""Windows, thinned counters, tables of kernels and Chakra traces of a timeline."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from sim import simulate
from sim.cli import app, main
from sim.result.chakra import write_execution_traces
from sim.result.timeline import Timeline
from sim.result.trace import to_trace
from traces.errors import TraceError
from traces.records import Counter, Trace
from traces.write.window import averaged, window

SMALL = {"model": "llama3-70b", "layers": 3, "tp": 2, "seq_len": 1024, "overlap_chunks": 2}


@pytest.fixture(scope="module")
def run() -> Timeline:
    return simulate(**SMALL)


def integral(counter: Counter, begin_ps: float, end_ps: float) -> float:
    """Independent of the writer: every step by itself."""
    ends = [*counter.time_ps[1:].tolist(), end_ps]
    return sum(
        value * max(0.0, min(end, end_ps) - max(begin, begin_ps))
        for begin, end, value in zip(counter.time_ps.tolist(), ends, counter.value.tolist(), strict=True)
    )


# -- windows ---------------------------------------------------------------------------------------------------


def test_a_window_keeps_whole_kernels_and_the_values_at_its_edge(run: Timeline) -> None:
    whole = to_trace(run)
    begin, end = round(0.3 * run.latency_s * 1e12), round(0.6 * run.latency_s * 1e12)
    part = window(whole, begin, end)
    spans = whole.spans
    timed = np.array([kind.timed for kind in whole.kinds])[spans.kind]
    inside = timed & (spans.start_ps < end) & (spans.end_ps > begin)
    kept = np.array([kind.timed for kind in part.kinds])[part.spans.kind]
    assert 0 < inside.sum() < timed.sum()
    assert sorted(part.spans.start_ps[kept].tolist()) == sorted(spans.start_ps[inside].tolist())
    assert part.spans.energy_j[kept].sum() == pytest.approx(spans.energy_j[inside].sum())
    assert part.spans.start_ps[~kept].min() >= begin
    assert part.spans.end_ps[~kept].max() <= end
    for mine, all_of_it in zip(part.counters, whole.counters, strict=True):
        assert mine.time_ps[0] == begin
        assert integral(mine, begin, end) == pytest.approx(integral(all_of_it, begin, end))
    assert 0 < len(part.flows) < len(whole.flows)
    for before, after in part.flows:
        assert part.spans.end_ps[before] <= part.spans.start_ps[after] + 1_000


def test_an_empty_window_says_where_the_trace_ends(run: Timeline) -> None:
    with pytest.raises(TraceError, match=r"no kernel in the window from 5000 ms on: the trace ends at \d+\.\d+ ms"):
        window(to_trace(run), round(5e12), round(6e12))


# -- counters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_ms", [0.05, 0.3, 100.0])
def test_thinned_counters_keep_their_integral(run: Timeline, step_ms: float) -> None:
    whole = to_trace(run)
    thin = averaged(whole, round(step_ms * 1e9))
    end = int(whole.spans.end_ps.max())
    for mine, all_of_it in zip(thin.counters, whole.counters, strict=True):
        assert len(mine.time_ps) <= min(len(all_of_it.time_ps), end / (step_ms * 1e9) + 2)
        if mine.total:
            assert mine.value[-1] == all_of_it.value[-1]
            assert (np.diff(mine.value) >= 0).all()
        else:
            assert integral(mine, 0, end) == pytest.approx(integral(all_of_it, 0, end), rel=1e-9)


def test_a_counter_that_is_sparse_already_is_left_alone() -> None:
    one = Counter(pid=0, name="x", time_ps=np.array([0, 10**12]), value=np.array([1.0, 2.0]))
    empty = to_trace(simulate(model="llama3-8b", layers=1, seq_len=128))
    trace = Trace(processes=empty.processes, lanes=empty.lanes, kinds=empty.kinds, spans=empty.spans, counters=[one])
    assert averaged(trace, 10).counters[0] is one


# -- command line ----------------------------------------------------------------------------------------------

COMMAND = ["simulate", "--model", "llama3-8b", "--layers", "2", "--seq-len", "512", "--quiet"]


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_kernels_are_a_table(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"kernels{ending}"
    result = CliRunner().invoke(app, [*COMMAND, "--kernels", str(path), "--json"])
    written = json.loads(result.stdout)
    table = pd.read_csv(path) if ending == ".csv" else pd.read_parquet(path)
    assert len(table) == written["kernels"]
    assert table["energy_j"].sum() == pytest.approx(written["energy_j"])
    assert table["end_s"].max() == pytest.approx(written["latency_s"])
    part = tmp_path / f"part{ending}"
    CliRunner().invoke(app, [*COMMAND, "--kernels", str(part), "--window", "0.1:0.2"])
    some = pd.read_csv(part) if ending == ".csv" else pd.read_parquet(part)
    assert len(some) == ((table["start_s"] < 0.2e-3) & (table["end_s"] > 0.1e-3)).sum() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--window", "3:2", "--trace", "t.json"],
            "window = '3:2': give START:END in milliseconds, START before END, like 5:7.5",
        ),
        (["--window", "x", "--trace", "t.json"], "window = 'x': give START:END"),
        (["--window", "1:2"], "--window is for --trace and --kernels"),
        (["--counter-ms", "1"], "--counter-ms 1 is for --trace: give a file"),
        (["--kernels", "k.txt"], "'k.txt': a table is written as .parquet or .csv"),
        (["--report", "r.pdf"], "--report 'r.pdf': a report is written as .html"),
        (["--report", "no/r.html"], "cannot write 'no/r.html': no folder 'no'"),
        (
            ["--trace", "ranks", "--trace-layout", "hta", "--kernels", "no/k.csv"],
            "cannot write 'no/k.csv': no folder 'no'",
        ),
        (["--trace", "t.json", "--window", "99999:"], "no kernel in the window from 99999 ms on: the trace ends at"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main([*COMMAND, *options])
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"wattline: {message}")
    assert list(tmp_path.iterdir()) == []


# -- Chakra ----------------------------------------------------------------------------------------------------


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and raw value of every field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
            yield key >> 3, value
        elif key & 7 == 1:
            yield key >> 3, struct.unpack("<d", data[at : at + 8])[0]
            at += 8
        else:
            assert key & 7 == 2
            size, at = varint(data, at)
            yield key >> 3, data[at : at + size]
            at += size


def attributes(data: list[bytes]) -> dict[str, tuple[int, Any]]:
    """Name -> (number of the value's field, value)."""
    found = {}
    for one in data:
        parts = dict(fields(one))
        name = parts.pop(1).decode()
        ((number, value),) = parts.items()
        found[name] = (number, value.decode() if number == 29 else value)
    return found


def nodes(path: Path) -> list[dict[str, Any]]:
    """Nodes of an execution trace, by the field numbers of the public et_def.proto."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        size, at = varint(data, at)
        messages.append(data[at : at + size])
        at += size
    assert dict(fields(messages[0]))[1] == b"0.0.4"
    found = []
    for message in messages[1:]:
        node: dict[str, Any] = {"id": 0, "start": 0, "duration": 0, "deps": []}
        attrs = []
        for number, value in fields(message):
            match number:
                case 1 | 3 | 6 | 7:
                    node[{1: "id", 3: "type", 6: "start", 7: "duration"}[number]] = value
                case 2:
                    node["name"] = value.decode()
                case 5:  # packed
                    place = 0
                    while place < len(value):
                        one, place = varint(value, place)
                        node["deps"].append(one)
                case 10:
                    attrs.append(value)
                case _:
                    raise AssertionError(f"field {number} is not written")
        found.append(node | {"attrs": attributes(attrs)})
    return found


def test_execution_traces_hold_every_kernel_and_what_it_waits_for(run: Timeline, tmp_path: Path) -> None:
    write_execution_traces(run, tmp_path / "et")
    for rank in range(2):
        found = nodes(tmp_path / "et" / f"wattline.{rank}.et")
        mine = run.kernels[run.kernels["gpu"] == rank].sort_values("op")
        assert [node["name"] for node in found] == mine["kernel"].tolist()
        assert sum(node["attrs"]["energy_j"][1] for node in found) == pytest.approx(mine["energy_j"].sum())
        assert max(node["start"] + node["duration"] for node in found) == round(mine["end_s"].max() * 1e6)
        ends = {node["id"]: node["start"] + node["duration"] for node in found}
        for node in found:
            assert all(one in ends for one in node["deps"])
            assert node["start"] >= max((ends[one] for one in node["deps"]), default=0) - 1
            assert node["attrs"]["is_cpu_op"] == (27, 0)


@pytest.mark.parametrize(
    ("scenario", "least"),
    [
        ({"model": "llama3-8b", "layers": 4, "phase": "decode", "batch": 8}, 0.99),
        ({"model": "llama3-70b", "layers": 3, "tp": 2, "seq_len": 1024}, 0.99),
        (SMALL, 0.9),  # chunks wait for SMs, which is no dependency
    ],
)
def test_a_reader_that_knows_only_dependencies_comes_near_the_latency(
    scenario: dict[str, Any], least: float, tmp_path: Path
) -> None:
    run = simulate(**scenario)
    write_execution_traces(run, tmp_path)
    ends: dict[int, int] = {}
    for node in nodes(tmp_path / "wattline.0.et"):
        ends[node["id"]] = max((ends[one] for one in node["deps"]), default=0) + node["duration"]
    assert least * run.latency_s * 1e6 <= max(ends.values()) <= 1.001 * run.latency_s * 1e6


def test_collectives_say_what_kind_how_much_and_who(tmp_path: Path) -> None:
    run = simulate(model="llama3-70b", layers=2, tp=2, pp=2, seq_len=512, sequence_parallel=True)
    write_execution_traces(run, tmp_path)
    groups = json.loads((tmp_path / "comm_groups.json").read_text())
    by_rank = [nodes(tmp_path / f"wattline.{rank}.et") for rank in range(4)]
    full = 512 * 8192 * 2  # tokens x width x bytes
    seen = set()
    for rank, found in enumerate(by_rank):
        for node in found:
            attrs = node["attrs"]
            match node["type"]:
                case 7:
                    seen.add(attrs["comm_type"])
                    assert rank in groups[attrs["pg_name"][1]]
                    if attrs["comm_type"][1] == 2:  # all-gather: a rank's own part, as int64 (field 9)
                        assert attrs["comm_size"] == (9, full // 2)
                    elif attrs["comm_type"][1] == 7:  # reduce-scatter: all of it
                        assert attrs["comm_size"] == (9, full)
                case 5:
                    assert attrs["comm_src"] == (7, rank)
                case 6:
                    assert attrs["comm_dst"] == (7, rank)
                    sender = by_rank[attrs["comm_src"][1]]
                    twins = [n for n in sender if n["type"] == 5 and n["attrs"]["comm_tag"] == attrs["comm_tag"]]
                    assert [n["attrs"]["comm_size"] for n in twins] == [attrs["comm_size"]]
                case kind:
                    assert kind == 4
                    assert attrs["num_ops"][0] == 9
                    assert attrs["tensor_size"][0] == 13
    assert seen >= {(9, 2), (9, 7)}


def test_a_step_round_a_ring_is_a_send_and_a_receive(tmp_path: Path) -> None:
    run = simulate(model="llama3-8b", layers=1, cp=4, cp_mode="ring", seq_len=4096)
    write_execution_traces(run, tmp_path)
    by_rank = [nodes(tmp_path / f"wattline.{rank}.et") for rank in range(4)]
    for rank, found in enumerate(by_rank):
        sends = [node["attrs"] for node in found if node["type"] == 5]
        receives = [node["attrs"] for node in found if node["type"] == 6]
        assert len(sends) == len(receives) == 3
        for sent in sends:
            next_rank = sent["comm_dst"][1]
            assert next_rank == (rank + 1) % 4
            twin = [node["attrs"] for node in by_rank[next_rank] if node["type"] == 6]
            assert sent["comm_tag"] in [one["comm_tag"] for one in twin if one["comm_src"] == (7, rank)]


def test_chakras_own_reader_agrees(run: Timeline, tmp_path: Path) -> None:
    """Where the package mlc-chakra is installed (it wants an old HolisticTraceAnalysis, so we do not ask for it)."""
    schema = pytest.importorskip("chakra.schema.protobuf.et_def_pb2", reason="needs the package mlc-chakra")
    protolib = pytest.importorskip("chakra.src.third_party.utils.protolib")
    write_execution_traces(run, tmp_path)
    ours = nodes(tmp_path / "wattline.0.et")
    with protolib.openFileRd(str(tmp_path / "wattline.0.et")) as file:
        assert protolib.decodeMessage(file, schema.GlobalMetadata())
        for mine in ours:
            node = schema.Node()
            assert protolib.decodeMessage(file, node)
            assert (node.id, node.name, node.type, list(node.data_deps)) == tuple(
                mine[key] for key in ("id", "name", "type", "deps")
            )
            assert {attr.name for attr in node.attr} == set(mine["attrs"])
        assert not protolib.decodeMessage(file, schema.Node())


def test_a_run_and_its_trace_are_written_without_pandas(tmp_path: Path) -> None:
    script = (
        "import sys; from sim.cli import main\n"
        f"main(['simulate', 'llama3-8b', '--layers', '1', '--trace', {str(tmp_path / 'run.json.gz')!r}])\n"
        "sys.exit('pandas' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run.json.gz").stat().st_size > 0
