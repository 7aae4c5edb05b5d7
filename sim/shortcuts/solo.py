"""Kernels by themselves on a GPU, each under its power target: how long they last and what the GPU draws meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from sim.engine.fluid import FluidModel, Running
from sim.engine.running import GpuModel, GpuState, Rules, Target, bounds
from sim.errors import LivelockError

Bounds = tuple[float, float]  # of power (W) and clock (Hz)
# Pairs of bounds of a GPU type under which states are remembered; those used last.
MAX_BOUNDS = 64


class SoloStates:
    """States of kernels by themselves that all models of a GPU type have in common, by bounds and cost."""

    def __init__(self) -> None:
        self._under: dict[Bounds, dict[int, GpuState]] = {}

    def under(self, bound: Bounds) -> dict[int, GpuState]:
        """Those under a pair of bounds."""
        found = self._under[bound] = self._under.pop(bound, {})
        if len(self._under) > MAX_BOUNDS:
            del self._under[next(iter(self._under))]
        return found


@lru_cache(maxsize=16)
def solo_states(_gpu: GpuModel, _rules: Rules) -> SoloStates:
    """The states of a GPU type."""
    return SoloStates()


def solo(class_id: int, model: FluidModel, *, waits: bool = False) -> Running:
    """The running set of one kernel, which runs or, ``waits``, spins until others come."""
    return ((class_id, model.grid(class_id).sms, waits, 1.0),)


class SoloKernels:
    """Kernels of one run: ``states`` are numbered in the order in which they are asked for.

    ``lasts_ps`` is how long the kernel of each state lasts (0 of one that spins), ``power_w`` the watts of its GPU.
    """

    def __init__(self, model: FluidModel, targets: Sequence[Target]) -> None:
        self.model = model
        self.states: list[GpuState] = []
        self.lasts_ps: list[int] = []
        self.power_w: list[float] = []
        self.bounds = [bounds(target, model.gpu.max_clock_hz) for target in targets]
        self.one_target = len(set(self.bounds)) == 1
        # Numbers by kernel, which GPUs under one target have in common.
        self._numbers: list[dict[object, int]] = [{}] * len(targets) if self.one_target else [{} for _ in targets]
        self._meetings: dict[object, tuple[int, list[int]]] = {}

    def all_of(self, gpu: int, classes: Sequence[int], costs: Mapping[int, int], states: SoloStates) -> None:
        """Number kernels of ``classes`` by themselves, one after the other; ``states`` are known by their costs."""
        model, known = self.model, states.under(self.bounds[gpu])
        first = len(self.states)
        for class_id in classes:
            state = known.get(costs[class_id])
            if state is None:
                state = known[costs[class_id]] = model.solve(solo(class_id, model), *self.bounds[gpu])
            self.states.append(state)
            self.lasts_ps.append(whole_ps(state.rates[0]))
            self.power_w.append(state.power_w)
        self._numbers[gpu].update(zip(classes, range(first, len(self.states)), strict=True))

    def number(self, gpu: int, cls: int, *, waits: bool = False, pace: float | None = None) -> int:
        """The number of the state of one kernel; it may spin, or be held to ``pace``."""
        key = cls if pace is None and not waits else (cls, waits, pace)
        found = self._numbers[gpu].get(key)
        if found is None:
            caps = None if pace is None else (pace,)
            found = self._numbers[gpu][key] = self._new(solo(cls, self.model, waits=waits), gpu, caps)
        return found

    def idle(self, gpu: int) -> int:
        """The number of the state in which nothing runs."""
        found = self._numbers[gpu].get(())
        if found is None:
            found = self._numbers[gpu][()] = self._new((), gpu, None)
        return found

    def _new(self, running: Running, gpu: int, caps: tuple[float, ...] | None) -> int:
        state = self.model.solve(running, *self.bounds[gpu], caps)
        self.states.append(state)
        self.lasts_ps.append(whole_ps(state.rates[0]) if state.rates and state.rates[0] else 0)
        self.power_w.append(state.power_w)
        return len(self.states) - 1

    def meeting(self, members: tuple[tuple[int, int], ...]) -> tuple[int, list[int]]:
        """Picoseconds of a collective of these (GPU, class) once all are there, and the number of each one's state.

        The common pace is found as :class:`sim.engine.core.Core` finds it.
        """
        found = self._meetings.get(members)
        if found is None:
            numbers = [self.number(gpu, cls) for gpu, cls in members]
            for _ in range(8 * len(members)):
                rates = [self.states[number].rates[0] for number in numbers]
                pace = min(rates)
                if max(rates) <= pace * (1.0 + 1e-9):
                    break
                numbers = [self.number(gpu, cls, pace=pace) for gpu, cls in members]
            else:
                raise LivelockError(f"the collective of (GPU, kernel class) {members} finds no common pace")
            found = self._meetings[members] = whole_ps(pace), numbers
        return found


def whole_ps(rate: float) -> int:
    """How long a kernel at ``rate`` (1/ps) lasts, in whole picoseconds."""
    return max(1, math.ceil(1.0 / rate - 1e-6))
