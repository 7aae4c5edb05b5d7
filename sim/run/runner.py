"""``simulate(scenario)``: plan the work, find the steady clock, run every kernel as events, return the timeline.

By default a run is all ranks and all layers on SimPy, up to :data:`MOST_EVENT_KERNELS`; beyond, equal ranks and layers
run once. Where only figures are needed (sweeps, searches), ``shortcuts`` take the cheapest way to the same figures
(:mod:`sim.shortcuts`); so do the details ``folded`` and ``segment``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, Unpack

from inputs.files import contents
from inputs.same import Keyed, Same
from sim.build.host import engine_issue_s
from sim.build.program import build, checked_contexts
from sim.engine.repeating import SteadyLimiter
from sim.engine.running import HeldClock, Target
from sim.errors import FoldError, ScenarioError
from sim.result.looks import Looks
from sim.result.timeline import Timeline
from sim.run.periodic import needs_time, periodic
from sim.run.plan import PieceSequence, Plan, classifier
from sim.run.steady import POWER_SLACK, governed, steady_clocks
from sim.run.video_clocks import VideoClocks
from sim.run.work import Work
from sim.scenario.fields import ScenarioFields
from sim.scenario.machine import Machine, machine_of, profile_of
from sim.scenario.memory import check_memory
from sim.scenario.partition import Partitions
from sim.scenario.resolved import Resolved, resolve_scenario
from sim.scenario.spec import Scenario
from sim.shortcuts.context_buckets import EXACT_STEPS, bucket_contexts
from sim.shortcuts.pieces import RepeatedPiece, by_events, play, play_governed
from workloads.diffusion import DECODE, STEP, TEXT
from workloads.program import Program

# Most kernels that run as events by default: some seconds.
MOST_EVENT_KERNELS = 200_000
# Kernels per second of one core as events (benchmarks/results.md, "Engine": chunked overlap, the slowest case).
EVENT_KERNELS_PER_S = 75_000
WORTH_SAYING_S = 2
FULL_DETAIL = "full detail"

Progress = Callable[[str], None]


def simulate(
    scenario: Scenario | None = None,
    /,
    *,
    progress: Progress | None = None,
    target: Machine | None = None,
    shortcuts: bool = False,
    **fields: Unpack[ScenarioFields],
) -> Timeline:
    """Simulate one scenario, given whole or as keywords, and return its :class:`Timeline`.

    ``target`` replaces the machine that the scenario describes (its GPUs under another profile).
    With ``shortcuts`` the cheapest way to the same figures is taken.

    >>> from sim import simulate
    >>> run = simulate(model="llama3-8b", gpu="h100-sxm-80gb", seq_len=512, layers=2)
    >>> abs(sum(run.energy_by("family")["energy_j"]) / run.energy_j - 1) < 1e-9
    True
    """
    if scenario is None:
        scenario = Scenario.of(**fields)
    elif fields:
        scenario = Scenario.parse({**scenario.model_dump(exclude_unset=True), **fields}, where="scenario")
    say = progress or (lambda _: None)
    say("building kernels")
    target = target or machine_of(scenario, stepped=scenario.regime == "cold")
    resolved = resolve_scenario(scenario)
    if not scenario.ignore_memory:
        check_memory(resolved, target.gpu)
    long = scenario.detail == "auto" and (scenario.output_len or 0) > EXACT_STEPS
    events = scenario.detail == "full" or (scenario.detail == "auto" and not shortcuts)
    refused: list[str] = []
    for detail, plan, layout in _ways(resolved, target, refused, buckets=long, events=events):
        if detail == "full" and events:
            kernels = plan.work.kernels
            seconds = round(kernels / EVENT_KERNELS_PER_S)
            if seconds >= WORTH_SAYING_S:
                say(f"{FULL_DETAIL}: {kernels:,} kernels, about {seconds} s a repetition")
        try:
            parts, targets, looks = _run(plan, layout, target, scenario, say, events=events)
        except FoldError as error:
            if scenario.detail != "auto":
                raise
            refused.append(f"{detail}: {error}")
            continue
        except OverflowError:
            size = f"batch = {scenario.batch} with seq_len = {scenario.seq_len}"
            raise ScenarioError(
                f"{size}: a kernel outlasts the 106 days of a clock of picoseconds: give less"
            ) from None
        why = "; ".join(refused) if scenario.detail == "auto" else "asked for"
        off = plan.context_bucket_error(layout, tuple([target.limits.fast_limit_w] * len(targets)))
        return Timeline(
            resolved=resolved,
            machine=target,
            outcome=plan.outcome(layout, parts, detail=detail, why=why, bucket_error=off, looks=looks),
            targets=_of_ranks(layout, targets),
            tokens=plan.work.tokens,
        )
    raise AssertionError("full detail is never refused")


def _uneven(scenario: Scenario) -> bool:
    """Whether stretches of a run differ so much in power that the limiters may have to run in time."""
    return scenario.phase == "generate" or scenario.pp > 1


def _ways(
    resolved: Resolved, target: Machine, refused: list[str], *, buckets: bool, events: bool
) -> Iterator[tuple[str, Plan, PieceSequence]]:
    """Plans and layouts to try: all as ``events`` where that is fast enough, else the cheapest first.

    Buckets of contexts only where layers are replayed too.
    """
    detail = resolved.scenario.detail
    if events and detail == "auto":
        plan = plan_of(resolved, target)
        kernels = plan.work.kernels
        if kernels <= MOST_EVENT_KERNELS:
            yield "full", plan, plan.full
        else:
            refused.append(f"full: {kernels:,} kernels, all of which run as events up to {MOST_EVENT_KERNELS:,}")
    if buckets:
        plan = plan_of(resolved, target, buckets=True)
        with suppress(FoldError):
            yield "segment", plan, plan.segments
    plan = plan_of(resolved, target)
    for name, layout in _layouts(plan, detail, refused):
        yield name, plan, layout


def _layouts(plan: Plan, detail: str, refused: list[str]) -> Iterator[tuple[str, PieceSequence]]:
    """The layouts to try, the cheapest first."""
    for name in ("segment", "folded", "full") if detail == "auto" else (detail,):
        try:
            layout = plan.segments if name == "segment" else plan.folded if name == "folded" else plan.full
        except FoldError as error:
            if detail != "auto":
                raise
            refused.append(f"{name}: {error}")
            continue
        yield name, layout


def _run(
    plan: Plan, layout: PieceSequence, target: Machine, scenario: Scenario, say: Progress, *, events: bool
) -> tuple[list[RepeatedPiece], Sequence[Target], Looks]:
    """Parts of the run, the power and clock bounds of each of the layout's GPUs, and how these were found."""
    gpus, looks = len(layout.folding.classes), Looks()
    if scenario.regime == "cold":
        say("running")
        parts, ends = governed(layout.sequence, target.limits, gpus, repetitions=1)
        return (by_events(parts) if events else parts), ends, looks
    say("finding the settled clock")
    settled = _steady_state(plan, layout, target, looks, uneven=_uneven(scenario))
    say("running")
    match settled:
        case VideoClocks():
            parts, targets = settled.play(layout), list(settled.steps)
        case SteadyLimiter():
            parts, targets = play_governed(layout.sequence, settled), settled.targets()
        case _:
            return play(layout.sequence, tuple(settled), events=events), settled, looks
    return (by_events(parts) if events else parts), targets, looks


