"""One group of GPUs that prefills and decodes at once, each phase on SMs of its own.

Both sides share memory, links, the power limiters and the clock: whenever one begins or ends a step, or the power
target moves, both go on at another pace (:mod:`sim.serving.beside`). Joules are shared out as they are burnt: what a
side adds to the idle GPUs is its own, idle power is that of the sides that run (of both, where none does).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from sim.serving.beside import BesidePrices
from sim.serving.cost import Batch, Cost
from sim.serving.inflight import PlannedStep, Sequence
from sim.serving.power import ReplicaGovernor
from sim.serving.replica import Replica

# A step of which no more than this share is left has ended: what rounding leaves.
DONE = 1e-9
# The least that time goes on: less might not move a clock that counts seconds as floats.
LEAST_S = 1e-9


@dataclass(slots=True, eq=False)
class _StepUnderWay:
    """A step under way: the share that is left of it, its pace (s for all of it) and clock cycles so far."""

    batch: Batch
    done: simpy.Event
    left: float = 1.0
    time_s: float = math.inf
    cycles: float = 0.0


@dataclass(kw_only=True, slots=True, eq=False)
class SharedGpus:
    """The GPUs of one replica in two partitions: the first for prompts, the second for decoding."""

    env: simpy.Environment
    governor: ReplicaGovernor
    prices: BesidePrices
    _works: list[_StepUnderWay | None] = field(default_factory=lambda: [None, None])
    _spent_j: list[float] = field(default_factory=lambda: [0.0, 0.0])  # since a side last took account
    _powers_w: tuple[float, float] = (0.0, 0.0)  # of the sides, over all GPUs
    _clock_hz: float = 0.0
    _since_s: float = 0.0
    _changed: simpy.Event = field(init=False)

    def __post_init__(self) -> None:
        self._changed = self.env.event()
        self._resolve()

    def work(self, side: int, batch: Batch) -> Generator[simpy.Event, Any, Cost]:
        """Run a step of ``side``; nothing of it may be under way."""
        self.settle()
        begun_s = self.env.now
        work = self._works[side] = _StepUnderWay(batch, self.env.event())
        self._resolve()
        if not self._changed.triggered:
            self._changed.succeed()
        yield work.done
        return Cost(time_s=self.env.now - begun_s, energy_j=self.take(side), cycles=work.cycles)

    def take(self, side: int) -> float:
        """Joules of a side since it last took account."""
        spent_j, self._spent_j[side] = self._spent_j[side], 0.0
        return spent_j

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Let both sides go on, from one change to the next."""
        while True:
            self._changed = self.env.event()
            until_s = self._until_s()
            yield self.env.timeout(until_s) | self._changed if until_s < math.inf else self._changed
            self.settle()

    def settle(self) -> None:
        """Account for the time since the last change; steps that have come to their end are done."""
        seconds = self.env.now - self._since_s
        if seconds > 0.0:
            self._since_s = self.env.now
            for side, power_w in enumerate(self._powers_w):
                self._spent_j[side] += power_w * seconds
            self.governor.spend(seconds, sum(self._powers_w) / self.governor.gpus)
            for side, work in enumerate(self._works):
                if work is not None:
                    work.left -= seconds / work.time_s
                    work.cycles += self._clock_hz * seconds
                    if work.left <= DONE:
                        self._works[side] = None
                        work.done.succeed()
            self._resolve()

    def _until_s(self) -> float:
        """Until the first end of a step, or until the power target may move."""
        ends = [work.left * work.time_s for work in self._works if work is not None]
        if not ends:
            return math.inf
        until_s = min(*ends, self.governor.until_tick_s(sum(self._powers_w) / self.governor.gpus))
        return max(float(until_s), LEAST_S)

    def _resolve(self) -> None:
        """Paces and powers of what runs now."""
        governor, (prompts, decoding) = self.governor, self._works
        idle_w, target_w = governor.idle_w * governor.gpus, governor.target_w
        if prompts is not None and decoding is not None:
            beside = self.prices.at(prompts.batch, decoding.batch, target_w)
            added = []
            for work, price, slower in zip((prompts, decoding), self.prices.alone, beside.slower, strict=True):
                cost = price.whole(work.batch)
                work.time_s = slower * cost.time_s
                added.append(max(0.0, cost.energy_j / cost.time_s - idle_w) / slower)
            above_w = max(0.0, beside.power_w * governor.gpus - idle_w)
            shares = [one / sum(added) if sum(added) else 0.5 for one in added]
            self._powers_w = (0.5 * idle_w + shares[0] * above_w, 0.5 * idle_w + shares[1] * above_w)
            self._clock_hz = beside.clock_hz
            return
        for side, one in enumerate(self._works):
            if one is not None:
                cost = self.prices.alone[side].whole(one.batch, target_w)
                one.time_s, self._clock_hz = cost.time_s, cost.clock_hz
                power_w = cost.energy_j / cost.time_s
                self._powers_w = (power_w, 0.0) if side == 0 else (0.0, power_w)
                return
        self._powers_w, self._clock_hz = (0.5 * idle_w, 0.5 * idle_w), governor.clock_hz


