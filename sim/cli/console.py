"""The console that tables go to."""

from __future__ import annotations

import sys

from sim.console import PlainConsole

# Columns of a file or pipe, where there is no terminal to ask: wide enough for every table.
PIPE_WIDTH = 140


def wide_console() -> PlainConsole:
    """Standard output; tables written to a file or pipe are not squeezed into 80 columns."""
    return PlainConsole(width=None if sys.stdout.isatty() else PIPE_WIDTH)
