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

import numpy as np

from hardware.clock import ClockLimits
from sim.engine.repeating import SteadyLimiter
from sim.engine.running import HeldClock
from sim.errors import ScenarioError
from sim.run.clock_search import ClockSearch, SearchRule
from sim.run.steady import mean_w, seconds_of
from sim.shortcuts.pieces import Repeated, RepeatedPiece, play_governed

# Two repetitions agree when times and joules differ by less than this share; the mean lies so far below the limit at
# most, and above it by hardly more than nothing.
AGREE, BELOW, ABOVE = 1e-3, 1.5e-3, 2e-4
MOST_REPETITIONS, MOST_CLOCKS = 60, 24
# After so many repetitions those that swing from one to the next are damped.
FREE_REPETITIONS = 8
RULE = SearchRule(grid_hz=0.25e6, below=BELOW, above=ABOVE, most_change=1.1)


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
