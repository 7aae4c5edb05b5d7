"""Seconds from the shell: ``python benchmarks/shell.py [--out benchmarks/results.md]``.

Best of five of each: wall time, and CPU time, which says what a free machine would take. Modules are compiled once, as
Python does by default.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from results import machine, put, section

FIRST = "from sim import simulate; simulate(model='llama3-8b', gpu='h100-sxm-80gb', seq_len=512).energy_j"
COMMANDS = (
    ("--help",),
    ("gpus",),
    ("simulate", "--model", "llama3-8b", "--gpu", "h100"),
    ("simulate", "--model", "llama3-70b", "--gpu", "h100", "--tp", "4", "--batch", "2", "--seq-len", "4096"),
    # 64 nodes: all-to-all over eight nodes at a time, by the cheaper of pairs and hierarchy
    ("simulate", "--model", "qwen3-235b-a22b", "--ep", "64", "--dp", "8", "--ep-mode", "all_to_all", "--phase",
     "decode", "--batch", "64", "--seq-len", "4096"),
)  # fmt: skip
REPEAT = 5


def children_s() -> float:
    """CPU seconds of the commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    where = machine()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    program = str(Path(sys.executable).with_name("wattline"))
    cases = {f"`wattline {' '.join(words)}`": [program, *words] for words in COMMANDS}
    cases["the first `simulate` of a Python process"] = [sys.executable, "-c", FIRST]
    rows = []
    for name, words in cases.items():
        wall_s, cpu_s = [], []
        for _ in range(REPEAT):
            begin, used_s = time.perf_counter(), children_s()
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment)
            wall_s.append(time.perf_counter() - begin)
            cpu_s.append(children_s() - used_s)
        rows.append((name, f"{min(wall_s):.2f}", f"{min(cpu_s):.2f}"))
    text = section("From the shell", "python benchmarks/shell.py", where, ("command", "wall s", "CPU s"), rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
