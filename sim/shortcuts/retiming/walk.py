"""The walk through a recorded order of events at many clocks at once: when each instant comes, and the joules.

An instant comes when its recorded causes say, at every clock. The order holds at a clock where instants come one after
another, those that came at once do so again, no kernel would have ended before, and tiles are dealt with last rounds of
the same blocks: then the engine's run at that clock has these times, to the picosecond, and these joules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from sim.engine.fluid import Running
from sim.engine.resources.tiles import begin_late
from sim.engine.running import GpuState
from sim.shortcuts.clocks import ClockCurves
from sim.shortcuts.retiming.dealing import WHOLE, Tiles, deal_at
from sim.shortcuts.retiming.order import Deal, Instant, Order
from sim.shortcuts.retiming.sets import SetsAtClocks, SetStates

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Rounding: of a duration as a share of the kernel's whole time, and in picoseconds; what is nearer to another whole
# picosecond is left to the engine.
ROUNDING, ROUNDING_PS = 2e-14, 1e-8
CEIL_PS = 1e-6  # what the engine forgives when it rounds an end up


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Lengths (ps) and joules at some clocks, and where the order ``held``.

    They are ``exact`` where no throttled kernel is dealt tiles otherwise than in the record: its clock there is that of
    the record. Where the order breaks they mean nothing.
    """

    length_ps: Floats
    energy_j: Floats
    held: Flags
    exact: Flags
    solved: Solved
    fills: Floats  # of dealt tiles, entry by entry and instant by instant

    def seed(self, column: int) -> None:
        """Have the engine's solver know the states at a clock."""
        solved, record = self.solved, self.solved.record
        states, sets, order = solved.states, record.sets, record.order
        model, limit_w, clock_hz = order.model, solved.limit_w, states.clock_hz.item(column)
        at = sets.column(states, column)
        for number, running in enumerate(order.sets):
            if running:
                state, over = solved.even.get(number, (None, None))
                if over is None or not over[column]:
                    state = at.state(number, [1.0] * len(running))
                assert state is not None
                if state.power_w <= limit_w and state.clock_hz <= clock_hz:
                    model.keep(_with(running), limit_w, clock_hz, state)
        fills = iter(self.fills[:, column].tolist())
        filled = (instant for instant in order.instants if instant.fills is not None)
        for instant, over in zip(filled, solved.over[:, column].tolist(), strict=True):
            here = list(islice(fills, len(instant.runs)))
            if not over:
                state = at.state(instant.number, here)
                if state.power_w <= limit_w:
                    model.keep(_with(order.sets[instant.number], here), limit_w, clock_hz, state)


