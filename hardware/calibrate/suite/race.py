"""Two streams side by side: how fast each lane goes alone and beside the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hardware.calibrate.suite.buffers import PREFIX, collective_buffers
from hardware.calibrate.suite.cases import attention_inputs
from hardware.calibrate.suite.comm import most
from hardware.calibrate.suite.timing import (
    Bench,
    SteadyReading,
    capture,
    new_slots,
    repeated,
    rough_s,
    stamps_between,
    steady,
    together,
)
from hardware.errors import HardwareError

Row = Mapping[str, Any]
BESIDE_S = 1.1
_GROUP_S = 0.002
MOST_STAMPED = 64
_KEPT_STAMPS = 1024
_DEPTH = 6
_PAUSE_S = 1e-4


@dataclass(slots=True, kw_only=True)
class StreamWork:
    """One stream's repeated work in a contention row: a graph of ``count`` repetitions."""

    stream: Any
    replay: Callable[[], None]
    count: int
    each_s: float
    slots: Any = None  # two stamps, around the whole graph
    starts: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)


def work_launch(bench: Bench, row: Row, what: str) -> tuple[Callable[[int], object], int]:
    """Launcher and rotation of the compute side of a contention row."""
    match what:
        case "gemm":
            m, n, k = row["gemm_mnk"]
            x, weights, y = bench.randn(m, k), bench.weights(n, k), bench.empty(m, n)
            return (lambda i: bench.kernels.linear(x, weights[i % len(weights)], y)), len(weights)
        case "copy":
            size = row["copy_bytes_moved"] // 4
            source, target = bench.randn(size), bench.empty(size)
            return (lambda _: target.copy_(source)), 1
        case "attention":
            q, k_, v = attention_inputs(
                bench,
                batch=row["batch"],
                q_len=row["seq_len"],
                kv_len=row["seq_len"],
                q_heads=row["q_heads"],
                kv_heads=row["kv_heads"],
            )
            return (lambda _: bench.kernels.attention(q, k_, v, causal=bool(row["causal"]))), 1
        case other:
            raise HardwareError(f"contention row with a = '{other}': one of gemm, copy, attention")


def collective_of(name: str) -> tuple[str, int]:
    """Operation and block count of a contention name.

    >>> collective_of("rs8")
    ('reduce_scatter', 8)
    """
    op = PREFIX.get(name[:2])
    if op is None or not name[2:].isdigit():
        raise HardwareError(f"contention name '{name}': two letters of {', '.join(PREFIX)} and a block count")
    return op, int(name[2:])


