"""Which clocks are worth a run: the guide of a search for the settled clock of work whose kernels overlap.

Each look at such work's mean power is a run of the engine. What its kernels would draw one after another
(:mod:`sim.shortcuts.clocks`) costs next to nothing at all clocks at once, and what overlap adds to that changes little
from clock to clock: after one run the next clock is within a step or two of the answer. Where that does not help, the
order of events of a run (:mod:`sim.run.retimed`) says what overlap adds. The guide only chooses where to look. The
answer is that of the runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.engine.running import GpuModel, HeldClock
from sim.result.looks import Looks
from sim.run.retimed import OrderBook, WorkOverClocks
from sim.shortcuts.clocks import KernelCurves, clock_of, curves_at, grid_of, top_step
from sim.shortcuts.pieces import Repeated

Floats = NDArray[np.float64]
Places = NDArray[np.intp]

# Curves are worked out at one of so many steps of the grid; between them power is as good as straight.
EVERY = 16
# Mean power over that of the kernels one after another, before any look: 1.04 to 1.11 in Llama-3-70B prefills of
# 1024 to 12,288 tokens in 4 chunks beside 4 to 24 blocks, TP4, where they settle (400 to 700 W).
FIRST_RATIO = 1.07
# An order is walked at each of so many points of that about where the first search has ended (512 MHz to both sides).
SPAN, STRIDE = 16, 2
# Looks that prove what a search finds: at that clock and at the next.
PROOFS = 2
# A walk, with what it takes to take an order down, costs as much as 1.8 looks (docs/detail.md), and spares two of three
# of those that a search takes beyond the proof: worth its price in plans whose searches have lost so many.
WORTH_LOOKS = 4
# So often in a row the same end of a search may come nearer before it goes further each time than the guide says.
SAME_END = 3


class PowerGuide:
    """Expected mean power of a GPU over a repetition of ``sequence``, and what searches have found of it.

    Once searches after the first have taken ``worth_looks`` more than prove their answers, the order of events of the
    next run is taken down, and walked through before the next search (None: never).
    """

    def __init__(self, sequence: Sequence[Repeated], *, worth_looks: int | None = WORTH_LOOKS) -> None:
        self._sequence = sequence
        self.top = top_step(sequence[0].piece.model.gpu)
        self.steps = np.append(np.arange(0, self.top, EVERY), self.top).astype(float)
        self._book = None if worth_looks is None else OrderBook(sequence)
        self._worth_looks = worth_looks or 0
        self._expected: dict[float, Floats] = {}
        self._found: dict[int, float] = {}  # ratios at the steps where searches ended
        self._walked: tuple[Places, WorkOverClocks] | None = None  # columns of ``steps``, and what was walked there
        self._spent = 0  # looks of searches after the first beyond those that prove their answers

    @property
    def walked(self) -> bool:
        """Whether it goes by an order of events."""
        return self._walked is not None

    @cached_property
    def _kernels(self) -> tuple[WorkOverClocks, WorkOverClocks]:
        """Kernels one after another: those of pieces that overlap, and the others."""
        grid = grid_of(self._sequence[0].piece.model.gpu, EVERY)
        count: tuple[list[float], list[float]] = ([], [])
        curves: tuple[list[KernelCurves], list[KernelCurves]] = ([], [])
        for step in self._sequence:
            kind = 0 if step.piece.serial is None else 1
            for class_id, times in Counter(step.piece.graph.op_class).items():
                count[kind].append(float(step.repeat * times))
                curves[kind].append(curves_at(grid, step.piece.model, class_id))
        overlapped, apart = (
            WorkOverClocks(
                count=np.array(times),
                lasts_ps=np.array([one.lasts_ps for one in kinds]).reshape(-1, len(self.steps)),
                power_w=np.array([one.power_w for one in kinds]).reshape(-1, len(self.steps)),
            )
            for times, kinds in zip(count, curves, strict=True)
        )
        return overlapped, apart

    def run(self, held: HeldClock) -> None:
        """Run what overlaps at a clock, if its order is wanted."""
        if self._book is not None and self._spent >= self._worth_looks:
            self._book.note(held)

    def retime(self, looks: Looks) -> None:
        """Before a search: expect what the order of a run gives at the clocks about the end of the last search."""
        if self._book is None or not self._found or not self._book.complete:
            return
        last = next(reversed(self._found)) // EVERY
        columns = np.arange(max(0, last - SPAN), min(last + SPAN + 1, len(self.steps)), STRIDE)
        retimed = self._book.retimed(grid_of(self._sequence[0].piece.model.gpu, EVERY).at(columns))
        self._book = None
        if retimed is not None:
            looks.walked_clocks += len(columns)
            looks.order_held += int(retimed.held.sum())
            stretches = retimed.stretches
            whole = np.flatnonzero(np.logical_and.reduce(np.isfinite(stretches.lasts_ps * stretches.power_w)))
            if len(whole):
                self._walked = columns[whole], stretches.at(whole)
                self._expected.clear()
                self._found.clear()

    def expected_w(self, limit_w: float) -> Floats:
        """Mean power at every step of the grid below the fast limit: the kernels one after another or, once their order
        has been walked through, as they overlap."""
        found = self._expected.get(limit_w)
        if found is None:
            every = np.arange(self.top + 1)
            one_by_one_w = mean_power_w(self._kernels, limit_w)
            found = np.interp(every, self.steps, one_by_one_w)
            if self._walked is not None:
                columns, stretches = self._walked
                overlapped_w = mean_power_w((stretches, self._kernels[1].at(columns)), limit_w)
                found *= np.interp(every, self.steps[columns], overlapped_w / one_by_one_w[columns])
            self._expected[limit_w] = found
        return found

    def ratio(self, expected_w: Floats, limit_w: float) -> float:
        """What may be added where a search for ``limit_w`` ends: as between or beyond the nearest two that ended."""
        found, first = self._found, FIRST_RATIO if self._walked is None else 1.0
        if not found:
            return first
        near = highest_within(expected_w * first, limit_w)
        one = min(found, key=lambda step: abs(step - near))
        if len(found) < 2:
            return found[one]
        other = min((step for step in found if step != one), key=lambda step: abs(step - one))
        step = highest_within(expected_w * found[one], limit_w)
        return found[one] + (found[other] - found[one]) / (other - one) * (step - one)

    def learn(self, step: int, ratio: float, looks: int) -> None:
        """A search has ended at ``step`` after so many ``looks``."""
        if self._found:
            self._spent += max(0, looks - PROOFS)
        self._found.pop(step, None)  # the last one found is the last one in it
        self._found[step] = ratio


def mean_power_w(work: Sequence[WorkOverClocks], limit_w: float) -> Floats:
    """Mean power over all stretches at each clock, no one's clock above that at which it meets the fast limit.

    >>> one = WorkOverClocks(
    ...     count=np.array([2.0]), lasts_ps=np.array([[4e6, 3e6, 2e6]]), power_w=np.array([[400.0, 500.0, 600.0]]))
    >>> mean_power_w([one], 550.0).tolist()
    [400.0, 500.0, 550.0]
    """
    clocks = work[0].lasts_ps.shape[1]
    length_ps, energy = np.zeros(clocks), np.zeros(clocks)
    for one in work:
        lasts_ps, power_w = _below(limit_w, one.lasts_ps, one.power_w)
        lasts_ps = lasts_ps * one.count[:, None]
        length_ps += lasts_ps.sum(axis=0)
        energy += (lasts_ps * power_w).sum(axis=0)
    return energy / length_ps


def _below(limit_w: float, lasts_ps: Floats, power_w: Floats) -> tuple[Floats, Floats]:
    """Lengths and power of stretches over the clock where none passes a limit."""
    over = power_w > limit_w
    rows = over[:, -1].nonzero()[0]
    if not len(rows):
        return lasts_ps, power_w
    own_ps, own_w = lasts_ps[rows], power_w[rows]
    first, every = over[rows].argmax(axis=1), np.arange(len(rows))
    last = np.maximum(first - 1, 0)
    low_ps, low_w, high_ps, high_w = own_ps[every, last], own_w[every, last], own_ps[every, first], own_w[every, first]
    met_ps = low_ps + (high_ps - low_ps) * ((limit_w - low_w) / np.where(first > 0, high_w - low_w, 1.0))
    beyond = first == 0  # it meets the limit at a clock below all of these: by the power law that holds among them
    if beyond.any():
        ends_ps, ends_w = own_ps[beyond][:, [0, -1]], own_w[beyond][:, [0, -1]]
        with np.errstate(divide="ignore", invalid="ignore"):
            law = np.log(ends_ps[:, 1] / ends_ps[:, 0]) / np.log(ends_w[:, 1] / ends_w[:, 0])
        law = np.where(np.isfinite(law), law, 0.0)
        met_ps[beyond] = ends_ps[:, 0] * (limit_w / ends_w[:, 0]) ** law
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
        self.looked = 0
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
        self.looked += 1
        self._ratios[self.step] = power_w / float(self.expected_w[self.step])
        if power_w <= self.limit_w:
            self.low, self._same_end = self.step, max(self._same_end, 0) + 1
        else:
            self.high, self._same_end = self.step, min(self._same_end, 0) - 1
        self.settled = self.high - self.low <= 1
        if self.settled:
            self.step = self.low
            self.guide.learn(self.step, next(reversed(self._ratios.values())), self.looked)
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
