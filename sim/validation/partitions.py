"""Kernels on partitions of a GPU, alone and side by side, predicted: rows of kinds ``partition`` and ``partitions``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sim.build.cost import Pricer
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.running import HeldClock
from sim.run.repetition import Prediction, machine_for
from sim.run.steady import held_clocks
from sim.scenario.machine import Machine
from sim.scenario.partition import Partitions, partitioned
from sim.validation.lanes import graph_of_lanes
from workloads.program import Kernel
from workloads.work import CollectiveWork, Work

# Repetitions of the longer lane, and the share of the time in which both run that is left out at its begin.
REPETITIONS, WARM_UP = 24, 0.3


def on_partition(inputs: Mapping[str, Any], work: Work) -> Prediction:
    """``work`` back to back on ``sms`` SMs alone."""
    target = machine_for(inputs, int(inputs["world"]), apart=not isinstance(work, CollectiveWork))
    sizes = (("own", int(inputs["sms"])),) if "asked_sms" in inputs else ()
    (seconds,), power_w, clock_hz = _steady_point(target, [work], sizes)
    return Prediction(
        latency_s=seconds,
        energy_j=seconds * power_w * target.world,
        power_w=[power_w] * target.world,
        sm_clock_mhz=[clock_hz / 1e6] * target.world,
    )


def side_by_side(inputs: Mapping[str, Any], a: Work, b: Work) -> Prediction:
    """``a`` and ``b`` each back to back on a side of the split, or both on the whole GPU: while both run."""
    target = machine_for(inputs, int(inputs["world"]), apart=not isinstance(b, CollectiveWork))
    sizes = (("a", int(inputs["a_sms"])), ("b", int(inputs["b_sms"])))
    (a_s, b_s), power_w, clock_hz = _steady_point(target, [a, b], sizes if "asked_b_sms" in inputs else ())
    return Prediction(
        latency_s=a_s,
        energy_j=None,
        power_w=[power_w] * target.world,
        sm_clock_mhz=[clock_hz / 1e6] * target.world,
        beside_s=b_s,
    )


def _steady_point(
    target: Machine, works: list[Work], sizes: tuple[tuple[str, int], ...]
) -> tuple[list[float], float, float]:
    """Seconds a repetition of each lane, watts of a GPU and the clock (Hz) at which the slow limit holds.

    ``sizes``: partitions by name with their SMs, one a lane; none: the whole GPU is one.
    """
    split = Partitions(sms=sizes, streams=(), gpu=target.gpu) if sizes else None
    pricer = Pricer.of_loops(target)
    priorities = [-1 if isinstance(work, CollectiveWork) else 0 for work in works]
    classes = [
        replace(
            pricer.price(Kernel(name=f"lane {i}", work=work, flops=0.0, bytes_moved=0.0, priority=priority)), lead_s=0.0
        )
        for i, (work, priority) in enumerate(zip(works, priorities, strict=True))
    ]
    seconds = [1.0] * len(works)

    def run(clock_hz: float) -> float:
        longest = max(seconds)
        counts = [min(400, math.ceil(REPETITIONS * longest / each)) for each in seconds]
        lanes = [[place] * count for _ in range(target.world) for place, count in enumerate(counts)]
        graph = graph_of_lanes(target.world, classes, lanes)
        graph = graph if split is None else partitioned(graph, split)
        model = FluidModel(target.model, graph.classes, [])
        held = HeldClock(clock_hz, target.limits.fast_limit_w)
        core = Core(graph, [model] * target.world, [held] * target.world)
        records = Engine(core).run()
        end_s = np.zeros(graph.kernels)
        end_s[np.asarray(records.span_op)] = np.asarray(records.span_end_ps) * 1e-12
        both_s = min(end_s[list(ops)].max() for ops in graph.queue_ops)
        seconds[:] = [_each_s(graph, end_s, lane, both_s, len(works)) for lane in range(len(works))]
        until_ps = round(both_s * 1e12)
        joules = sum(_until_j(records, gpu, until_ps) for gpu in range(target.world))
        return float(joules / both_s / target.world)

    run(target.model.max_clock_hz)  # says how long the lanes are
    (clock_hz,) = held_clocks(lambda clocks: [run(clocks[0])], target.limits, target.model, 1, slow_top=False)
    power_w = run(clock_hz)
    return list(seconds), power_w, clock_hz


def _each_s(graph: KernelGraph, end_s: np.ndarray, lane: int, both_s: float, lanes: int) -> float:
    """Mean seconds between ends of a lane's kernels while both lanes run, over the GPUs."""
    means = []
    for queue, ops in enumerate(graph.queue_ops):
        if queue % lanes == lane:
            ends = end_s[list(ops)]
            ends = ends[ends <= both_s * (1 + 1e-12)]
            kept = ends[ends >= WARM_UP * both_s]
            # A lane that hardly comes on beside the other is timed from its begin.
            means.append((kept[-1] - kept[0]) / (len(kept) - 1) if len(kept) > 1 else both_s / max(1, len(ends)))
    return float(np.mean(means))


def _until_j(records: Any, gpu: int, until_ps: int) -> float:
    """Joules of a GPU up to ``until_ps``: the integral of its power steps."""
    steps = [
        (time_ps, records.states[state].power_w)
        for of, time_ps, state in zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True)
        if of == gpu
    ]
    ends = [time_ps for time_ps, _ in steps[1:]] + [records.end_ps]
    return math.fsum(
        max(0, min(end, until_ps) - begin) * 1e-12 * power for (begin, power), end in zip(steps, ends, strict=True)
    )
