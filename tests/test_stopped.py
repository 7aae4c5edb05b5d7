"""A command that is stopped from outside ends in one line, its workers with it, and the rows it had stay."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sim.explore import sweep as sweeping
from tests.command_kit import run


def test_a_row_is_in_the_journal_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = tmp_path / "rows.csv.journal"
    journal.touch()
    seen: list[int] = []

    def row(i: str, *_: Any, **__: Any) -> dict[str, Any]:
        seen.append(journal.read_bytes().count(b"\n"))
        return {"scenario_id": i, "error": None}

    monkeypatch.setattr(sweeping, "_row", row)
    lines = sweeping.run_batch([("a", {}), ("b", {}), ("c", {})], journal=journal)
    assert seen == [0, 1, 2] and journal.read_text(encoding="utf-8") == "".join(lines)


def test_a_worker_gives_back_slow_rows_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "_row", lambda i, *_, **__: {"scenario_id": i})
    monkeypatch.setattr(sweeping, "BATCH_S", -1.0)
    assert len(sweeping.run_batch([("a", {}), ("b", {})])) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_in_one_line(
    request: pytest.FixtureRequest,
    number: int,
    code: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hardware.catalog.list_gpus", lambda: signal.raise_signal(number))
    if number == signal.SIGINT:  # a shell's background jobs, tests too, start with it ignored
        before = signal.signal(number, signal.default_int_handler)
        request.addfinalizer(lambda: signal.signal(number, before))
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    found, out, err = run(["gpus"], capsys)
    assert (found, out, err.strip()) == (code, "", "wattline: interrupted")
    assert handlers == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]


def test_a_signal_that_a_library_turns_into_an_error_of_its_own_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of C++ that is being imported: ImportError, initialization failed."""

    def starting(*, ctrl_c: bool) -> None:
        try:
            if ctrl_c:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from (error if ctrl_c else None)

    for ctrl_c, code in ((False, 143), (True, 130)):
        monkeypatch.setattr("hardware.catalog.list_gpus", lambda ctrl_c=ctrl_c: starting(ctrl_c=ctrl_c))
        found, out, err = run(["gpus"], capsys)
        assert (found, out, err.strip()) == (code, "", "wattline: interrupted")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_of_a_sweep_end_with_it_and_its_rows_stay(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grid = '[base]\nmodel = "llama3-8b"\nlayers = 4\n[grid]\nseq_len = { from = 64, to = 6000, step = 1 }\n'
    (tmp_path / "many.toml").write_text(grid, encoding="utf-8")
    code = "from sim.cli import main; main(['sweep', 'many.toml', '--out', 'many.csv', '--jobs', '2'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    journal = tmp_path / "many.csv.journal"
    while child.poll() is None and not (journal.exists() and journal.stat().st_size):
        time.sleep(0.01)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text(encoding="utf-8").split()
    child.send_signal(number)
    _, err = child.communicate(timeout=60)  # would hang as long as a worker holds the pipes
    assert len(children) >= 2
    if number == signal.SIGTERM:
        assert (child.returncode, err.decode().strip()) == (143, "wattline: interrupted")
    rows = journal.read_text(encoding="utf-8").splitlines()
    assert rows and json.loads(rows[0])["error"] is None and not (tmp_path / "many.csv").exists()
    while any(
        Path(f"/proc/{one}/cmdline").exists() and b"loky" in Path(f"/proc/{one}/cmdline").read_bytes()
        for one in children
    ):
        time.sleep(0.01)  # ends at once: those that wait for a parent that is gone do so for five minutes


def test_the_tracker_of_workers_prints_nothing_after_the_last_line() -> None:
    code = (
        "from sim.explore.workers import Pool\n"
        "from joblib.externals.loky.backend import resource_tracker as tracker\n"
        "with Pool(jobs=2)._backend():\n"
        "    tracker.ensure_running()\n"
        "    tracker.register('/left-behind', 'semlock')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)  # the tracker holds the pipe
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
