"""The walk through a recorded order of events at many clocks at once: when each instant comes, and the joules.

An instant comes when its recorded causes say, at every clock. The order holds at a clock where instants come one after
another, those that came at once do so again, no kernel would have ended before, and tiles are dealt with last rounds of
the same blocks: then the engine's run at that clock has these times, to the picosecond, and these joules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.resources.grid import Progress
from sim.engine.resources.tiles import begin_late
from sim.shortcuts.retiming.dealing import WHOLE, TilesOverClocks, deal_at
from sim.shortcuts.retiming.order import Deal, Instant
from sim.shortcuts.retiming.record import Solved

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Rounding: of a duration as a share of the kernel's whole time, and in picoseconds; what is nearer to another whole
# picosecond is left to the engine.
ROUNDING, ROUNDING_PS = 2e-14, 1e-8
CEIL_PS = 1e-6  # what the engine forgives when it rounds an end up


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Lengths (ps) and power (W) between instants at some clocks, and where the order ``held``.

    They are ``exact`` where no throttled kernel is dealt tiles otherwise than in the record: its clock there is that of
    the record, which is as good as true. Where the order breaks they mean little.
    """

    lasts_ps: Floats  # from each instant to the next, by clock, as is
    power_w: Floats  # meanwhile
    held: Flags
    exact: Flags

    @property
    def length_ps(self) -> Floats:
        """When the last kernel ends."""
        return self.lasts_ps.sum(axis=0)  # type: ignore[no-any-return]

    @property
    def energy_j(self) -> Floats:
        """Joules of the GPU until then."""
        return (self.power_w * (self.lasts_ps * 1e-12)).sum(axis=0)  # type: ignore[no-any-return]


def walk(solved: Solved) -> Walked:
    """Go through the order at all clocks of ``solved``."""
    return _OrderWalk(solved).run()


