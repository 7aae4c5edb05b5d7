"""Bursts with pauses and the true SM clock, idle power, and what a transient looks like."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

from hardware.calibrate.suite.cases import build
from hardware.calibrate.suite.timing import (
    GRAPH_S,
    Bench,
    EventTimer,
    capture,
    new_slots,
    stamps_between,
    steady,
    together,
)

Row = Mapping[str, Any]
_KEPT_ITERATIONS = 40
_WARM_S = 1.0
_MEASURED_S = 1.5
_MOST_BURSTS = 400


def work_row(row: Row) -> dict[str, Any]:
    """The kernel row that a duty row's ``work`` (and its fields) stands for.

    >>> work_row({"kind": "duty", "work": "gemm_64x28672x8192"})
    {'kind': 'gemm', 'm': 64, 'n': 28672, 'k': 8192, 'dtype': 'bf16'}
    """
    work = str(row["work"])
    if work.startswith("gemm_"):
        m, n, k = (int(size) for size in work.removeprefix("gemm_").split("x"))
        return {"kind": "gemm", "m": m, "n": n, "k": k, "dtype": "bf16"}
    return {**row["kernel"]}


def measure_duty(bench: Bench, row: Row) -> dict[str, Any]:
    """Time and clock of each place in a burst (medians over bursts), mean power over bursts and pauses."""
    timer, kernels = EventTimer(bench), bench.kernels
    case = build(bench, work_row(row))
    for i in range(2):
        case.launch(i)
    bench.synchronize()
    start = timer.record()
    tries = 4
    for i in range(tries):
        case.launch(i)
    each_s = timer.seconds(start, timer.record()) / tries
    count = max(1, int(row["burst_s"] / each_s))
    kept = min(count, _KEPT_ITERATIONS)
    slots = new_slots(bench, kept + 1)

    def burst() -> None:
        for i in range(count):
            if i <= kept:
                kernels.stamp(slots[i])
            case.launch(i)
        if count == kept:
            kernels.stamp(slots[kept])

    replay = capture(bench, burst)
    record = bench.torch.zeros(_MOST_BURSTS, *slots.shape, device=bench.device, dtype=slots.dtype)
    idle_s = float(row["idle_s"])

    def run(seconds: float, keep: bool) -> tuple[int, float]:
        begin, bursts = time.monotonic(), 0
        while time.monotonic() - begin < seconds and bursts < _MOST_BURSTS:
            replay()
            if keep:
                record[bursts].copy_(slots)
            bench.synchronize()
            if idle_s > 0 and not bench.dry:
                time.sleep(idle_s)
            bursts += 1
            if bench.dry:
                break
        return bursts, (time.monotonic() - begin) / bursts

    run(_WARM_S, keep=False)
    bench.meter.start()
    begin = time.monotonic()
    bursts, period_s = run(_MEASURED_S, keep=True)
    end = time.monotonic()
    bench.meter.stop()
    pairs = [(i, i + 1) for i in range(kept)]
    seen_stamps = record if bench.dry else record[:bursts].cpu()
    per_burst = [stamps_between(bench, seen_stamps[b], pairs) for b in range(bursts)]
    iter_s, clock_mhz = [], []
    for place in range(kept):
        seen = [burst_[place] for burst_ in per_burst if not math.isnan(burst_[place][0])]
        if seen:
            iter_s.append(statistics.median(s for s, _ in seen))
            clock_mhz.append(statistics.median(c for _, c in seen))
    return {
        **case.facts,
        "n_per_burst": count,
        "bursts": bursts,
        "period_s": period_s,
        "iter_s": iter_s,
        "clock_mhz": clock_mhz,
        "power_w": [bench.meter.power_w(begin, end)],
        "temperature_c": [bench.meter.temperature_c()],
    }


def measure_alternating(bench: Bench, row: Row) -> dict[str, Any]:
    """A kernel for about ``busy_s``, then a lone spinning block for ``pause_share`` of that, over and over in a graph.

    The pause is timed at the maximum clock: at a lower one it is longer in proportion.
    """
    timer = EventTimer(bench)
    case = build(bench, work_row(row))
    for i in range(3):
        case.launch(i)
    bench.synchronize()
    start = timer.record()
    for i in range(4):
        case.launch(i)
    each_s = timer.seconds(start, timer.record()) / 4
    count = max(1, round(row["busy_s"] / each_s))
    pause_s = row["pause_share"] * row["busy_s"]
    periods = max(1, round(GRAPH_S / row["busy_s"]))

    def body() -> None:
        for period in range(periods):
            for i in range(count):
                case.launch(period * count + i)
            if pause_s:
                bench.kernels.spin(pause_s)

    seen = together(bench, steady(bench, capture(bench, body), periods, window_s=_MEASURED_S))
    return {"n_per_burst": count, "pause_s": pause_s, **seen}


def measure_idle(bench: Bench, row: Row) -> dict[str, Any]:
    """Power with a context and nothing running, over ``idle_s`` (default 1.5 s)."""
    bench.synchronize()
    seconds = 0.0 if bench.dry else float(row.get("idle_s", 1.5))
    time.sleep(min(0.5, seconds))
    bench.meter.start()
    begin = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    bench.meter.stop()
    return {
        "power_w": bench.comm.share(bench.meter.power_w(begin, end) or math.nan),
        "sm_clock_mhz": [int(c) for c in bench.comm.share(bench.meter.sm_clock_mhz(begin, end))],
        "temperature_c": [int(t) for t in bench.comm.share(bench.meter.temperature_c())],
    }


def measure_host(bench: Bench) -> dict[str, Any]:
    """Cards by UUID (in the order of ranks), driver and library versions."""
    facts, torch = bench.meter.facts, bench.torch
    nccl = torch.cuda.nccl.version() if not bench.dry else ()
    cards = [] if bench.dry else [torch.cuda.get_device_properties(rank) for rank in range(bench.comm.world)]
    return {
        "name": facts.name,
        "limit_w": facts.limit_w,
        "max_sm": facts.max_sm_mhz,
        "max_mem": facts.max_memory_mhz,
        "driver": facts.driver,
        "uuids": [str(getattr(card, "uuid", "")) for card in cards],
        "torch": str(torch.__version__),
        "nccl": ".".join(str(part) for part in nccl),
    }
