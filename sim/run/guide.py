"""Which clocks are worth a run: the guide of a search for the settled clock of work whose kernels overlap.

Each look at such work's mean power is a run of the engine. What its kernels would draw one after another
(:mod:`sim.shortcuts.clocks`) costs next to nothing at all clocks at once, and what overlap adds to that changes little
from clock to clock: after one run the next clock is within a step or two of the answer. The guide only chooses where
to look. The answer is that of the runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.engine.running import GpuModel
from sim.run.retimed import Looks, OrderBook, Powers
from sim.shortcuts.clocks import clock_of, curves_at, grid_of, top_step
from sim.shortcuts.pieces import Repeated

Floats = NDArray[np.float64]

# Curves are worked out at one of so many steps of the grid; between them power is as good as straight.
EVERY = 16
# Mean power over that of the kernels one after another, before any look: 1.04 to 1.11 in Llama-3-70B prefills of
# 1024 to 12,288 tokens in 4 chunks beside 4 to 24 blocks, TP4, where they settle (400 to 700 W).
FIRST_RATIO = 1.07
# So often in a row the same end of a search may come nearer before it goes further each time than the guide says.
SAME_END = 3
WALK_FIRST, SEED, MOST_WALKS, BELOW, ABOVE = True, True, 2, 2, 3


class PowerGuide:
    """Expected mean power of a GPU over a repetition of ``sequence``, and what searches have found of it."""

    def __init__(self, sequence: Sequence[Repeated]) -> None:
        self._sequence = sequence
        self.top = top_step(sequence[0].piece.model.gpu)
        self.steps = np.append(np.arange(0, self.top, EVERY), self.top).astype(float)
        self.book = OrderBook(sequence)
        self._expected: dict[float, Floats] = {}
        self._found: dict[int, float] = {}  # ratios at the steps where searches ended

    @cached_property
    def _kinds(self) -> list[tuple[float, Floats, Floats]]:
        """How often each kind of kernel runs, its lengths (ps) and watts over the clock."""
        grid = grid_of(self._sequence[0].piece.model.gpu, EVERY)
        found = []
        for step in self._sequence:
            for class_id, count in Counter(step.piece.graph.op_class).items():
                curves = curves_at(grid, step.piece.model, class_id)
                found.append((float(step.repeat * count), curves.lasts_ps, curves.power_w))
        return found

    def expected_w(self, limit_w: float) -> Floats:
        """Mean power at every step of the grid below the fast limit, the kernels one after another."""
        found = self._expected.get(limit_w)
        if found is None:
            length_ps, energy = np.zeros(len(self.steps)), np.zeros(len(self.steps))
            for count, lasts_ps, power_w in self._kinds:
                if power_w[-1] > limit_w:  # no higher clock than that at which it meets the limit
                    at = np.minimum(self.steps, np.interp(limit_w, power_w, self.steps))
                    lasts_ps, power_w = np.interp(at, self.steps, lasts_ps), np.interp(at, self.steps, power_w)
                length_ps += count * lasts_ps
                energy += count * lasts_ps * power_w
            found = self._expected[limit_w] = np.interp(np.arange(self.top + 1), self.steps, energy / length_ps)
        return found

    def ratio(self, expected_w: Floats, limit_w: float) -> float:
        """What overlap may add where a search for ``limit_w`` ends: as between or beyond the nearest two that ended."""
        found = self._found
        if not found:
            return FIRST_RATIO
        near = highest_within(expected_w * FIRST_RATIO, limit_w)
        one = min(found, key=lambda step: abs(step - near))
        if len(found) < 2:
            return found[one]
        other = min((step for step in found if step != one), key=lambda step: abs(step - one))
        step = highest_within(expected_w * found[one], limit_w)
        return found[one] + (found[other] - found[one]) / (other - one) * (step - one)

    def learn(self, step: int, ratio: float) -> None:
        """A search has ended at ``step``."""
        self._found[step] = ratio


def highest_within(power_w: Floats, limit_w: float) -> int:
    """The step before the first one whose power passes the limit; the last one where none does.

    >>> highest_within(np.array([300.0, 400.0, 500.0]), 450.0)
    1
    """
    over = np.flatnonzero(power_w > limit_w)
    return int(over[0]) - 1 if len(over) else len(power_w) - 1


class GuidedSearch:
    """A search for the highest step whose mean power is within ``limit_w``, by a guide's ``expected_w``.

    It ends between two neighbours, of which one is within the limit and one is not, or at the highest step. Walks
    through the orders of ``fast_limit_w``'s book say which two these are (None: no walks).
    """

    def __init__(
        self,
        guide: PowerGuide,
        model: GpuModel,
        limit_w: float,
        expected_w: Floats,
        fast_limit_w: float | None = None,
        looks: Looks | None = None,
    ) -> None:
        self.guide, self.model, self.limit_w, self.expected_w = guide, model, limit_w, expected_w
        self.low, self.high = 0, guide.top + 1  # steps: one that is within the limit, or the lowest; one that is not
        self.settled = guide.top == 0
        self.looks = looks or Looks()
        self._fast_limit_w = fast_limit_w
        self._walked: Powers | None = None
        self._answer: int | None = None  # what the walks say
        first = highest_within(expected_w * guide.ratio(expected_w, limit_w), limit_w)
        self.step = max(first, 1) if guide.top else 0  # to look at, or found
        self._ratios: dict[int, float] = {}  # measured over expected power at the steps looked at, the last one last
        self._same_end = 0  # how often in a row the same end has moved, and which
        if WALK_FIRST and not self.settled and not guide.book.empty:
            self.step = max(self._by_walks(self.step), 1)

    @property
    def clock_hz(self) -> float:
        """The clock of the present step."""
        return clock_of(self.model, self.step)

    def prepare(self) -> bool:
        """Before a look at the present step by the engine: whether its order is to be taken down."""
        if self._walked is not None and SEED:
            self._walked.seed(self.step) if self.step in self._walked.steps else None
        return self._fast_limit_w is not None and (self.guide.book.empty or self._answer is None)

    def learn(self, power_w: float) -> None:
        """The mean power at the present clock."""
        if self.settled:
            return
        self._ratios[self.step] = power_w / float(self.expected_w[self.step])
        if power_w <= self.limit_w:
            self.low, self._same_end = self.step, max(self._same_end, 0) + 1
        else:
            self.high, self._same_end = self.step, min(self._same_end, 0) - 1
        self.settled = self.high - self.low <= 1
        if self.settled:
            self.step = self.low
            self.guide.learn(self.step, next(reversed(self._ratios.values())))
        else:
            step = self._next() if self._answer is None else self._answer
            step = min(max(step, self.low + 1), self.high - 1)
            if self._answer is None and abs(step - self.step) > 1:
                step = min(max(self._by_walks(step), self.low + 1), self.high - 1)
            self.step = step

    def _by_walks(self, step: int) -> int:
        """Where walks say that the search ends, begun at ``step``; ``step`` where they say nothing."""
        if self._fast_limit_w is None:
            return step
        for _ in range(MOST_WALKS):
            low, high = max(step - BELOW, 0), min(step + ABOVE, self.guide.top)
            steps = range(low, high + 1)
            found = self.guide.book.powers(steps, self._fast_limit_w)
            if found is None:
                return step
            self._walked = found
            looks = self.looks
            looks.walks += 1
            looks.walked += len(steps)
            looks.held += int(found.held.sum())
            looks.exact += int(found.exact.sum())
            known = [(at, float(power)) for at, power, held in zip(steps, found.power_w, found.held, strict=True) if held]
            if not known:
                looks.fell_back += 1
                return step
            within = [at for at, power in known if power <= self.limit_w]
            over = [at for at, power in known if power > self.limit_w]
            if within and over:
                self._answer = max(within)
                return self._answer
            if within and max(within) == self.guide.top:
                self._answer = self.guide.top
                return self.guide.top
            at, power = known[-1] if within else known[0]
            step = highest_within(self.expected_w * (power / float(self.expected_w[at])), self.limit_w)
            step = max(step, at + 1) if within else min(step, at - 1)
            step = min(max(step, 0), self.guide.top)
        return step

    def _next(self) -> int:
        """Where the limit is met if what overlap adds goes on as between the ends, or the last two looks."""
        known = self._ratios
        ends = [step for step in (self.low, self.high) if step in known]
        one, other = ends if len(ends) == 2 else (*known, *known)[-2:]
        slope = (known[other] - known[one]) / (other - one) if other != one else 0.0
        steps = np.arange(self.low, min(self.high, self.guide.top + 1))
        ratio = known[other] + slope * (steps - other)
        step = self.low + highest_within(self.expected_w[self.low : self.high] * ratio, self.limit_w)
        further = abs(self._same_end) - SAME_END
        if further >= 0:
            step = max(step, self.low + (2 << further)) if self._same_end > 0 else min(step, self.high - (2 << further))
        return step
