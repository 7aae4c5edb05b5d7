"""The console that tables go to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from sim.output.console import PlainConsole

# Columns of a file or pipe, where there is no terminal to ask: wide enough for every table.
PIPE_WIDTH = 140


def wide_console() -> PlainConsole:
    """Standard output; tables written to a file or pipe are not squeezed into 80 columns."""
    return _PipeConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH)


class _PipeConsole(PlainConsole):
    """A console that leaves a closed pipe to the caller, as writing without it does."""

    def on_broken_pipe(self) -> NoReturn:
        """Called while the error is handled."""
        raise


class Simulated(Protocol):
    """A row that says what its numbers rest on, and how many kernels went through SimPy or were derived from those."""

    @property
    def events_kernels(self) -> int:
        """Those that SimPy ran."""

    @property
    def derived_kernels(self) -> int:
        """The others."""

    @property
    def status(self) -> str:
        """One word."""

    @property
    def status_reasons(self) -> tuple[str, ...]:
        """What lies outside the measured."""


def print_reasons(rows: Sequence[Simulated], console: PlainConsole, most: int = 6) -> None:
    """Below a table with a column of statuses: why, each reason once, and how much was simulated kernel by kernel."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        for reason in row.status_reasons:
            counts[row.status, reason] = counts.get((row.status, reason), 0) + 1
    for (status, reason), count in list(counts.items())[:most]:
        of = "" if count == len(rows) else f" ({count} of {len(rows)} rows)"
        console.print(f"{status}: {reason}{of}", highlight=False)
    if len(counts) > most:
        console.print(f"and {len(counts) - most} more reasons: see --json", highlight=False)
    done, derived = sum(row.events_kernels for row in rows), sum(row.derived_kernels for row in rows)
    rest = f", {derived:,} derived" if derived else ""
    console.print(f"kernels of all rows: {done:,} through SimPy{rest}", highlight=False)
