"""Engine stories with literal endings, laws, deadlocks."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy.events import Event

from sim.engine.driver import Engine, Governor, Tick
from sim.engine.fluid import FluidModel, Running, _shared_by
from sim.engine.resources.bandwidth import share
from sim.errors import DeadlockError
from tests.engine_kit import COMPUTE, COPY, GPU, REDUCE, core_of, energy_of_steps, graph, run, spans, with_terms


def test_a_kernel_alone_ends_at_its_laws_picosecond_with_its_laws_joules() -> None:
    g = graph((0, [COMPUTE]))
    records = run(g)
    assert records.end_ps == 10_000_000
    # 100 W idle and 1 mJ of its own over 10 us
    assert records.span_energy_j[0] == pytest.approx(100.0 * 10e-6 + 1e-3, rel=1e-12)


def test_one_stream_is_in_order_and_two_streams_share_the_sms() -> None:
    half = with_terms(COMPUTE, blocks=50)
    serial = graph((0, [half, half]))
    parallel = graph((0, [half]), (0, [half]))
    assert spans(serial, run(serial)) == [("gemm", 0, 0.0, 10.0), ("gemm", 0, 10.0, 20.0)]
    assert spans(parallel, run(parallel)) == [("gemm", 0, 0.0, 10.0), ("gemm", 0, 0.0, 10.0)]


def test_a_spinning_rank_waits_at_waiting_power() -> None:
    g = graph((0, [(REDUCE, 0)]), (1, [COMPUTE, (REDUCE, 0)]))
    records = run(g)
    assert spans(g, records) == [
        ("all_reduce", 0, 0.0, 20.0),
        ("gemm", 1, 0.0, 10.0),
        ("all_reduce", 1, 10.0, 20.0),
    ]
    by_op = dict(zip(records.span_op, records.span_energy_j, strict=True))
    assert by_op[0] == pytest.approx((100 + 40) * 10e-6 + 100 * 10e-6 + 5e-4, rel=1e-9)
    assert by_op[2] == pytest.approx(100 * 10e-6 + 5e-4, rel=1e-9)


def test_links_are_shared_fairly_and_a_collective_goes_at_its_slowest_member() -> None:
    other = with_terms(REDUCE, link_bytes=2e6)
    g = graph((0, [(REDUCE, 0)]), (0, [(other, 1)]), (1, [(REDUCE, 0)]), (1, [(other, 1)]))
    # each gets half of the port: 1 MB in 20 us; then the other has 1 MB left at full speed: 10 us more
    assert [(n, e) for n, gpu, _, e in spans(g, run(g)) if gpu == 0] == [
        ("all_reduce", 20.0),
        ("all_reduce", 30.0),
    ]


def test_memory_is_shared_by_weight() -> None:
    light = with_terms(COPY, blocks=50, hbm_weight_per_sm=0.25)
    g = graph((0, [COPY]), (0, [light]))
    # weights 50 and 12.5: 0.8 and 0.2 TB/s; after 12.5 us the light one has 7.5 MB left at 1 TB/s
    assert [row[3] for row in spans(g, run(g))] == [12.5, 20.0]


def test_the_governor_lowers_the_clock_until_the_power_target_is_met() -> None:
    # P(f) = 100 f + 100 f^2 * f with f = clock / 2 GHz: 100 W at f = 0.682328
    records = run(graph((0, [COMPUTE])), limit_w=100.0)
    [state] = [records.states[s] for s in records.step_state][:1]
    assert state.power_w == pytest.approx(100.0, abs=1e-6)
    assert state.clock_hz == pytest.approx(0.682328 * 2e9, rel=1e-5)
    assert records.end_ps == pytest.approx(10e6 / 0.682328, rel=1e-5)


def test_a_stepped_clock_takes_the_highest_step_below_the_target() -> None:
    stepped = replace(GPU, clock_step_hz=15e6)
    records = run(graph((0, [COMPUTE])), limit_w=100.0, gpu=stepped)
    assert records.states[records.step_state[0]].clock_hz == 1_355_000_000.0  # 0.5 GHz + 57 steps; next is 1.370


def test_eager_kernels_wait_for_the_host() -> None:
    g = graph((0, [COMPUTE, COMPUTE]), issue_ps=[4_000_000, 30_000_000])
    assert spans(g, run(g)) == [("gemm", 0, 4.0, 14.0), ("gemm", 0, 30.0, 40.0)]


def test_crossed_collectives_are_a_named_deadlock() -> None:
    wide = with_terms(REDUCE, blocks=50)
    g = graph((0, [(wide, 0), (wide, 1)]), (1, [(wide, 1), (wide, 0)]))
    with pytest.raises(DeadlockError, match=r"collective 0 \(all_reduce\) has GPUs \[0\], misses \[1\]"):
        run(g)


def test_a_missing_rank_is_a_named_deadlock() -> None:
    g = graph((0, [(REDUCE, 0)]), (1, [COMPUTE, (REDUCE, 0)]), edges=((2, 1),))
    with pytest.raises(DeadlockError, match=r"collective 0 \(all_reduce\) has GPUs \[0\], misses \[1\]"):
        run(g)


def test_cyclic_dependencies_are_a_deadlock() -> None:
    g = graph((0, [COMPUTE]), (0, [COPY]), edges=((0, 1), (1, 0)))
    with pytest.raises(DeadlockError, match="cyclic dependencies"):
        run(g)


@given(
    demands=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=6),
    weights=st.lists(st.floats(0.1, 10.0), min_size=6, max_size=6),
    capacity=st.floats(0.1, 200.0),
)
def test_max_min_shares_are_feasible_and_leave_nothing_unused(
    demands: list[float], weights: list[float], capacity: float
) -> None:
    granted = share(demands, weights[: len(demands)], capacity)
    assert all(0.0 <= g <= d * (1 + 1e-9) for g, d in zip(granted, demands, strict=True))
    assert math.fsum(granted) == pytest.approx(min(capacity, math.fsum(demands)), rel=1e-9, abs=1e-12)


KERNELS = (COMPUTE, COPY, with_terms(COMPUTE, blocks=150), with_terms(COPY, hbm_weight_per_sm=3.0))
PROGRAMS = st.lists(st.integers(0, len(KERNELS)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(first=PROGRAMS, second=PROGRAMS, limit_w=st.sampled_from([1e9, 160.0, 90.0]))
def test_laws_hold_for_any_program(first: list[int], second: list[int], limit_w: float) -> None:
    queues = []
    for gpu in range(2):
        collective = iter(range(100))
        main = [KERNELS[i] if i < len(KERNELS) else (REDUCE, next(collective)) for i in first]
        side = [KERNELS[i % len(KERNELS)] for i in second[gpu:]]
        queues += [(gpu, main), (gpu, side)] if side else [(gpu, main)]
    g = graph(*queues)
    simpy = Engine(core_of(g, limit_w)).run()
    parts = math.fsum(simpy.span_energy_j) + math.fsum(simpy.idle_energy_j)
    assert parts == pytest.approx(energy_of_steps(simpy), rel=1e-9)
    assert len(simpy.span_op) == g.kernels
    if limit_w < 1e9:
        busy = [s for s in simpy.states if s.sms_busy]  # an idle GPU keeps its clock
        assert all(s.power_w <= limit_w * (1 + 1e-9) or s.clock_hz == GPU.min_clock_hz for s in busy)


@settings(deadline=None, max_examples=40)
@given(first=PROGRAMS, second=PROGRAMS)
def test_the_loop_arbitrates_as_events_of_lower_priority_do(first: list[int], second: list[int]) -> None:
    collective = [iter(range(100)), iter(range(100))]
    g = graph(
        *[
            (gpu, [KERNELS[i] if i < len(KERNELS) else (REDUCE, next(collective[gpu])) for i in first])
            for gpu in range(2)
        ],
        (0, [KERNELS[i % len(KERNELS)] for i in second]),
    )
    by_loop, by_events = Engine(core_of(g, 160.0)), Engine(core_of(g, 160.0))
    by_events.rounds.driven = False
    one, other = by_loop.run(), by_events.run()
    for name in ("span_op", "span_start_ps", "span_end_ps", "span_energy_j", "step_gpu", "step_time_ps", "step_state"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
    assert one.events < other.events


def test_a_kernel_costs_simpy_its_request_and_its_end() -> None:
    launch = 1
    assert run(graph((0, [COMPUTE, COPY, COMPUTE]))).events == launch + 2 * 3
    # Two GPUs whose kernels end together share the end.
    assert run(graph((0, [COMPUTE]), (1, [COMPUTE]))).events == 2 * launch + 2 + 1
    # The power limit slows the product down when the copy joins in: its end is scheduled once more.
    half, late, lead = with_terms(COMPUTE, blocks=50), replace(COPY, lead_s=1e-6), 1
    for limit_w, moved in ((1e9, 0), (160.0, 1)):
        assert run(graph((0, [half]), (0, [late])), limit_w).events == 2 * launch + lead + 2 * 2 + moved


@given(program=PROGRAMS)
def test_serial_programs_are_never_slower_with_more_of_anything(program: list[int]) -> None:
    g = graph((0, [KERNELS[i % len(KERNELS)] for i in program]))
    base = run(g).end_ps
    for better in (
        replace(GPU, max_clock_hz=2.2e9),
        replace(GPU, hbm_bytes_per_s=2e12),
        replace(GPU, link_bytes_per_s=2e11),
    ):
        assert run(g, gpu=better).end_ps <= base
    assert run(g, pool=[60.0]).end_ps >= base
    assert run(g, limit_w=150.0).end_ps >= base


def test_the_same_run_gives_the_same_bytes() -> None:
    g = graph((0, [COMPUTE, (REDUCE, 0), COPY]), (1, [COPY, (REDUCE, 0), COMPUTE]), (0, [COPY]))
    first, second = run(g, 150.0), run(g, 150.0)
    assert first.span_end_ps.tobytes() == second.span_end_ps.tobytes()
    assert first.span_energy_j.tobytes() == second.span_energy_j.tobytes()


@pytest.mark.parametrize("first", ["parts", "kernels"])
def test_parts_of_a_kernel_and_kernels_of_equal_costs_have_states_of_their_own(first: str) -> None:
    # Loads of a kernel queue behind those of another, not behind those of its own other blocks; models share states.
    classes = tuple(
        replace(with_terms(COMPUTE, blocks=512, hbm_bytes=4e6, hbm_bytes_per_s=1e12, load_wait=0.6), name=name)
        for name in ("one", "other")
    )
    asked: dict[str, Running] = {
        "parts": ((0, 50.0, False, 1.0), (0, 50.0, False, 1.0)),
        "kernels": ((0, 50.0, False, 1.0), (1, 50.0, False, 1.0)),
    }
    found = {}
    _shared_by.cache_clear()
    for name in sorted(asked, key=lambda name: name != first):
        found[name] = FluidModel(GPU, classes, []).solve(asked[name], 1e9, GPU.max_clock_hz).rates
        alone = FluidModel(GPU, classes, []).running_set(asked[name]).at(GPU.max_clock_hz)
        assert found[name] == alone.rates
    assert found["kernels"] < found["parts"]


class Ticking:
    """A governor that waits for its next tick when the run ends."""

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        while True:
            yield Tick(engine.env, 1_000_000)


@pytest.mark.parametrize("governor", [None, Ticking()])
def test_an_engine_is_freed_without_the_collector(governor: Governor | None) -> None:
    engine = Engine(core_of(graph((0, [COMPUTE, REDUCE]), (0, [COPY]), (1, [REDUCE, COMPUTE]))), governor)
    engine.run()
    parts = [weakref.ref(one) for one in (engine, engine.core, engine.env, engine.core.gpus[0].pools[0])]
    gc.disable()
    try:
        del engine
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()
