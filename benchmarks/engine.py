"""Speed and memory of the engine at full detail: ``python benchmarks/engine.py [--out benchmarks/results.md]``.

Every case runs in a fresh process, so memory is its own and no memo is warm. *Run* is one repetition of the kernel
graph of all ranks and layers under the settled clock, every kernel as SimPy events, the best of ``--repeat``; *summed*
is the same by the sums of :mod:`sim.shortcuts.serial`, where each GPU has one stream. *Whole* is ``simulate`` in full
detail with building, lowering and the search for that clock (by shortcuts), or all repetitions where the limiters act
in time. All are CPU seconds. Memory is the largest resident set of the process, interpreter and libraries (about the
first row) included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

from results import machine, put, section

COMMON = {"model": "llama3-70b", "gpu": "h100-sxm-80gb", "tp": 8}
CASES: dict[str, dict[str, Any]] = {
    "1 layer (what importing costs)": COMMON | {"batch": 1, "seq_len": 4096, "layers": 1},
    "prefill, 8 ranks x 80 layers": COMMON | {"batch": 1, "seq_len": 4096},
    "prefill in 4 overlapped chunks, 8 ranks x 80 layers": COMMON
    | {"batch": 1, "seq_len": 4096, "sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8, "lm_head": False},
    "235B-A22B decode, 512 ranks x 94 layers": {
        "model": "qwen3-235b-a22b", "gpu": "h100-sxm-80gb", "ep": 64, "dp": 8, "ep_mode": "all_to_all",
        "phase": "decode", "batch": 64, "seq_len": 4096,
    },
    "generate 256 tokens, 8 ranks x 80 layers": COMMON
    | {"phase": "generate", "batch": 8, "seq_len": 1024, "output_len": 256},
}  # fmt: skip


def measure(fields: dict[str, Any], repeat: int) -> dict[str, Any]:
    """One case, in this process."""
    from sim import Scenario, simulate
    from sim.run.runner import plan_of
    from sim.scenario.machine import machine_of
    from sim.scenario.resolved import resolve_scenario
    from sim.shortcuts.pieces import play

    scenario = Scenario.of(**fields, detail="full")
    begin = time.process_time()
    timeline = simulate(scenario)
    energy_j = timeline.energy_j  # a user reads at least this
    whole_s = time.process_time() - begin
    targets = timeline.targets
    kernels, steps = timeline.graph.kernels, len(timeline.records.step_time_ps)
    assert timeline.outcome.events_kernels == kernels
    simpy_events = timeline.outcome.events
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del timeline

    plan = plan_of(resolve_scenario(scenario), machine_of(scenario))
    begin = time.process_time()
    plan.work.full_graph()
    lower_s = time.process_time() - begin
    sequence = plan.full.sequence
    took_s: dict[bool, list[float]] = {True: [], False: []}
    for events in (True, False) if sequence[0].piece.serial is not None else (True,):
        for _ in range(repeat):
            for step in sequence:
                step.piece.played.clear()
            begin = time.process_time()
            (part,) = play(sequence, targets, events=events)
            took_s[events].append(time.process_time() - begin)
            assert part.played.by_events == events
            del part
    return {
        "kernels": kernels,
        "steps": steps,
        "energy_j": energy_j,
        "whole_s": whole_s,
        "lower_s": lower_s,
        "events": simpy_events,
        "run_s": min(took_s[True]),
        "summed_s": min(took_s[False], default=None),
        "peak_bytes": peak_bytes,
    }


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", help="run the cases whose name holds this text")
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    where = machine()
    rows = []
    for name, fields in CASES.items():
        if arguments.only and arguments.only not in name:
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            got = pool.apply(measure, (fields, arguments.repeat))
        rows.append(
            (
                name,
                f"{got['kernels']:,.0f}",
                f"{got['steps']:,.0f}",
                f"{got['events']:,.0f}",
                f"{got['lower_s']:.2f}",
                f"{got['run_s']:.2f}",
                f"{got['kernels'] / got['run_s']:,.0f}",
                "" if got["summed_s"] is None else f"{got['summed_s']:.2f}",
                f"{got['whole_s']:.2f}",
                f"{got['peak_bytes'] / 1e6:,.0f}",
            )
        )
        print(" | ".join(rows[-1]), flush=True)
    head = (
        "case",
        "kernels",
        "power steps",
        "SimPy events",
        "lower s",
        "run s",
        "kernels/s",
        "summed s",
        "whole s",
        "memory MB",
    )
    text = section("Engine, full detail on H100s", "python benchmarks/engine.py", where, head, rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
