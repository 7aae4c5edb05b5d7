"""Searches that go by the order of events of an earlier run: the same answers, by fewer runs of the engine."""

from __future__ import annotations

import numpy as np
import pytest

from sim import Scenario, simulate
from sim.engine.running import HeldClock
from sim.result.looks import Looks
from sim.result.report import summary
from sim.run.guide import PowerGuide, mean_power_w
from sim.run.retimed import OrderBook, WorkOverClocks
from sim.run.runner import plan_of
from sim.run.steady import steady_clocks
from sim.scenario.machine import Machine, machine_of
from sim.scenario.resolved import resolve_scenario
from sim.shortcuts.clocks import CLOCK_GRID_HZ, clock_of, grid_of, step_of
from sim.shortcuts.pieces import Repeated, mean_w_at

CAPS_W = (700.0, 600.0, 500.0, 450.0, 400.0)
CHUNKS = {
    "model": "llama3-70b",
    "tp": 4,
    "sequence_parallel": True,
    "overlap_chunks": 4,
    "comm_ctas": 16,
    "batch": 4,
    "seq_len": 4608,
    "lm_head": False,
    "layers": 3,  # no other test's plan
}


def laid_out(cap_w: float) -> tuple[Machine, tuple[Repeated, ...]]:
    scenario = Scenario.of(**CHUNKS | {"power_cap_w": cap_w})
    target = machine_of(scenario)
    return target, plan_of(resolve_scenario(scenario), target).segments.sequence


def searched(worth_looks: int | None) -> tuple[list[float], list[Looks], PowerGuide]:
    """Clocks (MHz) of the five caps, how each was found, and the guide."""
    _, sequence = laid_out(700.0)
    sequence[0].piece.played.clear()
    guide = PowerGuide(sequence, worth_looks=worth_looks)
    clocks, ways = [], []
    for cap_w in CAPS_W:
        target, _ = laid_out(cap_w)
        ways.append(Looks())
        (held,) = steady_clocks(sequence, target.limits, 1, guide, ways[-1])
        clocks.append(held.clock_hz / 1e6)
        above = held._replace(clock_hz=held.clock_hz + CLOCK_GRID_HZ)
        for proof in (held, above):
            assert (proof,) in sequence[0].piece.played, "the engine ran it"
        assert mean_w_at(sequence, (held,))[0] <= target.limits.slow_limit_w < mean_w_at(sequence, (above,))[0]
    return clocks, ways, guide


def test_five_caps_of_a_prefill_settle_where_they_did_after_a_walk() -> None:
    plain, before, _ = searched(None)
    walked, after, guide = searched(0)
    assert plain == walked == [1447.0, 1343.0, 1223.0, 1157.0, 1083.0]
    assert [way.engine_runs for way in before] == [4, 3, 2, 2, 2]
    assert [way.engine_runs for way in after] == [4, 2, 2, 2, 2]
    assert [way.walked_clocks for way in after] == [0, 17, 0, 0, 0]
    assert 3 <= after[1].order_held <= 8 and sum(way.fell_back for way in after) == 0
    assert not any(way.walked_clocks or way.fell_back for way in before)
    # What the order says of mean power, without another look: within a few ten-thousandths of the runs.
    for cap_w, clock_mhz in zip(CAPS_W[1:], walked[1:], strict=True):
        target, sequence = laid_out(cap_w)
        limit_w = target.limits.fast_limit_w
        step = step_of(target.model, clock_mhz * 1e6)
        assert step is not None
        (power_w,) = mean_w_at(sequence, (HeldClock(clock_of(target.model, step), limit_w),))
        assert guide.expected_w(limit_w)[step] == pytest.approx(power_w, rel=5e-4)


def test_nothing_is_noted_before_searches_have_taken_three_looks_too_many() -> None:
    _, ways, guide = searched(3)
    assert [way.engine_runs for way in ways] == [4, 3, 2, 2, 2]
    assert not guide.walked
    for step in (100, 101, 102):
        guide.learn(step, 1.05, looks=3)
    target, sequence = laid_out(420.0)
    way = Looks()
    steady_clocks(sequence, target.limits, 1, guide, way)  # takes the order down
    assert way.walked_clocks == 0 and not guide.walked
    target, _ = laid_out(410.0)
    steady_clocks(sequence, target.limits, 1, guide, way)
    assert way.walked_clocks > 0 and guide.walked


def test_work_whose_orders_are_not_kept_is_searched_as_ever() -> None:
    target, sequence = laid_out(600.0)
    book = OrderBook(sequence)
    assert not book.complete
    assert book.retimed(grid_of(target.model, 16).at(np.arange(10, 14))) is None
    guide = PowerGuide(sequence, worth_looks=0)
    guide.learn(400, 1.05, looks=2)
    way = Looks()
    guide.retime(way)
    assert not guide.walked and way.walked_clocks == 0


def test_a_stretch_that_meets_the_limit_below_all_clocks_goes_by_the_power_law() -> None:
    # Power with the square of the clock, time against it: at a quarter of the power half the clock, twice the time.
    clock = np.array([1.0, 1.5, 2.0])
    one = WorkOverClocks(count=np.array([1.0]), lasts_ps=1e6 / clock[None], power_w=100.0 * clock[None] ** 2)
    idle = WorkOverClocks(count=np.array([1.0]), lasts_ps=np.full((1, 3), 1e6), power_w=np.full((1, 3), 10.0))
    assert mean_power_w([one, idle], 25.0) == pytest.approx([(25.0 * 2 + 10.0) / 3] * 3, rel=1e-12)
    assert mean_power_w([one, idle], 1e9)[2] == pytest.approx((400.0 * 0.5 + 10.0) / 1.5, rel=1e-12)


def test_a_report_says_how_the_clock_was_found() -> None:
    fields = CHUNKS | {"seq_len": 1792, "layers": 2, "power_cap_w": 500.0}
    run = simulate(**fields, shortcuts=True)  # type: ignore[arg-type]
    search = summary(run)["clock_search"]
    assert search["engine_runs"] >= 2
    assert search | {"engine_runs": 0} == {"engine_runs": 0, "walked_clocks": 0, "order_held": 0, "fell_back": 0}
    again = simulate(**fields, shortcuts=True)  # type: ignore[arg-type]
    assert summary(again)["clock_search"]["engine_runs"] == 0  # what has run is remembered
    assert (run.latency_s, run.energy_j) == (again.latency_s, again.energy_j)
