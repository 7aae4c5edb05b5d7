"""The GPUs of this machine, through NVML: which catalog entries they are, and what energy work on them takes.

The NVML library is looked for when a function is called, never on import, so that a machine without an
NVIDIA driver gets one clear line instead of a failed import.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hardware.calibrate.suite.meter import NvmlMeter
from hardware.errors import HardwareError

# What nvmlDeviceGetName answers for the boards of the catalog (driver strings; other boards stay unnamed:
# an H200 NVL or a GH200 is not the SXM board, and a wrong entry would be worse than none).
CATALOG_IDS = {
    "NVIDIA A10": "a10-24gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA B200": "b200-sxm-180gb",
    "NVIDIA B300": "b300-sxm-288gb",
    "NVIDIA GB200": "gb200-nvl-186gb",
    "NVIDIA H20": "h20-sxm-96gb",
    "NVIDIA H800": "h800-sxm-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm-80gb",
    "NVIDIA H200": "h200-sxm-141gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA L40S": "l40s-48gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
    "Tesla V100-SXM2-32GB": "v100-sxm2-32gb",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedGpu:
    """One GPU as the driver reports it (W, Hz, bytes); ``gpu_id`` is None when the catalog lacks the board."""

    index: int
    uuid: str
    name: str
    gpu_id: str | None
    power_limit_w: float
    max_sm_clock_hz: float
    sm_clock_hz: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyReading:
    """What one GPU took between entering and leaving a meter: s, J, mean W, median SM clock in Hz."""

    duration_s: float
    energy_j: float
    power_w: float
    sm_clock_hz: float


def detect() -> list[DetectedGpu]:
    """The NVIDIA GPUs of this machine in NVML's order.

    Raises :class:`HardwareError` when the NVML module, the driver or a device cannot be reached.

    >>> try:
    ...     boards = [gpu.gpu_id for gpu in detect()]
    ... except HardwareError:
    ...     boards = []  # no driver here
    """
    nvml = _module()
    try:
        nvml.nvmlInit()
        try:
            return [_describe(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise HardwareError(f"NVML cannot list GPUs: {error}; is an NVIDIA driver loaded?") from None


class EnergyMeter:
    """Context that meters what runs inside it on ``gpus`` (NVML indices; None: all of them).

    The energy counter moves about every 100 ms, so the energy of a window is the slope between the first
    and the last move inside it, times its length: within about 2 % for a second of steady work, and refused
    for windows that hold fewer than two moves. The SM clock is the median of readings 10 ms apart.

    >>> try:
    ...     with EnergyMeter(gpus=[0]) as meter:
    ...         time.sleep(1.0)
    ...     idle_w = meter.reading(0).power_w
    ... except HardwareError:
    ...     idle_w = None  # no driver here
    """

    def __init__(self, *, gpus: Sequence[int] | None = None) -> None:
        self._gpus = None if gpus is None else tuple(gpus)
        self._meters: dict[int, NvmlMeter] = {}
        self._start_s = 0.0
        self._end_s: float | None = None

    def __enter__(self) -> EnergyMeter:
        chosen = [gpu.index for gpu in detect()] if self._gpus is None else self._gpus
        if not chosen:
            raise HardwareError("no GPU to meter: name NVML indices, or run where a GPU is")
        self._meters = {index: NvmlMeter(index=index) for index in chosen}
        self._end_s = None
        for meter in self._meters.values():
            meter.start()
        self._start_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_s = time.monotonic()
        for meter in self._meters.values():
            meter.stop()

    @property
    def gpus(self) -> tuple[int, ...]:
        """The NVML indices metered."""
        return tuple(self._meters)

    def reading(self, gpu: int) -> EnergyReading:
        """What GPU ``gpu`` took; call it after the context has ended."""
        if self._end_s is None:
            raise HardwareError("the meter still runs: read it after its with block")
        if gpu not in self._meters:
            raise HardwareError(f"GPU {gpu} was not metered: metered are {', '.join(map(str, self._meters))}")
        duration_s = self._end_s - self._start_s
        power_w = self._meters[gpu].power_w(self._start_s, self._end_s)
        if power_w is None:
            raise HardwareError(
                f"GPU {gpu}: {duration_s:.3f} s hold fewer than two moves of the energy counter "
                "(about 0.1 s apart): meter at least 0.3 s of work"
            )
        clock_mhz = self._meters[gpu].sm_clock_mhz(self._start_s, self._end_s)
        return EnergyReading(
            duration_s=duration_s, energy_j=power_w * duration_s, power_w=power_w, sm_clock_hz=clock_mhz * 1e6
        )


def _module() -> Any:
    try:
        import pynvml
    except ImportError:
        raise HardwareError("no module 'pynvml': install nvidia-ml-py to see this machine's GPUs") from None
    return pynvml


def _describe(nvml: Any, index: int) -> DetectedGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    return DetectedGpu(
        index=index,
        uuid=uuid,
        name=name,
        gpu_id=CATALOG_IDS.get(name),
        power_limit_w=nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        max_sm_clock_hz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        sm_clock_hz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
        memory_bytes=float(nvml.nvmlDeviceGetMemoryInfo(handle).total),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