def _steady_state(
    plan: Plan, layout: PieceSequence, target: Machine, looks: Looks, *, uneven: bool
) -> Sequence[Target] | VideoClocks | SteadyLimiter:
    """The steady clock of each of the layout's GPUs, those of a video's stretches, or the limiters before a repetition
    of ``uneven`` power.

    Computed on the cheapest layout: all agree to the picosecond.
    """
    for _, cheapest in _layouts(plan, "auto", []):
        try:
            targets = _settled_clocks(plan, cheapest, target, looks)
            if isinstance(targets, VideoClocks):
                return targets.on(_places(cheapest, layout))
            parts = play(cheapest.sequence, tuple(targets)) if uneven else []
            if needs_time(parts, target.limits):
                limiter = periodic(cheapest.sequence, target.limits, targets, parts)
                return limiter.of([limiter.loops[found] for found in _places(cheapest, layout)])
        except FoldError:
            continue
        return [targets[found] for found in _places(cheapest, layout)]
    raise AssertionError("full detail is never refused")


def _places(cheapest: PieceSequence, layout: PieceSequence) -> list[int]:
    """The GPU of ``cheapest`` that each GPU of ``layout`` is equal to."""
    place = {rank: number for number, ranks in enumerate(cheapest.folding.classes) for rank in ranks}
    return [place[ranks[0]] for ranks in layout.folding.classes]


