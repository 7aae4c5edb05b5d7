"""Run a grid on many workers; every finished row is kept at once, so that nothing is run twice.

Rows go to a journal beside the result, one JSON line each, as batches come back. The journal is what a later run
of the same command resumes from; the finished table replaces it in one step.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from sim.errors import SimError
from sim.studies.explore import workers
from sim.studies.explore.grid import Case, Grid
from sim.studies.explore.row import INTERVALS, figures, full, interval_figures, row_id
from sim.studies.explore.table import read_rows, write_rows

# A batch is what a worker takes and what a killed worker loses; its overhead is about 1 ms.
MAX_BATCH = 32
BATCHES_PER_WORKER = 16
MAX_DEATHS_IN_VAIN = 3

Step = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep did. ``resumed`` rows were there before; ``wall_s`` and the rate count only new ones."""

    rows: int
    failed: int
    excluded: int
    resumed: int
    wall_s: float

    @property
    def scenarios_per_s(self) -> float:
        """New rows a second."""
        return (self.rows - self.resumed) / self.wall_s


def sweep(
    grid: Grid,
    out: Path,
    *,
    pool: workers.Pool | None = None,
    fresh: bool = False,
    uncertainty: bool = False,
    step: Step = lambda _done, _failed: None,
) -> Swept:
    """Run every case of ``grid`` that ``out`` (.parquet or .csv) or its journal lacks, and write the table.

    ``uncertainty`` adds the columns of :data:`~sim.studies.explore.row.INTERVALS`, for some thirty more runs a row.
    ``step`` is told how many rows are done and how many of them failed. Raises :class:`SimError` when ``out`` cannot
    be written or workers die again and again; rows that fail carry their message in ``error``.
    """
    begin = time.perf_counter()
    cases = {row_id(case.fields): case for case in grid.cases}
    journal = out.with_name(out.name + ".journal")
    known = {} if fresh else {i: row for i, row in _earlier(out, journal) if i in cases}
    if uncertainty:
        known = {i: row for i, row in known.items() if row["error"] is not None or row.get(INTERVALS[0]) is not None}
    failed = sum(row["error"] is not None for row in known.values())
    resumed = len(known)
    step(resumed, failed)
    todo = [(i, case.fields) for i, case in cases.items() if i not in known]
    if todo:
        reached = workers.connected(pool or workers.Pool())
        with _appending(journal, known.values()) as stream:
            for lines in _finished(todo, reached, partial(run_batch, uncertainty=uncertainty)):
                stream.write("".join(lines).encode())
                stream.flush()
                rows = [json.loads(line) for line in lines]
                known |= {row["scenario_id"]: row for row in rows}
                failed += sum(row["error"] is not None for row in rows)
                step(len(known), failed)
    table = [known[i] | {"feasible": _feasible(known[i], case)} for i, case in cases.items()]
    write_rows(table, out)
    journal.unlink(missing_ok=True)
    return Swept(
        rows=len(table), failed=failed, excluded=grid.excluded, resumed=resumed, wall_s=time.perf_counter() - begin
    )


def run_batch(batch: Sequence[tuple[str, Mapping[str, Any]]], *, uncertainty: bool = False) -> list[str]:
    """What a worker does: one JSON line a scenario. A scenario that fails is a line too, with its error."""
    _settle_in()
    return [json.dumps(_row(i, fields, uncertainty=uncertainty)) + "\n" for i, fields in batch]


@cache
def _settle_in() -> None:
    """Once a worker: what is imported stays, so that the collector need not look through it again (6 % of the time)."""
    import sim.runner  # noqa: F401 - the most of it

    gc.collect()
    gc.freeze()


def _row(i: str, fields: Mapping[str, Any], *, uncertainty: bool) -> dict[str, Any]:
    # Imported here: the engine is not needed by whoever only reads a table.
    from sim.runner import simulate

    row = {"scenario_id": i, **full(fields), "error": None}
    try:
        run = simulate(**fields, shortcuts=True)
        return row | figures(run) | (interval_figures(run) if uncertainty else {})
    except Exception as error:
        ours = type(error).__module__.split(".")[0] in ("sim", "hardware", "workloads")
        return row | {"error": str(error) if ours else f"{type(error).__name__}: {error}"}


def _finished(
    todo: Sequence[tuple[str, Mapping[str, Any]]],
    pool: workers.Pool,
    run: Callable[[Sequence[tuple[str, Mapping[str, Any]]]], list[str]],
) -> Iterator[list[str]]:
    """Lines of batches as they come; when a worker dies, what it had is handed out again in smaller batches."""
    left = dict(todo)
    size = max(1, min(MAX_BATCH, len(left) // (pool.jobs * BATCHES_PER_WORKER)))
    deaths_in_vain = 0
    while left:
        items = list(left.items())
        batches = [items[at : at + size] for at in range(0, len(items), size)]
        before = len(left)
        try:
            for lines in pool.map(run, batches):
                for line in lines:
                    del left[json.loads(line)["scenario_id"]]
                yield lines
        except workers.WorkerDied as error:
            deaths_in_vain = 0 if len(left) < before else deaths_in_vain + 1
            if deaths_in_vain == MAX_DEATHS_IN_VAIN:
                raise SimError(
                    f"workers died {MAX_DEATHS_IN_VAIN} times without finishing a row ({error}); {len(left)} rows "
                    "are left: give them more memory or fewer --jobs; the same command resumes"
                ) from None
            size = max(1, size // 2)


def _feasible(row: Mapping[str, Any], case: Case) -> bool:
    return row["error"] is None and all(condition.holds(row) for condition in case.where)


def _earlier(out: Path, journal: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of an earlier run: those of the table, then those of the journal, up to where it breaks off."""
    if out.exists():
        for row in read_rows(out):
            row.pop("feasible", None)
            yield row["scenario_id"], row
    if journal.exists():
        for line in journal.read_bytes().split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the line that was being written when it stopped
            yield row["scenario_id"], row


def _appending(journal: Path, known: Any) -> IO[bytes]:
    """The journal, rewritten to hold exactly the known rows (a broken last line is gone), open for more."""
    temporary = journal.with_name(f".{journal.name}.{os.getpid()}")
    try:
        stream = temporary.open("wb")
        for row in known:
            stream.write(json.dumps(row).encode() + b"\n")
        stream.flush()
        temporary.replace(journal)
    except OSError as error:
        raise SimError(f"cannot write '{journal}': {error.strerror or error}") from None
    return stream
