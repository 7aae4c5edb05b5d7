"""Random programs of one GPU whose kernels overlap: products that are dealt tiles, copies, collectives, on streams."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from sim.engine.core import Core
from sim.engine.driver import Engine
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.noting import NotingCore
from sim.engine.record import Recorder
from sim.engine.running import GpuModel, HeldClock
from sim.shortcuts.clocks import clock_of
from sim.shortcuts.retiming.order import order_of
from sim.shortcuts.retiming.record import OrderRecord
from tests.engine_kit import COMPUTE, COPY, GPU, REDUCE, graph, with_terms

HOPPER = replace(GPU, sms=132, chip_power_factor=1.03)


def kinds(draw: random.Random) -> list[KernelClass]:
    """Six kinds of kernels, products twice."""
    one = draw.choice
    product = with_terms(
        COMPUTE,
        blocks=one([40, 100, 190, 512, 700]),
        cluster=one([1, 2]),
        cycles_per_block=one([2.0e4, 3.1e4]),
        hbm_bytes=one([0.0, 4e6]),
        hbm_bytes_per_s=1e12,
        sm_power_w=30.0,
        load_wait=one([0.0, 0.6]),
        sharpness=one([math.inf, 8.0]),
        core_energy_j=one([1e-3, 4e-3]),
    )
    small = with_terms(COMPUTE, blocks=one([10, 30]), cycles_per_block=one([9e3, 5e4]))
    copy = with_terms(
        COPY,
        quantised=one([True, False]),
        shrink=one(["persistent", "fluid"]),
        hbm_bytes=one([3e6, 1.1e7]),
        cycles_per_block=one([0.0, 3e3]),
    )
    collective = with_terms(
        REDUCE,
        blocks=one([4, 8, 32]),
        cluster=4,
        sms_per_block=1.0,
        hbm_bytes=one([0.0, 2e6]),
        hbm_weight_per_sm=2.0,
        moving_cycles=one([0.0, 3e4]),
        beside_slowdown=1.2,
    )
    return [
        replace(product, name="product"),
        replace(product, name="product"),
        replace(small, name="small"),
        replace(copy, gap_s=one([0.0, 1e-6])),
        replace(collective, lead_s=one([0.0, 2.2e-6])),
        replace(with_terms(product, blocks=264, top_clock_hz=1.4e9), name="slow", lead_s=1e-6),
    ]


def program(draw: random.Random) -> KernelGraph:
    """Two or three streams of a few kernels, some of which wait for those of other streams."""
    chosen, collectives, op = kinds(draw), 0, 0
    queues: list[tuple[int, list[KernelClass | tuple[KernelClass, int]]]] = []
    ops: list[list[int]] = []
    for _ in range(draw.choice([2, 2, 3])):
        kernels: list[KernelClass | tuple[KernelClass, int]] = []
        ops.append([])
        for _ in range(draw.randint(2, 6)):
            kernel = draw.choice(chosen)
            kernels.append((kernel, collectives) if kernel.collective else kernel)
            collectives += kernel.collective
            ops[-1].append(op)
            op += 1
        queues.append((0, kernels))
    edges = []
    for _ in range(draw.randint(0, 4)):
        a, b = draw.sample(range(len(queues)), 2)
        i, j = draw.randrange(len(ops[a])), draw.randrange(len(ops[b]))
        if (i, a) < (j, b):
            edges.append((ops[a][i], ops[b][j]))
    return graph(*queues, edges=tuple(edges))


def at_step(g: KernelGraph, gpu: GpuModel, step: int, limit_w: float) -> Recorder:
    """The engine's run at a step of the grid."""
    return Engine(Core(g, [FluidModel(gpu, g.classes, [])], [HeldClock(clock_of(gpu, step), limit_w)])).run()


def record_at(g: KernelGraph, gpu: GpuModel, step: int, limit_w: float) -> OrderRecord:
    """The order of the run there."""
    held = HeldClock(clock_of(gpu, step), limit_w)
    core = NotingCore(g, [FluidModel(gpu, g.classes, [])], [held])
    return OrderRecord(order_of(core, held, Engine(core).run()))
