"""The console that tables go to, and what ends a command from outside."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

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


class Stopped(KeyboardInterrupt):
    """A signal that asks the process to end: whatever cleans up after Ctrl-C cleans up after it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def stoppable() -> Iterator[list[Stopped]]:
    """In the block, the first SIGTERM or SIGHUP raises :class:`Stopped`; further ones do not disturb the clean-up.

    A signal that the caller ignores (``nohup``) or handles stays as it is. The list holds what was raised: a library
    that is being imported may make an error of its own of it.
    """
    came: list[Stopped] = []
    if threading.current_thread() is not threading.main_thread():  # others cannot take signals
        yield came
        return

    def stop(number: int, _: Any) -> None:
        for signal_number in taken:
            signal.signal(signal_number, signal.SIG_IGN)
        came.append(Stopped(number))
        raise came[0]

    taken = [
        signal_number
        for signal_number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signal_number) is signal.SIG_DFL
    ]
    for signal_number in taken:
        signal.signal(signal_number, stop)
    try:
        yield came
    finally:
        for signal_number in taken:
            signal.signal(signal_number, signal.SIG_DFL)


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
