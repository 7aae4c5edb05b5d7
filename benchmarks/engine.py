"""Engine speed and memory at full detail: ``python benchmarks/engine.py`` (a quiet machine, please)."""

from __future__ import annotations

import platform
import resource
import time
from importlib.metadata import version

import workloads
from sim.machine import machine_of
from sim.runner import build, lower_on, run
from sim.scenario import Scenario

CASES = {
    "Llama-3-70B prefill, 8 ranks x 80 layers": {"model": "llama3-70b", "tp": 8, "batch": 2, "seq_len": 4096},
    "Llama-3-70B, 8 ranks, prefill + 216 decode steps": {
        "model": "llama3-70b", "tp": 8, "phase": "generate", "batch": 8, "seq_len": 2048, "output_len": 217,
    },
}  # fmt: skip


def main() -> None:
    """Print one line a case: kernels, best kernels a second of CPU time, peak memory of the process."""
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, simpy {version('simpy')}")
    for name, fields in CASES.items():
        scenario = Scenario.of(**fields)
        target = machine_of(scenario)
        program, _ = build(scenario, workloads.load_model(scenario.model))
        graph = lower_on(program, target, scenario)
        best = 0.0
        for _ in range(5 if graph.kernels < 100_000 else 1):
            start = time.process_time()
            run(graph, target, [target.limits.slow_limit_w] * graph.gpus)
            best = max(best, graph.kernels / (time.process_time() - start))
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(f"{name}: {graph.kernels:,} kernels, {best:,.0f} kernels/s, peak {peak_gb:.2f} GB")


if __name__ == "__main__":
    main()
