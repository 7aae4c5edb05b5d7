"""A stream alone is summed, not scheduled: its records are the engine's, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.alone import run_alone, runs_alone
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from tests.engine_kit import COMPUTE, COPY, GPU, REDUCE, core_of, graph, with_terms

KERNELS = (
    COMPUTE,
    replace(COPY, gap_s=0.7e-6),
    with_terms(COMPUTE, blocks=281, l2_bytes=3e6, l2_bytes_per_cycle=900.0, floor_s=1.3e-6),
    with_terms(COPY, blocks=10, sms_per_block=0.0, quantised=False),  # copy engines
    replace(with_terms(COMPUTE, blocks=1, cycles_per_block=1.0), gap_s=1e-6),
    with_terms(COMPUTE, blocks=150, sms_cap=70.0),
)


@settings(deadline=None, max_examples=80)
@given(
    program=st.lists(st.integers(0, len(KERNELS)), min_size=1, max_size=30),
    limit_w=st.sampled_from([1e9, 160.0, 90.0, 1.0]),
    clock_step_hz=st.sampled_from([0.0, 15e6]),
)
def test_the_sum_over_a_stream_is_what_the_engine_runs(
    program: list[int], limit_w: float, clock_step_hz: float
) -> None:
    met = iter(range(len(program)))
    g = graph((0, [KERNELS[i] if i < len(KERNELS) else (REDUCE, next(met)) for i in program]))
    core = core_of(g, limit_w, replace(GPU, clock_step_hz=clock_step_hz))
    model = FluidModel(core.gpus[0].model.gpu, g.classes, [])
    assert runs_alone(g, model)
    summed, energy_j = run_alone(g, model, limit_w)
    run = Engine(core).run()
    for column in (
        "span_op",
        "span_start_ps",
        "span_end_ps",
        "span_energy_j",
        "step_gpu",
        "step_time_ps",
        "step_state",
    ):
        assert getattr(summed, column).tobytes() == getattr(run, column).tobytes(), column
    assert [s.power_w for s in summed.states] == [s.power_w for s in run.states]
    assert (summed.end_ps, summed.idle_energy_j) == (run.end_ps, run.idle_energy_j)
    assert energy_j == core.gpus[0].energy_j


@pytest.mark.parametrize(
    "g",
    [
        graph((0, [COMPUTE]), (0, [COPY])),
        graph((0, [COMPUTE, (REDUCE, 0)]), (1, [(REDUCE, 0)])),
        graph((0, [COMPUTE]), issue_ps=[5]),
        graph((0, [COMPUTE, COPY]), edges=((1, 0),)),
        graph((0, [replace(COMPUTE, lead_s=1e-6)])),
    ],
    ids=["two streams", "two GPUs", "host launches", "an edge", "a lead"],
)
def test_whatever_has_something_to_wait_for_is_scheduled(g: KernelGraph) -> None:
    assert not runs_alone(g, FluidModel(GPU, g.classes, []))
