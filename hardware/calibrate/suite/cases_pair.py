"""What several GPUs do: bare collectives, collectives after a GEMM in one graph, collectives beside work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hardware.calibrate.suite.buffers import BF16_BYTES, collective_buffers
from hardware.calibrate.suite.comm import most, part_bytes
from hardware.calibrate.suite.race import (
    BESIDE_S,
    MOST_STAMPED,
    beside_fields,
    collective_of,
    discard,
    make_lane,
    median_of,
    work_launch,
)
from hardware.calibrate.suite.timing import Bench, capture, new_slots, repeated, stamps_between, steady, together

Row = Mapping[str, Any]


def measure_collective(bench: Bench, row: Row) -> dict[str, Any]:
    """One collective back to back in a graph, or launched from Python (``launch`` loop: host-bound below 60 us)."""
    buffer, part = collective_buffers(bench, row["op"], row["bytes"])

    def launch(_: int) -> None:
        bench.comm.collective(row["op"], buffer, part, row["ctas"])

    if row.get("launch", "graph") == "graph":
        replay, count = repeated(bench, launch)
    else:
        for _ in range(3):
            launch(0)
        bench.synchronize()
        replay, count = (lambda: launch(0)), 1
    return together(bench, steady(bench, replay, count))


def measure_in_context(bench: Bench, row: Row) -> dict[str, Any]:
    """A collective after a GEMM, repeated in one graph; then once more with clocks read between the two.

    ``gemm_s``, ``collective_s`` (medians, slowest rank) and ``gemm_clock_mhz`` (one a GPU) come from on-chip
    counters in a second graph, whose stamps cost 1-2 us each; latency and energy come from the first.
    """
    m, n, k = row["gemm_mnk"]
    kernels, comm = bench.kernels, bench.comm
    x, weights, y = bench.randn(m, k), bench.weights(n, k), bench.empty(m, n)
    op = row["collective"]
    buffer, part = _after_gemm(bench, op, y, row["bytes"])

    def gemm(i: int) -> None:
        kernels.linear(x, weights[i % len(weights)], y)

    def exchange() -> None:
        if op == "none":
            return
        if op == "all_reduce" and row.get("ctas") is None:
            comm.all_reduce_sum(buffer)
        else:
            comm.collective(op, buffer, part, row.get("ctas"))

    def launch(i: int) -> None:
        gemm(i)
        exchange()

    replay, count = repeated(bench, launch, kernels_each=2, rotate=len(weights))
    measured = together(bench, steady(bench, replay, count))
    stamped = min(count, MOST_STAMPED)
    slots = new_slots(bench, 3 * stamped)

    def with_stamps() -> None:
        for i in range(stamped):
            kernels.stamp(slots[3 * i])
            gemm(i)
            kernels.stamp(slots[3 * i + 1])
            exchange()
            kernels.stamp(slots[3 * i + 2])

    replay_stamped = capture(bench, with_stamps)
    for _ in range(max(1, math.ceil(0.15 / (stamped * float(str(measured["latency_s"])))))):
        replay_stamped()
    bench.synchronize()
    host = slots if bench.dry else slots.cpu()
    places = range(stamped // 4, stamped)
    gemms = stamps_between(bench, host, [(3 * i, 3 * i + 1) for i in places])
    waits = stamps_between(bench, host, [(3 * i + 1, 3 * i + 2) for i in places])
    facts: dict[str, Any] = {
        "gemm_s": most(comm, median_of(s for s, _ in gemms)),
        "gemm_clock_mhz": comm.share(median_of(c for _, c in gemms)),
    }
    if op != "none":
        facts["collective_s"] = most(comm, median_of(s for s, _ in waits))
    return {**measured, **facts}


def _after_gemm(bench: Bench, op: str, y: Any, full_bytes: int) -> tuple[Any, Any]:
    """Buffers of ``op`` on the GEMM's output, so that sums start from fresh numbers every time."""
    if op == "none":
        return None, None
    if op == "all_gather":
        return collective_buffers(bench, op, full_bytes)
    flat = y.view(-1)
    return flat, bench.empty(part_bytes(op, full_bytes, bench.comm.world) // BF16_BYTES)


def measure_together(bench: Bench, row: Row) -> dict[str, Any]:
    """Compute on one stream beside a collective on another; seconds a repetition while both ran.

    ``power_w`` (one a GPU) and ``a_clock_mhz`` (true clock over the compute graph) cover the same time.
    """
    op, ctas = collective_of(row["b"])
    launch, rotate = work_launch(bench, row, row["a"])
    buffer, part = collective_buffers(bench, op, row["comm_bytes"])
    a = make_lane(bench, lambda i: discard(launch(i)), rotate=rotate, priority=0, stamped=True)
    b = make_lane(bench, lambda _: bench.comm.collective(op, buffer, part, ctas), rotate=1, priority=-1)
    return beside_fields(bench, a, b, seconds=BESIDE_S)
