"""The steady state of repetitions of uneven power: prefill and decode steps, stages of a pipeline.

Most settle as even work does, at one clock. Where a stretch is hot for long enough that the middle limiter acts on it,
or the slow limiter's window is hotter than the repetition, the limiters run in time (:mod:`sim.engine.repeating`)
until two repetitions agree, and the clock is raised or lowered until their mean power meets the slow limit. Where no
limiter but the slow one acts, this is the settled clock itself: there is no step between the two.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hardware.clock import ClockLimits
from sim.engine.repeating import SteadyLimiter
from sim.engine.running import GpuModel, HeldClock
from sim.errors import ScenarioError
from sim.run.steady import mean_w, seconds_of
from sim.shortcuts.pieces import Repeated, RepeatedPiece, play_governed

# Two repetitions agree when times and joules differ by less than this share; the mean lies so far below the limit at
# most, and above it by hardly more than nothing.
AGREE, BELOW, ABOVE = 1e-3, 1.5e-3, 2e-4
MOST_REPETITIONS, MOST_CLOCKS = 60, 24
# After so many repetitions those that swing from one to the next are damped.
FREE_REPETITIONS = 8
# Clocks tried lie on this grid, the next one no further from the last than this ratio.
GRID_HZ, MOST_CHANGE = 0.25e6, 1.1


def needs_time(parts: Sequence[RepeatedPiece], limits: ClockLimits) -> bool:
    """Whether repetitions of ``parts``, at settled clocks, meet another limiter than the slow one's mean."""
    if not parts or math.isinf(limits.slow_limit_w):
        return False
    for gpu in range(len(parts[0].played.energy_j)):
        stretches = np.array([stretch for part in parts for stretch in part.stretches(gpu)])
        seconds, power_w = stretches[:, 0], stretches[:, 1]
        if power_w.max() <= limits.slow_limit_w:
            continue
        if _hottest_w(seconds, power_w, limits.slow_time_s) > limits.slow_limit_w * (1.0 + ABOVE):
            return True
        if _middle_w(seconds.tolist(), power_w.tolist(), limits.middle_time_s) > limits.middle_limit_w:
            return True
    return False


def _middle_w(seconds: Sequence[float], power_w: Sequence[float], time_s: float) -> float:
    """The highest value of a mean of time constant ``time_s`` over periodic stretches."""
    mean = 0.0
    for length_s, power in zip(seconds, power_w, strict=True):
        mean += (power - mean) * -math.expm1(-length_s / time_s)
    mean /= -math.expm1(-math.fsum(seconds) / time_s)  # what a period begins with
    highest = mean
    for length_s, power in zip(seconds, power_w, strict=True):
        mean += (power - mean) * -math.expm1(-length_s / time_s)
        highest = max(highest, mean)
    return highest


def _hottest_w(seconds: np.ndarray, power_w: np.ndarray, window_s: float) -> float:
    """The highest plain mean of a window of ``window_s`` over periodic stretches; 0 where a period is no longer."""
    length_s = float(seconds.sum())
    if length_s <= window_s:
        return 0.0
    times = np.concatenate([[0.0], np.cumsum(np.tile(seconds, 2))])
    joules = np.concatenate([[0.0], np.cumsum(np.tile(seconds * power_w, 2))])
    ends = np.concatenate([times, times + window_s])
    ends = ends[(ends >= window_s) & (ends <= times[-1])]
    return float((np.interp(ends, times, joules) - np.interp(ends - window_s, times, joules)).max() / window_s)


def periodic(
    sequence: Sequence[Repeated], limits: ClockLimits, held: Sequence[HeldClock], parts: Sequence[RepeatedPiece]
) -> SteadyLimiter:
    """The limiters as they stand before each repetition of the steady state.

    ``parts`` ran at the settled clocks ``held``, whose limiters did not act in time.
    """
    gpu = sequence[0].piece.model.gpu
    limiter = SteadyLimiter(limits, held, mean_w(parts), seconds_of(parts))
    searches = [_Clock(gpu, limits.slow_limit_w, clock.clock_hz) for clock in held]
    for _ in range(MOST_CLOCKS):
        before, means = _repeat(sequence, limiter)
        steps = [search.learn(power) for search, power in zip(searches, means, strict=True)]
        if not any(steps):
            return before
        limiter.hold([search.clock_hz for search in searches])
    raise _unsettled(f"no clock among {MOST_CLOCKS} holds {limits.slow_limit_w:.0f} W")


def _unsettled(why: str) -> ScenarioError:
    return ScenarioError(
        f"regime = steady: the limiters find no steady state for this work ({why}); regime = cold runs it"
    )


def _repeat(sequence: Sequence[Repeated], limiter: SteadyLimiter) -> tuple[SteadyLimiter, list[float]]:
    """Repetitions until two agree: the limiters before the last one, and each GPU's mean power."""
    last: np.ndarray | None = None
    lowest_hz = sequence[0].piece.model.gpu.min_clock_hz
    for repetition in range(MOST_REPETITIONS):
        before = copy.deepcopy(limiter)
        parts = play_governed(sequence, limiter)
        means, length_s = mean_w(parts), seconds_of(parts)
        # At the lowest clock a target that goes on falling moves nothing.
        moving = [loop.target_w for loop in limiter.loops if loop.clock_hz > lowest_hz]
        now = np.array([length_s, *means, *moving])
        # What has not come yet is more than the last change where repetitions are short against the limiters' times.
        close = AGREE * -math.expm1(-length_s * limiter.limits.middle_gain_per_s)
        if last is not None and np.all(np.abs(now - last) <= close * now):
            return before, means
        last = now
        if repetition > FREE_REPETITIONS:
            limiter.halve(before)
    raise _unsettled(f"no two of {MOST_REPETITIONS} repetitions agree")


@dataclass(slots=True)
class _Clock:
    """One GPU's search for the highest clock whose power is within the limit."""

    gpu: GpuModel
    limit_w: float
    clock_hz: float
    seen: list[tuple[float, float]] = field(default_factory=list)

    def learn(self, power_w: float) -> bool:
        """The power at the present clock; False where it will do, or else the clock has moved."""
        over = power_w / self.limit_w - 1.0
        at_end = self.clock_hz >= self.gpu.max_clock_hz if over < 0.0 else self.clock_hz <= self.gpu.min_clock_hz
        if -BELOW <= over <= ABOVE or at_end:
            return False
        exponent = 2.0  # of power over clock
        if self.seen:
            hz, watts = self.seen[-1]
            moved = math.log(self.clock_hz / hz)
            if moved:
                exponent = min(max(math.log(power_w / watts) / moved, 0.2), 4.0)
        self.seen.append((self.clock_hz, power_w))
        aim_w = self.limit_w * (1.0 + 0.5 * (ABOVE - BELOW))
        change = min(max((aim_w / power_w) ** (1.0 / exponent), 1.0 / MOST_CHANGE), MOST_CHANGE)
        clock_hz = round(self.clock_hz * change / GRID_HZ) * GRID_HZ
        self.clock_hz = min(max(clock_hz, self.gpu.min_clock_hz), self.gpu.max_clock_hz)
        return True
