"""Seconds from the shell: ``python benchmarks/shell.py [--out benchmarks/results.md]``; best of five, wall time."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from results import machine, put, section

COMMANDS = (
    ("--help",),
    ("gpus",),
    ("simulate", "--model", "llama3-8b", "--gpu", "h100"),
    ("simulate", "--model", "llama3-70b", "--gpu", "h100", "--tp", "4", "--batch", "2", "--seq-len", "4096"),
)
REPEAT = 5


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    where = machine()
    program = Path(sys.executable).with_name("wattline")
    rows = []
    for words in COMMANDS:
        seconds = []
        for _ in range(REPEAT):
            begin = time.perf_counter()
            subprocess.run([program, *words], check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - begin)
        rows.append((f"`wattline {' '.join(words)}`", f"{min(seconds):.2f}"))
    text = section("From the shell", "python benchmarks/shell.py", where, ("command", "s"), rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
