"""What a walk works out at many clocks at once is what the engine works out at one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.laws.streaming import (
    slowdown,
    slowdown_at,
    unlimited,
    unlimited_at,
    waiting_slowdown,
    waiting_slowdown_at,
)
from sim.engine.fluid import FluidModel
from sim.engine.resources.hbm import share_behind_others, shares_behind_others
from sim.engine.resources.tiles import WHOLE as WHOLE_PART
from sim.engine.resources.tiles import Dealing, Part, deal
from sim.engine.running import Rules
from sim.shortcuts.clocks import grid_of, top_step
from sim.shortcuts.retiming.dealing import WHOLE, Share, TilesOverClocks, deal_at
from sim.shortcuts.retiming.sets import SetsAtClocks
from tests.engine_kit import GPU
from tests.overlapped import HOPPER, kinds


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_running_sets_at_many_clocks_are_those_of_the_solver_at_each(seed: int) -> None:
    draw = random.Random(seed)
    classes = tuple(dict.fromkeys(kinds(draw)))
    model = FluidModel(HOPPER, classes, [])
    sets = []
    for _ in range(6):
        numbers = sorted(draw.choice(range(len(classes))) for _ in range(draw.randint(1, 4)))
        whole = [model.grid(number).sms for number in numbers]
        sets.append(
            tuple([(n, draw.choice([1.0, 0.5]) * sms, False, 1.0) for n, sms in zip(numbers, whole, strict=True)])
        )
    steps = sorted({0, top_step(HOPPER), *(draw.randint(0, top_step(HOPPER)) for _ in range(4))})
    curves = grid_of(HOPPER).at(np.array(steps))
    solver = SetsAtClocks(model, sets)
    found = solver.at(curves)
    power = found.dynamic_w * HOPPER.chip_power_factor + found.idle_w * solver.share
    for number, running in enumerate(sets):
        rows = slice(solver.first[number], solver.first[number + 1])
        for column, clock_hz in enumerate(curves.clock_hz):
            state = model.running_set(running).at(float(clock_hz))
            assert found.rate[rows, column].tolist() == pytest.approx(state.rates, rel=1e-12)
            assert power[rows, column].tolist() == pytest.approx(state.kernel_power_w, rel=1e-12)


def test_other_rules_of_sharing_and_waiting_ranks_are_refused() -> None:
    classes = tuple(kinds(random.Random(1)))
    model = FluidModel(GPU, classes, [])
    with pytest.raises(ValueError, match="wait for other GPUs"):
        SetsAtClocks(model, [((0, 10.0, True, 1.0),)])
    other = model.under(Rules(hbm=model.rules.link, link=model.rules.link))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="other rules"):
        SetsAtClocks(other, [((0, 10.0, False, 1.0),)])


def test_laws_of_many_at_once_are_those_of_one() -> None:
    draw = random.Random(3)
    a, b = (np.array([draw.uniform(0.0, 2.5) for _ in range(50)]) for _ in range(2))
    sms = np.array([draw.uniform(1.0, 132.0) for _ in range(50)])
    flow = a * 1e12
    assert slowdown_at(a) == pytest.approx([slowdown(x) for x in a], rel=1e-14)
    assert unlimited_at(flow, b, sms) == pytest.approx(
        [unlimited(*x) for x in zip(flow, b, sms, strict=True)], rel=1e-13
    )
    assert waiting_slowdown_at(a, 1.0 + b) == pytest.approx(
        [waiting_slowdown(*x) for x in zip(a, 1.0 + b, strict=True)], rel=1e-13
    )
    behind = shares_behind_others(a + 0.1, sms, b, sms[::-1], 3.0)
    alone = [
        share_behind_others(x, w, [other], [v], 3.0) for x, w, other, v in zip(a + 0.1, sms, b, sms[::-1], strict=True)
    ]
    assert behind == pytest.approx(alone, rel=1e-15)
    classes = tuple(kinds(draw))
    model = FluidModel(HOPPER, classes, [])
    clocks = grid_of(HOPPER).clock_hz[::50]
    for number in range(len(classes)):
        if classes[number].terms.cycles_per_block:
            thin = [model.thin(number, float(hz), 4) for hz in clocks]
            assert model.thin_at(number, clocks, 4) == pytest.approx(thin, rel=1e-13)


@settings(max_examples=150)
@given(seed=st.integers(0, 10**9))
def test_tiles_dealt_at_many_clocks_are_dealt_as_at_each(seed: int) -> None:
    draw = random.Random(seed)
    blocks, tiles, clocks = 132, draw.choice([190, 264, 512, 700, 1440]), 5
    rounds = -(-tiles // blocks)
    own = min(2, rounds)
    fetched = float(max(0, tiles - own * blocks))
    dealing = Dealing(rounds, own, fetched, min(1.0, tiles / blocks - (own - 1)), 0.6, rounds * blocks / tiles)
    thin = np.array([draw.uniform(0.3, 1.0) for _ in range(clocks)])
    each = [dealing._replace(thin=float(one)) for one in thin]
    sizes = draw.sample([4.0, 8.0, 20.0, 40.0, 60.0], 3)
    held = np.ones(clocks, dtype=bool)
    shares: list[tuple[float, object, Share]] = []
    parts: list[list[tuple[float, float, Part]]] = [[] for _ in range(clocks)]
    compared = 0
    for start, slots in enumerate(sizes):
        # Those that have begun have come a little further, at each clock a little differently.
        step, spread = draw.uniform(0.0, 0.4), draw.choice([0.0, 1e-3, 0.05])
        gone = [step * (1.0 + draw.uniform(-spread, spread)) for _ in range(clocks)]
        shares = [(n, np.maximum(left - np.array(gone), 0.0), part) for n, left, part in shares]
        shares.append((slots, 1.0, WHOLE))
        for column in range(clocks):
            before = [(n, max(left - gone[column], 0.0), part) for n, left, part in parts[column]]
            before.append((slots, 1.0, WHOLE_PART))
            dealt = deal(tuple(before), each[column])
            parts[column] = [(n, left, part) for (n, _, _), (left, part) in zip(before, dealt, strict=True)]
        if not held.any():
            break
        column = int(held.argmax())
        last = [part.last for _, _, part in parts[column]]
        found = deal_at(shares, TilesOverClocks(dealing, thin), held, last)
        shares = [(n, left, part) for (n, _, _), (left, part) in zip(shares, found, strict=True)]
        for column in np.flatnonzero(held).tolist():
            for (_, left, part), (_, exact, own_part) in zip(shares, parts[column], strict=True):
                assert np.broadcast_to(left, clocks)[column] == exact
                for name in Part._fields:
                    assert np.broadcast_to(getattr(part, name), clocks)[column] == getattr(own_part, name), (
                        start,
                        name,
                    )
                compared += 1
    assert compared
    assert TilesOverClocks(dealing, thin).without(WHOLE._replace(fetched=3.0)).dealing.fetched == fetched - 3.0


def test_a_clock_that_deals_otherwise_is_dropped() -> None:
    dealing = Dealing(4, 2, 248.0, 1.0, 1.0, 1.03125)
    tiles = TilesOverClocks(dealing, np.ones(3))
    held = np.ones(3, dtype=bool)
    [(left, part)] = deal_at([(100.0, 1.0, WHOLE)], tiles, held, [48.0])
    assert left.tolist() == [1.25] * 3 and part.rounds.tolist() == [5.0] * 3 and part.last == 48.0 and held.all()
    # At the third clock the first blocks are a round further when 32 others start.
    lefts = np.array([1.25, 1.2, 0.9])
    deal_at([(100.0, lefts, part), (32.0, 1.0, WHOLE)], tiles, held, [100.0, 16.0])
    assert held.tolist() == [True, True, False]
    # No clock deals the record's last rounds.
    assert deal_at([(100.0, 1.0, WHOLE)], tiles, held, [47.0]) == [(1.0, WHOLE)] and not held.any()
