"""Runs by shortcuts equal the event run of every rank and layer; what cannot be folded says why."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from sim import simulate
from sim.build.program import build
from sim.engine.running import HeldClock
from sim.errors import FoldError
from sim.result.report import summary
from sim.run.plan import classifier
from sim.run.runner import MOST_EVENT_KERNELS
from sim.run.runner import plan_of as plan_of_model
from sim.run.steady import steady_clocks
from sim.scenario.machine import machine_of, profile_of
from sim.scenario.resolved import resolve_scenario
from sim.scenario.spec import Scenario
from sim.shortcuts.context_buckets import bucket_contexts
from sim.shortcuts.fold import fold
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import CollectiveWork, ElementwiseWork

LLAMA = {"model": "llama3-70b", "tp": 4, "layers": 5}
OVERLAP = LLAMA | {"sequence_parallel": True, "overlap_chunks": 4, "comm_ctas": 8, "seq_len": 4096}
EXPERTS = {"model": "qwen3-30b-a3b", "layers": 4, "tp": 4, "ep": 4, "seq_len": 1024}
# GPUs of three dense layers meet nowhere: each ends them at its own clock.
WIDE = {"model": "deepseek-v3", "gpu": "h800", "ep": 4, "ep_mode": "all_to_all", "ep_kernels": "normal", "dtype": "fp8",
        "batch": 2, "seq_len": 2048, "power_cap_w": 500, "lm_head": False, "ignore_memory": True}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "prefill": LLAMA,
    "prefill uncapped": LLAMA | {"uncapped": True},
    "prefill at 400 W": LLAMA | {"batch": 4, "power_cap_w": 400},
    "decode": LLAMA | {"phase": "decode", "batch": 32},
    "overlap": OVERLAP | {"batch": 2},
    "overlap at 500 W": OVERLAP | {"power_cap_w": 500},
    "overlap, limiters in time": OVERLAP | {"regime": "cold", "batch": 4, "layers": 12},
    "limiters in time": LLAMA | {"regime": "cold", "batch": 8, "layers": 20},
    "generate": LLAMA | {"phase": "generate", "seq_len": 512, "output_len": 5},
    "generate, limiters in time": {"model": "llama3-8b", "phase": "generate", "batch": 64, "seq_len": 2048,
                                   "output_len": 12, "layers": 8, "power_cap_w": 300},
    "uneven experts": EXPERTS | {"ep_mode": "all_reduce", "expert_skew": 0.6},
    "experts by all-to-all": EXPERTS | {"ep_mode": "all_to_all", "tp": 1, "phase": "decode", "batch": 16},
    "replicas": {"model": "llama3-8b", "tp": 2, "dp": 2, "layers": 4, "batch": 4},
    "pipeline": {"model": "llama3-8b", "tp": 2, "pp": 2, "dp": 2, "layers": 5, "batch": 8, "seq_len": 256},
    "context slices": {"model": "llama3-8b", "tp": 2, "cp": 2, "layers": 4, "seq_len": 4096, "uncapped": True},
    "context slices at their own clocks": {"model": "llama3-8b", "tp": 2, "cp": 2, "layers": 4, "seq_len": 4096},
    "uneven experts, limiters in time": EXPERTS | {"ep_mode": "all_to_all", "tp": 1, "expert_skew": 0.6, "batch": 16,
                                                   "regime": "cold", "power_cap_w": 400},
    "experts, generate": EXPERTS | {"ep_mode": "all_to_all", "tp": 1, "batch": 32, "phase": "generate",
                                    "output_len": 6, "power_cap_w": 300},
    "dense layers before experts, in two halves": WIDE | {"overlap": "two_batch", "layers": 6},
    "dense layers before experts, after one another": WIDE | {"layers": 5},
    "dense layers before experts, limiters in time": WIDE | {"overlap": "two_batch", "layers": 5, "regime": "cold"},
    "eager": {"model": "llama3-8b", "launch": "eager", "seq_len": 64, "layers": 4, "tp": 2},
}  # fmt: skip


def plan_of(scenario: Scenario) -> Any:
    return plan_of_model(resolve_scenario(scenario), machine_of(scenario))


@pytest.mark.parametrize("detail", ["folded", "segment"])
@pytest.mark.parametrize("name", CASES)
def test_detail_changes_nothing(name: str, detail: str) -> None:
    """Time to the picosecond, energy to 1e-9, and every span of every rank and layer at its place."""
    if detail == "folded" and "experts" in name:
        pytest.skip("no two ranks are equal")
    if detail == "segment" and name in ("eager", "pipeline"):
        pytest.skip("refused, see below")
    full, short = (simulate(**CASES[name], detail=d) for d in ("full", detail))
    assert short.outcome.detail == detail and full.outcome.detail == "full"
    assert short.outcome.end_ps == full.outcome.end_ps
    assert short.energy_j_per_gpu == pytest.approx(full.energy_j_per_gpu, rel=1e-9)
    assert short.targets == full.targets
    for figure in ("exposed_communication_s", "sm_clock_hz_per_gpu"):
        assert getattr(short, figure) == pytest.approx(getattr(full, figure), rel=1e-9)
    for by in ("kernel", "phase"):
        expected = full.sums_by(by)
        assert short.sums_by(by).keys() == expected.keys()
        for key, sums in short.sums_by(by).items():
            assert sums == pytest.approx(expected[key], rel=1e-9, abs=1e-12)
    pd.testing.assert_frame_equal(short.kernels, full.kernels, rtol=1e-9, atol=1e-15)
    assert (short.kernels["start_s"] == full.kernels["start_s"]).all()
    half_s = full.latency_s / 2
    assert short.energy_until(half_s) == pytest.approx(full.energy_until(half_s), rel=1e-9)


@pytest.mark.parametrize("name", ["prefill at 400 W", "overlap"])
def test_every_layout_settles_at_the_same_power_target(name: str) -> None:
    scenario = Scenario.of(**CASES[name])
    plan, limits = plan_of(scenario), machine_of(scenario).limits
    found = {
        steady_clocks(layout.sequence, limits, len(layout.folding.classes))[0]
        for layout in (plan.full, plan.folded, plan.segments)
    }
    assert len(found) == 1
    assert found.pop().clock_hz < machine_of(scenario).model.max_clock_hz


def test_the_settled_target_is_the_highest_that_the_slow_limit_allows() -> None:
    scenario = Scenario.of(**CASES["prefill at 400 W"])
    plan, limits = plan_of(scenario), machine_of(scenario).limits
    target = steady_clocks(plan.segments.sequence, limits, 1)[0]

    def mean_w(more_hz: float) -> float:
        held = HeldClock(target.clock_hz + more_hz, target.power_w)
        parts = [(step, step.piece.play((held,))) for step in plan.segments.sequence]
        joules = sum(step.repeat * played.energy_j[0] for step, played in parts)
        return joules / sum(step.repeat * played.records.end_ps * 1e-12 for step, played in parts)

    assert mean_w(0.0) <= limits.slow_limit_w < mean_w(2e6)


def test_every_kernel_is_an_event_unless_somebody_wants_only_figures() -> None:
    run = simulate(**CASES["overlap"])
    assert summary(run)["detail"] == "full"
    assert summary(run)["events_kernels"] == run.outcome.kernels == len(run.kernels) <= summary(run)["simpy_events"]
    assert "every rank and layer" in repr(run) and "all kernels (" in repr(run)
    short = simulate(**CASES["overlap"], shortcuts=True)
    assert summary(short)["detail"] == "segment"
    assert 0 < summary(short)["events_kernels"] < run.outcome.kernels / 4
    assert "equal ranks (1 of 4 GPUs) and equal layers once" in repr(short)
    eager = simulate(**CASES["eager"], shortcuts=True)
    assert summary(eager)["detail"] == "folded"
    assert "launch times are absolute" in summary(eager)["detail_why"]
    sums = simulate(**LLAMA, detail="folded")
    assert summary(sums)["events_kernels"] == 0 and summary(sums)["derived_kernels"] == sums.outcome.kernels


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "llama3-8b", "seq_len": 512},  # the README's example
        {"model": "llama3-70b", "tp": 4, "batch": 2, "seq_len": 4096},  # make demo
        {"model": "llama3-70b", "tp": 4, "phase": "decode", "batch": 8, "detail": "full"},
        {"model": "qwen3-30b-a3b", "ep": 2, "ep_mode": "all_to_all", "seq_len": 512},
        {"model": "llama3-8b", "tp": 2, "pp": 2, "layers": 8, "batch": 4, "seq_len": 256},
        {"model": "llama3-8b", "phase": "generate", "layers": 4, "output_len": 8},
        {"model": "llama3-8b", "regime": "cold", "layers": 4},
        {"model": "llama3-8b", "cp": 4, "cp_mode": "ring", "layers": 4},
    ],
)
def test_there_are_at_least_as_many_simpy_events_as_kernels(fields: dict[str, Any]) -> None:
    run = simulate(**fields)
    assert run.outcome.events >= run.outcome.events_kernels == run.outcome.kernels


def test_more_kernels_than_run_as_events_in_a_few_seconds_are_folded_and_told() -> None:
    run = simulate(model="llama3-8b", tp=2, layers=20, phase="generate", seq_len=64, output_len=600)
    kernels, events_kernels = run.outcome.kernels, run.outcome.events_kernels
    assert kernels > MOST_EVENT_KERNELS
    assert run.outcome.detail == "segment" and 0 < events_kernels < kernels / 4
    assert f"{kernels:,} kernels, all of which run as events up to 200,000" in run.outcome.why
    assert f"{kernels - events_kernels:,} derived from them" in repr(run)


def test_what_cannot_be_replayed_or_folded_is_refused_by_name() -> None:
    with pytest.raises(FoldError, match="launch = 'eager'"):
        simulate(**CASES["eager"], detail="segment")
    with pytest.raises(FoldError, match="beside the layers"):
        simulate(**CASES["pipeline"], detail="segment")
    with pytest.raises(FoldError, match="no two of the 4 ranks run equal programs"):
        simulate(**CASES["uneven experts"], detail="folded")


# -- context buckets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first, steps", [(1, 300), (100, 400), (4096, 1000)])
def test_bucket_contexts_are_near_every_step_and_right_on_average(first: int, steps: int) -> None:
    contexts = bucket_contexts(first, steps)
    exact = range(first, first + steps)
    assert len(contexts) == steps
    assert all(abs(context - own) <= own / 120 for context, own in zip(contexts, exact, strict=True))
    assert abs(sum(contexts) - sum(exact)) <= steps / 100 + 40  # a last group of even size is off by half a token
    assert len(set(contexts)) < steps


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "llama3-8b", "layers": 2, "batch": 16, "seq_len": 500, "output_len": 200},
        {"model": "llama3-8b", "layers": 4, "tp": 2, "batch": 64, "seq_len": 3000, "output_len": 140},
        {"model": "qwen3-30b-a3b", "layers": 2, "ep": 2, "ep_mode": "all_to_all", "batch": 8, "seq_len": 900,
         "output_len": 150},
    ],
)  # fmt: skip
def test_a_long_generation_is_within_its_stated_error(fields: dict[str, Any]) -> None:
    exact = simulate(**fields, phase="generate", detail="segment")
    bucketed = simulate(**fields, phase="generate", shortcuts=True)
    assert exact.outcome.context_buckets == 0 < bucketed.outcome.context_buckets < fields["output_len"]
    bound = bucketed.outcome.context_bucket_error
    assert 0.0 < bound < 2e-3
    assert bucketed.latency_s == pytest.approx(exact.latency_s, rel=bound)
    assert bucketed.energy_j == pytest.approx(exact.energy_j, rel=bound)
    assert bucketed.outcome.kernels == exact.outcome.kernels == len(bucketed.kernels)
    assert summary(bucketed)["context_bucket_error"] == bound
    assert "tokens: off by" in repr(bucketed)


# -- folding by hand: programs that no scenario makes ----------------------------------------------------------


def copy(rows: int) -> Kernel:
    work = ElementwiseWork(op=Elementwise.COPY, rows=rows, width=1024, bytes_moved=4096 * rows)
    return Kernel(name="copy", work=work, flops=0.0, bytes_moved=4096.0 * rows)


def reduce(*ranks: int, mib: int = 1) -> Kernel:
    work = CollectiveWork(op=CollectiveOp.ALL_REDUCE, ranks=ranks, buffer_bytes=mib << 20)
    return Kernel(name="reduce", work=work, flops=0.0, bytes_moved=0.0)


def program(*ranks: tuple[Kernel, ...]) -> Program:
    return Program(
        ranks=tuple(
            RankProgram(phases=(Phase(name="step", segments=(Segment(name="layer", kernels=kernels, repeat=3),)),))
            for kernels in ranks
        )
    )


CLASSIFY = classifier(machine_of(Scenario.of(model="llama3-8b", tp=4, ignore_memory=True)), eager=False)


def test_equal_programs_of_other_groups_are_one_class() -> None:
    """Two replicas of two ranks: nobody is the same object, everybody does the same."""
    both = program(*[(copy(64), reduce(0, 1))] * 2, *[(copy(64), reduce(2, 3))] * 2)
    folding = fold(both, CLASSIFY)
    assert folding.classes == ((0, 1, 2, 3),)
    assert folding.groups == {(0, 1): ((0, 0),), (2, 3): ((0, 0),)}


def test_ranks_that_meet_different_partners_are_different() -> None:
    """Ranks 0 and 2 run equal programs, but 0 waits for a busier partner."""
    folding = fold(
        program(
            (copy(64), reduce(0, 1)), (copy(9999), reduce(0, 1)), (copy(64), reduce(2, 3)), (copy(64), reduce(2, 3))
        ),
        CLASSIFY,
    )
    assert folding.classes == ((0,), (1,), (2, 3))
    assert folding.groups[0, 1] == ((0, 0), (1, 0))


def test_a_chain_in_which_neighbours_meet_at_different_places_is_refused() -> None:
    """Each rank of a ring meets its neighbours in turn: rank 0's first collective is rank 1's second."""
    with pytest.raises(FoldError, match="at different places"):
        fold(
            program((reduce(0, 1), reduce(0, 2)), (reduce(1, 2), reduce(0, 1)), (reduce(0, 2), reduce(1, 2))), CLASSIFY
        )


def test_a_missing_member_is_named() -> None:
    with pytest.raises(FoldError, match=r"ranks \(0, 1\) do not all take part"):
        fold(program((copy(64), reduce(0, 1)), (copy(64),)), CLASSIFY)


def test_kernels_are_counted_without_laying_them_out() -> None:
    scenario = Scenario.of(**LLAMA)
    made, _ = build(resolve_scenario(scenario), sms_per_cta=profile_of(scenario).sharing.sms_per_cta)
    run = simulate(scenario)
    assert (
        run.outcome.kernels
        == run.graph.kernels
        == 4 * sum(len(s.kernels) * s.repeat for s in made.ranks[0].phases[0].segments)
    )