@dataclass(kw_only=True, slots=True, eq=False)
class ReplicaSide(Replica):
    """One side of shared GPUs: a replica whose steps run on its own SMs, beside those of the ``other`` side."""

    shared: SharedGpus
    side: int
    sms: int
    other: ReplicaSide | None = None

    def run(self) -> Generator[simpy.Event, Any, None]:
        """PlannedStep after step; one that finds no memory waits for the other side."""
        while True:
            step = self._plan()
            if step is None:
                self._arrived = self.env.event()
                yield self._arrived
                self.idle_until_now()
                self._ahead.ran_s = self.env.now
                continue
            yield from self._one(step)
            assert self.other is not None
            self.other.wake()  # memory has changed

    def _plan(self) -> PlannedStep | None:
        if not self.scheduler.busy:
            self._open_inbox()
        if not self.scheduler.busy:
            return None
        self._planning = True
        step = self.scheduler.plan()
        self._planning = False
        self._open_inbox()
        return step if step.sequences else None

    def idle_until_now(self) -> None:
        """Account for the pause since the last step."""
        self.shared.settle()
        if self.env.now > self._since_s:
            energy_j = self.shared.take(self.side)
            self.log.idle_j += energy_j
            self._note(self.env.now - self._since_s, 0, Batch(), energy_j, self.governor.clock_hz)

    def _one(self, step: PlannedStep) -> Generator[simpy.Event, Any, None]:
        for sequence, _ in step.pieces:
            record = self.served[sequence.request.number]
            record.started_s = self.env.now if record.started_s < 0 else record.started_s
        hold_s = self.host.seconds(step.sequences) + step.swapped_tokens * self.swap_s_per_token
        hold_s += self._ahead.behind_s(step, self.prices, self.governor.target_w, self.env.now + hold_s)
        if hold_s:
            yield self.env.timeout(hold_s)
        self.idle_until_now()
        begun_s = self.env.now
        parts = self.prices.joules(step.batch, self.governor.target_w)
        cost = yield from self.shared.work(self.side, step.batch)
        self._show(begun_s, cost.time_s, step.batch)
        self._note(cost.time_s, 1, step.batch, cost.energy_j, cost.clock_hz)
        self._share_j += self._bill(step, parts, cost.energy_j)
        if count := step.batch.decoding - len(self._late):
            self.log.gap(hold_s + cost.time_s, count)
        self._catch_up(self._late)
        self._late.clear()
        self._advance(step, 1)

    def goes_on(self, sequence: Sequence) -> None:
        """A prompt that the other side has computed; its cache stays where it is."""
        pool = self.scheduler.pool
        need = pool.blocks_for(sequence.computed + 1)
        sequence.kept, sequence.blocks = "here", need if pool.take(need) else 0
        self.add(sequence)
