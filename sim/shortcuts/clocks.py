"""Time and energy of serial programs at every clock of a grid, from tables of each kernel over the clock.

Each kernel of a serial program (:mod:`sim.shortcuts.serial`) runs alone, at a rate and a power that depend on the
clock: one numpy call computes both for the whole grid of clocks. A program's time and energy are sums of them. GPUs
that run different programs synchronise in collectives, in the same order at every clock: the order is found once, and
the sums between collectives are taken at the clocks in question. The results equal those of
:meth:`sim.shortcuts.serial.Serial.run` within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from hardware.laws.terms import dynamic_power_w, own_clock_hz
from sim.engine.fluid import FluidModel
from sim.engine.running import PS_PER_S, GpuModel, GpuState, HeldClock
from sim.shortcuts.serial import Serial, meeting_of

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
        return replace(
            self,
            rate=rate,
            lasts_ps=_lasts_ps(rate),
            power_w=np.where(as_it_is, self.power_w, state.power_w),
            as_it_is=as_it_is,
        )


def _lasts_ps(rate: Floats) -> Floats:
    """Whole picoseconds, as floats: sums of them are exact up to hours, and long kernels do not overflow."""
    return np.maximum(1.0, np.ceil(1.0 / rate - 1e-6)) if rate.all() else np.zeros_like(rate)


@lru_cache(maxsize=16)
def _tables(_gpu: GpuModel) -> dict[tuple[int, bool], KernelCurves]:
    return {}


def kernel_curves(model: FluidModel, class_id: int, *, waits: bool = False) -> KernelCurves:
    """The table of one kernel, which runs or, ``waits``, spins until others come."""
    tables = _tables(model.gpu)
    key = (model.cost(class_id), waits)
    found = tables.get(key)
    if found is None:
        if len(tables) > MAX_TABLES:
            tables.clear()
        found = tables[key] = curves_at(grid_of(model.gpu), model, class_id, waits=waits)
    return found


def curves_at(grid: ClockCurves, model: FluidModel, class_id: int, *, waits: bool = False) -> KernelCurves:
    """The same at the clocks of ``grid``, not remembered."""
    gpu = model.gpu
    member = model.member(class_id, model.grid(class_id).sms, waits)
    terms = member.terms
    rate = per_run_j = np.zeros_like(grid.clock_hz)
    above_w = np.full_like(grid.clock_hz, terms.waiting_power_w)
    if not waits:
        work_s = member.pace.seconds_at(grid.clock_hz)
        lasts_s = work_s + member.cls.gap_s
        rate = 1.0 / lasts_s / PS_PER_S
        top_hz = own_clock_hz(terms, gpu.max_clock_hz)
        scales = {
            "voltage_scale": np.minimum(grid.voltage_scale, gpu.voltage_scale(top_hz)),
            "clock_fraction": np.minimum(grid.clock_fraction, top_hz / gpu.reference_clock_hz),
        }
        zeros, ones = np.zeros_like(rate), np.ones_like(rate)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Length (ps) of a serial piece, each GPU's joules, and whether all GPUs end at once."""

    end_ps: float
    energy_j: list[float]
    level: bool


