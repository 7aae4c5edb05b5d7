"""How the command line of every study ends: bad input is one line on stderr, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hardware.errors import HardwareError
from sim.errors import SimError
from workloads.errors import WorkloadError


def exit_code(name: str, work: Callable[[], object]) -> int:
    """0 after ``work``; 2 where its input is bad, with the reason after the study's ``name``.

    >>> exit_code("study", lambda: "done")
    0
    """
    try:
        work()
    except (SimError, HardwareError, WorkloadError) as error:
        message = str(error)
    except OSError as error:  # what cannot be written is a SimError by now
        message = f"cannot read '{error.filename}': {error.strerror}"
    else:
        return 0
    print(f"{name}: {message}", file=sys.stderr)
    return 2
