"""One repetition, in the steady state, of kernels or of a program that a measurement loops over, and its figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sim.build.cost import Pricer
from sim.build.lower import lower
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.record import Recorder
from sim.run.steady import steady_clocks
from sim.scenario.machine import Machine, Policy, machine
from sim.shortcuts.pieces import Piece, Repeated
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a record measures, predicted: s, J over all GPUs, W and MHz per GPU; None where it has none."""

    latency_s: float | None
    energy_j: float | None
    power_w: list[float] | None
    sm_clock_mhz: list[float] | None
    beside_s: float | None = None  # of a collective that ran beside the computation that latency_s times
    served: Mapping[str, float] | None = None  # percentiles of a server's latencies


def machine_for(inputs: Mapping[str, Any], world: int, *, apart: bool = False) -> Machine:
    """The machine of a row's ``gpu``: its profile, and temperature and power of the chips that are to be predicted.

    ``apart``: the GPUs exchange nothing.
    """
    policy = Policy(
        chip_temperature_c=inputs.get("chip_temperature_c"),
        chip_power_factor=inputs.get("chip_power_factor"),
        links_asleep=apart,
    )
    return machine(str(inputs["gpu"]), world, policy, profile=inputs.get("profile"))


def run_works(target: Machine, works: tuple[Work, ...], *, in_graph: bool, gap: bool) -> tuple[Recorder, Core]:
    """One repetition of ``works`` in one stream on every GPU of ``target``, in the steady state."""
    rank = RankProgram(
        phases=(
            Phase(
                name="loop",
                segments=(
                    Segment(
                        name="repetition",
                        kernels=tuple(
                            Kernel(name=type(work).__name__, work=work, flops=0.0, bytes_moved=0.0) for work in works
                        ),
                    ),
                ),
            ),
        )
    )
    gap_s = target.profile.launch.graph_gap_s if gap else 0.0
    return run_program(target, Program(ranks=(rank,) * target.world), in_graph=in_graph, gap_s=gap_s)


def run_program(target: Machine, program: Program, *, in_graph: bool, gap_s: float) -> tuple[Recorder, Core]:
    """One repetition of ``program``, every rank in full, in the steady state."""
    pricer = Pricer(
        profile=target.profile,
        gpu=target.gpu,
        gap_s=gap_s,
        in_graph=in_graph,
        cluster=target.cluster,
        chips=target.chips,
    )
    graph = lower(program, pricer.price)
    model = FluidModel(target.model, graph.classes, [])
    loop = Repeated(number=0, piece=Piece(graph, model), repeat=1)
    targets = steady_clocks([loop], target.limits, graph.gpus)
    core = Core(graph, [model] * graph.gpus, targets)
    return Engine(core).run(), core


def seen(records: Recorder, core: Core) -> Prediction:
    """The figures of a repetition."""
    seconds = records.end_ps * 1e-12
    energy = [gpu.energy_j for gpu in core.gpus]
    return Prediction(
        latency_s=seconds,
        energy_j=sum(energy),
        power_w=[e / seconds for e in energy],
        sm_clock_mhz=[_mean_clock_mhz(core, gpu) for gpu in range(len(core.gpus))],
    )


def _mean_clock_mhz(core: Core, gpu_index: int) -> float:
    records = core.recorder
    steps = [
        (t, records.states[s].clock_hz)
        for g, t, s in zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True)
        if g == gpu_index
    ]
    ends = [t for t, _ in steps[1:]] + [records.end_ps]
    weight = sum(end - t for (t, _), end in zip(steps, ends, strict=True))
    return sum((end - t) * f for (t, f), end in zip(steps, ends, strict=True)) / weight / 1e6
