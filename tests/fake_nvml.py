"""A stand-in for the module ``pynvml`` whose energy counter ticks on a clock of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    """What real NVML calls raise."""


class FakeClock:
    """Stands in for the module ``time``: sleeping advances it at once, so a second takes milliseconds.

    Threads advance together: none sleeps further than one step ahead of the slowest, however busy the machine is.
    """

    def __init__(self) -> None:
        self._started_s = 100.0
        self._slept_to_s: dict[int, float] = {}
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        if threading.current_thread() is threading.main_thread():
            return self._slowest_s()
        with self._lock:  # from its first look on, nobody runs ahead of a thread
            return self._slept_to_s.setdefault(threading.get_ident(), self._slowest_s())

    def sleep(self, seconds: float) -> None:
        me, mine = threading.get_ident(), self.monotonic() + seconds
        with self._lock:
            self._slept_to_s[me] = mine
        while mine - self._slowest_s() > seconds:
            time.sleep(0)

    def run_for(self, seconds: float) -> None:
        """Wait until the sampling threads have slept ``seconds`` away."""
        until = self._slowest_s() + seconds
        while self._slowest_s() < until:
            time.sleep(1e-4)

    def _slowest_s(self) -> float:
        alive = {thread.ident for thread in threading.enumerate()}
        times = [at for ident, at in list(self._slept_to_s.items()) if ident in alive]
        self._started_s = max(self._started_s, min(times, default=self._started_s))
        return self._started_s


@dataclass
class FakeNvml:
    """``names`` are the boards; each draws ``power_w`` and its counter moves every ``tick_s``."""

    clock: FakeClock
    names: list[str | bytes]
    power_w: float = 400.0
    tick_s: float = 0.1
    sm_mhz: int = 1755
    broken: str = ""
    opened: int = 0
    NVML_CLOCK_SM: int = 1
    NVML_CLOCK_MEM: int = 2
    NVML_TEMPERATURE_GPU: int = 0
    NVMLError: type[Exception] = field(default=NVMLError)

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise NVMLError(self.broken)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "1.0"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if not 0 <= index < len(self.names):
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        return self.names[handle]

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetEnforcedPowerLimit(self, _: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, _: int, kind: int) -> int:  # noqa: N802
        return 1980 if kind == self.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetClockInfo(self, _: int, __: int) -> int:  # noqa: N802
        return self.sm_mhz

    def nvmlDeviceGetMemoryInfo(self, _: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=85_520_809_984)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        ticks = int(self.clock.monotonic() / self.tick_s)
        return round(1e3 * self.power_w * (1 + handle) * ticks * self.tick_s)