class SerialAtClocks:
    """A serial program whose GPUs are held at clocks of the grid, each below the power ``limit_w``."""

    def __init__(self, serial: Serial, limit_w: float) -> None:
        layout, self.model = serial.layout, serial.model
        self.limit_w, self.gpus = limit_w, serial.graph.gpus
        self.idle_w = grid_of(self.model.gpu).idle_w
        self.kinds, self.parts, self.meetings = layout.kinds, len(layout.parts), layout.meetings
        self.own = layout.stretches
        self._known: dict[tuple[int, bool], KernelCurves] = {}
        self.tables = [self._table(cls) for _, cls in self.kinds]
        self._met: dict[tuple[int, ...], tuple[int, list[float]]] = {}

    @cached_property
    def _single(self) -> tuple[list[float], list[float]]:
        """Length (ps) and joules of a program of one GPU at every clock."""
        times = [(self.tables[kind], count) for kind, count in zip(self.own.kind, self.own.count, strict=True)]
        length_ps = sum(count * table.lasts_ps for table, count in times)
        energy_j = sum(count * table.lasts_ps * table.power_w for table, count in times) * 1e-12
        return length_ps.tolist(), energy_j.tolist()

    def at(self, steps: Sequence[int]) -> Ran | None:
        """The program with each GPU at a step of the grid; None on a deadlock."""
        if self.gpus == 1:
            length_ps, of_gpu_j = self._single
            return Ran(end_ps=length_ps[steps[0]], energy_j=[of_gpu_j[steps[0]]], level=True)
        if self.meetings is None:
            return None
        own = self.own
        here = [(table, steps[gpu]) for table, (gpu, _) in zip(self.tables, self.kinds, strict=True)]
        spent_ps = np.array([table.lasts_ps.item(step) for table, step in here])[own.kind] * own.count
        here_w = np.array([table.power_w.item(step) for table, step in here])[own.kind]
        joules = np.bincount(own.gpu, spent_ps * here_w * 1e-12, self.gpus)
        energy_j = joules.tolist()
        stretch_ps = np.bincount(own.stretch, spent_ps, self.parts + self.gpus).tolist()
        now_ps = [0.0] * self.gpus
        for met in self.meetings:
            come_ps = [now_ps[own.part_gpu[part]] + stretch_ps[part + own.part_gpu[part]] for part in met]
            ready_ps = max(come_ps)
            lasts_ps, powers_w = self._meeting(met, steps)
            for part, came_ps, power_w in zip(met, come_ps, powers_w, strict=True):
                gpu = own.part_gpu[part]
                now_ps[gpu] = ready_ps + lasts_ps
                energy_j[gpu] += power_w * (lasts_ps * 1e-12)
                if came_ps < ready_ps:
                    spin = self._table(self.kinds[own.part_kind[part]][1], waits=True)
                    energy_j[gpu] += spin.power_w.item(steps[gpu]) * ((ready_ps - came_ps) * 1e-12)
        end_ps = [now + stretch_ps[last] for now, last in zip(now_ps, own.last, strict=True)]
        longest_ps = max(end_ps)
        idle_w = [self.idle_w.item(step) for step in steps]
        return Ran(
            end_ps=longest_ps,
            energy_j=[
                have + idle * ((longest_ps - end) * 1e-12)
                for have, idle, end in zip(energy_j, idle_w, end_ps, strict=True)
            ],
            level=min(end_ps) == longest_ps,
        )

    def _table(self, class_id: int, *, waits: bool = False) -> KernelCurves:
        """A kernel's table under the fast limit."""
        known = self._known.get((class_id, waits))
        if known is None:
            model = self.model
            running = ((class_id, model.grid(class_id).sms, waits, 1.0),)
            free = kernel_curves(model, class_id, waits=waits)
            known = free.below(self.limit_w, lambda: model.solve(running, self.limit_w, model.gpu.max_clock_hz))
            self._known[class_id, waits] = known
        return known

    def _meeting(self, met: Sequence[int], steps: Sequence[int]) -> tuple[int, list[float]]:
        """Picoseconds of a collective from the last arrival on, and the watts of each of its GPUs."""
        kinds = [self.own.part_kind[part] for part in met]
        places = [steps[self.own.part_gpu[part]] for part in met]
        key = (*kinds, *places)
        found = self._met.get(key)
        if found is None:
            found = self._met[key] = self._common(kinds, places)
        return found

    def _common(self, kinds: Sequence[int], places: Sequence[int]) -> tuple[int, list[float]]:
        tables = [self.tables[kind] for kind in kinds]
        rates = [table.rate.item(place) for table, place in zip(tables, places, strict=True)]
        powers_w = [table.power_w.item(place) for table, place in zip(tables, places, strict=True)]
        pace = min(rates)
        if max(rates) > pace * (1.0 + 1e-9):
            if not all(self._simply_slower(kind, place, pace) for kind, place in zip(kinds, places, strict=True)):
                return self._solved(kinds, places)
            # A rank slowed by others has less work per second; its blocks stay active.
            powers_w = [
                power_w - table.j_per_run.item(place) * (rate - pace) * PS_PER_S
                for table, place, rate, power_w in zip(tables, places, rates, powers_w, strict=True)
            ]
        return max(1, math.ceil(1.0 / pace - 1e-6)), powers_w

    def _simply_slower(self, kind: int, place: int, pace: float) -> bool:
        """Whether a rank at the common rate is below the fast limit and gets the bandwidth for that rate."""
        terms, rules = self.model.classes[self.kinds[kind][1]].terms, self.model.rules
        hbm, link = terms.hbm_bytes * pace * PS_PER_S, terms.link_bytes * pace * PS_PER_S
        finds = rules.hbm.divide([hbm], [1.0]) == [hbm] and rules.link.divide([link], [1.0]) == [link]
        return finds and self.tables[kind].as_it_is.item(place)

    def _solved(self, kinds: Sequence[int], places: Sequence[int]) -> tuple[int, list[float]]:
        clocks = grid_of(self.model.gpu).clock_hz
        members = tuple([(i, self.kinds[kind][1]) for i, kind in enumerate(kinds)])
        held = [HeldClock(float(clocks[place]), self.limit_w) for place in places]
        lasts_ps, states = meeting_of(self.model, members, held)
        return lasts_ps, [state.power_w for state in states]
