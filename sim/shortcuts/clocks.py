"""Time and power of a kernel by itself at every clock of a grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hardware.laws.terms import dynamic_power_w
from inputs.changed import changed
from sim.engine.fluid import FluidModel
from sim.engine.running import PS_PER_S, GpuModel, GpuState
from sim.shortcuts.solo import solo

Floats = NDArray[np.float64]

# Grid of the clocks of the steady state (Hz), so that memo keys stay few.
CLOCK_GRID_HZ = 2e6
# Tables kept of one GPU type; beyond it they are computed again.
MAX_TABLES = 500


def top_step(gpu: GpuModel) -> int:
    """The grid's step at the maximum clock."""
    return math.ceil((gpu.max_clock_hz - gpu.min_clock_hz) / CLOCK_GRID_HZ)


def clock_of(gpu: GpuModel, step: int) -> float:
    """The clock of a step of the grid."""
    return min(gpu.min_clock_hz + step * CLOCK_GRID_HZ, gpu.max_clock_hz)


def step_of(gpu: GpuModel, clock_hz: float) -> int | None:
    """The step of a clock; None for a clock between two steps."""
    step = math.ceil((clock_hz - gpu.min_clock_hz) / CLOCK_GRID_HZ - 1e-6)
    return step if clock_of(gpu, step) == clock_hz else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCurves:
    """A GPU's curves at every clock of the grid."""

    clock_hz: Floats
    clock_fraction: Floats  # of the reference clock
    idle_w: Floats
    voltage_scale: Floats

    def at(self, columns: NDArray[np.intp]) -> ClockCurves:
        """The same at some of the clocks."""
        return ClockCurves(
            clock_hz=self.clock_hz[columns],
            clock_fraction=self.clock_fraction[columns],
            idle_w=self.idle_w[columns],
            voltage_scale=self.voltage_scale[columns],
        )


@lru_cache(maxsize=64)
def grid_of(gpu: GpuModel, every: int = 1) -> ClockCurves:
    """Every ``every``-th clock of the grid of a GPU type, and the last one."""
    top = top_step(gpu)
    clocks = [clock_of(gpu, step) for step in (*range(0, top, every), top)]
    return ClockCurves(
        clock_hz=np.array(clocks),
        clock_fraction=np.array(clocks) / gpu.reference_clock_hz,
        idle_w=np.array([gpu.idle_w(clock_hz) for clock_hz in clocks]),
        voltage_scale=np.array([gpu.voltage_scale(clock_hz) for clock_hz in clocks]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCurves:
    """One kernel alone on a GPU at every clock: its rate (1/ps), duration and power; 0 of one that spins.

    ``j_per_run``: joules above idle of one run of the kernel. ``as_it_is``: no limiter lowers the clock. ``peak_w``:
    its highest power before one does.
    """

    rate: Floats
    lasts_ps: Floats
    power_w: Floats
    j_per_run: Floats
    as_it_is: NDArray[np.bool_]
    peak_w: float

    def below(self, limit_w: float, held: Callable[[], GpuState]) -> KernelCurves:
        """The same under a fast limiter, which lowers each clock over the limit to that of the state ``held``."""
        if self.peak_w <= limit_w:
            return self
        as_it_is = self.power_w <= limit_w
        state = held()
        rate = np.where(as_it_is, self.rate, state.rates[0])
        return changed(
            self,
            rate=rate,
            lasts_ps=_lasts_ps(rate),
            power_w=np.where(as_it_is, self.power_w, state.power_w),
            as_it_is=as_it_is,
        )


def _lasts_ps(rate: Floats) -> Floats:
    """Whole picoseconds, as floats: sums of them are exact up to hours, and long kernels do not overflow."""
    return np.maximum(1.0, np.ceil(1.0 / rate - 1e-6)) if rate.all() else np.zeros_like(rate)


class KernelTables:
    """Tables of kernels by their costs, below limits on power, that all programs on a GPU type have in common."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool, float], KernelCurves] = {}

    def curves(
        self, model: FluidModel, class_id: int, cost: int, *, waits: bool = False, limit_w: float = math.inf
    ) -> KernelCurves:
        """The table of one kernel of a ``cost``, which runs or, ``waits``, spins until others come."""
        key = (cost, waits, limit_w)
        found = self._known.get(key)
        if found is None:
            if limit_w == math.inf:
                found = curves_at(grid_of(model.gpu), model, class_id, waits=waits)
            else:
                running, top_hz = solo(class_id, model, waits=waits), model.gpu.max_clock_hz
                free = self.curves(model, class_id, cost, waits=waits)
                found = free.below(limit_w, lambda: model.solve(running, limit_w, top_hz))
            if len(self._known) > MAX_TABLES:
                self._known.clear()
            self._known[key] = found
        return found


@lru_cache(maxsize=16)
def kernel_tables(_gpu: GpuModel) -> KernelTables:
    """The tables of a GPU type."""
    return KernelTables()


def curves_at(grid: ClockCurves, model: FluidModel, class_id: int, *, waits: bool = False) -> KernelCurves:
    """The same at the clocks of ``grid``, not remembered."""
    gpu = model.gpu
    member = model.member(class_id, model.grid(class_id).sms, waits)
    terms = member.terms
    zeros = np.zeros_like(grid.clock_hz)
    if waits:
        rate = per_run_j = zeros
        above_w = np.full_like(grid.clock_hz, terms.waiting_power_w)
    else:
        work_s = member.pace.seconds_at(grid.clock_hz)
        lasts_s = work_s + member.cls.gap_s
        rate = 1.0 / lasts_s / PS_PER_S
        scales = {"voltage_scale": grid.voltage_scale, "clock_fraction": grid.clock_fraction}
        if (top_hz := terms.top_clock_hz) < gpu.max_clock_hz:
            scales = {
                "voltage_scale": np.minimum(grid.voltage_scale, gpu.voltage_scale(top_hz)),
                "clock_fraction": np.minimum(grid.clock_fraction, top_hz / gpu.reference_clock_hz),
            }
        ones = np.ones_like(rate)
        per_run_j = dynamic_power_w(terms, sms=zeros, gpu_sms=gpu.sms, progress_per_s=ones, **scales)
        busy_sms = member.sms * (work_s / lasts_s)
        above_w = dynamic_power_w(terms, sms=busy_sms, gpu_sms=gpu.sms, progress_per_s=rate * PS_PER_S, **scales)
    power_w = above_w * gpu.chip_power_factor + grid.idle_w
    return KernelCurves(
        rate=rate,
        lasts_ps=_lasts_ps(rate),
        power_w=power_w,
        j_per_run=per_run_j * gpu.chip_power_factor,
        as_it_is=np.ones(len(rate), dtype=bool),
        peak_w=float(power_w.max()),
    )
