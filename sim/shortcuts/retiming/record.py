"""A recorded order of events with what is solved of it at many clocks: rates and power of its running sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sim.engine.fluid import Running
from sim.engine.running import GpuState
from sim.shortcuts.clocks import ClockCurves
from sim.shortcuts.retiming.order import Order
from sim.shortcuts.retiming.sets import SetsAtClocks, SetStates

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]


class OrderRecord:
    """An order, and what the solver needs of its sets at any clock.

    Each entry of the order has a place for every instant after which it runs, one entry's after another's.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.sets = SetsAtClocks(order.model, order.sets)
        first: list[int] = self.sets.first.tolist()
        lives: list[list[tuple[int, int]]] = [[] for _ in range(order.entries)]
        self.filled = [at for at, instant in enumerate(order.instants) if instant.fills is not None]
        for at, instant in enumerate(order.instants):
            row = first[instant.number]
            for entry in instant.runs:
                lives[entry].append((row, at))
                row += 1
        self.first_place = np.cumsum([0, *(len(life) for life in lives)]).tolist()
        self.begins = [life[0][1] for life in lives]
        rows, instants = np.array([both for life in lives for both in life], dtype=np.intp).reshape(-1, 2).T
        self.rows, self.instants = rows, instants
        self.entries = [entry for entry, life in enumerate(lives) for _ in life]
        self.instant_of: list[int] = instants.tolist()
        self.numbers = np.array([instant.number for instant in order.instants], dtype=np.intp)
        self.some = [number for number, running in enumerate(order.sets) if running]
        self.some_first = np.array([first[number] for number in self.some], dtype=np.intp)
        shown = [order.instants[at] for at in self.filled]
        self.fills = np.array([fill for one in shown for fill in one.fills or ()]).reshape(-1, 1)
        self.filled_rows = np.array(
            [row for one in shown for row in range(first[one.number], first[one.number + 1])], dtype=np.intp
        )
        self.filled_first = np.cumsum([0, *(len(one.runs) for one in shown)])[:-1]

    def solved(self, curves: ClockCurves, limit_w: float, *, known: bool = False) -> Solved:
        """Its sets at the clocks of ``curves`` under a fast limit; ``known``: which lowers only what it has lowered
        before."""
        return Solved(self, self.sets.at(curves), limit_w, known=known)

    def places(self, at: int) -> list[int]:
        """Of the entries that run after an instant, in the order of the running set."""
        return [self.first_place[entry] + at - self.begins[entry] for entry in self.order.instants[at].runs]


class Solved:
    """States of a record's sets at some clocks under a fast limit: ``rates`` by place, ``power_w`` by set."""

    def __init__(self, record: OrderRecord, states: SetStates, limit_w: float, *, known: bool = False) -> None:
        self.record, self.states, self.limit_w, self._known_alone = record, states, limit_w, known
        self._chip = record.sets.gpu.chip_power_factor
        self._idle_w = states.idle_w * record.sets.share
        self.rates = states.rate[record.rows]
        self.even: dict[int, tuple[GpuState, Flags]] = {}  # sets that pass the limit, all rounds evenly filled
        self.power_w = np.tile(states.idle_w, (len(record.order.sets), 1))
        if record.some:
            even_w = np.add.reduceat(states.dynamic_w * self._chip + self._idle_w, record.some_first)
            self.power_w[record.some] = even_w
            self._throttle_even(even_w > limit_w)
        self.over = self.filled_w(record.fills) > limit_w  # of the instants with dealt tiles
        self.filled_states = [
            self._throttle_filled(at, over) if over.any() else None
            for at, over in zip(record.filled, self.over, strict=True)
        ]

    def turns(self) -> list[list[tuple[int, Floats]]]:
        """When the rate of each entry changes, and to what."""
        record, rates = self.record, self.rates
        turned = np.ones(len(rates), dtype=bool)
        turned[1:] = (rates[1:] != rates[:-1]).any(axis=1)
        turned[record.first_place[:-1]] = True
        turns: list[list[tuple[int, Floats]]] = [[] for _ in record.begins]
        entries, instants = record.entries, record.instant_of
        for place in turned.nonzero()[0].tolist():
            turns[entries[place]].append((instants[place], rates[place]))
        return turns

    def filled_w(self, fills: Floats) -> Floats:
        """Power of the sets with dealt tiles before any limiter acts, instant by clock."""
        rows = self.record.filled_rows
        if not len(rows):
            return np.zeros((0, len(self.states.idle_w)))
        own_w = self.states.dynamic_w[rows] * (fills * self._chip) + self._idle_w[rows]
        return np.add.reduceat(own_w, self.record.filled_first)

    def all_w(self, fills: Floats) -> tuple[Floats, Flags]:
        """Power from each instant on, with tiles dealt so, and the clocks at which no limit depends on how."""
        record = self.record
        power_w = self.power_w[record.numbers]
        exact = np.ones(len(self.states.idle_w), dtype=bool)
        if record.filled:
            filled_w = self.filled_w(fills)
            over = filled_w > self.limit_w
            if over.any() or self.over.any():
                same = np.logical_and.reduceat(fills == record.fills, record.filled_first)
                exact = ((over == self.over) & (same | ~over)).all(axis=0)
                for place, state in enumerate(self.filled_states):
                    if state is not None:
                        filled_w[place, over[place]] = state.power_w
            power_w[record.filled] = filled_w
        return power_w, exact

    def _throttle_even(self, over: Flags) -> None:
        record = self.record
        for place in np.flatnonzero(over.any(axis=1)).tolist():
            number = record.some[place]
            state = self._throttle(filled_by(record.order.sets[number]))
            if state is None:
                continue
            self.even[number] = state, over[place]
            self.power_w[number, over[place]] = state.power_w
        if self.even:
            for at, instant in enumerate(record.order.instants):
                if instant.fills is None and instant.number in self.even:
                    self._lower(at, *self.even[instant.number])

    def _throttle_filled(self, at: int, over: Flags) -> GpuState | None:
        instant = self.record.order.instants[at]
        state = self._throttle(filled_by(self.record.order.sets[instant.number], instant.fills))
        if state is not None:
            self._lower(at, state, over)
        return state

    def _lower(self, at: int, state: GpuState, over: Flags) -> None:
        for place, rate in zip(self.record.places(at), state.rates, strict=True):
            self.rates[place, over] = rate

    def _throttle(self, running: Running) -> GpuState | None:
        """The state at the fast limit, which is that of any higher clock."""
        model = self.record.order.model
        if self._known_alone:
            return model.throttled(running, self.limit_w)
        return model.solve(running, self.limit_w, model.gpu.max_clock_hz)


def filled_by(running: Running, fills: Sequence[float] | None = None) -> Running:
    """A set whose rounds are filled by ``fills``, or evenly."""
    return tuple([(*one[:3], fill) for one, fill in zip(running, fills or [1.0] * len(running), strict=True)])
