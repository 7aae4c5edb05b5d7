"""The guided search for a settled clock: where it ends is the runs' own answer, whatever the guide expects."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest

from sim import Scenario
from sim.engine.running import HeldClock
from sim.run.guide import GuidedSearch, PowerGuide
from sim.run.runner import plan_of
from sim.run.steady import steady_clocks
from sim.scenario.machine import Machine, machine_of
from sim.scenario.resolved import resolve_scenario
from sim.shortcuts.clocks import CLOCK_GRID_HZ, clock_of
from sim.shortcuts.pieces import mean_w_at

CHUNKS = {
    "model": "llama3-70b",
    "tp": 4,
    "sequence_parallel": True,
    "overlap_chunks": 4,
    "comm_ctas": 8,
    "lm_head": False,
    "layers": 2,
}


def laid_out(**fields: object) -> tuple[Machine, PowerGuide, tuple[object, ...]]:
    scenario = Scenario.of(**CHUNKS | fields)
    target = machine_of(scenario)
    layout = plan_of(resolve_scenario(scenario), target).segments
    return target, PowerGuide(layout.sequence), layout.sequence


def answer(power_w: list[float], limit_w: float) -> int:
    """The last step within the limit of powers that rise; the lowest where none is."""
    return max((step for step, power in enumerate(power_w) if power <= limit_w), default=0)


@pytest.mark.parametrize("seed", range(200))
def test_a_search_ends_at_the_last_step_within_the_limit_whatever_was_expected(seed: int) -> None:
    draw = random.Random(seed)
    target, guide, _ = laid_out()
    steps = guide.top + 1
    power_w = list(accumulate((draw.choice((0.01, 0.4, 1.0, 30.0 * draw.random())) for _ in range(steps)), initial=90))
    expected_w = np.array([power * draw.uniform(0.2, 3.0) for power in power_w[:steps]])
    limit_w = draw.choice((80.0, power_w[draw.randrange(steps)], draw.uniform(90.0, 1.1 * power_w[-1])))
    search = GuidedSearch(guide, target.model, limit_w, expected_w)
    looks = 0
    while not search.settled:
        looks += 1
        search.learn(power_w[search.step])
    assert search.step == answer(power_w[:steps], limit_w)
    assert search.clock_hz == clock_of(target.model, search.step)
    assert looks < 60  # a guide without any sense costs looks, never the answer


def test_a_good_guide_leaves_little_more_than_the_two_looks_that_prove_the_answer() -> None:
    target, guide, _ = laid_out()
    expected_w = guide.expected_w(1e9)
    assert (np.diff(expected_w) > 0.0).all()
    looks = []
    for cap_w in range(300, 600, 7):
        search = GuidedSearch(guide, target.model, float(cap_w), expected_w)
        looks.append(0)
        while not search.settled:
            looks[-1] += 1
            search.learn(float(expected_w[search.step]) * (1.04 + 1e-4 * search.step))
    assert max(looks) <= 4
    assert sum(looks) <= 3 * len(looks)


def test_overlapped_work_settles_between_two_runs_of_the_engine_in_few_runs() -> None:
    few = []
    for cap_w in (700.0, 550.0, 400.0):
        target, guide, sequence = laid_out(batch=2, seq_len=3072, power_cap_w=cap_w)
        piece = sequence[0].piece
        before = len(piece.played)
        (held,) = steady_clocks(sequence, target.limits, 1, guide)
        few.append(len(piece.played) - before)
        above = HeldClock(held.clock_hz + CLOCK_GRID_HZ, held.power_w)
        assert mean_w_at(sequence, (held,))[0] <= target.limits.slow_limit_w < mean_w_at(sequence, (above,))[0]
        assert len(piece.played) - before == few[-1], "both were looked at"
    assert max(few) <= 5
    assert few[-1] <= 3, "searches of one plan learn from one another"


def test_power_that_stays_below_the_limit_is_looked_at_once() -> None:
    target, guide, sequence = laid_out(seq_len=512, batch=1, power_cap_w=700.0)
    (held,) = steady_clocks(sequence, target.limits, 1, guide)
    assert held.clock_hz == target.model.max_clock_hz
    assert len(sequence[0].piece.played) == 1