def _settled_clocks(plan: Plan, layout: PieceSequence, target: Machine, looks: Looks) -> list[HeldClock] | VideoClocks:
    """Each GPU's clock at which the mean power of the run is within the cap; of a video that of its denoising steps,
    which can last longer than the limiters look back, and another of its decoder."""
    kinds = {phase.name for phase in plan.work.program.ranks[0].phases}
    if DECODE not in kinds:
        return steady_clocks(layout.sequence, target.limits, len(layout.folding.classes), layout.guide, looks)
    steps, decoder = (_clocks_of(plan, kind, layout, target, looks) for kind in (STEP, DECODE))
    if steps == decoder and math.isinf(target.limits.slow_limit_w):
        return steps
    found = VideoClocks.of(layout, steps, decoder)
    if max(found.steps_w) > (1.0 + POWER_SLACK) * target.limits.slow_limit_w:  # so few steps that the text counts
        with_text = _clocks_of(plan, (TEXT, STEP), layout, target, looks)
        found = VideoClocks.of(layout, [min(pair) for pair in zip(steps, with_text, strict=True)], decoder)
    return list(found.steps) if found.steps == found.decoder else found


def _clocks_of(
    plan: Plan, kind: str | tuple[str, ...], layout: PieceSequence, target: Machine, looks: Looks
) -> list[HeldClock]:
    """The settled clocks of the phases of one ``kind`` by themselves, of each GPU of ``layout``."""
    part = plan.of_phases(kind)
    assert part is not None, "a run with a decoder has phases of other kinds"
    for _, alone in _layouts(part, "auto", []):
        with suppress(FoldError):
            clocks = steady_clocks(alone.sequence, target.limits, len(alone.folding.classes), alone.guide, looks)
            return [clocks[place] for place in _places(alone, layout)]
    raise AssertionError("full detail is never refused")


def _of_ranks(layout: PieceSequence, values: Sequence[Target]) -> tuple[Target, ...]:
    """Values of the simulated GPUs, one a rank."""
    by_rank = {rank: value for value, ranks in zip(values, layout.folding.classes, strict=True) for rank in ranks}
    return tuple(by_rank[rank] for rank in range(len(by_rank)))


class _Asked(NamedTuple):
    """What a plan is made of, and the keys by which its work and the programs in it are known."""

    resolved: Resolved
    target: Machine
    buckets: bool
    work: Hashable
    programs: Hashable


def plan_of(resolved: Resolved, target: Machine, *, buckets: bool = False) -> Plan:
    """The plan of a scenario; scenarios that differ in nothing but power policy share it, those at other clocks
    its work.
    """
    scenario = resolved.scenario
    named = [one for one in (scenario.routing, scenario.node, scenario.network) if one and "." in one]
    files = contents(*named) if named else ()
    programs = (resolved.work, Same(target.gpu), files, buckets)  # what runs does not depend on the profile
    work = (programs, Same(target.profile))
    return _plan(Keyed((work, Same(target.model)), _Asked(resolved, target, buckets, work, programs)))


@lru_cache(maxsize=16)
def _plan(asked: Keyed[_Asked]) -> Plan:
    return Plan(work=_work(Keyed(asked.held.work, asked.held)), model=asked.held.target.model)


@lru_cache(maxsize=16)
def _work(asked: Keyed[_Asked]) -> Work:
    resolved, target = asked.held.resolved, asked.held.target
    scenario = resolved.scenario
    contexts = None
    if asked.held.buckets:
        assert scenario.output_len is not None
        cached = bucket_contexts(scenario.seq_len, scenario.output_len - 1)
        contexts = tuple(cached) if scenario.speculation is None else checked_contexts(scenario, cached)
    program, tokens = _built(Keyed(asked.held.programs, resolved), contexts)
    eager = scenario.launch == "eager"
    classify = classifier(target, eager=eager)
    behind_s = engine_issue_s(resolved, program, classify, sms=target.gpu.sms, clock_hz=target.gpu.max_clock_hz)
    return Work(
        program=program,
        tokens=tokens,
        classify=classify,
        issue_s=target.profile.launch.host_issue_s if eager else behind_s,
        contexts=contexts,
        partitions=partitions_of(scenario, target),
    )


def partitions_of(scenario: Scenario, target: Machine) -> Partitions | None:
    """The partitions of each GPU's SMs, if there are any."""
    if scenario.sm_partitions is None:
        return None
    return Partitions(sms=scenario.sm_partitions, streams=scenario.sm_partition or (), gpu=target.gpu)


@lru_cache(maxsize=16)
def _built(asked: Keyed[Resolved], contexts: tuple[int, ...] | None) -> tuple[Program, float]:
    sharing = profile_of(asked.held.scenario).sharing
    return build(asked.held, sms_per_cta=sharing.sms_per_cta, contexts=contexts)
