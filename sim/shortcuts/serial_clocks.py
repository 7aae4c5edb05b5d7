"""Time and energy of serial programs at every clock of a grid, from tables of their kernels over the clock.

Each kernel of a serial program (:mod:`sim.shortcuts.serial`) runs alone, at a rate and a power that depend on the
clock (:mod:`sim.shortcuts.clocks`). What a GPU runs between two collectives is a sum of them. GPUs that run different
programs synchronise in collectives, in the same order at every clock: the order is found once, and the collectives are
gone through at the clocks in question. The results equal those of :meth:`sim.shortcuts.serial.Serial.run` within
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sim.engine.running import PS_PER_S, GpuModel, HeldClock, Target, bounds
from sim.shortcuts.clocks import Floats, KernelCurves, grid_of, kernel_tables, step_of
from sim.shortcuts.serial import Serial
from sim.shortcuts.solo import SoloKernels

# Stretches between collectives times classes of kernels up to which the stretches are summed at all clocks at once, and
# how many of these sums one product of matrices works out (a larger one would wake BLAS's threads).
MAX_SUMMED, AT_ONCE = 512, 256
Tables = dict[int, KernelCurves]  # by class


def steps_of(gpu: GpuModel, held: Sequence[Target]) -> tuple[list[int], float] | None:
    """The step of the grid at which each GPU is held, and the power limit of all; None of GPUs held otherwise."""
    if gpu.clock_step_hz:
        return None
    steps, (limit_w, _) = [], bounds(held[0], 0.0)
    for target in held:
        step = step_of(gpu, target.clock_hz) if isinstance(target, HeldClock) and target.power_w == limit_w else None
        if step is None:
            return None
        steps.append(step)
    return steps, limit_w


class Ran(NamedTuple):
    """Length (ps) of a serial piece, each GPU's joules, and whether all GPUs end at once."""

    end_ps: float
    energy_j: list[float]
    level: bool


class Spent(NamedTuple):
    """At every clock of the grid: picoseconds of each stretch between collectives, each GPU's joules in its own."""

    stretch_ps: Floats
    gpu_j: Floats