def measure_alone(bench: Bench, row: Row) -> dict[str, Any]:
    """The compute side, or the collective, of contention rows by itself."""
    if row["what"][:2] in PREFIX and "op" in row:
        buffer, part = collective_buffers(bench, row["op"], row["bytes"])
        replay, count = repeated(bench, lambda _: bench.comm.collective(row["op"], buffer, part, row["ctas"]))
    else:
        launch, rotate = work_launch(bench, row, row["what"])
        replay, count = repeated(bench, lambda i: discard(launch(i)), rotate=rotate)
    return together(bench, steady(bench, replay, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasurement:
    """What two lanes did while both ran: seconds a repetition of each, watts, true SM clock in MHz."""

    a_s: float
    b_s: float
    power_w: float
    clock_mhz: float


def make_lane(
    bench: Bench,
    launch: Callable[[int], None],
    *,
    rotate: int,
    priority: int,
    stamped: bool = False,
    stream: Any = None,
) -> StreamWork:
    """A graph of about 2 ms of ``launch`` and how long one repetition takes alone, settled for 0.5 s.

    It runs on ``stream``, or on a new one of ``priority``.
    """
    each_s = rough_s(bench, launch)
    count = 1 if bench.dry else max(1, min(200, round(_GROUP_S / each_s)))
    count = -(-count // rotate) * rotate if count > rotate else count
    slots: Any = new_slots(bench, 2) if stamped else None

    def body() -> None:
        if stamped:
            bench.kernels.stamp(slots[0])
        for i in range(count):
            launch(i)
        if stamped:
            bench.kernels.stamp(slots[1])

    replay = capture(bench, body, priority=priority, stream=stream)
    alone: SteadyReading = steady(bench, replay, count, window_s=0.3)
    stream = stream or (None if bench.dry else bench.torch.cuda.Stream(priority=priority))
    each_s = most(bench.comm, alone.latency_s)
    return StreamWork(stream=stream, replay=replay, count=count, each_s=each_s, slots=slots)


def beside_fields(bench: Bench, a: StreamWork, b: StreamWork, *, seconds: float) -> dict[str, Any]:
    """The measured fields of a record of two lanes, both of which run for about ``seconds``."""
    # How much b slows down sets how many of it fill the window: a short trial measures that.
    slow = max(1.0, most(bench.comm, race(bench, a, b, seconds=0.25).b_s / b.each_s))
    seen = race(bench, a, b, seconds=seconds / slow)
    share = bench.comm.share
    return {
        "a_alone_s": a.each_s,
        "b_alone_s": b.each_s,
        "a_together_s": share(seen.a_s),
        "b_together_s": share(seen.b_s),
        "power_w": [None if math.isnan(p) else p for p in share(seen.power_w)],
        "a_clock_mhz": share(seen.clock_mhz),
        "temperature_c": [int(t) for t in share(bench.meter.temperature_c())],
    }


def race(bench: Bench, a: StreamWork, b: StreamWork, *, seconds: float) -> PairMeasurement:
    """Replay ``b`` as often as takes ``seconds`` alone, and ``a`` beside it until ``b`` is done.

    Each lane has a few replays in flight whatever the other does: were launches interleaved in one order, the
    slower lane would hold back the faster one. Ranks replay ``b`` equally often, ``a`` as each needs.
    """
    if bench.dry:
        return PairMeasurement(a_s=a.each_s, b_s=b.each_s, power_w=100.0, clock_mhz=1980.0)
    torch, meter = bench.torch, bench.meter
    wanted_b = max(8, round(seconds / (b.each_s * b.count)))
    record = torch.zeros(_KEPT_STAMPS, *a.slots.shape, device=bench.device, dtype=a.slots.dtype)
    bench.synchronize()
    bench.comm.share(0.0)
    meter.start()
    origin = torch.cuda.Event(enable_timing=True)
    origin.record()
    for lane in (a, b):
        lane.stream.wait_stream(torch.cuda.current_stream())
        lane.starts, lane.ends = [], []

    def in_flight(lane: StreamWork) -> int:
        # Events of a stream finish in order, so only the latest few can be unfinished.
        return sum(not end.query() for end in lane.ends[-_DEPTH:])

    def launch(lane: StreamWork) -> None:
        with torch.cuda.stream(lane.stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            lane.replay()
            end.record()
            if lane is a:
                record[len(lane.ends) % _KEPT_STAMPS].copy_(a.slots)
        lane.starts.append(start)
        lane.ends.append(end)

    while len(b.ends) < wanted_b or not b.ends[-1].query():
        moved = False
        if len(b.ends) < wanted_b and in_flight(b) < _DEPTH:
            launch(b)
            moved = True
        if in_flight(a) < _DEPTH:
            launch(a)
            moved = True
        if not moved:
            time.sleep(_PAUSE_S)
    bench.synchronize()
    finished_s = time.monotonic()
    meter.stop()
    times = [
        [
            (origin.elapsed_time(start) / 1e3, origin.elapsed_time(end) / 1e3)
            for start, end in zip(lane.starts, lane.ends, strict=True)
        ]
        for lane in (a, b)
    ]
    b_end = times[1][-1][1]
    b_start = times[1][0][0] + 0.3 * (b_end - times[1][0][0])
    kept = [[i for i, (s, e) in enumerate(lane) if s >= b_start and e <= b_end] for lane in times]
    if not kept[0] or not kept[1]:
        raise HardwareError("contention row: no repetition fell wholly into the time when both ran; use smaller work")
    means = [
        (spans[places[-1]][1] - spans[places[0]][0]) / (len(places) * lane.count)
        for lane, spans, places in zip((a, b), times, kept, strict=True)
    ]
    host = record.cpu()
    latest = [i for i in kept[0] if i >= len(times[0]) - _KEPT_STAMPS]
    clocks = [stamps_between(bench, host[i % _KEPT_STAMPS], [(0, 1)])[0][1] for i in latest]
    offset_s = finished_s - max(lane[-1][1] for lane in times)
    power = meter.power_w(offset_s + b_start, offset_s + b_end)
    return PairMeasurement(
        a_s=means[0],
        b_s=means[1],
        power_w=math.nan if power is None else power,
        clock_mhz=median_of(c for c in clocks if not math.isnan(c)),
    )


def median_of(values: Any) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else math.nan


def discard(_: object) -> None:
    """Launches return tensors that nobody reads."""
