"""The power limiters of work that repeats without end, in its periodic state.

The fast limit and the middle limiter act as in :class:`sim.engine.governor.Limiter`, but a repetition is divided into a
whole number of ticks, so that equal repetitions have equal ticks. The dips of the slow limiter are not simulated one by
one, because their phase against the repetition varies: their mean effect over many windows is an upper bound on the
clock (:class:`sim.engine.running.HeldClock`), and :mod:`sim.run.periodic` searches for the one at which the mean power
is within the slow limit. In a repetition longer than the slow limiter's window some windows have a higher mean: while
they are above the limit the middle limit falls, and rises again after them, by the dips' average.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hardware.clock import ClockLimits
from sim.engine.governor import TARGET_STEP_W
from sim.engine.running import HeldClock

# Least ticks of a repetition: they must resolve its stretches of different power.
LEAST_TICKS = 12
# Samples of the slow limiter in its window.
WINDOW_LOOKS = 16


@dataclass(slots=True)
class SteadyLoop:
    """The limiters of one GPU."""

    clock_hz: float
    mean_w: float  # of the middle limiter
    target_w: float  # instantaneous power
    level: float = 1.0  # factor on the middle limit after windows above the slow limit
    seen_w: deque[float] = field(default_factory=deque)  # mean power of the window's ticks, where it is followed


class SteadyLimiter:
    """The limiters of all GPUs over repetitions of about ``length_s``; keeps its state from one to the next."""

    def __init__(
        self, limits: ClockLimits, held: Sequence[HeldClock], mean_w: Sequence[float], length_s: float
    ) -> None:
        self.limits = limits
        self.ticks = max(LEAST_TICKS, math.ceil(length_s / limits.tick_s))
        self.loops = [
            SteadyLoop(clock_hz=clock.clock_hz, mean_w=min(power, limits.middle_limit_w), target_w=limits.fast_limit_w)
            for clock, power in zip(held, mean_w, strict=True)
        ]
        self.ticked = 0
        self._cut(length_s)

    def _cut(self, length_s: float) -> None:
        """Ticks of the next repetition, and of a window; equal numbers: windows are not simulated."""
        self.tick_ps = max(1, round(length_s * 1e12 / self.ticks))
        window = round(self.limits.slow_time_s * 1e12 / self.tick_ps)
        for loop in self.loops:
            if window >= self.ticks:
                loop.seen_w.clear()
                loop.level = 1.0
                continue
            if not loop.seen_w:
                loop.seen_w.append(loop.mean_w)
            loop.seen_w.extendleft([loop.seen_w[0]] * (window - len(loop.seen_w)))
            while len(loop.seen_w) > window:
                loop.seen_w.popleft()

    def begin(self, _idle_w: float) -> None:
        """Before a repetition: nothing to initialise, since no GPU was idle."""
        self.ticked = 0

    def targets(self) -> list[HeldClock]:
        """The power and clock bounds of each GPU."""
        return [HeldClock(loop.clock_hz, self._power_w(loop)) for loop in self.loops]

    def _power_w(self, loop: SteadyLoop) -> float:
        if loop.target_w >= self.limits.fast_limit_w:
            return self.limits.fast_limit_w
        return math.floor(loop.target_w / TARGET_STEP_W) * TARGET_STEP_W

    def step(self, energy_j: Sequence[float]) -> list[HeldClock]:
        """One tick, after which the GPUs used ``energy_j`` since the last one; returns the new bounds of each."""
        self._step([joules / (self.tick_ps * 1e-12) for joules in energy_j])
        return self.targets()

    def _step(self, power_w: Sequence[float]) -> None:
        limits, tick_s = self.limits, self.tick_ps * 1e-12
        self.ticked += 1
        for power, loop in zip(power_w, self.loops, strict=True):
            loop.mean_w += (power - loop.mean_w) * -math.expm1(-tick_s / limits.middle_time_s)
            limit_w = limits.middle_limit_w * loop.level
            if loop.target_w < limits.fast_limit_w or loop.mean_w > limit_w:
                loop.target_w += (limit_w - power) * limits.middle_gain_per_s * tick_s
                loop.target_w = min(max(loop.target_w, 0.0), limits.fast_limit_w)
            if loop.seen_w:
                loop.seen_w.popleft()
                loop.seen_w.append(power)
                self._look(loop)

    def _look(self, loop: SteadyLoop) -> None:
        """Update the slow limiter's window; an excess is compensated over about the window's length."""
        ticks, window = max(1, len(loop.seen_w) // WINDOW_LOOKS), len(loop.seen_w)
        if self.ticked % ticks:
            return
        over = math.fsum(loop.seen_w) / window / self.limits.slow_limit_w - 1.0
        level = min(max(loop.level - over * ticks / window, self.limits.dip_ratio), 1.0)
        if loop.target_w < self.limits.fast_limit_w:  # scaled too: power follows within a tick
            loop.target_w *= level / loop.level
        loop.level = level

    def end(self, since_j: Sequence[float], since_ps: int, length_ps: int) -> None:
        """After a repetition of ``length_ps`` that used ``since_j`` since its last tick: the tick at its end."""
        if self.ticked < self.ticks and since_ps > 0:
            self._step([joules / (since_ps * 1e-12) for joules in since_j])
        self._cut(length_ps * 1e-12)

    def of(self, loops: Sequence[SteadyLoop]) -> SteadyLimiter:
        """These limiters with other ``loops``, those of equal GPUs of another layout."""
        other = copy.copy(self)
        other.loops = [copy.deepcopy(loop) for loop in loops]
        return other

    def hold(self, clock_hz: Sequence[float]) -> None:
        """Set other upper bounds on the clocks."""
        for hz, loop in zip(clock_hz, self.loops, strict=True):
            loop.clock_hz = hz

    def halve(self, before: SteadyLimiter) -> None:
        """Go half-way back to the state ``before`` the last repetition: damps an oscillation between repetitions."""
        for loop, other in zip(self.loops, before.loops, strict=True):
            loop.mean_w = 0.5 * (loop.mean_w + other.mean_w)
            loop.target_w = 0.5 * (loop.target_w + other.target_w)
            loop.level = 0.5 * (loop.level + other.level)
        self._cut(0.5e-12 * self.ticks * (self.tick_ps + before.tick_ps))
