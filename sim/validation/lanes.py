"""Kernels side by side on the engine: a computation in one lane, a collective in the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.build.cost import Pricer, expected_maximum
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass, KernelGraph
from sim.scenario.machine import Machine
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.program import Kernel
from workloads.work import AttentionWork, CollectiveWork, ElementwiseWork, GemmWork, Work

Inputs = Mapping[str, Any]
OPS = {
    "rs": CollectiveOp.REDUCE_SCATTER,
    "ar": CollectiveOp.ALL_REDUCE,
    "ag": CollectiveOp.ALL_GATHER,
    "aa": CollectiveOp.ALL_TO_ALL,
    "sr": CollectiveOp.SEND_RECV,
}
# Repetitions of the longer side that a prediction runs, and the share of them it lets pass before it looks.
REPETITIONS, WARM_UP = 14, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Seconds a repetition of both sides, alone and together."""

    a_alone_s: float
    b_alone_s: float
    a_together_s: float
    b_together_s: float

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Of the computation and of the collective."""
        return self.a_together_s / self.a_alone_s, self.b_together_s / self.b_alone_s


def computation(inputs: Inputs, what: str) -> Work:
    """The compute side of a contention row."""
    match what:
        case "gemm":
            m, n, k = inputs["gemm_mnk"]
            return GemmWork(m=m, n=n, k=k)
        case "copy":
            moved = inputs["copy_bytes_moved"]
            return ElementwiseWork(op=Elementwise.COPY, rows=1, width=moved, bytes_moved=moved)
        case "attention":
            return AttentionWork(
                batch=inputs["batch"],
                q_len=inputs["seq_len"],
                kv_len=inputs["seq_len"],
                q_heads=inputs["q_heads"],
                kv_heads=inputs["kv_heads"],
                head_dim=inputs["head_dim"],
                causal=bool(inputs["causal"]),
            )
    raise ValueError(f"a = {what!r}: one of gemm, copy, attention")


def collective(name: str, world: int, buffer_bytes: int) -> CollectiveWork:
    """The collective of a contention row by its name.

    >>> collective("rs8", 2, 1024).ctas
    8
    """
    if name[:2] not in OPS or not name[2:].isdigit():
        raise ValueError(f"b = {name!r}: two letters of {', '.join(OPS)} and a block count")
    return CollectiveWork(op=OPS[name[:2]], ranks=tuple(range(world)), buffer_bytes=buffer_bytes, ctas=int(name[2:]))


def together(inputs: Inputs, target: Machine) -> Beside:
    """Both sides of one row on ``target``, each in a loop of its own on every rank, by the engine."""
    work = computation(inputs, str(inputs["a"]))
    beside = collective(str(inputs["b"]), target.world, int(inputs["comm_bytes"]))
    pricer = Pricer.of_loops(target)
    a = pricer.price(Kernel(name="a", work=work, flops=0.0, bytes_moved=0.0))
    b = pricer.price(Kernel(name="b", work=beside, flops=0.0, bytes_moved=0.0, priority=-1))
    b = replace(b, lead_s=target.profile.launch.graph_gap_s)  # within it, blocks that wait get the SMs
    alone_a, _ = _loop(target, a, None, 1, 0, target.limits.slow_limit_w)
    _, alone_b = _loop(target, None, b, 0, 1, target.limits.slow_limit_w)
    a_s, b_s = _steady_s(target, a, b, alone_a, alone_b)
    return Beside(a_alone_s=alone_a, b_alone_s=alone_b, a_together_s=a_s, b_together_s=b_s)


def beside_waiting(inputs: Inputs, target: Machine) -> tuple[float, float, float]:
    """A GEMM in a loop, alone or beside a receive whose sender never comes: seconds, watts, mean clock in Hz."""
    m, n, k = inputs["gemm_mnk"]
    receive = CollectiveWork(op=CollectiveOp.SEND, ranks=(0, 1), buffer_bytes=inputs["bytes"], ctas=inputs.get("ctas"))
    pricer = Pricer(profile=target.profile, gpu=target.gpu, gap_s=0.0, chips=target.chips, cluster=target.cluster)
    gemm, wait = (
        pricer.price(Kernel(name="", work=work, flops=0.0, bytes_moved=0.0))
        for work in (GemmWork(m=m, n=n, k=k), receive)
    )
    gemm = replace(gemm, terms=gemm.beside or gemm.terms, beside=None)  # in the tiles that decide what runs beside it
    held = min(wait.terms.blocks * wait.terms.sms_per_block, target.gpu.sms - 1.0) if inputs.get("waits") else 0.0
    spins_w = wait.terms.waiting_power_w if held else 0.0
    graph = graph_of_lanes(1, [gemm], [[0] * 8])
    low, high = 0.5 * target.limits.slow_limit_w, target.limits.fast_limit_w
    seconds, watts, clock_hz = 0.0, math.inf, 0.0
    tried = high
    for _ in range(14):
        core = Core(graph, [FluidModel(target.model, graph.classes, [])], [tried], [target.gpu.sms - held])
        records = Engine(core).run()
        seconds = records.end_ps * 1e-12
        watts = core.gpus[0].energy_j / seconds + spins_w
        ends = np.append(np.asarray(records.step_time_ps)[1:], records.end_ps)
        clocks = [records.states[s].clock_hz for s in records.step_state]
        clock_hz = float(np.average(clocks, weights=ends - np.asarray(records.step_time_ps)))
        if watts <= target.limits.slow_limit_w:
            low = tried
        else:
            high = tried
        if low >= target.limits.fast_limit_w:
            break
        tried = 0.5 * (low + high)
    return seconds / 8, watts, clock_hz


def _steady_s(target: Machine, a: KernelClass, b: KernelClass, a_s: float, b_s: float) -> tuple[float, float]:
    """Both sides at the highest power target whose mean power keeps the slow limit; lanes end about together."""
    limit_w, top = target.limits.slow_limit_w, target.limits.fast_limit_w
    seen, watts = (a_s, b_s), math.inf
    low, high, tried = 0.5 * limit_w, top, top
    for attempt in range(7):
        longer = max(seen)
        n_a, n_b = (min(400, math.ceil(REPETITIONS * longer / each)) for each in seen)
        seen, watts = _loops(target, a, b, n_a, n_b, tried)
        if attempt == 0:
            continue  # only says how long the lanes are
        if watts <= limit_w:
            low = tried
        else:
            high = tried
        if low >= top:
            break
        tried = 0.5 * (low + high)
    return seen


def _loop(
    target: Machine, a: KernelClass | None, b: KernelClass | None, n_a: int, n_b: int, limit_w: float
) -> tuple[float, float]:
    """One kernel alone: its seconds at the settled clock."""
    kernel = a or b
    assert kernel is not None
    graph = graph_of_lanes(1, [kernel], [[0] * max(n_a, n_b)])
    core = Core(graph, [FluidModel(target.model, graph.classes, [])], [limit_w])
    seconds = Engine(core).run().end_ps * 1e-12
    return seconds, seconds


def _loops(
    target: Machine, a: KernelClass, b: KernelClass, n_a: int, n_b: int, limit_w: float
) -> tuple[tuple[float, float], float]:
    """Seconds a repetition while both ran, and mean watts of a GPU; chips lie apart as their spread says."""
    world = target.world
    lag = expected_maximum(world) * target.profile.spread.throttled_time
    chips = [
        replace(a, name=f"a{r}", terms=replace(a.terms, scale=a.terms.scale * (1.0 - lag * r))) for r in range(world)
    ]
    graph = graph_of_lanes(world, [*chips, b], [lane for r in range(world) for lane in ([r] * n_a, [world] * n_b)])
    core = Core(graph, [FluidModel(target.model, graph.classes, [])] * world, [limit_w] * world)
    records = Engine(core).run()
    end = np.zeros(graph.kernels)
    end[np.asarray(records.span_op)] = np.asarray(records.span_end_ps) * 1e-12
    both = min(end[list(ops)].max() for ops in graph.queue_ops)
    power = math.fsum(records.span_energy_j) / world / (records.end_ps * 1e-12)
    means: list[list[float]] = [[], []]
    for queue, ops in enumerate(graph.queue_ops):
        kept = end[list(ops)]
        kept = kept[(kept >= WARM_UP * both) & (kept <= both * (1 + 1e-12))]
        means[queue % 2].append((kept[-1] - kept[0]) / (len(kept) - 1))
    return (float(np.mean(means[0])), float(np.mean(means[1]))), power


def graph_of_lanes(gpus: int, classes: list[KernelClass], lanes: list[list[int]]) -> KernelGraph:
    """Loops without edges: lanes of class indices, as many for each GPU; collectives meet in order."""
    op_class = [c for lane in lanes for c in lane]
    starts = np.concatenate([[0], np.cumsum([len(lane) for lane in lanes])]).tolist()
    each = len(lanes) // gpus
    op_collective = [-1] * len(op_class)
    members: list[tuple[int, ...]] = []
    shared = [q for q, lane in enumerate(lanes) if classes[lane[0]].collective]
    for i in range(len(lanes[shared[0]]) if shared else 0):
        members.append(tuple(starts[q] + i for q in shared))
        for op in members[-1]:
            op_collective[op] = i
    return KernelGraph(
        gpus=gpus,
        classes=tuple(classes),
        op_class=op_class,
        op_gpu=[q // each for q, lane in enumerate(lanes) for _ in lane],
        op_queue=[q for q, lane in enumerate(lanes) for _ in lane],
        op_segment=[0] * len(op_class),
        op_collective=op_collective,
        queue_gpu=tuple(q // each for q in range(len(lanes))),
        queue_stream=tuple(q % each for q in range(len(lanes))),
        queue_ops=tuple(range(starts[q], starts[q + 1]) for q in range(len(lanes))),
        successors={},
        predecessor_count={},
        collective_members=members,
        segments=(("contention", "loop", 0),),
    )
