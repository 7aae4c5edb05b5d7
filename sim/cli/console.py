"""The console that tables go to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console

# Columns of a file or pipe, where there is no terminal to ask: wide enough for every table.
PIPE_WIDTH = 140


def wide_console() -> Console:
    """Standard output; tables written to a file or pipe are not squeezed into 80 columns."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


class Rested(Protocol):
    """A row that says what its numbers rest on."""

    @property
    def status(self) -> str:
        """One word."""

    @property
    def status_reasons(self) -> tuple[str, ...]:
        """What lies outside the measured."""


def print_reasons(rows: Sequence[Rested], console: Console, most: int = 6) -> None:
    """Below a table with a column of statuses: why, each reason once."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        for reason in row.status_reasons:
            counts[row.status, reason] = counts.get((row.status, reason), 0) + 1
    for (status, reason), count in list(counts.items())[:most]:
        of = "" if count == len(rows) else f" ({count} of {len(rows)} rows)"
        console.print(f"{status}: {reason}{of}", markup=False, highlight=False)
    if len(counts) > most:
        console.print(f"and {len(counts) - most} more reasons: see --json", markup=False, highlight=False)
