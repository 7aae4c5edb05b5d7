"""The walk through a recorded order of events at many clocks at once: when each instant comes, and the joules.

An instant comes when its recorded causes say, at every clock. The order holds at a clock where instants come one after
another, those that came at once do so again, no kernel would have ended before, and tiles are dealt with last rounds of
the same blocks: then the engine's run at that clock has these times, to the picosecond, and these joules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from sim.engine.fluid import FluidModel, Running
from sim.engine.resources.tiles import WHOLE, Dealing, Part, begin_late, deal
from sim.engine.running import GpuState
from sim.shortcuts.clocks import ClockCurves
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
    times_ps: Floats  # instant by clock
    solved: Solved

    def seed(self, column: int) -> None:
        """Have the engine's solver know the states at a clock."""
        self.solved.seed(column)


@dataclass(slots=True)
class Solved:
    """States of an order's sets at some clocks under a fast limit."""

    order: Order
    sets: SetsAtClocks
    curves: ClockCurves
    states: SetStates
    limit_w: float
    power_w: list[Floats] = field(default_factory=list)  # of each set, all rounds evenly filled
    rates: list[list[Floats]] = field(default_factory=list)  # of each set's members
    throttled: dict[Running, GpuState] = field(default_factory=dict)
    filled: list[tuple[int, list[Floats], Flags]] = field(default_factory=list)  # set, fills, below the limit

    def __post_init__(self) -> None:
        states, sets = self.states, self.sets
        chip = sets.gpu.chip_power_factor
        rows = states.dynamic_w * chip + states.idle_w * sets.share
        first = sets.first.tolist()
        for number, running in enumerate(self.order.sets):
            low, high = first[number], first[number + 1]
            rates = list(states.rate[low:high])
            power_w = rows[low] if high == low + 1 else rows[low:high].sum(axis=0) if high > low else states.idle_w
            over = power_w > self.limit_w
            if running and over.any():
                even = tuple([(*one[:3], 1.0) for one in running])
                state = self.throttle(even)
                rates = [np.where(over, own, rate) for own, rate in zip(state.rates, rates, strict=True)]
                power_w = np.where(over, state.power_w, power_w)
            self.power_w.append(power_w)
            self.rates.append(rates)

    def throttle(self, running: Running) -> GpuState:
        """The state at the fast limit, which is that of any higher clock."""
        found = self.throttled.get(running)
        if found is None:
            model = self.order.model
            found = self.throttled[running] = model.solve(running, self.limit_w, model.gpu.max_clock_hz)
        return found

    def fill(self, instant: Instant, fills: list[Floats], exact: Flags) -> tuple[list[Floats], Floats]:
        """Rates and power of a set with dealt tiles; ``exact`` falls where its clock depends on how they were dealt."""
        number, states, sets = instant.number, self.states, self.sets
        low = int(sets.first[number])
        chip = sets.gpu.chip_power_factor
        power_w = states.idle_w.copy()
        for slot, each in enumerate(fills):
            power_w += states.dynamic_w[low + slot] * (each * chip)
        over = power_w > self.limit_w
        rates = list(states.rate[low : low + len(fills)])
        if over.any():
            assert instant.fills is not None
            running = self.order.sets[number]
            state = self.throttle(
                tuple([(*one[:3], own) for one, own in zip(running, instant.fills, strict=True)])
            )
            rates = [np.where(over, own, rate) for own, rate in zip(state.rates, rates, strict=True)]
            power_w = np.where(over, state.power_w, power_w)
            for own, each in zip(instant.fills, fills, strict=True):
                exact &= ~over | (each == own)
        self.filled.append((number, fills, ~over))
        return rates, power_w

    def seed(self, column: int) -> None:
        """Have the engine's solver know the states at one of the clocks."""
        model, limit_w, clock_hz = self.order.model, self.limit_w, self.states.clock_hz.item(column)
        for number, running in enumerate(self.order.sets):
            if running:
                even = tuple([(*one[:3], 1.0) for one in running])
                state = self.throttled.get(even)
                if state is None or state.clock_hz > clock_hz or self.power_w[number].item(column) < state.power_w:
                    state = self.sets.state(number, self.states, column, [1.0] * len(running))
                if state.power_w <= limit_w:
                    model.keep(even, limit_w, clock_hz, state)
        for number, fills, below in self.filled:
            if below[column]:
                here = [each.item(column) for each in fills]
                state = self.sets.state(number, self.states, column, here)
                if state.power_w <= limit_w:
                    running = self.order.sets[number]
                    filled = tuple([(*one[:3], own) for one, own in zip(running, here, strict=True)])
                    model.keep(filled, limit_w, clock_hz, state)


