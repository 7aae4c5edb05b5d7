"""Where the limiters leave repeated work: one clock for all of it, or, where its power is uneven, limiters in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hardware.clock import ClockLimits
from sim.engine.governor import Limiter
from sim.engine.running import GpuModel, Held
from sim.shortcuts.pieces import Part, Repeated, play, play_governed

# Settled clocks lie on this grid, so that memo keys stay few.
CLOCK_GRID_HZ = 2e6
# Points of the grid that a search leaps while its ends are far apart.
COARSE = 10
# Where a search begins, of the maximum clock: near where big products settle on an H100 at its TDP.
FIRST_SHARE = 0.73
# GPUs that wait for each other move each other's power: so often is what was found looked at again, and what is too
# much by more than this share made less.
MOST_TRIMS, POWER_SLACK = 12, 0.001
# How near the middle limit of uneven work is found.
MIDDLE_STEP_W = 2.0


def governed(
    sequence: Sequence[Repeated], limits: ClockLimits, gpus: int, *, repetitions: int
) -> tuple[list[Part], list[float]]:
    """Repetitions with the limiters acting in time; the parts are the last one's."""
    limiter = Limiter(limits, gpus=gpus)
    for _ in range(repetitions - 1):
        play_governed(sequence, limiter)
    parts = play_governed(sequence, limiter)
    return parts, limiter.targets_w()


def followed_s(parts: Sequence[Part], limits: ClockLimits) -> float | None:
    """Seconds of a run at settled clocks that outlasts the slow limiter or, repeated, passes the middle one's mean on a
    GPU; None of any other.

    The stretches of different power of such a run are long enough for the limiters to follow: one mean is not enough.
    """
    if not parts:
        return None
    length_s = seconds_of(parts)
    if length_s > limits.slow_time_s:
        return length_s
    for gpu, mean_w in enumerate(_mean_w(parts, length_s)):
        for part in parts:
            for seconds, power_w in part.stretches(gpu):
                mean_w += (power_w - mean_w) * -math.expm1(-seconds / limits.middle_time_s)
                if mean_w > limits.middle_limit_w:
                    return length_s
    return None


def seconds_of(parts: Sequence[Part]) -> float:
    """How long the parts of a run take together."""
    return sum(part.repeat * part.played.records.end_ps for part in parts) * 1e-12


def _mean_w(parts: Sequence[Part], length_s: float) -> list[float]:
    gpus = range(len(parts[0].played.energy_j))
    return [sum(part.repeat * part.played.energy_j[gpu] for part in parts) / length_s for gpu in gpus]


def in_time(
    sequence: Sequence[Repeated], limits: ClockLimits, gpus: int, *, length_s: float
) -> tuple[list[Part], list[float]]:
    """The second of two repetitions, of about ``length_s``, with the limiters acting in time.

    In repetitions shorter than the slow limiter's window that limiter is not followed: the middle limit is lowered
    until no GPU's mean power passes the slow one, which is what its dips come to over many repetitions.
    """

    def under(middle_limit_w: float) -> tuple[list[Part], list[float], float]:
        own = replace(limits, slow_limit_w=math.inf, middle_limit_w=middle_limit_w)
        parts, targets = governed(sequence, own, gpus, repetitions=2)
        return parts, targets, max(_mean_w(parts, seconds_of(parts)))

    if length_s > limits.slow_time_s:
        return governed(sequence, limits, gpus, repetitions=2)
    parts, targets, hottest_w = under(limits.middle_limit_w)
    low_w, high_w = 0.8 * limits.slow_limit_w, limits.middle_limit_w
    while hottest_w > limits.slow_limit_w and high_w - low_w > MIDDLE_STEP_W:
        middle_w = 0.5 * (low_w + high_w)
        found = under(middle_w)
        if found[2] > limits.slow_limit_w:
            high_w = middle_w
        else:
            low_w = middle_w
            parts, targets, _ = found
    return parts, targets


