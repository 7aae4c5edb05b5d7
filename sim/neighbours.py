"""Whether the packages that wattline imports are its own.

They have plain names (``traces``, ``hardware``): in an environment that it shares, another distribution's package of
the same name may stand before them on the path, or have been written over them; neither pip nor Python says a word.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

NAMES = ("inputs", "workloads", "hardware", "traces")
MARK = "# wattline's own: sim/neighbours.py looks for this line"
COMMAND = "wattline"
MISSING = "missing"


def check_neighbours() -> None:
    """Refuse to go on with foreign packages: an :class:`ImportError`, of the command one line and exit code 2."""
    foreign = next(((name, found) for name in NAMES if (found := _foreign(name)) is not None), None)
    if foreign is None:
        return
    name, found = foreign
    what = (
        "missing, taken away with another distribution's" if found == MISSING else f"another distribution's ({found})"
    )
    text = f"the package '{name}' is {what}: install wattline in an environment of its own, "
    text += "such as 'uv tool install' or a fresh venv makes"
    if Path(sys.argv[0]).stem == COMMAND:
        print(f"wattline: {text}", file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(text)


def _foreign(name: str) -> str | None:
    """Where the package ``name`` comes from, if it is not ours."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return MISSING
    head = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    return None if MARK in head else spec.origin
