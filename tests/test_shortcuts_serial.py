"""One stream a GPU is summed, not scheduled; what it leaves behind is what the engine leaves."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import Scenario
from sim.engine import fluid
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.errors import DeadlockError
from sim.run.runner import plan_of
from sim.scenario.machine import machine_of
from sim.scenario.resolved import resolve_scenario
from sim.shortcuts.pieces import Piece
from sim.shortcuts.serial import Serial, is_serial
from tests.engine_kit import COMPUTE, COPY, GPU, REDUCE, graph, with_terms

WIDE = replace(with_terms(REDUCE, blocks=20, link_bytes=3e6, cycles_per_block=4e3, core_energy_j=2e-3), name="wide")
KERNELS = (
    COMPUTE,
    replace(COPY, gap_s=0.7e-6),
    with_terms(COMPUTE, blocks=281, l2_bytes=3e6, l2_bytes_per_cycle=900.0, floor_s=1.3e-6),
    with_terms(COPY, blocks=10, sms_per_block=0.0, quantised=False),  # copy engines
    replace(with_terms(COMPUTE, blocks=1, cycles_per_block=1.0), gap_s=1e-6),
    with_terms(COMPUTE, blocks=150, sms_cap=70.0),
)
MEETINGS = (REDUCE, WIDE, replace(REDUCE, gap_s=0.5e-6))
# What a GPU runs by itself, then the meeting that ends the round: of all, of the first two, of the last two, of one.
ROUND = st.tuples(
    st.lists(st.lists(st.integers(0, len(KERNELS) - 1), max_size=5), min_size=3, max_size=3),
    st.sampled_from([(0, 1, 2), (0, 1), (1, 2), (1,)]),
    st.lists(st.integers(0, len(MEETINGS) - 1), min_size=3, max_size=3),
)


def serial_graph(rounds: list[tuple[list[list[int]], tuple[int, ...], list[int]]], gpus: int) -> KernelGraph:
    queues: list[list[object]] = [[COPY] for _ in range(gpus)]
    for number, (alone, party, kinds) in enumerate(rounds):
        for gpu in range(gpus):
            queues[gpu] += [KERNELS[i] for i in alone[gpu]]
            if gpu in party:
                queues[gpu].append((MEETINGS[kinds[gpu]], number))
    return graph(*[(gpu, queue) for gpu, queue in enumerate(queues)])  # type: ignore[arg-type]


def told(records: Recorder) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]], list[float]]:
    """Spans by kernel and power steps by GPU, to the picosecond; then joules, watts and Hz.

    Left out are steps that change nothing: the engine solves a GPU again when others find their pace.
    """
    columns = (records.span_op, records.span_start_ps, records.span_end_ps, records.span_energy_j)
    spans = sorted(zip(*columns, strict=True))
    reals = [*map(itemgetter(3), spans), *records.idle_energy_j, *records.energy_j]
    steps: list[tuple[int, int]] = []
    now: tuple[int, float, float] = (-1, 0.0, 0.0)
    for gpu, time_ps, index in sorted(zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True)):
        state = records.states[index]
        if now != pytest.approx((gpu, state.power_w, state.clock_hz), rel=1e-8):
            steps.append((gpu, time_ps))
            reals += [state.power_w, state.clock_hz]
            now = (gpu, state.power_w, state.clock_hz)
    return [span[:3] for span in spans], steps, reals


@settings(deadline=None, max_examples=120)
@given(
    rounds=st.lists(ROUND, min_size=1, max_size=6),
    gpus=st.integers(1, 3),
    limits_w=st.lists(st.sampled_from([1e9, 160.0, 90.0, 1.0]), min_size=3, max_size=3),
    clock_step_hz=st.sampled_from([0.0, 15e6]),
)
def test_sums_over_streams_are_what_the_engine_runs(
    rounds: list[tuple[list[list[int]], tuple[int, ...], list[int]]],
    gpus: int,
    limits_w: list[float],
    clock_step_hz: float,
) -> None:
    g = serial_graph(rounds, gpus)
    gpu = replace(GPU, clock_step_hz=clock_step_hz)
    model = FluidModel(gpu, g.classes, [])
    assert is_serial(g, model)
    summed = Serial(g, model).run(limits_w[:gpus])
    run = Engine(Core(g, [FluidModel(gpu, g.classes, [])] * gpus, limits_w[:gpus])).run()
    assert summed is not None and summed.end_ps == run.end_ps
    (spans, steps, reals), (expected_spans, expected_steps, expected_reals) = told(summed), told(run)
    assert spans == expected_spans
    assert steps == expected_steps
    assert reals == pytest.approx(expected_reals, rel=1e-9, abs=1e-18)
    if gpus == 1:
        for column in ("span_op", "span_start_ps", "span_end_ps", "span_energy_j", "step_time_ps"):
            assert getattr(summed, column).tobytes() == getattr(run, column).tobytes(), column


@pytest.mark.parametrize(
    "g",
    [
        graph((0, [COMPUTE]), (0, [COPY])),
        graph((0, [COMPUTE]), (1, [COPY]), issue_ps=[5, 5]),
        graph((0, [COMPUTE, COPY]), edges=((1, 0),)),
        graph((0, [replace(COMPUTE, lead_s=1e-6)])),
    ],
    ids=["two streams", "host launches", "an edge", "a lead"],
)
def test_whatever_has_something_else_to_wait_for_is_scheduled(g: KernelGraph) -> None:
    assert not is_serial(g, FluidModel(GPU, g.classes, []))


def test_meetings_that_cross_are_left_to_the_engine_to_name() -> None:
    g = graph((0, [(REDUCE, 0), (REDUCE, 1)]), (1, [(REDUCE, 1), (REDUCE, 0)]))
    model = FluidModel(GPU, g.classes, [])
    assert Serial(g, model).run([1e9, 1e9]) is None
    with pytest.raises(DeadlockError, match=r"collective 0 \(all_reduce\) has GPUs \[0\], misses \[1\]"):
        Piece(g, model).play((1e9, 1e9))


def test_what_a_graph_is_at_any_clock_is_worked_out_once_for_all_plans() -> None:
    pieces = []
    for clock_mhz in (1980, 1410):
        scenario = Scenario.of(
            model="qwen3-30b-a3b", phase="decode", ep=4, ep_mode="all_to_all", sm_clock_mhz=clock_mhz
        )
        layout = plan_of(resolve_scenario(scenario), machine_of(scenario)).segments
        pieces.append([step.piece for step in layout.sequence])
    assert pieces[0] != pieces[1]
    for one, other in zip(*pieces, strict=True):
        assert one.serial and other.serial and one.model.gpu != other.model.gpu
        assert one.graph is other.graph and one.serial.layout is other.serial.layout


def test_running_sets_keep_their_numbers_when_the_list_of_them_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    g = graph((0, [COMPUTE, COPY, with_terms(COPY, hbm_bytes=7e6), COMPUTE]))
    ends = []
    for most in (fluid.MAX_STATES, 1):
        monkeypatch.setattr(fluid, "MAX_STATES", most)
        run = Serial(g, FluidModel(GPU, g.classes, [])).run([300.0])
        assert run is not None
        ends.append((run.end_ps, run.energy_j))
    assert ends[0] == ends[1]