def settled_clocks(sequence: Sequence[Repeated], limits: ClockLimits, gpus: int) -> list[Held]:
    """The clock of each GPU at which the mean power of back-to-back repetitions meets the slow limit.

    A point of the 2 MHz grid (the limiter's dithering between its own, coarser steps) whose mean power is within the
    slow limit while the next point's is not.
    """
    model = sequence[0].piece.model.gpu

    def mean_w(clocks_hz: list[float]) -> list[float]:
        parts = play(sequence, tuple([Held(clock_hz, limits.fast_limit_w) for clock_hz in clocks_hz]))
        return _mean_w(parts, seconds_of(parts))

    found = [model.max_clock_hz] * gpus
    searches = [_Search(limits.slow_limit_w, model) for _ in range(gpus)]
    if math.isfinite(limits.slow_limit_w) and any(part.piece.serial is None for part in sequence):
        _look(searches, mean_w)  # the top, where the fast limiter acts too, takes longest to work out
    if any(search.low for search in searches) or not searches[0].seen:
        for search, power in zip(searches, mean_w(found), strict=True):
            search.high_w = power if search.high_w == math.inf else search.high_w
    if any(search.high_w > limits.slow_limit_w for search in searches):
        while any(search.high - search.low > 1 for search in searches):
            _look(searches, mean_w)
        found = [search.clock_hz(search.low) for search in searches]
        for _ in range(MOST_TRIMS):
            over = [max(0.0, power / limits.slow_limit_w - 1.0 - POWER_SLACK) for power in mean_w(found)]
            if not any(over):
                break
            # Power goes with the cube of the clock at most.
            less = [math.ceil(excess * hz / 3.0 / CLOCK_GRID_HZ) for hz, excess in zip(found, over, strict=True)]
            found = [max(model.min_clock_hz, hz - n * CLOCK_GRID_HZ) for hz, n in zip(found, less, strict=True)]
    return [Held(clock_hz, limits.fast_limit_w) for clock_hz in found]


def _look(searches: Sequence[_Search], mean_w: Callable[[list[float]], list[float]]) -> None:
    """One more point of each GPU's search."""
    steps = [search.guess() for search in searches]
    clocks_hz = [search.clock_hz(step) for search, step in zip(searches, steps, strict=True)]
    for search, step, power in zip(searches, steps, mean_w(clocks_hz), strict=True):
        search.learn(step, power)


class _Search:
    """One GPU's clock, in steps of the grid: by the power law from the last one seen, then by false position; halves
    where that does not help."""

    def __init__(self, limit_w: float, gpu: GpuModel) -> None:
        self.limit_w, self.gpu = limit_w, gpu
        self.low, self.low_w = 0, 0.0
        self.high, self.high_w = math.ceil((gpu.max_clock_hz - gpu.min_clock_hz) / CLOCK_GRID_HZ), math.inf
        # Near the top the fast limit holds power down, so that its fall says little.
        self.next = self._step(FIRST_SHARE * gpu.max_clock_hz)
        self.seen = 0
        self.same_end = 0  # how often in a row the same end has moved, and which

    def clock_hz(self, step: int) -> float:
        """The clock of a step."""
        return min(self.gpu.min_clock_hz + step * CLOCK_GRID_HZ, self.gpu.max_clock_hz)

    def _step(self, clock_hz: float) -> int:
        return int((clock_hz - self.gpu.min_clock_hz) / CLOCK_GRID_HZ)

    def guess(self) -> int:
        """The next step to look at, between the ends."""
        down, up = self.low, self.high
        if self.seen < 2 or not down:
            step = self.next
        elif abs(self.same_end) < 3 and self.high_w > self.limit_w:
            step = down + int((self.limit_w - self.low_w) / (self.high_w - self.low_w) * (up - down))
        else:
            step = (down + up) // 2
        if up - down > 4 * COARSE:
            step -= step % COARSE  # a clock that other caps and scenarios have met too
        return min(max(step, down + 1), max(up - 1, down))

    def learn(self, step: int, power_w: float) -> None:
        """The mean power at ``step``."""
        # With pauses and idle power in it, power goes with about the square of the clock.
        self.next = self._step(self.clock_hz(step) * math.sqrt(self.limit_w / power_w))
        if power_w <= self.limit_w:
            self.low, self.low_w = step, power_w
            self.same_end = max(self.same_end, 0) + 1 if self.seen else 0
        else:
            self.high, self.high_w = max(step, self.low + 1), power_w
            self.same_end = min(self.same_end, 0) - 1 if self.seen else 0
        self.seen += 1
