"""Energy, clock and temperature of one GPU through NVML, sampled by a thread while work runs.

NVML's energy counter integrates real power but moves only every 100 ms or so; power over a window is
therefore the slope between the first and the last tick inside it. NVML's power *reading* is a one-second
average and is not used.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from hardware.errors import HardwareError

_POLL_S = 0.002
_CLOCK_EVERY_POLLS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTick:
    """One move of the energy counter: when it was seen (s, host monotonic) and its value (J)."""

    at_s: float
    energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What NVML says of a GPU: name, power limit (W), maximum clocks (MHz), driver version."""

    name: str
    limit_w: float
    max_sm_mhz: int
    max_memory_mhz: int
    driver: str


class Meter(Protocol):
    """What the suite asks of a meter; times are ``time.monotonic()`` seconds."""

    facts: HostFacts

    def start(self, *, detail: bool = False) -> None:
        """Begin sampling; ``detail`` also logs the power reading and clock at every poll."""

    def stop(self) -> None:
        """End sampling; what was sampled stays readable."""

    def power_w(self, start_s: float, end_s: float) -> float | None:
        """Mean power between the first and last counter tick in the window; None below two ticks."""

    def sm_clock_mhz(self, start_s: float, end_s: float) -> int:
        """Median SM clock seen in the window."""

    def temperature_c(self) -> int:
        """GPU temperature now."""

    def samples(self) -> list[tuple[float, int, int, int]]:
        """The log of a detailed start: (s, energy counter mJ, power reading mW, SM MHz)."""


def slope_w(ticks: list[CounterTick], start_s: float, end_s: float) -> float | None:
    """Joules per second between the first and the last tick inside [start_s, end_s].

    >>> ticks = [CounterTick(at_s=0.1 * n, energy_j=50.0 * n) for n in range(10)]
    >>> round(slope_w(ticks, 0.15, 0.75))
    500
    >>> slope_w(ticks, 0.15, 0.25) is None
    True
    """
    inside = [tick for tick in ticks if start_s <= tick.at_s <= end_s]
    if len(inside) < 2:
        return None
    return (inside[-1].energy_j - inside[0].energy_j) / (inside[-1].at_s - inside[0].at_s)


class NvmlMeter:
    """:class:`Meter` of a real GPU, by its NVML index or by its UUID (as PyTorch reports it)."""

    def __init__(self, *, index: int, uuid: str | None = None) -> None:
        try:
            import pynvml
        except ImportError:
            raise HardwareError("no module 'pynvml': install nvidia-ml-py to meter a GPU") from None
        self._nvml: Any = pynvml
        self._detail = False
        try:
            pynvml.nvmlInit()
            self._handle: Any = _handle(pynvml, index, uuid)
            self.facts = HostFacts(
                name=_text(pynvml.nvmlDeviceGetName(self._handle)),
                limit_w=pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3,
                max_sm_mhz=pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
                max_memory_mhz=pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_MEM),
                driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            )
            pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except pynvml.NVMLError as error:
            raise HardwareError(f"NVML cannot meter GPU {index}: {error}; an energy counter is needed") from None
        self._ticks: list[CounterTick] = []
        self._clocks: list[tuple[float, int]] = []
        self._log: list[tuple[float, int, int, int]] = []
        self._running = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, detail: bool = False) -> None:
        """Begin sampling from nothing."""
        self.stop()
        self._detail = detail
        self._ticks, self._clocks, self._log = [], [], []
        self._running.set()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._running.clear()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def power_w(self, start_s: float, end_s: float) -> float | None:
        """See :class:`Meter`."""
        return slope_w(list(self._ticks), start_s, end_s)

    def sm_clock_mhz(self, start_s: float, end_s: float) -> int:
        """See :class:`Meter`."""
        seen = [mhz for at, mhz in list(self._clocks) if start_s <= at <= end_s]
        return int(statistics.median(seen)) if seen else self._clock()

    def temperature_c(self) -> int:
        """See :class:`Meter`."""
        return int(self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU))

    def samples(self) -> list[tuple[float, int, int, int]]:
        """See :class:`Meter`."""
        return list(self._log)

    def _clock(self) -> int:
        return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def _sample(self) -> None:
        last_mj, last_at, polls = -1, time.monotonic(), 0
        while self._running.is_set():
            now_mj = int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
            at = time.monotonic()
            if now_mj != last_mj and last_mj >= 0:
                # The counter moved somewhere between the two polls.
                self._ticks.append(CounterTick(at_s=(last_at + at) / 2, energy_j=now_mj / 1e3))
            if self._detail:
                reading = int(self._nvml.nvmlDeviceGetPowerUsage(self._handle))
                self._log.append((at, now_mj, reading, self._clock()))
            elif polls % _CLOCK_EVERY_POLLS == 0:
                self._clocks.append((at, self._clock()))
            last_mj, last_at, polls = now_mj, at, polls + 1
            time.sleep(_POLL_S)


class DryMeter:
    """A meter without a GPU: fixed figures, for dry runs and tests only."""

    def __init__(self) -> None:
        self.facts = HostFacts(name="dry run", limit_w=700.0, max_sm_mhz=1980, max_memory_mhz=2619, driver="0")

    def start(self, *, detail: bool = False) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def power_w(self, start_s: float, end_s: float) -> float | None:
        """A made-up constant."""
        return 100.0 if end_s >= start_s else None

    def sm_clock_mhz(self, start_s: float, end_s: float) -> int:
        """A made-up constant."""
        return 1980 if end_s >= start_s else 0

    def temperature_c(self) -> int:
        """A made-up constant."""
        return 40

    def samples(self) -> list[tuple[float, int, int, int]]:
        """Nothing was sampled."""
        return []


def _handle(nvml: Any, index: int, uuid: str | None) -> Any:
    if uuid is not None:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except nvml.NVMLError:
            pass  # some virtual machines report a different UUID through NVML; the index still holds there
    return nvml.nvmlDeviceGetHandleByIndex(index)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
