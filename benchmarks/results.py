"""What every benchmark prints: a Markdown section with its table, the machine and the versions.

``put`` replaces the section of the same title in a file, so that each benchmark owns its part of results.md.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from sim.engine.kind import engine_kind

PACKAGES = ("wattline", "simpy", "numpy", "scipy", "pandas")
TITLE = "# Benchmark results\n\nReal runs; each section is written by the command it names.\n"


def machine() -> str:
    """One line on the machine, its load and the versions."""
    cpu = "unknown CPU"
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))):
        cpu = found[1]
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    load = f"{os.getloadavg()[0]:.1f}"
    return (
        f"{os.cpu_count()} x {cpu}, {platform.system()} {platform.release().split('-')[0]}, load average {load} at the "
        f"start; Python {platform.python_version()}, {engine_kind()} engine, {packages}."
    )


def section(title: str, command: str, where: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A section: title, command, machine, table with a text column first."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    table = "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))
    return f"## {title}\n\n`{command}`\n\n{where}\n\n{table}\n"


def put(text: str, path: Path) -> None:
    """Write the section ``text`` into ``path`` in place of the one with its title, or at the end."""
    old = path.read_text(encoding="utf-8") if path.exists() else TITLE
    title = text.split("\n", 1)[0]
    parts = [part for part in re.split(r"(?m)^(?=## )", old) if part.split("\n", 1)[0] != title]
    path.write_text("\n\n".join(part.strip() for part in (*parts, text)) + "\n", encoding="utf-8")