class Record:
    """A run's order, and what the solver needs of its sets at any clock."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.sets = SetsAtClocks(order.model, order.sets)
        first = self.sets.first.tolist()
        self.rows = [range(low, high) for low, high in pairwise(first)]  # of each set's members
        filled = [instant for instant in order.instants if instant.fills is not None]
        self.filled_rows = np.array([row for one in filled for row in self.rows[one.number]], dtype=np.intp)
        self.filled_first = np.cumsum([0, *(len(one.runs) for one in filled)])[:-1]
        self.fills = np.array([fill for one in filled for fill in one.fills or ()]).reshape(-1, 1)
        before: dict[int, int] = {}
        self._moved: list[tuple[int, int]] = []  # rows of entries that go on, before and after each instant
        for instant in order.instants:
            now = dict(zip(instant.runs, self.rows[instant.number], strict=True))
            self._moved += [(before[entry], row) for entry, row in now.items() if entry in before]
            before = now

    def solved(self, curves: ClockCurves, limit_w: float) -> Solved:
        """Its sets at the clocks of ``curves`` under a fast limit."""
        return Solved(self, self.sets.at(curves), limit_w)

    def changed(self, rate: Floats) -> list[bool]:
        """Whether the rate of entries that go on changes, in their order."""
        before, after = np.array(self._moved, dtype=np.intp).reshape(-1, 2).T
        return (rate[before] != rate[after]).any(axis=1).tolist()  # type: ignore[no-any-return]


class Solved:
    """States of a record's sets at some clocks under a fast limit."""

    def __init__(self, record: Record, states: SetStates, limit_w: float) -> None:
        self.record, self.states, self.limit_w = record, states, limit_w
        sets = record.sets
        self._chip = sets.gpu.chip_power_factor
        self._idle_w = states.idle_w * sets.share
        even_w = states.dynamic_w * self._chip + self._idle_w
        first = [rows.start for rows in record.rows if rows]
        self.power_w = [states.idle_w] * len(record.rows)  # of each set, all rounds evenly filled
        some = [number for number, rows in enumerate(record.rows) if rows]
        sums = np.add.reduceat(even_w, first) if first else even_w
        rate = list(states.rate)
        self.rates = [rate[rows.start : rows.stop] for rows in record.rows]
        self.even: dict[int, tuple[GpuState, Flags]] = {}  # sets that pass the limit
        for number, power_w, over in zip(some, sums, sums > limit_w, strict=True):
            self.power_w[number] = power_w
            if over.any():
                state = self._throttle(_with(record.order.sets[number]))
                self.even[number] = state, over
                self.rates[number] = _chosen(over, state, self.rates[number])
                self.power_w[number] = np.where(over, state.power_w, power_w)
        self.filled: list[list[Floats]] = []  # rates where tiles have been dealt, instant by instant
        self.over = self._over(record.fills)
        self.states_over: list[GpuState | None] = []
        place = 0
        for instant in record.order.instants:
            if instant.fills is not None:
                over = self.over[place]
                place += 1
                own = rate[record.rows[instant.number].start : record.rows[instant.number].stop]
                state = None
                if over.any():
                    state = self._throttle(_with(record.order.sets[instant.number], instant.fills))
                    own = _chosen(over, state, own)
                self.states_over.append(state)
                self.filled.append(own)
        self.changed = None if self.even or any(self.states_over) else record.changed(states.rate)

    def filled_w(self, fills: Floats) -> Floats:
        """Power of the sets with dealt tiles before any limiter acts, instant by clock."""
        record = self.record
        if not len(record.filled_rows):
            return np.zeros((0, len(self.states.idle_w)))
        rows = self.states.dynamic_w[record.filled_rows] * (fills * self._chip) + self._idle_w[record.filled_rows]
        return np.add.reduceat(rows, record.filled_first)  # type: ignore[no-any-return]

    def _over(self, fills: Floats) -> Flags:
        return self.filled_w(fills) > self.limit_w

    def _throttle(self, running: Running) -> GpuState:
        """The state at the fast limit, which is that of any higher clock."""
        model = self.record.order.model
        return model.solve(running, self.limit_w, model.gpu.max_clock_hz)


def _with(running: Running, fills: Sequence[float] | None = None) -> Running:
    """A set whose rounds are filled by ``fills``, or evenly."""
    return tuple([(*one[:3], fill) for one, fill in zip(running, fills or [1.0] * len(running), strict=True)])


def _chosen(over: Flags, state: GpuState, rates: Sequence[Floats]) -> list[Floats]:
    """Rates below the limit, and at it."""
    return [np.where(over, own, rate) for own, rate in zip(state.rates, rates, strict=True)]


def walk(solved: Solved) -> Walked:
    """Go through the order at all clocks of ``solved``."""
    return _Walk(solved).run()