class SerialCurves:
    """A serial program whose GPUs are held at clocks of the grid."""

    def __init__(self, serial: Serial) -> None:
        self.layout, self.model, self.gpus = serial.layout, serial.model, serial.graph.gpus
        self._known, self._costs = kernel_tables(self.model.gpu), self.layout.costs(self.model)
        self.tables = {cls: self.table(cls) for cls in self.layout.classes}

    def table(self, class_id: int, *, waits: bool = False, limit_w: float = math.inf) -> KernelCurves:
        """The table of kernels of a class, which run or, ``waits``, spin until others come."""
        return self._known.curves(self.model, class_id, self._costs[class_id], waits=waits, limit_w=limit_w)

    @property
    def few(self) -> bool:
        """Whether stretches are summed at all clocks."""
        return len(self.layout.stretches.gpu_of) * len(self.tables) <= MAX_SUMMED

    @cached_property
    def spent(self) -> Spent:
        """The sums where no limiter acts."""
        tables = self.tables.values()
        lasts_ps = np.array([table.lasts_ps for table in tables])
        joules = lasts_ps * np.array([table.power_w for table in tables]) * 1e-12
        counts, gpu_counts = self.layout.counts
        rows = max(1, AT_ONCE // len(lasts_ps))
        parts = [counts[at : at + rows] @ lasts_ps for at in range(0, len(counts), rows)]
        return Spent(np.concatenate(parts), gpu_counts @ joules)

    def spent_with(self, limited: Tables) -> Spent:
        """The same with other tables of some classes."""
        if not limited:
            return self.spent
        pairs = [(table, self.tables[cls]) for cls, table in limited.items()]
        more_ps = np.array([table.lasts_ps - free.lasts_ps for table, free in pairs])
        more_j = np.array([table.lasts_ps * table.power_w - free.lasts_ps * free.power_w for table, free in pairs])
        places = np.searchsorted(self.layout.classes, list(limited))
        counts, gpu_counts = self.layout.counts
        stretch_ps, gpu_j = self.spent
        return Spent(stretch_ps + counts[:, places] @ more_ps, gpu_j + gpu_counts[:, places] @ more_j * 1e-12)


class _Part(NamedTuple):
    """A GPU's part of a collective: the stretch before it, and its rate, watts and joules by step of the grid."""

    gpu: int
    stretch: int
    cls: int
    rate: Callable[[int], float]
    power_w: Callable[[int], float]
    j_per_run: Callable[[int], float]


class SerialAtClocks:
    """A serial program whose GPUs are held at clocks of the grid, each below the power ``limit_w``."""

    def __init__(self, curves: SerialCurves, limit_w: float) -> None:
        self.curves, self.limit_w = curves, limit_w
        self.layout, self.model = curves.layout, curves.model
        self.idle_w = grid_of(self.model.gpu).idle_w
        self.limited: Tables = {  # kernels whose clock it lowers somewhere
            cls: curves.table(cls, limit_w=limit_w) for cls, table in curves.tables.items() if table.peak_w > limit_w
        }
        self.tables = curves.tables | self.limited
        self._spins: dict[int, Floats] = {}
        self._finds: dict[int, bool] = {}

    @cached_property
    def _meetings(self) -> list[list[_Part]] | None:
        """The collectives in order, each GPU's part with what it takes at every clock."""
        if self.layout.meetings is None:
            return None
        items = {cls: (table.rate.item, table.power_w.item, table.j_per_run.item) for cls, table in self.tables.items()}
        return [
            [_Part(part.gpu, part.stretch, part.cls, *items[part.cls]) for part in met] for met in self.layout.meetings
        ]

    def at(self, steps: Sequence[int]) -> Ran | None:
        """The program with each GPU at a step of the grid; None on a deadlock."""
        meetings = self._meetings
        if meetings is None:
            return None
        stretch_ps, energy_j = self._summed(steps) if self.curves.few else self._sums(steps)
        now_ps = [0.0] * len(steps)
        for met in meetings:
            come_ps = [now_ps[gpu] + stretch_ps[stretch] for gpu, stretch, _, _, _, _ in met]
            ready_ps = max(come_ps)
            lasts_ps, powers_w = self._meeting(met, steps)
            done_ps, lasts_s = ready_ps + lasts_ps, lasts_ps * 1e-12
            for part, came_ps, power_w in zip(met, come_ps, powers_w, strict=True):
                gpu = part.gpu
                now_ps[gpu] = done_ps
                energy_j[gpu] += power_w * lasts_s
                if came_ps < ready_ps:
                    energy_j[gpu] += self._spin_w(part.cls).item(steps[gpu]) * ((ready_ps - came_ps) * 1e-12)
        end_ps = [now + stretch_ps[last] for now, last in zip(now_ps, self.layout.stretches.last, strict=True)]
        longest_ps = max(end_ps)
        level = min(end_ps) == longest_ps
        if not level:
            for gpu, (end, step) in enumerate(zip(end_ps, steps, strict=True)):
                energy_j[gpu] += self.idle_w.item(step) * ((longest_ps - end) * 1e-12)
        return Ran(longest_ps, energy_j, level)

    @cached_property
    def _spent(self) -> Spent:
        return self.curves.spent_with(self.limited)

    def _summed(self, steps: Sequence[int]) -> tuple[list[float], list[float]]:
        """Picoseconds of each stretch and joules of each GPU in its own at these clocks, by the sums at all clocks."""
        length_ps, joules = self._spent.stretch_ps.item, self._spent.gpu_j.item
        spent = [length_ps(stretch, steps[gpu]) for stretch, gpu in enumerate(self.layout.stretches.gpu_of)]
        return spent, [joules(gpu, step) for gpu, step in enumerate(steps)]

    def _sums(self, steps: Sequence[int]) -> tuple[list[float], list[float]]:
        """The same, added up at these clocks."""
        own = self.layout.stretches
        here = [(self.tables[cls], steps[gpu]) for gpu, cls in self.layout.kinds]
        spent_ps = np.array([table.lasts_ps.item(step) for table, step in here])[own.kind] * own.count
        here_w = np.array([table.power_w.item(step) for table, step in here])[own.kind]
        joules = np.bincount(own.gpu, spent_ps * here_w * 1e-12, len(steps))
        return np.bincount(own.stretch, spent_ps, len(own.gpu_of)).tolist(), joules.tolist()

    def _spin_w(self, class_id: int) -> Floats:
        """Watts of a GPU that waits in a collective, at every clock."""
        found = self._spins.get(class_id)
        if found is None:
            table = self.curves.table(class_id, waits=True, limit_w=self.limit_w)
            found = self._spins[class_id] = table.power_w
        return found

    def _meeting(self, met: Sequence[_Part], steps: Sequence[int]) -> tuple[int, list[float]]:
        """Picoseconds of a collective from the last arrival on, and the watts of each of its GPUs."""
        rates = [rate(steps[gpu]) for gpu, _, _, rate, _, _ in met]
        powers_w = [power_w(steps[gpu]) for gpu, _, _, _, power_w, _ in met]
        pace = min(rates)
        if max(rates) > pace * (1.0 + 1e-9):
            if not all(self._simply_slower(part.cls, steps[part.gpu], pace) for part in met):
                return self._solved(met, steps)
            # A rank slowed by others has less work per second; its blocks stay active.
            powers_w = [
                power_w - part.j_per_run(steps[part.gpu]) * (rate - pace) * PS_PER_S
                for part, rate, power_w in zip(met, rates, powers_w, strict=True)
            ]
        return max(1, math.ceil(1.0 / pace - 1e-6)), powers_w

    def _simply_slower(self, class_id: int, step: int, pace: float) -> bool:
        """Whether a rank at the common rate is below the fast limit and gets the bandwidth for that rate."""
        finds = self._finds.get(class_id)
        if finds is None:  # what it finds at its highest rate it finds at lower ones
            finds = self._finds[class_id] = self._bandwidth(class_id, float(self.tables[class_id].rate.max()))
        finds = finds or self._bandwidth(class_id, pace)
        return finds and (class_id not in self.limited or self.limited[class_id].as_it_is.item(step))

    def _bandwidth(self, class_id: int, rate: float) -> bool:
        """Whether a kernel by itself gets the bandwidth for a rate."""
        terms, rules = self.model.classes[class_id].terms, self.model.rules
        hbm, link = terms.hbm_bytes * rate * PS_PER_S, terms.link_bytes * rate * PS_PER_S
        return rules.hbm.divide([hbm], [1.0]) == [hbm] and rules.link.divide([link], [1.0]) == [link]

    def _solved(self, met: Sequence[_Part], steps: Sequence[int]) -> tuple[int, list[float]]:
        clocks = grid_of(self.model.gpu).clock_hz
        members = tuple([(i, part.cls) for i, part in enumerate(met)])
        held = [HeldClock(float(clocks[steps[part.gpu]]), self.limit_w) for part in met]
        solo = SoloKernels(self.model, held)
        lasts_ps, numbers = solo.meeting(members)
        return lasts_ps, [solo.power_w[number] for number in numbers]
