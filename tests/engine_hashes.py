"""Hashes of what runs of the engine record, by kernel: ``python -m tests.engine_hashes TRACES`` prints them as JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from simpy.events import Event

from sim import Scenario, simulate
from sim.engine.kind import engine_kind
from sim.engine.record import Recorder
from sim.engine.resources.sm_pool import SmPool
from sim.engine.running import HeldClock
from sim.engine.time import WholeTime
from sim.replay.study import replay_trace
from sim.run.retimed import OrderBook
from sim.run.runner import plan_of
from sim.scenario.machine import machine_of
from sim.scenario.resolved import resolve_scenario
from sim.shortcuts.clocks import grid_of
from sim.shortcuts.pieces import play

LLAMA = {"model": "llama3-70b", "gpu": "h100-sxm-80gb", "tp": 4, "layers": 3, "batch": 1, "seq_len": 4096}
CHUNKED = LLAMA | {"sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8}
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": LLAMA,
    "launched by the host": LLAMA | {"launch": "eager"},
    "chunked": CHUNKED,
    "chunked under a cap": CHUNKED | {"power_cap_w": 450.0},
    "chunked from idle": CHUNKED | {"power_cap_w": 450.0, "regime": "cold"},
    "uneven chunks": CHUNKED | {"seq_len": 3000, "overlap_chunks": 3, "comm_ctas": 20},
    "pipeline": LLAMA | {"pp": 2, "tp": 2, "layers": 4, "batch": 4, "micro_batches": 4},
    "mixture of experts": {
        "model": "qwen3-30b-a3b", "gpu": "h200-sxm-141gb", "ep": 4, "dp": 4, "ep_mode": "all_to_all", "layers": 3,
        "phase": "decode", "batch": 64, "seq_len": 2048, "routing_seed": 3,
    },
    "two batches": {
        "model": "qwen3-30b-a3b", "gpu": "h100-sxm-80gb", "ep": 4, "dp": 4, "ep_mode": "all_to_all", "layers": 3,
        "overlap": "two_batch", "batch": 8, "seq_len": 2048,
    },
    "over nodes": LLAMA | {"tp": 8, "dp": 4, "batch": 4, "phase": "train", "layers": 2},
    "ring of contexts": LLAMA | {"tp": 1, "cp": 4, "cp_mode": "ring", "model": "llama3-8b", "seq_len": 32768},
    "ring exchange": LLAMA | {"sequence_parallel": True, "overlap": "ring_exchange"},
    "diffusion": {
        "model": "flux.1-dev", "gpu": "h100-sxm-80gb", "phase": "denoise", "cp": 4, "layers": 3, "video": "1024x1024",
    },
}  # fmt: skip
TRACES = "llama3-70b-prefill-2x4096-tp2-overlap_chunks4-comm_ctas4.rank{}.json.gz"


def hash_of(records: Recorder) -> str:
    """Of spans, power steps and joules, to the last bit."""
    columns = (
        records.span_op, records.span_start_ps, records.span_end_ps, records.span_energy_j,
        records.step_gpu, records.step_time_ps, records.step_state,
    )  # fmt: skip
    rest = records.energy_j, records.idle_energy_j, records.end_ps, records.events, records.crossing
    solved = [
        (s.clock_hz, s.power_w, s.kernel_power_w, s.rates, s.hbm_bytes_per_s, s.link_bytes_per_s)
        for s in records.states
    ]
    text = repr((rest, records.crossing_time_ps, solved)).encode()
    return hashlib.sha256(b"".join([column.tobytes() for column in columns]) + text).hexdigest()


def run_of(fields: dict[str, Any]) -> str:
    """A scenario in full detail, by events: also where sums would do."""
    scenario = Scenario.of(**fields, detail="full")
    timeline = simulate(scenario)
    plan = plan_of(resolve_scenario(scenario), machine_of(scenario))
    parts = play(plan.full.sequence, timeline.targets, events=True)
    return hash_of(timeline.records) + "".join([hash_of(part.played.records) for part in parts])


def replayed(folder: Path) -> str:
    """A recorded trace in four chunks, replayed."""
    work = replay_trace([folder / TRACES.format(rank) for rank in (0, 1)]).simulated.capture.work
    return hashlib.sha256(work.start_ns.tobytes() + work.end_ns.tobytes()).hexdigest()


def walked() -> str:
    """The order of events of a run in chunks, at other clocks."""
    scenario = Scenario.of(**CHUNKED)
    sequence = plan_of(resolve_scenario(scenario), machine_of(scenario)).segments.sequence
    gpu, book = sequence[0].piece.model.gpu, OrderBook(sequence)
    book.note(HeldClock(1.4e9, 600.0))
    found = book.retimed(grid_of(gpu, 16).at(np.arange(30, 40)))
    assert found is not None
    stretches = found.stretches
    columns = (stretches.count, stretches.lasts_ps, stretches.power_w, found.held)
    return hashlib.sha256(b"".join([np.ascontiguousarray(column).tobytes() for column in columns])).hexdigest()


def late(begin: int) -> list[tuple[int, str, float]]:
    """Kernels on a pool of SMs at a time that no machine word of tagged integers holds."""
    env = WholeTime(begin)
    pool, log = SmPool(env, 132), []

    def kernel(name: str, sms: float, lasts: int, priority: int) -> Generator[Event, Any, None]:
        blocks = pool.request(sms, priority=priority)
        yield blocks
        log.append((env.now, name, blocks.held))
        yield env.timeout(lasts)
        yield pool.release(blocks)

    for one in (kernel("product", 132, 10, 0), kernel("copy", 20, 5, 0), kernel("all-reduce", 32, 5, -1)):
        env.process(one)
    env.run()
    return log


def main() -> None:
    """Print the kind of the engine and the hash of each run."""
    runs = {name: run_of(fields) for name, fields in SCENARIOS.items()}
    others = {"replay": replayed(Path(sys.argv[1])), "walked": walked(), "late": late(2**62 - 3)}
    print(json.dumps({"engine": engine_kind()} | others | runs))


if __name__ == "__main__":
    main()