class _Walk:
    """The state of a walk: of each entry what is left of it, since which instant, and its rate."""

    def __init__(self, solved: Solved) -> None:
        order = self.order = solved.record.order
        self.solved, self.clocks = solved, solved.states.clock_hz
        width = len(self.clocks)
        self.ones = np.ones(width)
        self.held, self.exact = np.ones(width, dtype=bool), np.ones(width, dtype=bool)
        self.filled: list[list[Floats]] = []  # fills where tiles have been dealt
        self.moved = 0
        self.left: list[Floats] = [self.ones] * order.entries
        self.since = [0] * order.entries
        self.rate: list[Floats] = [self.ones] * order.entries
        self.fills: list[Floats] = [self.ones] * order.entries
        self.parts = [WHOLE] * order.entries
        self.tiles: dict[int, Tiles] = {}  # of kernels that are dealt
        self.tail_ps: dict[int, tuple[Floats, Floats]] = {}  # when SMs are released, and before rounding
        self.times: list[Floats] = []
        self.more: list[tuple[Floats, Floats]] = []  # left of kernels that go on, and their rates
        self.rounded: list[tuple[Floats, Floats]] = []  # durations before rounding, and rates

    def run(self) -> Walked:
        """The whole walk."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for at, instant in enumerate(self.order.instants):
                self._step(at, instant)
            times = np.array(self.times)
            lasts = np.diff(times, axis=0)
            fills = np.array([fill for fills in self.filled for fill in fills]).reshape(-1, len(self.clocks))
            energy_j = (self._power_w(fills)[:-1] * (lasts * 1e-12)).sum(axis=0)
            self.held &= (lasts > 0.0).all(axis=0) & self._apart() & np.isfinite(energy_j)
        return Walked(
            length_ps=times[-1], energy_j=energy_j, held=self.held, exact=self.exact, solved=self.solved, fills=fills
        )

    def _power_w(self, fills: Floats) -> Floats:
        """Power from each instant on; ``exact`` falls where a clock below the limit depends on how tiles were dealt."""
        solved = self.solved
        filled_w = solved.filled_w(fills)
        over = filled_w > solved.limit_w
        self.exact &= (over == solved.over).all(axis=0)
        if over.any():
            same = np.logical_and.reduceat(fills == solved.record.fills, solved.record.filled_first)
            self.exact &= (same | ~over).all(axis=0)
        power_w, filled = [], iter(zip(filled_w, over, solved.states_over, strict=True))
        for instant in self.order.instants:
            if instant.fills is None:
                power_w.append(solved.power_w[instant.number])
            else:
                own, passes, state = next(filled)
                power_w.append(own if state is None else np.where(passes, state.power_w, own))
        return np.array(power_w)

    def _step(self, at: int, instant: Instant) -> None:
        now = self._now(at, instant)
        self.times.append(now)
        if self.tail_ps:
            self._watch(at, now, instant)
        for entry, split in instant.leaves:
            self.tiles[split] = self.tiles[split].without(self.parts[entry])
        for one in instant.deals:
            self._deal(one, at, now)
        for entry, share in instant.grows:
            self._grow(entry, share, at, now)
        if instant.fills is None:
            rates = self.solved.rates[instant.number]
        else:
            rates = self.solved.filled[len(self.filled)]
            self.filled.append([self.fills[entry] for entry in instant.runs])
        changed = self.solved.changed
        for entry, rate in zip(instant.runs, rates, strict=True):
            before = self.rate[entry]
            if before is self.ones:
                self.since[entry] = at  # it starts
            else:
                moves = changed[self.moved] if changed is not None else (before != rate).any()
                self.moved += 1
                if moves and self.since[entry] != at:
                    left = self._left(entry, now)
                    self.more.append((left, before))
                    self.left[entry] = np.maximum(left, 0.0)
                    self.since[entry] = at
            self.rate[entry] = rate
        for tail in instant.tails:
            self._arm(tail.entry, tail.last, tail.split_rounds, now)

    # -- when -----------------------------------------------------------------------------------------------

    def _now(self, at: int, instant: Instant) -> Floats:
        """When the instant comes: all its causes have to agree."""
        if not at:
            return np.zeros(len(self.clocks))
        moments = iter(self._moments(instant))
        now = next(moments)
        for other in moments:
            self.held &= other == now
        return now

    def _moments(self, instant: Instant) -> Iterator[Floats]:
        for before, lead_ps in instant.asks:
            yield self.times[before] + lead_ps
        for entry in instant.ends:
            lasts_ps = self.left[entry] / self.rate[entry]
            self.rounded.append((lasts_ps - CEIL_PS, self.rate[entry]))
            yield self._due(entry, lasts_ps)
        for entry in instant.releases:
            due_ps, lasts_ps = self.tail_ps[entry]
            self.rounded.append((lasts_ps, self.rate[entry]))
            yield due_ps

    def _due(self, entry: int, lasts_ps: Floats) -> Floats:
        return self.times[self.since[entry]] + np.maximum(1.0, np.ceil(lasts_ps - CEIL_PS))

    def _left(self, entry: int, now: Floats) -> Floats:
        return self.left[entry] - self.rate[entry] * (now - self.times[self.since[entry]])

    def _apart(self) -> Flags:
        """Where no kernel that goes on would have ended, and no rounding decides."""
        held = np.ones(len(self.clocks), dtype=bool)
        if self.more:
            left, rate = np.array([one[0] for one in self.more]), np.array([one[1] for one in self.more])
            held &= (left > rate * (2.0 * CEIL_PS) + ROUNDING).all(axis=0)
        lasts_ps, rate = np.array([one[0] for one in self.rounded]), np.array([one[1] for one in self.rounded])
        slack = ROUNDING / rate + ROUNDING_PS
        share = np.ceil(lasts_ps) - lasts_ps
        return held & ((share > slack) & (share < 1.0 - slack)).all(axis=0)

    # -- last rounds ----------------------------------------------------------------------------------------

    def _arm(self, entry: int, last: float, split_rounds: int, now: Floats) -> None:
        """The start of a last round while requests wait; see :meth:`SmPool.arm_tails`."""
        rate = self.rate[entry]
        share: Floats | float = last
        if split_rounds:
            share = self.parts[entry].lasts / split_rounds
        lasts_ps = (self._left(entry, now) - share) / rate
        due_ps = now + np.maximum(1.0, np.ceil(lasts_ps))
        before = due_ps < self._due(entry, self.left[entry] / rate)
        if entry in self.tail_ps:
            old_ps, old_lasts_ps = self.tail_ps[entry]
            self.tail_ps[entry] = np.where(before, due_ps, old_ps), np.where(before, lasts_ps, old_lasts_ps)
        elif before.any():
            self.tail_ps[entry] = np.where(before, due_ps, np.inf), lasts_ps

    def _watch(self, at: int, now: Floats, instant: Instant) -> None:
        """Last rounds begin when they did in the record, or at least between the same instants."""
        armed, held, before = self.tail_ps, self.held, self.times[at - 1]
        quiet = self.order.instants[at - 1].quiet
        for entry in instant.releases:
            held &= armed.pop(entry)[0] == now
        for entry in instant.passed:
            due_ps, _ = armed.pop(entry)
            held &= due_ps > before
            if not (quiet and entry in instant.ends):  # else it gives all its SMs back, seen by no one before
                held &= due_ps <= now
        for entry in instant.ends:
            if entry in armed:
                held &= armed.pop(entry)[0] > (before if quiet else now)
        for due_ps, _ in armed.values():
            held &= due_ps > now

    # -- tiles ----------------------------------------------------------------------------------------------

    def _deal(self, one: Deal, at: int, now: Floats) -> None:
        """Deal a kernel's tiles anew."""
        if one.first is not None:
            class_id, dealing = one.first
            thin = self.order.model.thin
            every = [thin(class_id, clock_hz, dealing.rounds) for clock_hz in self.clocks.tolist()]
            self.tiles[one.split] = Tiles(dealing, np.array(every))
        lefts = []
        for entry in one.begun[:-1]:
            left = self._left(entry, now)
            self.more.append((left, self.rate[entry]))
            lefts.append(np.maximum(left, 0.0))
        lefts.append(1.0)
        parts = [(n, left, self.parts[entry]) for n, left, entry in zip(one.slots, lefts, one.begun, strict=True)]
        for entry, (left, part) in zip(one.begun, deal_at(parts, self.tiles[one.split], self.held, one.last), strict=True):
            self.left[entry], self.parts[entry], self.since[entry] = left, part, at
            self.fills[entry] = part.fill * self.ones

    def _grow(self, entry: int, share: float, at: int, now: Floats) -> None:
        """Blocks of a collective start that have waited for SMs."""
        raw = self._left(entry, now)
        self.more.append((raw, self.rate[entry]))
        left = []
        for one in raw.tolist():
            progress = SimpleNamespace(left=one, rate=0.0, updated_ps=0, due_ps=-1)
            begin_late(progress, share, 0)
            left.append(progress.left)
        self.left[entry], self.since[entry] = np.array(left), at
