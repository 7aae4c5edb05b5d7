"""What products cost after other kernels and beside held SMs, for :mod:`hardware.calibrate.suite.placement`."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hardware.calibrate.suite.placement_probe import CTAS, Probe
from hardware.calibrate.suite.plan import MIB
from hardware.calibrate.suite.timing import Bench, capture, new_slots, stamps_between

AFTER = (
    (1024, 5120, 8192), (2048, 5120, 8192), (8192, 5120, 8192), (1024, 8192, 4096), (2048, 8192, 4096),
    (8192, 8192, 4096), (1024, 28672, 8192), (2048, 28672, 8192), (1024, 8192, 14336), (2048, 8192, 14336),
)  # fmt: skip
BESIDE = (
    (1024, 5120, 8192), (2048, 5120, 8192), (1024, 8192, 4096), (2048, 8192, 4096), (2048, 28672, 8192),
    (2048, 8192, 14336), (8192, 8192, 4096),
)  # fmt: skip
RUNNING = ((2048, 8192, 4096), (2048, 28672, 8192), (2048, 8192, 14336), (8192, 8192, 14336))
HOLDERS = ((1, 1), (2, 1), (4, 1), (4, 4), (8, 1), (8, 4), (16, 1), (16, 4), (32, 1), (32, 4))  # blocks, cluster
# All products that are measured beside them end before the holding blocks do.
HOLD_NS = 80_000_000
# Products in one graph, the first of which does not count.
PRODUCTS = 6

Launch = Callable[[int], object]


class Stamped:
    """A graph of products, each between two stamps of (cycles, nanoseconds) of every SM."""

    def __init__(self, bench: Bench, product: Launch, before: Launch = lambda _: None) -> None:
        self._bench = bench
        self._slots = slots = new_slots(bench, 2 * PRODUCTS)

        def body() -> None:
            for i in range(PRODUCTS):
                before(i)
                bench.kernels.stamp(slots[2 * i])
                product(i)
                bench.kernels.stamp(slots[2 * i + 1])

        self._replay = capture(bench, body)

    def launch(self) -> None:
        """Replay once."""
        self._slots.zero_()
        self._replay()

    def read(self) -> list[tuple[float, float]]:
        """(s, MHz) of every product of the last replay but the first."""
        pairs = stamps_between(self._bench, self._slots.cpu(), [(2 * i, 2 * i + 1) for i in range(PRODUCTS)])
        return [(seconds, mhz) for seconds, mhz in pairs if not math.isnan(seconds)][1:]


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians over products: microseconds, true SM clock, thousands of SM cycles.

    >>> summary([(1e-4, 1500.0), (2e-4, 1600.0), (2e-4, 1500.0)])
    {'latency_us': 200.0, 'clock_mhz': 1500.0, 'kcycles': 300.0}
    """
    return {
        "latency_us": round(statistics.median(seconds for seconds, _ in pairs) * 1e6, 2),
        "clock_mhz": round(statistics.median(mhz for _, mhz in pairs), 1),
        "kcycles": round(statistics.median(seconds * mhz for seconds, mhz in pairs) * 1e3, 2),
    }


def operands(bench: Bench, mnk: tuple[int, int, int]) -> tuple[Any, Launch]:
    """The input of a product, and the product: cuBLAS, with weights that come from HBM."""
    m, n, k = mnk
    x, weights, y = bench.randn(m, k), bench.weights(n, k), bench.empty(m, n)
    return x, lambda i: bench.kernels.linear(x, weights[i % len(weights)], y)


def gemm_after(probe: Probe) -> None:
    """Products after another kernel: does what lies in L2, or who had the SMs, change their cycles?"""
    bench = probe.bench
    flush, flushed = bench.randn(128 * MIB), bench.empty(128 * MIB)
    for mnk in AFTER:
        x, product = operands(bench, mnk)
        for name, before in befores(bench, x, product, lambda _: flushed.copy_(flush)).items():
            stamped = Stamped(bench, product, before)
            got = []
            probe.meet()
            for repetition in range(10):
                stamped.launch()
                bench.synchronize()
                got += stamped.read() if repetition >= 2 else []
                time.sleep(0.01)
            probe.say("gemm_after", gemm_mnk=list(mnk), before=name, **summary(got))


def befores(bench: Bench, x: Any, product: Launch, flush: Launch) -> dict[str, Launch]:
    """What may come before ``product`` of ``x``, by the name in records."""
    source, half, other = x.clone(), x[: x.shape[0] // 2].clone(), bench.empty(*x.shape)
    gather = partial(bench.comm.collective, "all_gather")
    return {
        "gemm": lambda i: product(i + 3),
        "nothing": lambda _: None,
        "flush": flush,
        "copy_into": lambda _: x.copy_(source),
        "ag_into": lambda _: gather(x, half, None),
        "ag4_into": lambda _: gather(x, half, 4),
        "ag_other": lambda _: gather(other, half, None),
    }


def gemm_beside(probe: Probe) -> None:
    """Products beside parked collectives and beside blocks that hold SMs."""
    for mnk in BESIDE:
        _beside(probe, mnk)


def _beside(probe: Probe, mnk: tuple[int, int, int]) -> None:
    bench = probe.bench
    stamped = Stamped(bench, operands(bench, mnk)[1])

    def measure(**what: object) -> None:
        got = []
        for _ in range(3):
            stamped.launch()
            bench.torch.cuda.current_stream().synchronize()  # the parked collective goes on waiting
            got += stamped.read()
            time.sleep(0.002)
        probe.say("gemm_beside", gemm_mnk=list(mnk), **what, **summary(got))

    if probe.measures:
        measure(beside="nothing")
    for op, ctas in itertools.product(("all_gather", "reduce_scatter", "sendrecv_ring"), CTAS):
        probe.parked(op, ctas, partial(measure, beside=op, ctas=ctas))
    for blocks, cluster in HOLDERS if probe.measures else ():
        room = probe.room(blocks)
        probe.hold(probe.high, room, cluster, HOLD_NS)
        time.sleep(0.001)
        measure(beside="hold", ctas=blocks, cluster=cluster)
        bench.synchronize()


def gemm_running(probe: Probe) -> None:
    """Products beside collectives that move data all the time; replays that outlast these do not count."""
    bench, event = probe.bench, probe.bench.torch.cuda.Event
    full, part = bench.randn(128 * MIB), bench.randn(64 * MIB)
    for mnk in RUNNING:
        stamped = Stamped(bench, operands(bench, mnk)[1])
        for op, ctas in itertools.product(("all_gather", "reduce_scatter"), (None, *CTAS[1:-1])):
            got: list[tuple[float, float]] = []
            for repetition in range(4):
                probe.meet()
                with bench.torch.cuda.stream(probe.high):
                    for _ in range(3):
                        bench.comm.collective(op, full, part, ctas)
                time.sleep(0.0004)
                begin, products, moved = (event(enable_timing=True) for _ in range(3))
                begin.record()
                stamped.launch()
                products.record()
                moved.record(probe.high)
                bench.synchronize()
                if repetition and begin.elapsed_time(moved) >= begin.elapsed_time(products):
                    got += stamped.read()
                time.sleep(0.01)
            found = summary(got) if got else {}
            probe.say("gemm_running", gemm_mnk=list(mnk), beside=op, ctas=ctas, products=len(got), **found)