def walk(solved: Solved) -> Walked:
    """Go through the order at all clocks of ``solved``."""
    return _Walk(solved).run()


class _Walk:
    """The state of a walk: of each entry what is left of it, since which instant, and its rate."""

    def __init__(self, solved: Solved) -> None:
        order = self.order = solved.order
        self.solved, self.clocks = solved, solved.states.clock_hz
        width = len(self.clocks)
        self.ones = np.ones(width)
        self.held, self.exact = np.ones(width, dtype=bool), np.ones(width, dtype=bool)
        self.left: list[Floats] = [self.ones] * order.entries
        self.since = [0] * order.entries
        self.rate: list[Floats] = [self.ones] * order.entries
        self.fills: list[Floats] = [self.ones] * order.entries
        self.parts: list[list[Part]] = [[]] * order.entries
        self.dealings: dict[int, list[Dealing]] = {}
        self.tail_ps: dict[int, tuple[Floats, Floats]] = {}  # when SMs are released, and before rounding
        self.times: list[Floats] = []
        self.power_w: list[Floats] = []
        self.more: list[tuple[Floats, Floats]] = []  # left of kernels that go on, and their rates
        self.rounded: list[tuple[Floats, Floats]] = []  # durations before rounding, and rates

    def run(self) -> Walked:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for at, instant in enumerate(self.order.instants):
                self._step(at, instant)
            times = np.array(self.times)
            lasts = np.diff(times, axis=0)
            energy_j = (np.array(self.power_w[:-1]) * (lasts * 1e-12)).sum(axis=0)
            self.held &= (lasts > 0.0).all(axis=0) & self._apart()
        return Walked(
            length_ps=times[-1], energy_j=energy_j, held=self.held & np.isfinite(energy_j), exact=self.exact,
            times_ps=times, solved=self.solved,
        )  # fmt: skip

    def _step(self, at: int, instant: Instant) -> None:
        now = self._now(at, instant)
        self.times.append(now)
        if self.tail_ps:
            self._watch(at, now, instant)
        for entry, split in instant.leaves:
            dealings = self.dealings[split]
            for column, part in enumerate(self.parts[entry]):
                dealing = dealings[column]
                dealings[column] = dealing._replace(fetched=dealing.fetched - part.fetched)
        for one in instant.deals:
            self._deal(one, at, now)
        for entry, share in instant.grows:
            self._grow(entry, share, at, now)
        if instant.fills is None:
            rates, power_w = self.solved.rates[instant.number], self.solved.power_w[instant.number]
        else:
            rates, power_w = self.solved.fill(instant, [self.fills[entry] for entry in instant.runs], self.exact)
        self.power_w.append(power_w)
        for entry, rate in zip(instant.runs, rates, strict=True):
            before = self.rate[entry]
            if before is self.ones:
                self.since[entry] = at  # it starts
            elif before is not rate and (before != rate).any() and self.since[entry] != at:
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
            share = np.array([part.lasts / split_rounds for part in self.parts[entry]])
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
        """Deal a kernel's tiles anew at every clock at which the order holds so far."""
        model: FluidModel = self.order.model
        held = self.held.tolist()
        if one.first is not None:
            class_id, dealing = one.first
            self.dealings[one.split] = [
                dealing._replace(thin=model.thin(class_id, clock_hz, dealing.rounds)) for clock_hz in self.clocks.tolist()
            ]
        dealings = self.dealings[one.split]
        fresh = one.begun[-1]
        self.parts[fresh] = [WHOLE] * len(dealings)
        lefts = [np.maximum(self._left(entry, now), 0.0).tolist() for entry in one.begun[:-1]]
        lefts.append([1.0] * len(dealings))
        dealt = [([0.5] * len(dealings), self.parts[entry].copy()) for entry in one.begun]
        for column, dealing in enumerate(dealings):
            if not held[column]:
                continue
            parts = tuple(
                [
                    (slots, left[column], self.parts[entry][column])
                    for slots, left, entry in zip(one.slots, lefts, one.begun, strict=True)
                ]
            )
            after = deal(parts, dealing)
            for (left, part), (all_left, all_parts), last in zip(after, dealt, one.last, strict=True):
                all_left[column], all_parts[column] = left, part
                if part.last != last:
                    held[column] = False
        for entry, (left, parts_) in zip(one.begun, dealt, strict=True):
            if entry != fresh:
                self.more.append((self._left(entry, now), self.rate[entry]))
            self.left[entry], self.parts[entry], self.since[entry] = np.array(left), parts_, at
            self.fills[entry] = np.array([part.fill for part in parts_])
        self.held &= np.array(held)

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