class _OrderWalk:
    """The state of a walk: of each entry what is left of it, since which instant, and its rate."""

    def __init__(self, solved: Solved) -> None:
        order = self.order = solved.record.order
        self.solved, self.clocks = solved, solved.states.clock_hz
        width = len(self.clocks)
        self.ones, self.held = np.ones(width), np.ones(width, dtype=bool)
        self.turns = solved.turns()
        self.turn = [0] * order.entries
        self.left: list[Any] = [self.ones] * order.entries
        self.since = solved.record.begins.copy()
        self.rate = [turns[0][1] for turns in self.turns]
        self.parts = [WHOLE] * order.entries
        self.tiles: dict[int, TilesOverClocks] = {}  # of kernels that are dealt
        self.tail_ps: dict[int, tuple[Floats, Floats]] = {}  # when SMs are released, and before rounding
        self.never = np.full(width, np.inf), self.ones * 0.5
        self.times: list[Floats] = []
        self.filled: list[Any] = []  # fills where tiles have been dealt
        self.resets: dict[int, Any] = {}  # what is left at a place from where it is counted anew
        self.rounded: list[tuple[Floats, Floats]] = []  # durations before rounding, and rates

    def run(self) -> Walked:
        """The whole walk."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for at, instant in enumerate(self.order.instants):
                self._step(at, instant)
            times = np.array(self.times)
            lasts_ps = times[1:] - times[:-1]
            fills = np.array([one if isinstance(one, np.ndarray) else self.ones * one for one in self.filled])
            fills = fills.reshape(-1, len(self.clocks))
            power_w, exact = self.solved.all_w(fills)
            held = self.held & (lasts_ps > 0.0).all(axis=0) & self._still_run(lasts_ps) & self._apart()
            # Instants that never come, of orders that break, say nothing.
            lasts_ps = np.where(np.isfinite(lasts_ps), lasts_ps, np.nan)
        return Walked(lasts_ps=lasts_ps, power_w=power_w[:-1], held=held, exact=held & exact)

    def _step(self, at: int, instant: Instant) -> None:
        now = self._now(at, instant)
        self.times.append(now)
        if self.tail_ps:
            self._watch(at, now, instant)
        for entry, split in instant.leaves:
            self.tiles[split] = self.tiles[split].without(self.parts[entry])
        for one in instant.deals:
            self._deal(one, at)
        for entry, share in instant.grows:
            self._grow(entry, share, at)
        if instant.fills is not None:
            self.filled += [self.parts[entry].fill for entry in instant.runs]
        for tail in instant.tails:
            self._arm(at, tail.entry, tail.last, tail.split_rounds, now)

    # -- when -----------------------------------------------------------------------------------------------

    def _now(self, at: int, instant: Instant) -> Floats:
        """When the instant comes: all its causes have to agree."""
        if not at:
            return np.zeros(len(self.clocks))
        moments = self._moments(at, instant)
        now = next(moments)
        for other in moments:
            self.held &= other == now
        return now

    def _moments(self, at: int, instant: Instant) -> Iterator[Floats]:
        for before, lead_ps in instant.asks:
            yield self.times[before] + lead_ps
        for entry in instant.ends:
            self._advance(entry, at)
            lasts_ps = self.left[entry] / self.rate[entry] - CEIL_PS
            self.rounded.append((lasts_ps, self.rate[entry]))
            yield self.times[self.since[entry]] + np.maximum(1.0, np.ceil(lasts_ps))
        for entry in instant.releases:
            due_ps, lasts_ps = self.tail_ps.get(entry, self.never)
            self.rounded.append((lasts_ps, self.rate[entry]))
            yield due_ps

    def _advance(self, entry: int, until: int) -> None:
        """Count what is left as the engine does, at each turn of the rate before the instant ``until``."""
        turns, turn = self.turns[entry], self.turn[entry] + 1
        if turn >= len(turns) or turns[turn][0] >= until:
            return
        left, rate, since, times = self.left[entry], self.rate[entry], self.since[entry], self.times
        while turn < len(turns) and turns[turn][0] < until:
            at, after = turns[turn]
            if at > since:
                left = np.maximum(left - rate * (times[at] - times[since]), 0.0)
                since = at
            rate = after
            turn += 1
        self.left[entry], self.rate[entry], self.since[entry], self.turn[entry] = left, rate, since, turn - 1

    def _left(self, entry: int, at: int) -> Floats:
        self._advance(entry, at)
        since = self.since[entry]
        if since == at:
            return self.left[entry]  # type: ignore[no-any-return]
        return self.left[entry] - self.rate[entry] * (self.times[at] - self.times[since])  # type: ignore[no-any-return]

    def _reset(self, entry: int, at: int, left: Any) -> None:
        """What is left of an entry is ``left`` from an instant on."""
        self._advance(entry, at + 1)
        self.left[entry], self.since[entry] = left, at
        record = self.solved.record
        self.resets[record.first_place[entry] + at - record.begins[entry]] = left

    # -- checks ---------------------------------------------------------------------------------------------

    def _still_run(self, lasts_ps: Floats) -> Flags:
        """Where no kernel would have ended before it did."""
        record, rates = self.solved.record, self.solved.rates
        gone = np.cumsum(rates * lasts_ps[record.instants], axis=0)
        first = record.first_place
        starts = sorted({*first[:-1], *self.resets})
        before = gone[np.array(starts) - 1]
        if starts[0] == 0:
            before[0] = 0.0
        lefts = np.array([self.resets.get(start, 1.0) * self.ones for start in starts]) + before
        counts = np.diff([*starts, first[-1]])
        left = np.repeat(lefts, counts, axis=0) - gone
        more = left > rates * (2.0 * CEIL_PS) + 10.0 * ROUNDING
        more[np.array(first[1:]) - 1] = True  # it ends
        still: Flags = np.logical_and.reduce(more)
        return still

    def _apart(self) -> Flags:
        """Where no rounding decides."""
        lasts_ps, rate = np.array([one[0] for one in self.rounded]), np.array([one[1] for one in self.rounded])
        slack = ROUNDING / rate + ROUNDING_PS
        share = np.ceil(lasts_ps) - lasts_ps
        apart: Flags = np.logical_and.reduce((share > slack) & (share < 1.0 - slack))
        return apart

    # -- last rounds ----------------------------------------------------------------------------------------

    def _arm(self, at: int, entry: int, last: float, split_rounds: int, now: Floats) -> None:
        """The start of a last round while requests wait; see :meth:`SmPool.arm_tails`."""
        left = self._left(entry, at)
        self._advance(entry, at + 1)
        rate = self.rate[entry]
        share = self.parts[entry].lasts / split_rounds if split_rounds else last
        lasts_ps = (left - share) / rate
        due_ps = now + np.maximum(1.0, np.ceil(lasts_ps))
        before = due_ps < self.times[self.since[entry]] + np.ceil(self.left[entry] / rate - CEIL_PS)
        old_ps, old_lasts_ps = self.tail_ps.get(entry, self.never)
        self.tail_ps[entry] = np.where(before, due_ps, old_ps), np.where(before, lasts_ps, old_lasts_ps)

    def _watch(self, at: int, now: Floats, instant: Instant) -> None:
        """Last rounds begin when they did in the record, or at least between the same instants."""
        armed, held, before = self.tail_ps, self.held, self.times[at - 1]
        quiet = self.order.instants[at - 1].quiet
        for entry in instant.releases:
            held &= armed.pop(entry, self.never)[0] == now
        for entry in instant.passed:
            due_ps, _ = armed.pop(entry, self.never)
            held &= due_ps > before
            if not (quiet and entry in instant.ends):  # else it gives all its SMs back, seen by no one before
                held &= due_ps <= now
        for entry in instant.ends:
            if entry in armed:
                due_ps, _ = armed.pop(entry)  # at once is well, too: it gives all its SMs back
                held &= (due_ps > before) if quiet else (due_ps >= now)
        for due_ps, _ in armed.values():
            held &= due_ps > now

    # -- tiles ----------------------------------------------------------------------------------------------

    def _deal(self, one: Deal, at: int) -> None:
        """Deal a kernel's tiles anew."""
        if one.first is not None:
            class_id, dealing = one.first
            thin = self.order.model.thin_at(class_id, self.clocks, dealing.rounds)
            self.tiles[one.split] = TilesOverClocks(dealing, thin)
        lefts: list[Any] = [np.maximum(self._left(entry, at), 0.0) for entry in one.begun[:-1]]
        lefts.append(1.0)
        parts = [(n, left, self.parts[entry]) for n, left, entry in zip(one.slots, lefts, one.begun, strict=True)]
        dealt = deal_at(parts, self.tiles[one.split], self.held, one.last)
        for entry, (left, part) in zip(one.begun, dealt, strict=True):
            self.parts[entry] = part
            self._reset(entry, at, left)

    def _grow(self, entry: int, share: float, at: int) -> None:
        """Blocks of a collective start that have waited for SMs."""
        left = []
        for one in self._left(entry, at).tolist():
            progress = Progress()
            progress.left, progress.rate, progress.updated_ps, progress.due_ps = one, 0.0, 0, -1
            begin_late(progress, share, 0)
            left.append(progress.left)
        self._reset(entry, at, np.array(left))
