"""The highest clocks of GPUs whose mean power is within a limit, where each one's clock moves the others' power too.

Of a single kernel, whose power rises with the clock alone, :func:`hardware.power.highest_clock` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sim.engine.running import GpuModel

# With pauses and idle power in it, mean power goes with about the square of the clock; from two looks the exponent is
# taken within these bounds.
EXPONENT, EXPONENTS = 2.0, (0.2, 4.0)
# So often in a row the same end of a search may come nearer before the rest is halved.
SAME_END = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRule:
    """How searches go: on which grid of clocks, from the lowest one, and which powers will do.

    A power no further ``below`` and ``above`` the limit than these shares will do; where both are 0, a search ends
    between two neighbours, of which one is within the limit and one is not. The next clock is no further from the last
    than ``most_change``; while the ends are far apart it is one of each ``coarse`` points of the grid.
    """

    grid_hz: float
    below: float = 0.0
    above: float = 0.0
    most_change: float = math.inf
    coarse: int = 1


class ClockSearch:
    """One GPU's search, by steps of the grid.

    Between two ends it goes by the power law, then by false position, and halves where that does not help. Where a band
    of powers will do, other GPUs and the limiters' own state may have moved since an end was looked at: then it goes by
    the power law of the last two looks alone.
    """

    def __init__(self, gpu: GpuModel, limit_w: float, rule: SearchRule, *, first_hz: float, high: int) -> None:
        self.gpu, self.limit_w, self.rule = gpu, limit_w, rule
        self.low, self.high = 0, high  # steps: one that is within the limit, or the lowest; one that is not, or no step
        self.low_w, self.high_w = 0.0, math.inf
        self.settled = high <= 1
        self.step = 0 if self.settled else min(self._coarse(self._step(first_hz)), high - 1)  # to look at, or found
        self._beyond = high
        self._last: tuple[float, float] | None = None  # clock and power of the last look that did not do
        self._looks = 0
        self._same_end = 0  # how often in a row the same end has moved, and which

    @property
    def clock_hz(self) -> float:
        """The clock of the present step."""
        return min(self.gpu.min_clock_hz + self.step * self.rule.grid_hz, self.gpu.max_clock_hz)

    def learn(self, power_w: float) -> None:
        """The mean power at the present clock: it will do, or the search goes on."""
        if self.high - self.low <= 1 and not self.rule.below:
            return
        over = power_w / self.limit_w - 1.0
        self.settled = -self.rule.below <= over <= self.rule.above
        if self.settled:
            return
        if over < 0.0:
            self.low, self.low_w = self.step, power_w
            self.high = self._beyond if self.rule.below else self.high
            self._same_end = max(self._same_end, 0) + 1 if self._looks else 0
        else:
            self.high, self.high_w = self.step, power_w
            self.low = 0 if self.rule.below else self.low
            self._same_end = min(self._same_end, 0) - 1 if self._looks else 0
        self._looks += 1
        self.settled = self.high - self.low <= 1
        step = self._by_last_looks(power_w) if self.rule.below else self._between_ends(power_w)
        self.step = self.low if self.settled else min(max(self._coarse(step), self.low + 1), self.high - 1)

    def _by_last_looks(self, power_w: float) -> int:
        rule, clock_hz, exponent = self.rule, self.clock_hz, EXPONENT
        if self._last and (moved := math.log(clock_hz / self._last[0])):
            exponent = min(max(math.log(power_w / self._last[1]) / moved, EXPONENTS[0]), EXPONENTS[1])
        self._last = clock_hz, power_w
        aim_w = self.limit_w * (1.0 + 0.5 * (rule.above - rule.below))
        change = min(max((aim_w / power_w) ** (1.0 / exponent), 1.0 / rule.most_change), rule.most_change)
        return self._step(clock_hz * change)

    def _between_ends(self, power_w: float) -> int:
        if self._looks < 2 or not self.low:
            return self._step(self.clock_hz * (self.limit_w / power_w) ** (1.0 / EXPONENT))
        if abs(self._same_end) < SAME_END and self.high_w > self.limit_w:
            share = (self.limit_w - self.low_w) / (self.high_w - self.low_w)
            return self.low + int(share * (self.high - self.low))
        return (self.low + self.high) // 2

    def _step(self, clock_hz: float) -> int:
        steps = (clock_hz - self.gpu.min_clock_hz) / self.rule.grid_hz
        return round(steps) if self.rule.below else int(steps)

    def _coarse(self, step: int) -> int:
        return step - step % self.rule.coarse if self.high - self.low > 4 * self.rule.coarse else step


class PowerSearch(Protocol):
    """A search by one GPU's looks at its mean power."""

    settled: bool

    @property
    def clock_hz(self) -> float:
        """Where to look."""

    def learn(self, power_w: float) -> None:
        """What it found there."""


def look(searches: Sequence[PowerSearch], at: Callable[[list[float]], list[float]]) -> None:
    """One more look at the power of all GPUs, ``at`` the clock of each one's search."""
    for search, power_w in zip(searches, at([search.clock_hz for search in searches]), strict=True):
        search.learn(power_w)
