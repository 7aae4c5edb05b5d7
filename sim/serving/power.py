"""The power limiters of one replica over the whole life of a server: they remember across steps and pauses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hardware.clock import ClockLimits
from sim.engine.governor import Loop
from sim.scenario.machine import Machine
from sim.serving.cost import Cost

# Where work is asked about whose power grows with its context, a little more is asked for: the next is then known.
HEADROOM = 1.02


@dataclass(slots=True)
class Seen:
    """One GPU since the last look: joules, the highest power (W), and for how long a limiter held it back."""

    drawn_j: float = 0.0
    peak_w: float = 0.0
    held_s: float = 0.0

    def passed(self, seconds: float, power_w: float, *, held: bool) -> None:
        """It drew ``power_w`` for ``seconds``."""
        self.drawn_j += power_w * seconds
        self.peak_w = max(self.peak_w, power_w)
        self.held_s += held * seconds


@dataclass(kw_only=True, slots=True, eq=False)
class ReplicaGovernor:
    """Power target of a replica's ``gpus`` equal GPUs, moved by the limiters' ticks as time passes."""

    machine: Machine
    gpus: int
    limiter: Loop = field(init=False)
    target_w: float = field(init=False)
    _tick_s: float = field(init=False)
    _left_s: float = field(init=False)  # until the next tick
    _since_j: float = 0.0  # of one GPU since the last one
    seen: Seen | None = None  # what somebody wants to know, who looks from time to time
    _steady_w: float = -math.inf  # known to move no limiter, as they are now: nor does less

    def __post_init__(self) -> None:
        self.limiter = Loop(self.machine.limits)
        self.limiter.begin(self.idle_w)
        self.target_w = self.limiter.grid_w
        self._tick_s = self._left_s = round(self.machine.limits.tick_s * 1e12) * 1e-12

    @property
    def clock_hz(self) -> float:
        """The clock that the GPUs are locked at, or their highest."""
        return self.machine.model.max_clock_hz

    @property
    def idle_w(self) -> float:
        """What a GPU draws that runs nothing."""
        return self.machine.model.idle_w(self.clock_hz)

    def limit(self, limits: ClockLimits) -> None:
        """Another power cap from now on, of the same GPU."""
        if limits is not self.limiter.limits:
            self.limiter.limit(limits)
            self.target_w, self._steady_w = self.limiter.grid_w, -math.inf

    def pause(self, seconds: float) -> float:
        """Nothing runs for ``seconds``; returns the joules over all GPUs."""
        self.spend(seconds, self.idle_w)
        return seconds * self.idle_w * self.gpus

    def is_steady(self, power_w: float) -> bool:
        """True when work at ``power_w`` a GPU, however long, moves no limiter."""
        if power_w <= self._steady_w:
            return True
        for asked_w in (HEADROOM * power_w, power_w):
            if self.limiter.is_steady(asked_w):
                self._steady_w = asked_w
                return True
        return False

    @property
    def is_resting(self) -> bool:
        """True when no limiter holds the GPUs back: only then can any work be steady."""
        return self.limiter.is_resting

    def steady(self, cost: Cost) -> None:
        """Work that moves no limiter was done."""
        self.spend(cost.time_s, cost.energy_j / self.gpus / cost.time_s)

    def work(self, cost_at: Callable[[float], Cost]) -> Cost:
        """One step, whose cost at a power target is ``cost_at``: its pace changes when the limiters move."""
        left, spent_s, spent_j, spent_cycles = 1.0, 0.0, 0.0, 0.0
        gpus, target_w = self.gpus, self.target_w
        while True:
            cost = cost_at(target_w)
            time_s, energy_j, cycles = cost
            power_w = energy_j / gpus / time_s
            while True:
                rest_s = left * time_s
                if rest_s <= self._left_s or self.is_steady(power_w):
                    self.spend(rest_s, power_w)
                    if not spent_s:
                        return cost
                    return Cost(spent_s + left * time_s, spent_j + left * energy_j, spent_cycles + left * cycles)
                share = self._left_s / time_s
                left -= share
                spent_s += share * time_s
                spent_j += share * energy_j
                spent_cycles += share * cycles
                self.spend(self._left_s, power_w)
                if self.target_w != target_w:
                    target_w = self.target_w
                    break

    def until_tick_s(self, power_w: float) -> float:
        """How long work at ``power_w`` a GPU goes on before its target may move; infinite where no limiter minds it."""
        return math.inf if self.is_steady(power_w) else self._left_s

    def spend(self, seconds: float, power_w: float) -> None:
        """The GPUs drew ``power_w`` each for ``seconds``."""
        if self.seen is not None:
            self.seen.passed(seconds, power_w, held=not self.limiter.is_resting)
        if seconds < self._left_s:  # most often
            self._since_j += power_w * seconds
            self._left_s -= seconds
            return
        limiter, tick_s, left_s, since_j = self.limiter, self._tick_s, self._left_s, self._since_j
        every_s = limiter.limits.tick_s
        while seconds >= left_s:
            seconds -= left_s
            mean_w = (since_j + power_w * left_s) / every_s
            before_w = limiter.target_w
            limiter.step(mean_w)
            if mean_w > self._steady_w:
                self._steady_w = -math.inf
            since_j, left_s = 0.0, tick_s
            if seconds >= tick_s and self.is_steady(power_w):
                ticks = int(seconds / tick_s)
                limiter.rest(power_w, ticks)
                seconds = max(0.0, seconds - ticks * tick_s)
            if limiter.target_w != before_w:
                self.target_w = limiter.grid_w
        self._since_j = since_j + power_w * seconds
        self._left_s = left_s - seconds
