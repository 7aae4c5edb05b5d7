"""The steady state of repetitions of uneven power: prefill and decode steps, stages of a pipeline.

Most have one steady clock, as work of even power has. Where a stretch of high power is long enough for the middle
limiter to act, or the power of some window of the slow limiter exceeds the mean of the repetition, the limiters run in
time (:mod:`sim.engine.repeating`) until two repetitions agree, and an upper bound on the clock is raised or lowered
until their mean power meets the slow limit. Where only the slow limiter acts, the result is the steady clock itself.

The search for that bound is :class:`sim.run.clock_search.ClockSearch`, as for work of even power, with another end.
There the mean power is a function of the clocks alone and rises with them: the search ends between two neighbours of
the grid, one within the limit and one not. Here it depends on the limiters' state too, which every earlier bound has
changed: the power at an end of such an interval is not the same when it is looked at again. So the search ends at the
first mean within a band below the limit. The two ends give different figures (docs/laws.md, "End of the search for the
steady clock").
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np

from hardware.clock import ClockLimits
from sim.engine.repeating import SteadyLimiter
from sim.engine.running import HeldClock
from sim.errors import ScenarioError
from sim.run.clock_search import ClockSearch, SearchRule
from sim.run.steady import mean_w, seconds_of
from sim.shortcuts.pieces import Repeated, RepeatedPiece, play_governed

# Largest relative difference of times and joules of two repetitions that agree; the band of mean power below and above
# the limit in which a search ends.
AGREE, BELOW, ABOVE = 1e-3, 1.5e-3, 2e-4
MOST_REPETITIONS, MOST_CLOCKS = 60, 24
# After so many repetitions an oscillation between repetitions is damped.
FREE_REPETITIONS = 8
RULE = SearchRule(grid_hz=0.25e6, below=BELOW, above=ABOVE, most_change=1.1)


def needs_time(parts: Sequence[RepeatedPiece], limits: ClockLimits) -> bool:
    """Whether repetitions of ``parts``, at steady clocks, exceed the limit of another limiter than the slow one."""
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
    mean /= -math.expm1(-math.fsum(seconds) / time_s)  # at the start of a period
    highest = mean
    for length_s, power in zip(seconds, power_w, strict=True):
        mean += (power - mean) * -math.expm1(-length_s / time_s)
        highest = max(highest, mean)
    return highest


def _hottest_w(seconds: np.ndarray, power_w: np.ndarray, window_s: float) -> float:
    """The highest mean over a window of ``window_s`` of periodic stretches; 0 for a period that is no longer."""
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
    """The state of the limiters before each repetition of the steady state.

    ``parts`` ran at the steady clocks ``held``, without limiters in time.
    """
    gpu = sequence[0].piece.model.gpu
    limiter = SteadyLimiter(limits, held, mean_w(parts), seconds_of(parts))
    beyond = math.ceil((gpu.max_clock_hz - gpu.min_clock_hz) / RULE.grid_hz) + 1
    searches = [ClockSearch(gpu, limits.slow_limit_w, RULE, first_hz=clock.clock_hz, high=beyond) for clock in held]
    for _ in range(MOST_CLOCKS):
        before, means = _repeat(sequence, limiter)
        tried = [search.step for search in searches]
        for search, power in zip(searches, means, strict=True):
            search.learn(power)
        if [search.step for search in searches] == tried:
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
        # At the lowest clock a falling target has no effect.
        moving = [loop.target_w for loop in limiter.loops if loop.clock_hz > lowest_hz]
        now = np.array([length_s, *means, *moving])
        # Repetitions shorter than the limiters' time constants: the remaining change exceeds the last one.
        close = AGREE * -math.expm1(-length_s * limiter.limits.middle_gain_per_s)
        if last is not None and np.all(np.abs(now - last) <= close * now):
            return before, means
        last = now
        if repetition > FREE_REPETITIONS:
            limiter.halve(before)
    raise _unsettled(f"no two of {MOST_REPETITIONS} repetitions agree")
