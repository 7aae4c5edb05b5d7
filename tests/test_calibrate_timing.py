"""How the measuring suite times work, on machines with a time of their own: settling, windows, lanes side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from hardware.calibrate.suite import race, timing
from hardware.calibrate.suite.comm import QuietComm
from hardware.calibrate.suite.meter import CounterTick, DryMeter, HostFacts, slope_w


class FakeGpu:
    """A GPU with its own time: work takes what it takes, and waiting for it moves the clock."""

    def __init__(self, *, replay_s: float, watts: float) -> None:
        self.replay_s, self.watts = replay_s, watts
        self.queued_s = self.now_s = 0.0
        self.idle_s = 0.0
        self.cuda = self

    def replay(self) -> None:
        if self.queued_s < self.now_s:
            self.idle_s += self.now_s - self.queued_s
            self.queued_s = self.now_s
        self.queued_s += self.replay_s

    def synchronize(self) -> None:
        self.now_s = max(self.now_s, self.queued_s)

    def Event(self, *, enable_timing: bool) -> FakeEvent:  # noqa: N802
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self.at_s = gpu, math.nan

    def record(self) -> None:
        self.at_s = max(self._gpu.queued_s, self._gpu.now_s)

    def synchronize(self) -> None:
        self._gpu.now_s = max(self._gpu.now_s, self.at_s)

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.at_s - self.at_s)


class FakeMeter(DryMeter):
    """The fake GPU's energy counter, moving every 100 ms; remembers the windows asked about."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.facts = HostFacts(name="fake", limit_w=700.0, max_sm_mhz=1980, max_memory_mhz=2619, driver="0")
        self._gpu = gpu
        self.windows: list[tuple[float, float]] = []

    def power_w(self, start_s: float, end_s: float) -> float | None:
        self.windows.append((start_s, end_s))
        ticks = [CounterTick(at_s=0.1 * n, energy_j=0.1 * n * self._gpu.watts) for n in range(200)]
        return slope_w(ticks, start_s, end_s)


@pytest.mark.parametrize(
    ("replay_s", "watts", "settled_s"),
    [(0.004, 400.0, 0.45), (0.004, 690.0, 2.0), (0.7, 690.0, 2.0), (6e-4, 500, 0.45)],
)
def test_work_settles_before_it_is_measured(
    monkeypatch: pytest.MonkeyPatch, replay_s: float, watts: float, settled_s: float
) -> None:
    gpu = FakeGpu(replay_s=replay_s, watts=watts)
    meter = FakeMeter(gpu)
    monkeypatch.setattr("time.monotonic", lambda: gpu.now_s)
    kernels: Any = None
    bench = timing.Bench(
        torch=gpu,
        device="cuda:0",
        kernels=kernels,
        meter=meter,
        comm=QuietComm(),
        gpu_id="fake",
        dry=False,
        pool=None,
    )
    replay: Callable[[], None] = gpu.replay
    seen = timing.steady(bench, replay, 10)
    assert seen.latency_s == pytest.approx(replay_s / 10)
    assert seen.power_w == pytest.approx(watts)
    start_s, end_s = meter.windows[-1]
    chunk_s = max(replay_s, 0.05)
    begun_s = meter.windows[0][0] - 0.1
    assert settled_s - 1e-9 <= start_s - begun_s <= settled_s + 1.05 * chunk_s
    assert timing.WINDOW_S - 1e-9 <= end_s - start_s <= timing.WINDOW_S + 1.05 * chunk_s
    assert gpu.idle_s == 0.0


class FakeStream:
    def __init__(self) -> None:
        self.free_s = 0.0

    def wait_stream(self, other: FakeStream) -> None:
        self.free_s = max(self.free_s, other.free_s)


class FakeTorch:
    """Streams that run side by side; only sleeping and synchronizing move the host's time."""

    int64 = "int64"

    def __init__(self) -> None:
        self.now_s = 0.0
        self.main = self.current = FakeStream()
        self.streams = [self.main]
        self.cuda = self

    def run(self, seconds: float) -> None:
        self.current.free_s = max(self.current.free_s, self.now_s) + seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self) -> None:
        self.now_s = max([self.now_s, *(stream.free_s for stream in self.streams)])

    def Event(self, *, enable_timing: bool) -> FakeTorchEvent:  # noqa: N802
        assert enable_timing
        return FakeTorchEvent(self)

    def zeros(self, *shape: int, **_: object) -> Any:
        return FakeRecord(shape)


class FakeTorchEvent:
    def __init__(self, torch: FakeTorch) -> None:
        self._torch, self.at_s = torch, math.inf

    def record(self) -> None:
        self.at_s = max(self._torch.current.free_s, self._torch.now_s)

    def query(self) -> bool:
        return self.at_s <= self._torch.now_s

    def elapsed_time(self, later: FakeTorchEvent) -> float:
        return 1e3 * (later.at_s - self.at_s)


class FakeRecord:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, "int64"

    def __getitem__(self, _: int) -> FakeRecord:
        return self

    def copy_(self, _: object) -> None:
        pass

    def cpu(self) -> FakeRecord:
        return self


@pytest.mark.parametrize(("a_s", "b_s"), [(0.002, 0.006), (0.003, 0.002), (0.0105, 0.002)])
def test_lanes_do_not_hold_each_other_back(monkeypatch: pytest.MonkeyPatch, a_s: float, b_s: float) -> None:
    """A lane twice as slow as its first guess must not slow the other one: each shows its own time."""
    torch = FakeTorch()
    monkeypatch.setattr("time.monotonic", lambda: torch.now_s)
    monkeypatch.setattr("time.sleep", torch.sleep)
    monkeypatch.setattr(race, "stamps_between", lambda *_: [(a_s, 1500.0)])
    kernels: Any = None
    bench = timing.Bench(
        torch=torch,
        device="cuda:0",
        kernels=kernels,
        meter=DryMeter(),
        comm=QuietComm(),
        gpu_id="fake",
        dry=False,
        pool=None,
    )
    slots = FakeRecord((2, 4, 2))
    lanes = [
        race.StreamWork(stream=FakeStream(), replay=partial(torch.run, t), count=2, each_s=0.001, slots=slots)
        for t in (a_s, b_s)
    ]
    torch.streams += [lane.stream for lane in lanes]
    seen = race.race(bench, lanes[0], lanes[1], seconds=0.5)
    assert seen.a_s == pytest.approx(a_s / 2, rel=0.02)
    assert seen.b_s == pytest.approx(b_s / 2, rel=0.02)
    assert len(lanes[1].ends) == 250
    assert seen.clock_mhz == 1500.0
