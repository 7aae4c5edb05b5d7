"""What a measuring run says while it runs: a bar with the time left on a terminal, a line a row elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hardware.calibrate.suite.plan import estimated_s

Row = Mapping[str, Any]


@dataclass(slots=True)
class Reporter:
    """Prints rank 0's progress, and failures of every rank."""

    rank: int
    rows: int
    left_s: float
    bar: Progress | None = None
    task: TaskID | None = None
    number: int = 0

    def say(self, text: str) -> None:
        """A line of its own, from rank 0."""
        if self.rank != 0:
            return
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def measured(self, text: str, row: Row) -> None:
        """One row is in the file."""
        self._passed(row)
        if self.bar is not None:
            self.bar.update(self.task or TaskID(0), description=text[:70])
        else:
            self.say(f"[{self.number}/{self.rows}] left ~{self.left_s:3.0f} s  {text}")

    def failed(self, text: str, row: Row) -> None:
        """One row could not be measured."""
        self._passed(row)
        if self.bar is not None:
            self.bar.console.print(f"FAILED {text}", style="red", highlight=False, markup=False)
        else:
            print(f"[{self.number}/{self.rows}] FAILED {text}", file=sys.stderr, flush=True)

    def _passed(self, row: Row) -> None:
        self.number += 1
        self.left_s -= estimated_s(row)
        if self.bar is not None:
            self.bar.advance(self.task or TaskID(0), estimated_s(row))


@contextmanager
def reporter(rank: int, rows: Sequence[Row]) -> Iterator[Reporter]:
    """A reporter for one rank's run over ``rows``; only rank 0 on a terminal draws the bar."""
    total_s = sum(estimated_s(row) for row in rows)
    if rank != 0 or not sys.stderr.isatty():
        yield Reporter(rank, len(rows), total_s)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=sys.stderr)) as bar:
        yield Reporter(rank, len(rows), total_s, bar, bar.add_task("settling", total=total_s))
