"""The compiled engine beside pure Python, by turns: ``python benchmarks/compiled.py --pure P --compiled C``.

``P`` and ``C`` are interpreters of two environments with wattline installed from one checkout, as a plain wheel and as
one with the compiled engine (docs/compiled.md). Every case of every turn runs in a fresh process; figures are CPU
seconds, each the least of its turns, and hashes of the rows have to be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import CASES, measure
from results import put, section

GRID = Path(__file__).with_name("ten_thousand.toml")
POINTS = 40
TENTH = 10  # rows in a row of each hundred


def engine(name: str) -> tuple[float, str]:
    """A run of the engine, and its joules."""
    got = measure(CASES[name], 8)
    return got["run_s"], repr(got["energy_j"])


def point() -> tuple[float, str]:
    """A new capped prefill in 4 chunks: median of some that share no work."""
    from sim.result.report import summary
    from sim.run.runner import simulate

    took_s, found = [], []
    for number in range(POINTS):
        fields = {
            "model": "llama3-70b", "gpu": "h100-sxm-80gb", "tp": 4, "seq_len": 2048 + 128 * number,
            "sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8, "power_cap_w": 400.0 + 5.0 * number,
            "detail": "segment",
        }  # fmt: skip
        begin = time.process_time()
        found.append(summary(simulate(**fields)))
        took_s.append(time.process_time() - begin)
    return statistics.median(took_s), repr(found)


def tenth() -> tuple[float, str]:
    """A tenth of the sweep of ten thousand, in its order, in one process."""
    from sim.explore.batches import MAX_BATCH, families
    from sim.explore.grid import load_grid
    from sim.explore.row import row_id
    from sim.explore.sweep import run_batch

    cases = {row_id(case.fields): case for case in load_grid(GRID).cases}
    found = families([(number, case.fields) for number, case in cases.items()])
    todo = [one for family in found for work in family for one in work]
    left = [one for at in range(0, len(todo), TENTH * 10) for one in todo[at : at + TENTH]]
    run_batch(left[:1])  # imports are not counted
    begin, lines = time.process_time(), []
    while left:
        ran = run_batch(left[:MAX_BATCH])
        lines += ran
        left = left[len(ran) :]
    return time.process_time() - begin, "\n".join(lines)


RUNS: dict[str, Callable[[], tuple[float, str]]] = {
    "engine, prefill, 8 ranks x 80 layers": lambda: engine("prefill, 8 ranks x 80 layers"),
    "engine, the same in 4 overlapped chunks": lambda: engine("prefill in 4 overlapped chunks, 8 ranks x 80 layers"),
    "a new capped point in 4 chunks": point,
    "a tenth of the ten thousand": tenth,
}


def one(name: str) -> None:
    """Run a case in this process and print it."""
    from results import machine

    from sim.engine.kind import engine_kind

    where = machine()
    cpu_s, rows = RUNS[name]()
    print(json.dumps({
        "cpu_s": cpu_s, "hash": hashlib.sha256(rows.encode()).hexdigest(), "engine": engine_kind(), "where": where
    }))  # fmt: skip


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pure", default=sys.executable, help="interpreter of an environment with the plain wheel")
    parser.add_argument("--compiled", help="interpreter of an environment with the compiled wheel")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--case", choices=RUNS, help="run this case in this process")
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    if arguments.case:
        return one(arguments.case)
    where, rows = "", []
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in RUNS:
        took_s: dict[str, list[float]] = {"pure Python": [], "compiled": []}
        hashes = set()
        for _ in range(arguments.turns):
            for kind, python in (("pure Python", arguments.pure), ("compiled", arguments.compiled)):
                words = [python, __file__, "--case", name]
                done = subprocess.run(words, env=alone, stdout=subprocess.PIPE, text=True, check=True)
                got: dict[str, Any] = json.loads(done.stdout)
                assert got["engine"] == kind, f"{python} has a {got['engine']} engine"
                took_s[kind].append(got["cpu_s"])
                hashes.add(got["hash"])
                where = where or got["where"]
        assert len(hashes) == 1, f"{name}: rows differ"
        pure_s, compiled_s = min(took_s["pure Python"]), min(took_s["compiled"])
        rows.append((name, f"{pure_s:.4f}", f"{compiled_s:.4f}", f"{pure_s / compiled_s:.2f}"))
        print(" | ".join(rows[-1]), flush=True)
    head = ("CPU s", "pure Python", "compiled", "times")
    text = section("The compiled engine", "python benchmarks/compiled.py --pure P --compiled C", where, head, rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)
    return None


if __name__ == "__main__":
    main()
