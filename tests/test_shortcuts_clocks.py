"""Serial programs from tables over the clock are what the engine runs at each of its clocks."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.running import HeldClock
from sim.errors import FoldError
from sim.shortcuts import serial_clocks
from sim.shortcuts.clocks import clock_of, grid_of, step_of, top_step
from sim.shortcuts.pieces import Piece, Repeated, mean_w_at, play
from tests.engine_kit import COMPUTE, COPY, GPU, REDUCE, graph, with_terms
from tests.test_shortcuts_serial import ROUND, serial_graph

# An odd range: the highest clock is no multiple of the grid's step.
ODD = replace(GPU, max_clock_hz=1.9993e9, chip_power_factor=1.03)


@pytest.mark.parametrize("summed", [512, 0], ids=["summed at all clocks", "added up at each"])
@settings(deadline=None, max_examples=60)
@given(
    rounds=st.lists(ROUND, min_size=1, max_size=5),
    gpus=st.integers(1, 3),
    shares=st.lists(st.sampled_from([0.0, 0.31, 0.77, 0.99, 1.0]), min_size=3, max_size=3),
    limit_w=st.sampled_from([math.inf, 230.0, 160.0, 90.0, 1.0]),
)
def test_a_program_at_any_clocks_takes_the_time_and_joules_of_the_event_run(
    rounds: list[tuple[list[list[int]], tuple[int, ...], list[int]]],
    gpus: int,
    shares: list[float],
    limit_w: float,
    summed: int,
) -> None:
    rounds = [(alone, tuple(gpu for gpu in party if gpu < gpus), kinds) for alone, party, kinds in rounds]
    g = serial_graph(rounds, gpus)
    model = FluidModel(ODD, g.classes, [])
    steps = [int(share * top_step(ODD)) for share in shares[:gpus]]
    held = [HeldClock(clock_of(ODD, step), limit_w) for step in steps]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serial_clocks, "MAX_SUMMED", summed)
        ran = Piece(g, model).at_clocks(tuple(held))
    core = Core(g, [FluidModel(ODD, g.classes, [])] * gpus, held)
    records = Engine(core).run()
    assert ran is not None
    assert ran.end_ps == pytest.approx(records.end_ps, rel=1e-9)
    assert ran.energy_j == pytest.approx(records.energy_j, rel=1e-9)


@pytest.mark.parametrize("changes", [{}, {"sharpness": 6.0}, {"floor_s": 2e-6, "tail_cycles": 9e3, "scale": 1.1}])
def test_every_clock_of_the_grid_gives_the_law_of_that_clock(changes: dict[str, float]) -> None:
    kernel = with_terms(COMPUTE, blocks=281, l2_bytes=3e6, l2_bytes_per_cycle=900.0, hbm_bytes=8e6, **changes)
    kernel = with_terms(kernel, hbm_bytes_per_s=1e12)
    model = FluidModel(ODD, (kernel,), [])
    pace = model.member(0, 100.0, False).pace
    clocks = grid_of(ODD).clock_hz
    assert pace.seconds_at(clocks).tolist() == pytest.approx([pace.seconds(hz) for hz in clocks], rel=1e-14)
    assert [step_of(ODD, hz) for hz in clocks] == list(range(top_step(ODD) + 1))
    assert step_of(ODD, clocks[3] + 1e6) is None and clocks[-1] == ODD.max_clock_hz


def test_mean_power_of_a_sequence_is_that_of_its_runs() -> None:
    both = graph((0, [COMPUTE, (REDUCE, 0)]), (1, [COPY, COPY, (REDUCE, 0)]))
    head = graph((0, [COMPUTE, (REDUCE, 0)]), (1, [COMPUTE, (REDUCE, 0)]))
    pieces = [Piece(g, FluidModel(GPU, g.classes, [])) for g in (both, head)]
    sequence = [Repeated(number=i, piece=piece, repeat=3 - i) for i, piece in enumerate(pieces)]
    held = tuple(HeldClock(clock_of(GPU, step), 1e9) for step in (300, 512))
    parts = play(sequence, held)
    seconds = sum(part.repeat * part.played.records.end_ps for part in parts) * 1e-12
    joules = [sum(part.repeat * part.played.energy_j[gpu] for part in parts) for gpu in (0, 1)]
    assert mean_w_at(sequence, held) == pytest.approx([j / seconds for j in joules], rel=1e-9)
    between = (HeldClock(1.2345e9, 1e9),) * 2  # two clocks of the grid
    assert pieces[0].at_clocks(between) is None and len(mean_w_at(sequence, between)) == 2


def test_a_cut_that_is_not_level_is_refused_as_by_a_run() -> None:
    g = graph((0, [COMPUTE]), (1, [COPY, COPY]))
    sequence = [Repeated(number=0, piece=Piece(g, FluidModel(GPU, g.classes, [])), repeat=2)]
    with pytest.raises(FoldError, match="at different times"):
        mean_w_at(sequence, (HeldClock(clock_of(GPU, 700), 1e9),) * 2)


def test_tables_go_with_their_piece() -> None:
    # Nothing refers to itself: sweeps freeze what a batch leaves, so that the collector would not find it.
    g = graph((0, [COMPUTE, (REDUCE, 0)]), (1, [COPY, (REDUCE, 0)]))
    piece = Piece(g, FluidModel(GPU, g.classes, []))
    assert piece.at_clocks((HeldClock(clock_of(GPU, 700), 150.0),) * 2) is not None
    known = [weakref.ref(piece._at_clocks), weakref.ref(piece._curves)]
    del piece
    assert [one() for one in known] == [None, None]
