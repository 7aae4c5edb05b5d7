"""What a scenario costs by detail: ``python benchmarks/detail.py [--out benchmarks/results.md]``.

CPU milliseconds of one scenario with its figures (``sim.result.report.summary``), in one process. *First* is a scenario
nobody has run before in a process that has run another of its kind: building, prices and the search for the power
target included. *Again* is the mean over scenarios that differ from it in the power cap alone (uncapped: the same
scenario). Every row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path
from typing import Any

from results import machine, put, section

PREFILL = {"model": "llama3-70b", "tp": 8, "batch": 2, "seq_len": 4096}
OVERLAP = {"model": "llama3-70b", "tp": 4, "seq_len": 4096, "sequence_parallel": True, "overlap_chunks": 4,
           "comm_ctas": 8}  # fmt: skip
DECODE = {"model": "llama3-70b", "tp": 4, "phase": "decode", "batch": 32, "seq_len": 4096}
EXPERTS = {"model": "qwen3-30b-a3b", "ep": 4, "ep_mode": "all_to_all", "phase": "decode", "batch": 64, "seq_len": 4096}
NODES = {"model": "qwen3-235b-a22b", "ep": 64, "dp": 8, "ep_mode": "all_to_all", "phase": "decode", "batch": 64,
         "seq_len": 4096}  # fmt: skip
GENERATE = {"model": "llama3-70b", "tp": 8, "phase": "generate", "batch": 8, "seq_len": 1024, "output_len": 256}
CAPPED = (500.0, 520.0, 540.0, 560.0)
CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "70B TP8 prefill, full": (PREFILL, "full", False),
    "70B TP8 prefill, folded": (PREFILL, "folded", False),
    "70B TP8 prefill, segment": (PREFILL, "segment", False),
    "70B TP8 prefill, capped, folded": (PREFILL, "folded", True),
    "70B TP8 prefill, capped, segment": (PREFILL, "segment", True),
    "70B TP4 prefill in 4 chunks, segment": (OVERLAP, "segment", False),
    "70B TP4 prefill in 4 chunks, capped, segment": (OVERLAP, "segment", True),
    "70B TP4 decode, segment": (DECODE, "segment", False),
    "30B-A3B EP4 decode, segment": (EXPERTS, "segment", False),
    "235B-A22B EP64 x DP8 decode, 512 GPUs, auto": (NODES, "auto", False),
    "70B TP8 generate 256 tokens, segment": (GENERATE, "segment", False),
    "70B TP8 generate 256 tokens, auto (context buckets)": (GENERATE, "auto", False),
}


def measure(fields: dict[str, Any], detail: str, capped: bool) -> tuple[int, float, float, float]:
    """Kernels, GPUs simulated, and CPU seconds of the first and of later scenarios, in this process."""
    from sim.result.report import summary
    from sim.run.runner import simulate

    policies: list[dict[str, Any]] = [{"power_cap_w": w} for w in CAPPED] if capped else [{"uncapped": True}] * 4
    other = fields | {"batch": 2 * fields.get("batch", 1)}
    summary(simulate(**other, detail=detail, **policies[0], ignore_memory=True))
    seconds = []
    for policy in policies:
        begin = time.process_time()
        run = simulate(**fields, detail=detail, **policy)
        summary(run)
        seconds.append(time.process_time() - begin)
    simulated = len(run.outcome.folding.classes)
    return run.outcome.kernels, simulated, seconds[0], sum(seconds[1:]) / len(seconds[1:])


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="run the cases whose name holds this text")
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    where = machine()
    rows = []
    for name, case in CASES.items():
        if arguments.only and arguments.only not in name:
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            kernels, simulated, first_s, again_s = pool.apply(measure, case)
        rows.append((name, f"{kernels:,}", f"{simulated}", f"{1e3 * first_s:.1f}", f"{1e3 * again_s:.1f}"))
        print(" | ".join(rows[-1]), flush=True)
    head = ("case", "kernels", "GPUs simulated", "first ms", "again ms")
    text = section("A scenario by detail", "python benchmarks/detail.py", where, head, rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
