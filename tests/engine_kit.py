"""Toy kernels and a graph builder for engine tests."""

from __future__ import annotations

import math
from dataclasses import replace

from hardware.laws.terms import KernelTerms
from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import GpuModel

GPU = GpuModel(
    sms=100,
    max_clock_hz=2e9,
    min_clock_hz=0.5e9,
    reference_clock_hz=2e9,
    clock_step_hz=0.0,
    hbm_bytes_per_s=1e12,
    link_bytes_per_s=1e11,
    idle_w=lambda clock_hz: 100.0 * clock_hz / 2e9,
    voltage_scale=lambda clock_hz: (clock_hz / 2e9) ** 2,
)
# 100 blocks of 20,000 cycles: one wave of 10 us at 2 GHz on 100 SMs, 1 mJ of core energy (100 W).
COMPUTE = KernelClass(
    name="gemm",
    family="gemm",
    terms=KernelTerms(floor_s=0.0, blocks=100, cycles_per_block=20_000.0, core_energy_j=1e-3),
)
# 10 MB at 1 TB/s: 10 us, at any clock.
COPY = KernelClass(
    name="copy",
    family="elementwise",
    terms=KernelTerms(
        floor_s=0.0, blocks=50, cycles_per_block=0.0, hbm_bytes=1e7, hbm_bytes_per_s=1e12, hbm_energy_j=1e-3
    ),
)
# 1 MB over a 0.1 TB/s port: 10 us; 10 SMs; a rank that waits for others burns 40 W above idle.
REDUCE = KernelClass(
    name="all_reduce",
    family="communication",
    terms=KernelTerms(
        floor_s=0.0, blocks=5, sms_per_block=2.0, cycles_per_block=0.0, link_bytes=1e6,
        link_bytes_per_s=1e11, link_energy_j=5e-4, waiting_power_w=40.0,
    ),
    collective=True,
    priority=-1,
)  # fmt: skip


def with_terms(kernel: KernelClass, **changes: object) -> KernelClass:
    """A variant of a class with other terms."""
    return replace(kernel, terms=replace(kernel.terms, **changes))  # type: ignore[arg-type]


def graph(
    *queues: tuple[int, list[KernelClass | tuple[KernelClass, int]]],
    edges: tuple[tuple[int, int], ...] = (),
    issue_ps: list[int] | None = None,
) -> KernelGraph:
    """A graph from (gpu, kernels) queues; a pair (class, id) is this rank's part of collective ``id``."""
    classes: list[KernelClass] = []
    op_class: list[int] = []
    op_gpu: list[int] = []
    op_queue: list[int] = []
    op_collective: list[int] = []
    members: dict[int, list[int]] = {}
    queue_ops: list[list[int]] = []
    stream_count: dict[int, int] = {}
    streams: list[int] = []
    for queue, (gpu, kernels) in enumerate(queues):
        queue_ops.append([])
        streams.append(stream_count.get(gpu, 0))
        stream_count[gpu] = streams[-1] + 1
        for item in kernels:
            kernel, collective = item if isinstance(item, tuple) else (item, -1)
            if kernel not in classes:
                classes.append(kernel)
            op = len(op_class)
            queue_ops[-1].append(op)
            op_class.append(classes.index(kernel))
            op_gpu.append(gpu)
            op_queue.append(queue)
            op_collective.append(collective)
            if collective >= 0:
                members.setdefault(collective, []).append(op)
    successors: dict[int, tuple[int, ...]] = {}
    blocked: dict[int, int] = {}
    for before, after in edges:
        successors[before] = (*successors.get(before, ()), after)
        blocked[after] = blocked.get(after, 0) + 1
    return KernelGraph(
        gpus=max(gpu for gpu, _ in queues) + 1,
        classes=tuple(classes),
        op_class=op_class,
        op_gpu=op_gpu,
        op_queue=op_queue,
        op_segment=[0] * len(op_class),
        op_collective=op_collective,
        queue_gpu=tuple(gpu for gpu, _ in queues),
        queue_stream=tuple(streams),
        queue_ops=tuple(queue_ops),
        successors=successors,
        predecessor_count=blocked,
        collective_members=[tuple(members.get(i, ())) for i in range(max(members, default=-1) + 1)],
        segments=(("test", "all", 0),),
        issue_ps=issue_ps,
    )


def core_of(g: KernelGraph, limit_w: float = 1e9, gpu: GpuModel = GPU, pool: list[float] | None = None) -> Core:
    """A fresh core with one model for all GPUs."""
    return Core(g, [FluidModel(gpu, g.classes, [])] * g.gpus, [limit_w] * g.gpus, pool)


def run(g: KernelGraph, limit_w: float = 1e9, gpu: GpuModel = GPU, pool: list[float] | None = None) -> Recorder:
    """Run on SimPy."""
    return Engine(core_of(g, limit_w, gpu, pool)).run()


def spans(g: KernelGraph, records: Recorder) -> list[tuple[str, int, float, float]]:
    """(name, gpu, start us, end us) in order of start."""
    rows = [
        (g.classes[g.op_class[op]].name, g.op_gpu[op], start / 1e6, end / 1e6)
        for op, start, end in zip(records.span_op, records.span_start_ps, records.span_end_ps, strict=True)
    ]
    return sorted(rows, key=lambda row: (row[2], row[1], row[0]))


def energy_of_steps(records: Recorder) -> float:
    """The integral of the power steps, summed independently of the engine's own bookkeeping."""
    total = 0.0
    for gpu in set(records.step_gpu):
        steps = [
            (t, records.states[s].power_w)
            for g, t, s in zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True)
            if g == gpu
        ]
        ends = [t for t, _ in steps[1:]] + [records.end_ps]
        total += math.fsum(w * (end - t) * 1e-12 for (t, w), end in zip(steps, ends, strict=True))
    return total
