"""Run a grid on many workers; every finished row is kept at once, so that nothing is run twice.

Rows go to a journal beside the result, one JSON line each: processes of this machine write each row as it is done,
those of a cluster, which may not see the file, send theirs back within seconds. The journal is what a later run of
the same command resumes from; the finished table replaces it in one step.
"""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from inputs.collector import collector_paused
from inputs.files import check_regular
from inputs.texts import parse_json
from sim.errors import SimError
from sim.explore import workers
from sim.explore.batches import MAX_BATCH, Item, batch_size, batches, families
from sim.explore.grid import GridPoint, ScenarioGrid
from sim.explore.in_work import telling
from sim.explore.lines import line_of, row_of
from sim.explore.row import INTERVALS, RESULTS, figures, full, full_of, interval_figures, row_id
from sim.output.files import OutputError, write_atomically
from sim.scenario.spec import Scenario

MAX_DEATHS_IN_VAIN = 3
# After so long a worker gives back what it has done of a batch, and the rest is handed out again.
BATCH_S = 2.0
# Of batches that leave no cycles of objects one in so many is looked through.
LOOK_EVERY = 16

Step = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep did. ``resumed`` rows were there before; ``wall_s`` and the rate count only new ones."""

    rows: int
    failed: int
    excluded: int
    resumed: int
    wall_s: float
    first_error: str | None

    @property
    def scenarios_per_s(self) -> float:
        """New rows a second."""
        return (self.rows - self.resumed) / self.wall_s


def sweep(
    grid: ScenarioGrid,
    out: Path,
    *,
    pool: workers.Pool | None = None,
    fresh: bool = False,
    uncertainty: bool = False,
    step: Step = lambda _done, _failed: None,
) -> Swept:
    """Run every case of ``grid`` that ``out`` (.parquet or .csv) or its journal lacks, and write the table.

    ``uncertainty`` adds the columns of :data:`~sim.explore.row.INTERVALS`, for some thirty more runs a row.
    ``step`` gets how many rows are done and how many of them failed. Raises :class:`SimError` when ``out`` cannot
    be written or workers die again and again; rows that fail carry their message in ``error``.
    """
    begin = time.perf_counter()
    cases = {row_id(case.fields): case for case in grid.cases}
    journal = journal_of(out)
    known = {} if fresh else {i: row for i, row in _earlier(out, journal) if i in cases}
    if uncertainty:
        known = {i: row for i, row in known.items() if row["error"] is not None or row.get(INTERVALS[0]) is not None}
    failed = sum(row["error"] is not None for row in known.values())
    resumed = len(known)
    step(resumed, failed)
    todo = {i: case.fields for i, case in cases.items() if i not in known}
    with ExitStack() as held:
        if todo:
            reached = workers.connected(pool or workers.Pool())
            if journal.exists():
                with _alone(journal, out):
                    pass
            _start_journal(journal, known.values())
            held.enter_context(_alone(journal, out))
            local = reached.backend == "processes"
            run = partial(run_batch, uncertainty=uncertainty, journal=journal.absolute() if local else None)
            for lines, rows in _finished(todo, reached, run):
                import sim.explore.table  # noqa: F401 - pandas, while the workers are at work

                if not local:
                    append(journal, lines)
                known |= {row["scenario_id"]: row for row in rows}
                failed += sum(row["error"] is not None for row in rows)
                step(len(known), failed)
        from sim.explore.table import write_rows  # pandas, which no worker needs

        table = [known[i] | {"feasible": _feasible(known[i], case)} for i, case in cases.items()]
        write_rows(table, out)
        journal.unlink(missing_ok=True)
    return Swept(
        rows=len(table),
        failed=failed,
        excluded=grid.excluded,
        resumed=resumed,
        wall_s=time.perf_counter() - begin,
        first_error=next((row["error"] for row in table if row["error"] is not None), None),
    )


@contextmanager
def _alone(journal: Path, out: Path) -> Iterator[None]:
    """Refuse while another sweep holds ``journal``, which whichever ends first would remove; hold it, else."""
    handle = os.open(journal, os.O_WRONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SimError(f"another sweep is writing '{out}': wait until it ends, or give another --out") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def journal_of(out: Path) -> Path:
    """Where finished rows of the table ``out`` wait for the others."""
    return out.with_name(out.name + ".journal")


def run_batch(batch: Sequence[Item], *, uncertainty: bool = False, journal: Path | None = None) -> list[str]:
    """What a worker does: one JSON line a scenario, written to ``journal`` too, for :data:`BATCH_S` or a little more.

    A scenario that fails is a line too, with its error. What follows the returned lines was not run.
    """
    _settle_in()
    begin = time.perf_counter()
    lines: list[str] = []

    def keep(line: str) -> None:
        if journal is not None:
            append(journal, [line])

    with _collected_at_its_end(), telling(keep) as begun:
        for i, fields in batch:
            lines.append(line_of(_row(i, fields, begun(i, fields).say, uncertainty=uncertainty)))
            keep(lines[-1])
            if time.perf_counter() - begin > BATCH_S:
                break
    return lines


def append(journal: Path, lines: Sequence[str]) -> None:
    """Add ``lines`` to the end of ``journal``, whoever else does so too; an :class:`OutputError` where that fails."""
    data = "".join(lines).encode()
    try:
        handle = os.open(journal, os.O_WRONLY | os.O_APPEND)
        try:
            while data:
                data = data[os.write(handle, data) :]
        finally:
            os.close(handle)
    except OSError as error:
        raise OutputError(f"cannot write '{journal}': {error.strerror or error}") from None


@cache
def _settle_in() -> None:
    """Once a worker: what is imported stays, so that the collector need not look through it again (6 % of the time)."""
    import sim.run.runner  # noqa: F401 - the most of it

    gc.collect()
    gc.freeze()


class Collector:
    """What batches leave, looked through by Python's collector (10 % of the time) only where it finds something.

    Most of it is memos, which stay; what refers to itself comes from rows of some kinds alone.
    """

    def __init__(self) -> None:
        self.unseen = 0  # batches that may go by without a look

    def look(self) -> None:
        """After a batch: collect, unless the last look found nothing and was not long ago; what is left stays."""
        if self.unseen:
            self.unseen -= 1
        elif not gc.collect():
            self.unseen = LOOK_EVERY - 1
        gc.freeze()


_COLLECTOR = Collector()


@contextmanager
def _collected_at_its_end() -> Iterator[None]:
    """Nothing is collected within a batch."""
    with collector_paused():
        try:
            yield
        finally:
            _COLLECTOR.look()


def _row(i: str, fields: Mapping[str, Any], say: Callable[[str], None], *, uncertainty: bool) -> dict[str, Any]:
    # Imported here: the engine is not needed by whoever only reads a table.
    from sim.run.runner import simulate

    row: dict[str, Any] = {"scenario_id": i}
    try:
        scenario = Scenario.of(**fields)
        row |= full_of(scenario) | {"error": None}
        run = simulate(scenario, progress=say, shortcuts=True)
        return row | figures(run) | (interval_figures(run) if uncertainty else {})
    except Exception as error:
        ours = type(error).__module__.split(".")[0] in ("sim", "hardware", "workloads")
        return row | full(fields) | {"error": str(error) if ours else f"{type(error).__name__}: {error}"}


def _finished(
    todo: Mapping[str, Mapping[str, Any]], pool: workers.Pool, run: Callable[[Sequence[Item]], list[str]]
) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
    """Lines and rows of batches as they come; what a worker could not finish is handed out again in smaller batches."""
    left = dict(todo)
    most = MAX_BATCH
    deaths_in_vain = 0
    while left:
        before = len(left)
        size = batch_size(before, pool.jobs, most)
        try:
            for lines in pool.map(run, list(batches(families(list(left.items())), pool.jobs, most))):
                rows = [row_of(line) for line in lines]
                for row in rows:
                    del left[row["scenario_id"]]
                yield lines, rows
        except workers.WorkerDied as error:
            deaths_in_vain = 0 if len(left) < before else deaths_in_vain + 1
            if deaths_in_vain == MAX_DEATHS_IN_VAIN:
                raise SimError(
                    f"workers died {MAX_DEATHS_IN_VAIN} times without finishing a row ({error}); {len(left)} rows "
                    "are left: give them more memory or fewer --jobs; the same command resumes"
                ) from None
        most = max(1, size // 2)


def _feasible(row: Mapping[str, Any], case: GridPoint) -> bool:
    return row["error"] is None and all(condition.holds(row) for condition in case.where)


def _earlier(out: Path, journal: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of an earlier run: those of the table, then those of the journal, up to where it breaks off."""
    if out.is_file():
        from sim.explore.table import read_rows  # as above

        for row in read_rows(out):
            row.pop("feasible", None)
            yield row["scenario_id"], row
    if journal.exists():
        check_regular(journal, "journal", SimError)
        with journal.open("rb") as stream:
            for line in stream:
                if (kept := _journal_row(line.decode("utf-8", "replace"))) is not None:
                    yield kept["scenario_id"], kept


def _journal_row(line: str) -> dict[str, Any] | None:
    """A row of the journal; None where the line is none: that which was being written as a run stopped, or damage."""
    try:
        row = parse_json(line, "journal", SimError, one_line=True)
    except SimError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("scenario_id"), str) or "error" not in row:
        return None
    return row if row["error"] is not None or row.keys() >= RESULTS else None


def _start_journal(journal: Path, known: Iterable[Mapping[str, Any]]) -> None:
    """Rewrite ``journal`` to hold exactly the known rows: a broken last line is gone."""
    write_atomically(journal, "".join(map(line_of, known)).encode())
