"""Bring work to a steady state on a GPU and read time, power and clock; see :func:`steady`.

Back-to-back repetitions are captured in a CUDA graph and replayed so that the GPU never waits for the
host. Power-capped work runs 2 s before it counts (the slow power limiter averages over about a
second), other work 0.45 s. The window is 0.65 s: five or six ticks of the energy counter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardware.calibrate.suite.comm import Comm, most
from hardware.calibrate.suite.kernels import Kernels
from hardware.calibrate.suite.meter import Meter
from hardware.calibrate.suite.shapes import SHAPES, ModelShape

SETTLE_CAPPED_S = 2.0
SETTLE_FREE_S = 0.45
WINDOW_S = 0.65
CHUNK_S = 0.05
CAPPED_FRACTION_OF_LIMIT = 0.92
GRAPH_S = 0.006
GRAPH_KERNELS = 600


@dataclass(slots=True, kw_only=True)
class Bench:
    """One rank's measuring place: torch, device, kernels, meter, group, and a pool of random weights.

    Whole-model steps are profiled into the folder ``traces``, where one is given.
    """

    torch: Any
    device: str
    kernels: Kernels
    meter: Meter
    comm: Comm
    gpu_id: str
    dry: bool
    pool: Any
    shapes: Mapping[str, ModelShape] = field(default_factory=lambda: SHAPES)
    traces: Path | None = None
    window_s: float = WINDOW_S
    settle_capped_s: float = SETTLE_CAPPED_S
    log: Callable[[str], None] = field(default=lambda _: None)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if not self.dry:
            self.torch.cuda.synchronize()

    def randn(self, *shape: int) -> Any:
        """bf16 normal numbers."""
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.bfloat16)

    def empty(self, *shape: int) -> Any:
        """bf16, not initialised."""
        return self.torch.empty(*shape, device=self.device, dtype=self.torch.bfloat16)

    def weights(self, *shape: int, span_bytes: int = 256 << 20, most_copies: int = 64) -> list[Any]:
        """bf16 weights of one shape at different places of the pool, more than ``span_bytes`` together."""
        size = math.prod(shape)
        copies = min(most_copies, max(1, math.ceil(span_bytes / (2 * size)) + 1), self.pool.numel() // size)
        if copies == 0:
            return [self.randn(*shape) * 0.02]
        return [self.pool[i * size : (i + 1) * size].view(*shape) for i in range(copies)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyReading:
    """What was read: seconds a repetition, watts (None: window too short), median SM clock, temperature."""

    latency_s: float
    power_w: float | None
    sm_clock_mhz: int
    temperature_c: int
    repetitions: int = 0


class EventTimer:
    """Events on the current stream, or fixed figures in a dry run."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def record(self) -> Any:
        """A recorded event."""
        if self._bench.dry:
            return None
        event = self._bench.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two recorded events (waits for the second)."""
        if self._bench.dry:
            return 1e-3
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def capture(bench: Bench, body: Callable[[], None], *, priority: int = 0, stream: Any = None) -> Callable[[], None]:
    """``body`` as a CUDA graph's replay; it runs twice eagerly first, so that nothing is built in capture.

    Kernels keep what belongs to the stream they are captured on: its ``priority`` (-1: before others), or, on a
    ``stream`` of a green context, that context's SMs.
    """
    if bench.dry:
        body()
        return lambda: None
    torch = bench.torch
    stream = stream or torch.cuda.Stream(priority=priority)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog, the meter) may call CUDA while this thread captures.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    torch.cuda.synchronize()

    def replay(_keeps_tensors: Callable[[], None] = body) -> None:
        # The graph holds addresses only: weights that ``body`` made before capture live as long as it does.
        graph.replay()

    return replay


def rough_s(bench: Bench, launch: Callable[[int], None]) -> float:
    """Seconds of one ``launch``, on the slowest rank: mean of three after the first."""
    timer = EventTimer(bench)
    launch(0)
    bench.synchronize()
    start = timer.record()
    for i in range(3):
        launch(i)
    return most(bench.comm, timer.seconds(start, timer.record()) / 3)


def repeated(
    bench: Bench,
    launch: Callable[[int], None],
    *,
    kernels_each: int = 1,
    rotate: int = 1,
    stream: Any = None,
    slots: Any = None,
) -> tuple[Callable[[], None], int]:
    """A graph of enough repetitions of ``launch`` to take about 6 ms; returns (replay, repetitions).

    Two ``slots`` are stamped, one before them and one after.

    ``launch(i)`` is repetition i; weights rotate with period ``rotate``, which the count is a multiple of
    when it fits.
    """
    each_s = rough_s(bench, launch)
    count = max(1, min(math.ceil(GRAPH_S / max(each_s, 1e-6)), GRAPH_KERNELS // kernels_each))
    count = min(math.ceil(count / rotate) * rotate, max(GRAPH_KERNELS // kernels_each, rotate, 1))
    if bench.dry:
        count = 1

    def body() -> None:
        if slots is not None:
            bench.kernels.stamp(slots[0])
        for i in range(count):
            launch(i)
        if slots is not None:
            bench.kernels.stamp(slots[1])

    return capture(bench, body, stream=stream), count


def steady(
    bench: Bench, replay: Callable[[], None], repetitions: int, *, window_s: float | None = None
) -> SteadyReading:
    """Replay until settled, then over a window; every rank replays the same number of times.

    One chunk of about 50 ms is always queued ahead, so the GPU does not see the host decide.
    """
    timer, meter = EventTimer(bench), bench.meter
    window_s = window_s or bench.window_s
    if bench.dry:
        replay()
        return SteadyReading(latency_s=1e-3 / repetitions, power_w=100.0, sm_clock_mhz=1980, temperature_c=40)
    start = timer.record()
    replay()
    each_s = most(bench.comm, timer.seconds(start, timer.record()))
    tries = max(1, min(5, round(0.01 / max(each_s, 1e-9))))
    start = timer.record()
    for _ in range(tries):
        replay()
    each_s = most(bench.comm, timer.seconds(start, timer.record()) / tries)
    chunk = max(1, round(CHUNK_S / each_s))
    chunk_s = chunk * each_s
    meter.start()
    try:
        marks = [timer.record()]
        seen_s = [time.monotonic()]

        def enqueue() -> None:
            for _ in range(chunk):
                replay()
            marks.append(timer.record())

        def wait() -> None:
            timer.seconds(marks[0], marks[len(seen_s)])
            seen_s.append(time.monotonic())

        enqueue()
        capped: bool | None = None
        settled_at = 0
        while True:
            enqueue()
            wait()
            done_s = (len(seen_s) - 1) * chunk_s
            if capped is None and done_s >= SETTLE_FREE_S:
                power = meter.power_w(seen_s[0] + 0.1, seen_s[-1])
                hot = power is None or power > CAPPED_FRACTION_OF_LIMIT * meter.facts.limit_w
                capped = most(bench.comm, float(hot)) > 0
            if capped is not None and done_s >= (bench.settle_capped_s if capped else SETTLE_FREE_S):
                settled_at = len(seen_s) - 1
                break
        chunks = max(1, math.ceil(window_s / chunk_s))
        while len(marks) - 1 < settled_at + chunks:
            enqueue()
            wait()
        while len(seen_s) - 1 < settled_at + chunks:
            wait()
        end = settled_at + chunks
        total_s = timer.seconds(marks[settled_at], marks[end])
        bench.synchronize()
        meter.stop()
        return SteadyReading(
            latency_s=total_s / (chunks * chunk * repetitions),
            power_w=meter.power_w(seen_s[settled_at], seen_s[end]),
            sm_clock_mhz=meter.sm_clock_mhz(seen_s[settled_at], seen_s[end]),
            temperature_c=meter.temperature_c(),
            repetitions=chunks * chunk * repetitions,
        )
    finally:
        meter.stop()


def together(bench: Bench, mine: SteadyReading) -> dict[str, object]:
    """The measured fields of a record: slowest rank's latency, one power a GPU, energy of all GPUs."""
    share = bench.comm.share
    latency_s = max(share(mine.latency_s))
    powers = [None if math.isnan(p) else p for p in share(math.nan if mine.power_w is None else mine.power_w)]
    known = [p for p in powers if p is not None]
    return {
        "latency_s": latency_s,
        "power_w": powers,
        "energy_j": latency_s * sum(known) if len(known) == len(powers) else None,
        "sm_clock_mhz": [int(c) for c in share(mine.sm_clock_mhz)],
        "temperature_c": [int(t) for t in share(mine.temperature_c)],
    }


def stamps_between(bench: Bench, slots: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
    """(seconds, SM clock in MHz) between pairs of stamps: medians over the SMs that both stamps reached."""
    if bench.dry:
        return [(1e-3, 1980.0) for _ in pairs]
    host = [slot.cpu() for slot in slots]
    out = []
    for first, second in pairs:
        a, b = host[first], host[second]
        both = (a[:, 1] > 0) & (b[:, 1] > a[:, 1])
        nanoseconds = (b[both, 1] - a[both, 1]).double()
        cycles = (b[both, 0] - a[both, 0]).double()
        if nanoseconds.numel() == 0:
            out.append((math.nan, math.nan))
            continue
        out.append((float(nanoseconds.median()) * 1e-9, float((cycles / nanoseconds).median()) * 1e3))
    return out


def new_slots(bench: Bench, count: int) -> Any:
    """Room for ``count`` stamps, [count, sms, 2] int64 zeros."""
    return bench.torch.zeros(count, bench.kernels.sms, 2, device=bench.device, dtype=bench.torch.int64)
