"""Searches for the settled clock of overlapped work, and orders of events at other clocks: ``benchmarks/retiming.py``.

``searches``: random capped prefills in 4 chunks of ``ten_thousand.toml``, each under all of its caps: runs of the
engine and CPU milliseconds (medians) of a search in a plan that nobody has searched before (*first*) and of those after
it (*further*), without orders, with them from the second search on, and as by default. All in turns in one process;
that clocks, times and joules are the same is checked.

``orders``: an order of events is taken down where a capped scenario settles and walked through at clocks on both sides,
each of which the engine runs, too: where the order held and the walk was the engine's (*exact*), where it held and a
throttled kernel was dealt tiles otherwise (*estimate*), where it broke; and the largest errors of mean power.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from results import machine, put, section

from sim import Scenario
from sim.engine import fluid
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.noting import NotingCore
from sim.engine.running import HeldClock
from sim.result.looks import Looks
from sim.run import runner
from sim.run.guide import WORTH_LOOKS, PowerGuide
from sim.run.steady import steady_clocks
from sim.scenario.machine import Machine, machine_of
from sim.scenario.resolved import resolve_scenario
from sim.shortcuts.clocks import clock_of, grid_of, step_of, top_step
from sim.shortcuts.pieces import Repeated
from sim.shortcuts.retiming.order import order_of
from sim.shortcuts.retiming.record import OrderRecord
from sim.shortcuts.retiming.walk import walk

CAPS_W = (700.0, 600.0, 500.0, 450.0, 400.0)
BASE = {"phase": "prefill", "sequence_parallel": True, "layers": 2, "lm_head": False}
WAYS = {"without": None, "from the second search on": 0, f"after {WORTH_LOOKS} looks too many (default)": WORTH_LOOKS}
AWAY = (0, 1, 3, 10, 30, 60)  # steps of 2 MHz
H100, H200, A100 = "h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb"
KINDS: dict[str, dict[str, Any]] = {
    "Llama-3-70B TP4, 4 chunks, H100": {"gpu": H100, "model": "llama3-70b", "tp": 4, "overlap_chunks": 4},
    "Llama-3-70B TP8, 2 chunks, H100": {"gpu": H100, "model": "llama3-70b", "tp": 8, "overlap_chunks": 2},
    "Llama-3-70B TP4, 8 chunks, H100": {"gpu": H100, "model": "llama3-70b", "tp": 4, "overlap_chunks": 8},
    "Llama-3-8B TP2, 4 chunks, H100": {"gpu": H100, "model": "llama3-8b", "tp": 2, "overlap_chunks": 4},
    "Qwen3-32B TP4, 4 chunks, H200": {"gpu": H200, "model": "qwen3-32b", "tp": 4, "overlap_chunks": 4},
    "Llama-3-8B TP4, 4 chunks, A100": {"gpu": A100, "model": "llama3-8b", "tp": 4, "overlap_chunks": 4},
}


def draws(draw: random.Random) -> dict[str, Any]:
    """One of the prefills of ``ten_thousand.toml``."""
    return {
        "batch": draw.choice([1, 2, 3, 4]),
        "seq_len": draw.randrange(1024, 5121, 256),
        "comm_ctas": draw.choice([4, 8, 12, 16, 24]),
    }


def laid_out(fields: dict[str, Any]) -> tuple[Machine, tuple[Repeated, ...]]:
    """The machine and the pieces of a scenario."""
    scenario = Scenario.of(**BASE | fields)
    target = machine_of(scenario)
    return target, runner.plan_of(resolve_scenario(scenario), target).segments.sequence


def forgotten() -> None:
    """Plans and solved states of those before."""
    runner._plan.cache_clear()
    fluid._shared_by.cache_clear()


def searches(points: int) -> str:
    """The section on searches."""
    draw, spent, looks = random.Random(11), defaultdict(list), defaultdict(list)
    more: dict[str, Looks] = {way: Looks() for way in WAYS}
    gc.collect()
    gc.freeze()
    gc.disable()
    for _ in range(points):
        fields, answers = KINDS["Llama-3-70B TP4, 4 chunks, H100"] | draws(draw), set()
        for way in draw.sample(list(WAYS), len(WAYS)):
            forgotten()
            guide, found = None, []
            for number, cap_w in enumerate(CAPS_W):
                target, sequence = laid_out(fields | {"power_cap_w": cap_w})
                begin, count = time.process_time(), Looks()
                guide = guide or PowerGuide(sequence, worth_looks=WAYS[way])
                held = tuple(steady_clocks(sequence, target.limits, 1, guide, count))
                spent[way, number > 0].append(time.process_time() - begin)
                looks[way, number > 0].append(count.engine_runs)
                for name in ("walked_clocks", "order_held", "fell_back"):
                    setattr(more[way], name, getattr(more[way], name) + getattr(count, name))
                played = [step.piece.play(held) for step in sequence]
                found.append((held, *((one.end_ps, one.energy_j[0]) for one in played)))
            answers.add(tuple(found))
        assert len(answers) == 1, f"other answers: {fields}"
    rows = [
        [
            way,
            *(f"{mean(looks[way, later]):.2f}" for later in (False, True)),
            *(f"{1e3 * median(spent[way, later]):.1f}" for later in (False, True)),
            f"{1e3 * sum(map(sum, (spent[way, False], spent[way, True]))) / points:.1f}",
            f"{more[way].walked_clocks}",
            f"{more[way].order_held}",
            f"{more[way].fell_back}",
        ]
        for way in WAYS
    ]
    head = ["orders", "runs, first", "runs, further", "ms, first", "ms, further", "ms, all caps", "walked clocks",
            "held", "fell back"]  # fmt: skip
    return section(f"Searches of {points} prefills under {len(CAPS_W)} caps", "python benchmarks/retiming.py",
                   machine(), head, rows)  # fmt: skip


def walks(fields: dict[str, Any], draw: random.Random) -> Iterator[tuple[int, str, float]]:
    """Of one scenario: steps away, how the order did, and the error of mean power."""
    target, sequence = laid_out(fields | draws(draw) | {"power_cap_w": draw.choice(CAPS_W) * target_share(fields)})
    piece = sequence[0].piece
    if piece.serial is not None or piece.graph.gpus > 1:
        return
    (held,) = steady_clocks(sequence, target.limits, 1)
    gpu = piece.model.gpu
    core = NotingCore(piece.graph, [piece.model], [held])
    record = OrderRecord(order_of(core, held, Engine(core).run()))
    step = step_of(gpu, held.clock_hz)
    assert step is not None
    steps = [(away, step + sign * away) for away in AWAY for sign in (1, -1)]
    steps = [(away, there) for away, there in steps if 0 <= there <= top_step(gpu)]
    found = walk(record.solved(grid_of(gpu).at(np.array([there for _, there in steps])), held.power_w))
    power_w = found.energy_j / found.length_ps
    for column, (away, there) in enumerate(steps):
        model = FluidModel(gpu, piece.graph.classes, [])
        ran = Engine(Core(piece.graph, [model], [HeldClock(clock_of(gpu, there), held.power_w)])).run()
        error = abs(power_w[column] * ran.end_ps / ran.energy_j[0] - 1.0)
        if found.exact[column]:
            assert found.length_ps[column] == ran.end_ps
            assert abs(found.energy_j[column] / ran.energy_j[0] - 1.0) < 1e-9
        yield away, "exact" if found.exact[column] else "estimate" if found.held[column] else "broken", error


def target_share(fields: dict[str, Any]) -> float:
    """Caps of a GPU of 400 W as those of one of 700 W."""
    return 4.0 / 7.0 if fields["gpu"] == A100 else 1.0


def orders(scenarios: int) -> str:
    """The section on orders."""
    rows = []
    for kind, fields in KINDS.items():
        draw, counts, errors = random.Random(5), Counter[tuple[int, str]](), defaultdict(list)
        for _ in range(scenarios):
            for away, how, error in walks(fields, draw):
                counts[away, how] += 1
                errors[how].append(error)
        cells = []
        for away in AWAY:
            every = sum(counts[away, how] for how in ("exact", "estimate", "broken"))
            cells.append(
                " / ".join(f"{100 * counts[away, how] / max(every, 1):.0f}" for how in ("exact", "estimate", "broken"))
            )
        worst = [f"{max(errors[how], default=0.0):.0e}" for how in ("estimate", "broken")]
        rows.append([kind, *cells, *worst])
    head = ["exact / estimate / broken, %", *(f"{2 * away} MHz" for away in AWAY), "estimates off by", "broken off by"]
    return section(f"Orders of {scenarios} scenarios of each kind at other clocks", "python benchmarks/retiming.py",
                   machine(), head, rows)  # fmt: skip


def main() -> None:
    """Both sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=84, help="scenarios that are searched, under five caps each")
    parser.add_argument("--scenarios", type=int, default=20, help="of each kind whose orders are walked through")
    parser.add_argument("--out", type=Path, help="Markdown file whose sections of these titles are replaced")
    given = parser.parse_args()
    for text in (searches(given.points), orders(given.scenarios)):
        print(text)
        if given.out:
            put(text, given.out)


if __name__ == "__main__":
    main()
