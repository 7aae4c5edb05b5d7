"""``simulate(scenario)``: build the program, lower it, find the settled power target, run, hand over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import workloads
from sim.cost import Pricer
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel, GpuState
from sim.engine.governor import Limiter
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.layout import layout_of
from sim.lower import lower
from sim.machine import Machine, machine_of
from sim.memory import check_memory
from sim.scenario import Scenario
from sim.timeline import Timeline
from workloads.program import Program

# Power targets lie on this grid, so that memo keys stay few (design.md, physics).
TARGET_STEP_W = 2.0

Progress = Callable[[str], None]


def simulate(scenario: Scenario | None = None, /, *, progress: Progress | None = None, **fields: Any) -> Timeline:
    """Simulate one scenario, given whole or as keywords, and return its :class:`Timeline`.

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
    target = machine_of(scenario, stepped=scenario.regime == "cold")
    model = workloads.load_model(scenario.model)
    if not scenario.ignore_memory:
        check_memory(scenario, model, target.gpu)
    program, tokens = build(scenario, model)
    graph = lower_on(program, target, scenario)
    if scenario.regime == "cold":
        say("running")
        records, limits = run_governed(graph, target, repetitions=1)
    else:
        say("finding the settled power target")
        limits = settled_targets(graph, target, shared=len({id(r) for r in program.ranks}) == 1)
        say("running")
        records = run(graph, target, limits)
        if scenario.phase == "generate" and records.end_ps * 1e-12 > target.limits.slow_time_s:
            # Phases of different power, each long enough for the limiters to follow: one mean is not enough.
            records, limits = run_governed(graph, target, repetitions=2)
    return Timeline(
        scenario=scenario,
        machine=target,
        graph=graph,
        records=records,
        power_limit_w=tuple(limits),
        tokens=tokens,
    )


def build(scenario: Scenario, model: workloads.ModelSpec) -> tuple[Program, int]:
    """The rank programs of ``scenario`` and the tokens they process or produce."""
    layout = layout_of(scenario)
    options = workloads.Options(
        layers=scenario.layers,
        lm_head=scenario.lm_head,
        dtype=workloads.DType(scenario.dtype),
        stack=scenario.stack,
        routing=routing_of(scenario),
        tokens_per_ep_rank=scenario.tokens_per_ep_rank,
        overlap_chunks=scenario.overlap_chunks,
        comm_ctas=scenario.comm_ctas,
        all_reduce=workloads.AllReduce(scenario.all_reduce),
    )
    lengths = {"batch": scenario.batch, "seq_len": scenario.seq_len}
    own_batches = scenario.ep if scenario.ep_mode == "all_to_all" else 1
    if scenario.phase == "generate":
        assert scenario.output_len is not None
        program = workloads.build_generate(model, layout, output_len=scenario.output_len, options=options, **lengths)
        return program, scenario.batch * scenario.output_len * own_batches
    program = workloads.build_program(model, layout, phase=scenario.phase, options=options, **lengths)
    per_sequence = scenario.seq_len if scenario.phase == "prefill" else 1
    return program, scenario.batch * per_sequence * own_batches


def routing_of(scenario: Scenario) -> workloads.Routing:
    """How the scenario's tokens choose experts."""
    law = scenario.routing
    return workloads.Routing(
        popularity=workloads.parse_popularity(law) if law else workloads.Zipf(exponent=scenario.expert_skew),
        seed=scenario.routing_seed,
        replicas=scenario.expert_replicas,
    )


def lower_on(program: Program, target: Machine, scenario: Scenario) -> KernelGraph:
    """The kernel graph of ``program`` priced on ``target``."""
    launch = target.profile.launch
    eager = scenario.launch == "eager"
    pricer = Pricer(
        profile=target.profile,
        gpu=target.gpu,
        gap_s=launch.eager_gap_s if eager else launch.graph_gap_s,
        world=target.world,
        cluster=target.cluster,
    )
    return lower(program, pricer.price, issue_s=launch.host_issue_s if eager else None)


def run(graph: KernelGraph, target: Machine, limits_w: list[float]) -> Recorder:
    """One repetition of ``graph`` under fixed power targets (W per GPU)."""
    model = FluidModel(target.model, graph.classes, [])
    return Engine(Core(graph, [model] * graph.gpus, limits_w)).run()


def run_governed(graph: KernelGraph, target: Machine, *, repetitions: int) -> tuple[Recorder, list[float]]:
    """Repetitions of ``graph`` with the limiters acting in time; the records are the last one's."""
    limiter = Limiter(target.limits, gpus=graph.gpus)
    for _ in range(repetitions):
        model = FluidModel(target.model, graph.classes, [])
        core = Core(graph, [model] * graph.gpus, limiter.targets_w())
        records = Engine(core, limiter).run()
    return records, limiter.targets_w()


def settled_targets(graph: KernelGraph, target: Machine, *, shared: bool) -> list[float]:
    """Power target X of each GPU at which the mean power of back-to-back repetitions meets the slow limit.

    Programs that all ranks share on one stream have a closed form (sum of kernels); others are run. X is
    the highest point of the 2 W grid, at most the fast limit, whose mean power is within the slow limit.
    """
    limits = target.limits
    serial = shared and len(graph.queue_ops) == graph.gpus and graph.issue_ps is None
    mean = _serial_mean_power(graph, target) if serial else _simulated_mean_power(graph, target)
    top = [limits.fast_limit_w] * graph.gpus
    low = [0] * graph.gpus
    high = [int(limits.fast_limit_w / TARGET_STEP_W) if limits.fast_limit_w < 1e6 else 0] * graph.gpus
    if all(power <= limits.slow_limit_w for power in mean(top)):
        return top
    while any(top_ - base > 1 for base, top_ in zip(low, high, strict=True)):
        middle = [(base + top_) // 2 for base, top_ in zip(low, high, strict=True)]
        powers = mean([m * TARGET_STEP_W for m in middle])
        for gpu, power in enumerate(powers):
            if power <= limits.slow_limit_w:
                low[gpu] = middle[gpu]
            else:
                high[gpu] = max(middle[gpu], low[gpu] + 1)
    return [step * TARGET_STEP_W for step in low]


def _serial_mean_power(graph: KernelGraph, target: Machine) -> Callable[[list[float]], list[float]]:
    model = FluidModel(target.model, graph.classes, [])
    per_gpu = graph.kernels // graph.gpus
    counts: dict[int, int] = {}
    for class_id in graph.op_class[:per_gpu]:
        counts[class_id] = counts.get(class_id, 0) + 1

    def alone(class_id: int, limit_w: float) -> GpuState:
        terms = graph.classes[class_id].terms
        sms = min(terms.blocks * terms.sms_per_block, float(target.model.sms))
        return model.solve(((class_id, sms, False),), limit_w, target.model.max_clock_hz)

    def mean(limits_w: list[float]) -> list[float]:
        states = {class_id: alone(class_id, limits_w[0]) for class_id in counts}
        time = sum(n / states[c].rates[0] for c, n in counts.items())
        energy = sum(n / states[c].rates[0] * states[c].power_w for c, n in counts.items())
        return [energy / time] * graph.gpus

    return mean


def _simulated_mean_power(graph: KernelGraph, target: Machine) -> Callable[[list[float]], list[float]]:
    def mean(limits_w: list[float]) -> list[float]:
        model = FluidModel(target.model, graph.classes, [])
        core = Core(graph, [model] * graph.gpus, limits_w)
        end_ps = Engine(core).run().end_ps
        return [gpu.energy_j / (end_ps * 1e-12) for gpu in core.gpus]

    return mean
