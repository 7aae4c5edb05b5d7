"""Sweeps: every row once, whatever stops, dies or fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim import simulate
from sim.cli import main
from sim.errors import SimError
from sim.explore.grid import ScenarioGrid, parse_grid
from sim.explore.in_work import slowest, telling
from sim.explore.sweep import LOOK_EVERY, Collector, append, run_batch, sweep
from sim.explore.table import read_table
from sim.explore.workers import Pool, WorkerDied

SMALL = {"model": "llama3-8b", "layers": 1, "lm_head": False}
ALONE = Pool(jobs=1)


def grid_of(**axes: Any) -> ScenarioGrid:
    return parse_grid({"base": SMALL, "grid": axes}, where="test")


def seq_lens(count: int) -> ScenarioGrid:
    return grid_of(seq_len={"from": 64, "to": 63 + count, "step": 1})


def caps(count: int) -> ScenarioGrid:
    """Scenarios that are quick because they share their work: power limits that none of them reaches."""
    return grid_of(phase=["decode"], power_cap_w={"from": 600, "to": 600 + (count - 1) / 10, "step": 0.1})


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_row_holds_the_scenario_and_the_figures_of_its_run(tmp_path: Path, ending: str) -> None:
    done = sweep(grid_of(batch=[1, 2]), tmp_path / f"rows.{ending}", pool=ALONE)
    table = read_table(tmp_path / f"rows.{ending}")
    run = simulate(**SMALL, batch=2)
    row = table[table["batch"] == 2].iloc[0]
    assert (done.rows, done.failed, done.resumed) == (2, 0, 0)
    assert row["latency_s"] == row["ttft_s"] == run.latency_s
    assert row["energy_j"] == run.energy_j
    assert row["seq_len"] == 2048 and row["world"] == 1 and row["gpu"] == "h100-sxm-80gb"
    families = [name for name in table.columns if name.startswith("energy_j_") and "per" not in name]
    assert row[families].sum() == pytest.approx(run.energy_j, rel=1e-9)
    assert [p.name for p in tmp_path.iterdir()] == [f"rows.{ending}"]


def test_failing_rows_carry_their_error_and_stop_nothing(tmp_path: Path) -> None:
    done = sweep(grid_of(tp=[1, 3, 2], model=["llama3-8b", "llama9"]), tmp_path / "r.parquet", pool=ALONE)
    table = read_table(tmp_path / "r.parquet")
    assert (done.rows, done.failed) == (6, 4)
    assert table["error"].notna().sum() == 4 and not table.loc[table["error"].notna(), "feasible"].any()
    assert table.loc[(table["tp"] == 3) & (table["model"] == "llama3-8b"), "error"].item().startswith("tp = 3 does not")
    assert table.loc[table["error"].isna(), "latency_s"].notna().all()


def test_conditions_on_results_mark_rows(tmp_path: Path) -> None:
    data = {"base": SMALL, "grid": {"batch": [1, 8]}, "where": ["latency_s < 0.002"]}
    sweep(parse_grid(data, where="test"), tmp_path / "r.parquet", pool=ALONE)
    table = read_table(tmp_path / "r.parquet")
    assert (table["feasible"] == (table["latency_s"] < 0.002)).all() and table["feasible"].tolist() == [True, False]


def test_interrupted_sweeps_resume_and_run_nothing_twice(tmp_path: Path) -> None:
    grid, out = seq_lens(48), tmp_path / "r.parquet"

    def stop(done: int, _failed: int) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(grid, out, pool=ALONE, step=stop)
    journal = tmp_path / "r.parquet.journal"
    assert not out.exists()
    kept = len(journal.read_bytes().splitlines())
    with journal.open("ab") as stream:
        stream.write(b'{"scenario_id": "half a li')  # what a crash in the middle of writing leaves
    done = sweep(grid, out, pool=ALONE)
    assert (done.rows, done.resumed) == (48, kept) and 20 <= kept < 48
    assert sorted(read_table(out)["seq_len"]) == list(range(64, 112))
    # A larger grid runs only what is new.
    assert sweep(seq_lens(50), out, pool=ALONE).resumed == 48
    assert sweep(seq_lens(50), out, pool=ALONE, fresh=True).resumed == 0


def test_a_second_sweep_into_one_file_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    grid, out = seq_lens(6), tmp_path / "r.parquet"
    refusals = []

    def again(done: int, _failed: int) -> None:
        if done:
            with pytest.raises(SimError) as refused:
                sweep(seq_lens(8), out, pool=ALONE)
            refusals.append(str(refused.value))

    assert sweep(grid, out, pool=ALONE, step=again).rows == 6
    assert set(refusals) == {f"another sweep is writing '{out}': wait until it ends, or give another --out"}
    assert sweep(seq_lens(8), out, pool=ALONE).resumed == 6


def test_a_dead_worker_process_is_replaced(tmp_path: Path) -> None:
    killed = []

    def kill_one(done: int, _failed: int) -> None:
        if done >= 4 and not killed:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
            workers = [int(c) for c in children if b"loky" in Path(f"/proc/{c}/cmdline").read_bytes()]
            victim = next(c for c in workers if b"resource_tracker" not in Path(f"/proc/{c}/cmdline").read_bytes())
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    done = sweep(caps(120), tmp_path / "r.parquet", pool=Pool(jobs=2), step=kill_one)
    table = read_table(tmp_path / "r.parquet")
    assert killed and (done.rows, done.failed) == (120, 0)
    assert sorted(table["power_cap_w"]) == pytest.approx([600 + i / 10 for i in range(120)])


def test_what_workers_die_of_is_handed_out_in_halves(tmp_path: Path) -> None:
    longest = []

    class Deadly(Pool):
        def map(self, _: object, batches: Sequence[Sequence[object]]) -> Iterator[Any]:
            longest.append(max(map(len, batches)))
            raise WorkerDied("killed")
            yield

    with pytest.raises(SimError, match=r"workers died 3 times without finishing a row \(killed\); 120 rows are left"):
        sweep(caps(120), tmp_path / "r.parquet", pool=Deadly(jobs=2))
    assert longest == [7, 3, 1]


def test_shell_prints_the_four_fixed_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "g.toml"
    file.write_text('[base]\nmodel = "llama3-8b"\nlayers = 1\n[grid]\nbatch = [1, 2]\n', encoding="utf-8")
    main_ok(["sweep", str(file), "--out", str(tmp_path / "r.parquet"), "--jobs", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 2 and found["failed"] == 0
    assert found["scenarios_per_s"] == pytest.approx(2 / found["wall_s"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--out", "r.xlsx"], "'r.xlsx': a sweep is written as .parquet or .csv"),
        (["--out", "none/r.parquet"], "cannot write 'none/r.parquet': no folder 'none'"),
        (["--out", "r.csv", "--address", "tcp://x:1"], "--address tcp://x:1 needs --backend dask or ray"),
        (["--out", "r.csv", "--backend", "dask"], "--backend dask needs --address tcp://HOST:PORT of its scheduler"),
    ],
)
def test_bad_options_are_one_line(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("g.toml").write_text('[base]\nmodel = "llama3-8b"\nlayers = 1\n', encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "g.toml", *args])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"wattline: {message}\n"
    assert [p.name for p in tmp_path.iterdir()] == ["g.toml"]


def main_ok(args: list[str]) -> None:
    main(args)


# -- a real Dask cluster: a scheduler and two workers, each a process of its own -----------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    pytest.importorskip("distributed")
    found = tmp_path / "scheduler.json"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}

    def start(module: str, *args: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{module}", *args, "--no-dashboard"]
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    local = ("--nthreads", "1", "--no-nanny", "--local-directory", str(tmp_path / "dask"))
    started = [start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(found))]
    try:
        deadline = time.monotonic() + 30
        while not (found.exists() and found.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        address = json.loads(found.read_text(encoding="utf-8"))["address"]
        started += [start("dask_worker", address, *local) for _ in range(2)]
        yield address, started[1:]
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_thousand_rows_on_dask_with_a_worker_killed(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    from distributed import Client

    address, workers = cluster
    with Client(address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=30)

    def kill_one(done: int, _failed: int) -> None:
        if done >= 200 and workers[0].poll() is None:
            workers[0].kill()

    done = sweep(caps(1000), tmp_path / "r.parquet", pool=Pool(backend="dask", address=address), step=kill_one)
    table = read_table(tmp_path / "r.parquet")
    assert workers[0].wait() == -signal.SIGKILL and workers[1].poll() is None
    assert (done.rows, done.failed, len(table)) == (1000, 0, 1000)
    assert (
        sorted(table["power_cap_w"]) == pytest.approx([600 + i / 10 for i in range(1000)])
        and table["scenario_id"].is_unique
    )
    assert pd.notna(table["energy_j"]).all()


def test_scenarios_that_share_work_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[int, float]] = []

    def noted(batch: list[tuple[str, dict[str, Any]]], **options: Any) -> list[str]:
        ran.extend((fields["seq_len"], fields["power_cap_w"]) for _, fields in batch)
        return run_batch(batch, **options)

    class Here(Pool):
        def map(self, function: Any, batches: Any) -> Iterator[Any]:
            return map(function, batches)

    monkeypatch.setattr("sim.explore.sweep.run_batch", noted)
    grid = grid_of(power_cap_w=[500, 600, 700], seq_len=[64, 128])
    sweep(grid, tmp_path / "rows.parquet", pool=Here(jobs=1))
    assert [length for length, _ in ran] == [64, 64, 64, 128, 128, 128]
    assert [cap for _, cap in ran] == [500, 600, 700] * 2
    rows = read_table(tmp_path / "rows.parquet")
    assert list(rows["seq_len"]) == [64, 128] * 3  # the table keeps the grid's order


def test_what_a_worker_returns_is_lines_of_json() -> None:
    good, bad = run_batch([("a", SMALL), ("b", {"model": "llama3-8b", "batch": 0})])
    assert json.loads(good)["error"] is None and json.loads(good)["energy_j"] > 0
    assert json.loads(bad)["error"] == "scenario: batch = 0: input should be greater than 0"


def test_a_scenario_that_takes_long_is_told_of_until_its_row_is_there(tmp_path: Path) -> None:
    journal, heard = tmp_path / "r.parquet.journal", threading.Event()
    assert slowest(journal, time.time()) == ""
    journal.touch()

    def write(line: str) -> None:
        append(journal, [line])
        heard.set()

    with telling(write, tell_s=0.01) as begun:
        begun("a", {"model": "llama3-8b", "tp": 4, "regime": "cold"}).say("full detail: 9 kernels")
        assert heard.wait(30)
    told = json.loads(journal.read_text(encoding="utf-8").splitlines()[0])
    now = told["begun_s"] + 7
    assert slowest(journal, now) == "in work for 7 s: model llama3-8b, tp 4: full detail: 9 kernels"
    assert slowest(journal, now + 60) == ""  # whoever told is gone
    append(journal, ['{"scenario_id": "a", "error": null}\n'])
    assert slowest(journal, now) == ""
    # A sweep that resumes from the journal takes such lines for no rows.
    assert sweep(seq_lens(2), tmp_path / "r.parquet", pool=ALONE).resumed == 0


def test_batches_are_looked_through_while_they_leave_cycles_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter((7, 0, 3, 0, 0))
    found: list[int] = []
    monkeypatch.setattr("sim.explore.sweep.gc.freeze", lambda: None)
    monkeypatch.setattr("sim.explore.sweep.gc.collect", lambda: found.append(next(left)) or found[-1])
    collector, looks = Collector(), []
    for batch in range(3 * LOOK_EVERY + 2):
        before = len(found)
        collector.look()
        looks += [batch] * (len(found) - before)
    assert looks == [0, 1, 1 + LOOK_EVERY, 2 + LOOK_EVERY, 2 + 2 * LOOK_EVERY]
