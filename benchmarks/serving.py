"""Requests (twenty thousand) on eight GPUs: ``python benchmarks/serving.py [--requests N] [--out FILE]``."""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from results import machine, put, section

from sim.serving import serve
from sim.serving.price_cache import switched_off

CASES: dict[str, dict[str, object]] = {
    "8 replicas": {"model": "llama3-8b", "replicas": 8, "rate_per_s": 60.0},
    "3 for prompts, 5 for decoding": {"model": "llama3-8b", "replicas": 5, "prefill_replicas": 3, "rate_per_s": 60.0},
}
TRAFFIC = {"input_tokens": 1000, "output_tokens": 250, "length_spread": 0.6}


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    parser.add_argument("--requests", type=int, default=20_000, help="how many")
    arguments = parser.parse_args()
    where, rows = machine(), []
    again = {f"{name}, again": fields for name, fields in CASES.items()}  # at prices that the process knows by then
    for name, fields in (CASES | again).items():
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        with switched_off():  # no prices of earlier processes
            run = serve(**fields, **TRAFFIC, requests=arguments.requests)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        tokens = int(run.requests["output_tokens"].sum())
        served = f"{run.end_s:.0f}"
        rows.append((name, f"{tokens:,}", served, f"{wall_s:.1f}", f"{cpu_s:.1f}", f"{memory_mb:.0f}"))
    head = (
        f"{arguments.requests:,} requests, Llama-3-8B",
        "output tokens",
        "simulated s",
        "wall s",
        "CPU s",
        "memory MB so far",
    )
    text = section("Serving", "python benchmarks/serving.py", where, head, rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
