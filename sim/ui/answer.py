"""What one scenario answers on the page: headline figures, memory, timeline and roofline."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Any

from sim.errors import MemoryShortError
from sim.explore.choice import command_of
from sim.result.report import count, duration, extent, share, summary
from sim.result.timeline import Timeline
from sim.run.runner import simulate
from sim.scenario.spec import Scenario
from sim.ui import drawn
from sim.ui.state import scenario_of

# Plans and prices are shared by all requests: one simulates at a time.
BUSY = threading.Lock()
ANSWERS = 64  # kept for going back and forth
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that one side shows. ``tiles`` are (label, value, small print); pictures are HTML."""

    title: str
    tiles: tuple[tuple[str, str, str], ...]
    memory: Mapping[str, float]
    timeline: str
    timeline_note: str
    roofline: str
    basis: str
    command: str
    seconds: float
    figures: Mapping[str, float]


def answer(fields: Mapping[str, Any]) -> Answer:
    """Simulate what a form says; a :class:`~inputs.errors.WattlineError` where it cannot be run."""
    return _answer(scenario_of(fields))


@lru_cache(maxsize=ANSWERS)
def _answer(scenario: Scenario) -> Answer:
    with BUSY:
        begun = perf_counter()
        try:
            run = simulate(scenario, shortcuts=True)  # the cheapest way to the figures of every rank and layer
        except MemoryShortError as error:
            raise MemoryShortError(str(error).removesuffix("; or --ignore-memory")) from None
    data = summary(run)
    timeline, note = drawn.lanes(run)
    return Answer(
        title=f"{data['model']} {scenario.phase} on {run.gpus} x {run.machine.gpu.id}",
        tiles=tuple(_tiles(run, data)),
        memory=data["memory_bytes_per_gpu"],
        timeline=timeline,
        timeline_note=note,
        roofline=drawn.roofline(run),
        basis=run.standing.words(),
        command=command_of(scenario),
        seconds=perf_counter() - begun,
        figures={
            "latency": run.latency_s,
            "energy": run.energy_j,
            "tokens/s": data["tokens_per_s"],
            "J per token": data["energy_j_per_token"],
            "power a GPU": sum(run.power_w_per_gpu) / run.gpus,
            "memory a GPU": data["memory_bytes_per_gpu"]["gpu"] - data["memory_bytes_per_gpu"]["room"],
        },
    )


def _tiles(run: Timeline, data: dict[str, Any]) -> list[tuple[str, str, str]]:
    held = data["memory_bytes_per_gpu"]
    what = "time to first token" if run.scenario.phase == "prefill" else "time per output token"
    tiles = [
        ("latency", duration(run.latency_s), what),
        ("energy, all GPUs", f"{run.energy_j:.4g} J", f"{data['energy_j_per_token']:.4g} J a token"),
        ("tokens a second", count(data["tokens_per_s"]), f"{count(data['tokens_per_s_per_gpu'])} a GPU"),
        (
            "memory a GPU",
            f"{(held['gpu'] - held['room']) / GB:.1f} GB",
            f"of {held['gpu'] / GB:.0f}; largest batch {held['largest_batch']:,}",
        ),
        ("mean power a GPU", extent(run.power_w_per_gpu, 1.0, "W"), f"TDP {run.machine.gpu.tdp_w:g} W"),
        (
            "mean SM clock",
            extent(run.sm_clock_hz_per_gpu, 1e6, "MHz"),
            f"at most {run.machine.model.max_clock_hz / 1e6:g}",
        ),
        ("MFU, MBU", f"{share(data['mfu'])}, {share(data['mbu'])}", "of the datasheet's rates"),
    ]
    if run.gpus > 1:
        alone_s = run.exposed_communication_s
        tiles.append(("exposed communication", duration(alone_s), f"{alone_s / run.latency_s:.1%} of the run"))
    return tiles


def beside(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[str, str]]:
    """How B differs from A, figure by figure, in percent of A.

    >>> beside({"latency": 2.0}, {"latency": 1.5})
    [('latency', '-25.0 %')]
    """
    return [(name, f"{b[name] / a[name] - 1.0:+.1%}".replace("%", " %")) for name in a]
