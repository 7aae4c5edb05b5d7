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
from sim.run.retimed import OrderBook, Stretches
from sim.shortcuts.clocks import KernelCurves, clock_of, curves_at, grid_of, top_step
from sim.shortcuts.pieces import Repeated

Floats = NDArray[np.float64]

# Curves are worked out at one of so many steps of the grid; between them power is as good as straight.
EVERY = 16
# Mean power over that of the kernels one after another, before any look: 1.04 to 1.11 in Llama-3-70B prefills of
# 1024 to 12,288 tokens in 4 chunks beside 4 to 24 blocks, TP4, where they settle (400 to 700 W).
FIRST_RATIO = 1.07
# Orders are walked at so many points of that on both sides of where a search has ended.
SPAN, STRIDE = 16, 1
# So often in a row the same end of a search may come nearer before it goes further each time than the guide says.
SAME_END = 3


class PowerGuide:
    """Expected mean power of a GPU over a repetition of ``sequence``, and what searches have found of it."""

    def __init__(self, sequence: Sequence[Repeated]) -> None:
        self._sequence = sequence
        self.top = top_step(sequence[0].piece.model.gpu)
        self.steps = np.append(np.arange(0, self.top, EVERY), self.top).astype(float)
        self.book = OrderBook(sequence)
        self._expected: dict[float, Floats] = {}
        self._found: dict[int, float] = {}  # ratios at the steps where searches ended
        self._walked: tuple[slice, Stretches] | None = None  # columns of ``steps``, and the stretches there
        self.held = 0

    @cached_property
    def _kernels(self) -> dict[bool, Stretches]:
        """Kernels one after another: of pieces that overlap, and of those that do not."""
        grid = grid_of(self._sequence[0].piece.model.gpu, EVERY)
        count: dict[bool, list[float]] = {True: [], False: []}
        curves: dict[bool, list[KernelCurves]] = {True: [], False: []}
        for step in self._sequence:
            overlaps = step.piece.serial is None
            for class_id, times in Counter(step.piece.graph.op_class).items():
                count[overlaps].append(float(step.repeat * times))
                curves[overlaps].append(curves_at(grid, step.piece.model, class_id))
        return {
            overlaps: Stretches(
                count=np.array(count[overlaps]),
                lasts_ps=np.array([one.lasts_ps for one in curves[overlaps]]).reshape(-1, len(self.steps)),
                power_w=np.array([one.power_w for one in curves[overlaps]]).reshape(-1, len(self.steps)),
            )
            for overlaps in (True, False)
        }

    def retime(self) -> None:
        """Expect, from now on, what the order of the first run gives at the clocks about that of the last search."""
        if self._walked is None and self._found and not self.book.empty:
            middle = next(reversed(self._found)) // EVERY
            columns = slice(max(0, middle - SPAN), min(middle + SPAN + 1,len(self.steps)), STRIDE)
            grid = grid_of(self._sequence[0].piece.model.gpu, EVERY)
            walked = self.book.walked(grid.part(columns))
            if walked is not None:
                stretches, held = walked
                self.held=held
                self._walked = columns, stretches
                self._expected.clear()
                self._found.clear()

    def expected_w(self, limit_w: float) -> Floats:
        """Mean power at every step of the grid below the fast limit: by the order of a run, where there is one, else of
        the kernels one after another."""
        found = self._expected.get(limit_w)
        if found is None:
            apart = self._kernels
            alone_w = _mean_w([apart[True], apart[False]], self.steps, limit_w)
            every = np.arange(self.top + 1)
            found = np.interp(every, self.steps, alone_w)
            if self._walked is not None:
                columns, stretches = self._walked
                steps = self.steps[columns]
                overlapped_w = _mean_w([stretches, apart[False].part(columns)], steps, limit_w)
                found *= np.interp(every, steps, overlapped_w / alone_w[columns])
            self._expected[limit_w] = found
        return found

    def ratio(self, expected_w: Floats, limit_w: float) -> float:
        """What overlap may add where a search for ``limit_w`` ends: as between or beyond the nearest two that ended."""
        found = self._found
        if not found:
            return FIRST_RATIO if self._walked is None else 1.0
        near = highest_within(expected_w * (FIRST_RATIO if self._walked is None else 1.0), limit_w)
        one = min(found, key=lambda step: abs(step - near))
        if len(found) < 2:
            return found[one]
        other = min((step for step in found if step != one), key=lambda step: abs(step - one))
        step = highest_within(expected_w * found[one], limit_w)
        return found[one] + (found[other] - found[one]) / (other - one) * (step - one)

    def learn(self, step: int, ratio: float) -> None:
        """A search has ended at ``step``."""
        self._found[step] = ratio


def _mean_w(work: Sequence[Stretches], steps: Floats, limit_w: float) -> Floats:
    """Mean power over the stretches at ``steps`` of the grid, no one at a clock above that at which it meets a limit."""
    length_ps, energy = np.zeros(len(steps)), np.zeros(len(steps))
    for one in work:
        lasts_ps, power_w = _below(limit_w, one.lasts_ps, one.power_w)
        lasts_ps = lasts_ps * one.count[:, None]
        length_ps += lasts_ps.sum(axis=0)
        energy += (lasts_ps * power_w).sum(axis=0)
    return energy / length_ps


def _below(limit_w: float, lasts_ps: Floats, power_w: Floats) -> tuple[Floats, Floats]:
    """Lengths and power of stretches, one a row, over the clock, no one's above that at which it meets the limit."""
    over = power_w > limit_w
    rows = over[:, -1].nonzero()[0]
    if not len(rows):
        return lasts_ps, power_w
    own_ps, own_w = lasts_ps[rows], power_w[rows]
    first, every = over[rows].argmax(axis=1), np.arange(len(rows))
    last = np.maximum(first - 1, 0)
    low_ps, low_w, high_ps, high_w = own_ps[every, last], own_w[every, last], own_ps[every, first], own_w[every, first]
    met_ps = low_ps + (high_ps - low_ps) * ((limit_w - low_w) / np.where(first > 0, high_w - low_w, 1.0))
    beyond = first == 0  # it meets the limit at a lower clock than any here: power law
    if beyond.any():
        law = np.log(own_ps[beyond, -1] / own_ps[beyond, 0]) / np.log(own_w[beyond, -1] / own_w[beyond, 0])
        law = np.where(np.isfinite(law), law, 0.0)
        met_ps[beyond] = own_ps[beyond, 0] * (limit_w / own_w[beyond, 0]) ** law
    held = np.arange(lasts_ps.shape[1]) >= first[:, None]
    lasts_ps, power_w = lasts_ps.copy(), power_w.copy()
    lasts_ps[rows] = np.where(held, met_ps[:, None], own_ps)
    power_w[rows] = np.where(held, limit_w, own_w)
    return lasts_ps, power_w


def highest_within(power_w: Floats, limit_w: float) -> int:
    """The step before the first one whose power passes the limit; the last one where none does.

    >>> highest_within(np.array([300.0, 400.0, 500.0]), 450.0)
    1
    """
    over = np.flatnonzero(power_w > limit_w)
    return int(over[0]) - 1 if len(over) else len(power_w) - 1


class GuidedSearch:
    """A search for the highest step whose mean power is within ``limit_w``, by a guide's ``expected_w``.

    It ends between two neighbours, of which one is within the limit and one is not, or at the highest step.
    """

    def __init__(self, guide: PowerGuide, model: GpuModel, limit_w: float, expected_w: Floats) -> None:
        self.guide, self.model, self.limit_w, self.expected_w = guide, model, limit_w, expected_w
        self.low, self.high = 0, guide.top + 1  # steps: one that is within the limit, or the lowest; one that is not
        self.settled = guide.top == 0
        first = highest_within(expected_w * guide.ratio(expected_w, limit_w), limit_w)
        self.step = max(first, 1) if guide.top else 0  # to look at, or found
        self._ratios: dict[int, float] = {}  # measured over expected power at the steps looked at, the last one last
        self._same_end = 0  # how often in a row the same end has moved, and which

    @property
    def clock_hz(self) -> float:
        """The clock of the present step."""
        return clock_of(self.model, self.step)

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
            self.step = min(max(self._next(), self.low + 1), self.high - 1)

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
