"""One replica: a group of GPUs that plans a step, runs it, and plans the next, as a SimPy process."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simpy

from hardware.clock import ClockLimits
from sim.serving.adapters import AdapterSlots
from sim.serving.buckets import context_ends
from sim.serving.clock import CATCH_UP_STEPS, PhaseClock, SloClock
from sim.serving.cost import Batch, Cost, Joules
from sim.serving.even_steps import EvenSteps
from sim.serving.host import HostTime
from sim.serving.inflight import PlannedStep, Sequence
from sim.serving.launched import LaunchedAhead
from sim.serving.power import ReplicaGovernor
from sim.serving.price import StepPrices
from sim.serving.records import Log, RunStep, Served, stretch_of
from sim.serving.scheduler import Scheduler
from sim.serving.untold import Untold

# Steps that are run in one go at most, so that a long quiet stretch still shows in the trace.
MAX_STRETCH = 512
PAUSE = Batch()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCaps:
    """Limits of the power limiters in steps with prompts, and in those without."""

    prefill: ClockLimits
    decode: ClockLimits


@dataclass(kw_only=True, slots=True, eq=False)
class Replica:
    """GPUs that serve together. ``handover`` gets sequences that have their first token, where others go on; ``done``
    hears of each that has its last; ``untold`` has what a step has yielded, where the engine tells it later.
    """

    number: int
    env: simpy.Environment
    prices: StepPrices
    scheduler: Scheduler
    governor: ReplicaGovernor
    log: Log
    served: dict[int, Served]
    host: HostTime
    swap_s_per_token: float = 0.0
    clock: SloClock | PhaseClock | None = None
    caps: PhaseCaps | None = None
    adapters: AdapterSlots | None = None
    handover: Callable[[Sequence], None] | None = None
    done: Callable[[], None] = lambda: None
    untold: Untold | None = None
    outstanding_tokens: int = 0
    alive: bool = True
    serving: bool = True  # takes requests
    powered: bool = True
    busy_s: float = 0.0  # in steps
    _share_j: float = 0.0  # what a sequence has burnt that has been decoding since the start
    _arrived: simpy.Event = field(init=False)
    _planning: bool = False
    _asleep: bool = False
    _waited_s: float = 0.0  # for adapters, before the step at hand
    _retiring: bool = False  # goes off once it has finished what it has
    _ahead: LaunchedAhead = field(init=False)
    _inbox: list[Sequence] = field(default_factory=list)  # came after the next step had been planned,
    _inbox_s: list[float] = field(default_factory=list)  # and when
    _late: list[Sequence] = field(default_factory=list)  # come back to yield tokens in the step at hand
    _since_s: float = 0.0  # up to when the limiters have seen the load

    def __post_init__(self) -> None:
        self._arrived = self.env.event()
        self._ahead = LaunchedAhead(host=self.host)
        self.scheduler.left = self._left
        self.scheduler.joined = self._joined
        self.scheduler.fetch = self._send_for

    def _send_for(self, sequence: Sequence, pieces: tuple[int, ...]) -> None:
        self.env.process(self._fetch(sequence, pieces))

    def _fetch(self, sequence: Sequence, pieces: tuple[int, ...]) -> Generator[simpy.Event, Any, None]:
        """Bring the beginning of a prompt back from outside; it waits meanwhile."""
        tiers = self.scheduler.memory.tiers
        assert tiers is not None
        begin_s, record = self.env.now, self.served[sequence.request.number]
        yield from tiers.load(pieces)
        record.fetch_s += self.env.now - begin_s
        record.fetched_tokens += len(pieces) * sequence.request.block_tokens
        self.scheduler.fetched(sequence, pieces)
        self.wake()

    def add(self, sequence: Sequence) -> None:
        """A sequence comes to this replica."""
        self.outstanding_tokens += sequence.request.input_tokens + sequence.request.output_tokens
        self.served[sequence.request.number].replica = self.number
        if self.host.plans_ahead and self.scheduler.busy:
            self._inbox.append(sequence)
            self._inbox_s.append(self.env.now)
        else:
            self.scheduler.add(sequence)
        self.wake()

    def wake(self) -> None:
        """Something happened that the running stretch should look at."""
        if not self._arrived.triggered:
            self._arrived.succeed()

    @property
    def governors(self) -> list[ReplicaGovernor]:
        """The limiters of its GPUs."""
        return [self.governor]

    def show(self) -> None:
        """Somebody wants to know what it draws: a pause is billed until now, a row of steps ends with that at hand."""
        if self._asleep:
            self.idle_until_now()
        else:
            self.wake()

    def take_slots(self, slots: list[AdapterSlots]) -> None:
        """Where its adapters lie, on each of its stages."""
        (self.adapters,) = slots

    def retire(self) -> None:
        """Take no more requests, and go off once those that are here are done."""
        self.serving, self._retiring = False, True
        self.wake()

    def unretire(self) -> None:
        """Stay after all."""
        self.serving, self._retiring = True, False

    def power_on(self) -> None:
        """From nothing to idle; it does not serve yet."""
        self.powered, self._since_s = True, self.env.now
        if self.adapters is not None:
            self.adapters.held.clear()
        self.governor = ReplicaGovernor(machine=self.governor.machine, gpus=self.governor.gpus)

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Step after step while it lives."""
        while self.alive:
            if not self.scheduler.busy:
                self._tell(0.0)
            if not self.scheduler.busy and self._inbox:
                self._open_inbox()
            if not self.scheduler.busy:
                if self._retiring and not self.scheduler.loading:
                    self.powered = self._retiring = False
                yield from self._sleep()
                continue
            if self._inbox and self._ahead.is_busy:
                self._open_inbox(self._ahead.launched_s)
            self._planning = True
            step = self.scheduler.plan()
            self._planning = False
            came = bool(self._inbox)
            self._open_inbox()
            if not step.sequences:  # all that is here waits for caches that are on their way
                self._tell(0.0)
                if not came:
                    yield from self._sleep()
                continue
            if self.adapters is not None and (missing := self.adapters.missing(step.adapters)):
                begin_s = self.env.now
                yield from self.adapters.bring(missing, step.adapters)
                self._waited_s = self.env.now - begin_s
                self.idle_until_now()
                if not self.alive:
                    break
            if self.caps is not None:
                self.governor.limit(self.caps.prefill if step.pieces else self.caps.decode)
            if self.clock is not None:
                self.prices = self.clock.choose(step, self.scheduler, self.governor.target_w, self.env.now)
                self.governor.machine = self.prices.machine
            steady = not (step.pieces or step.swapped_tokens or self._late or came or self._waited_s)
            steady = steady and not self._ahead.is_busy
            steps = self.scheduler.steady_steps() if steady else 1
            if steps > 1 and (row := self._even_steps(step, steps)):
                yield from self._stretch(step, row)
            else:
                yield from self._one(step)

    def _sleep(self) -> Generator[simpy.Event, Any, None]:
        """Until something comes."""
        self._arrived = self.env.event()
        self._asleep = True
        yield self._arrived
        self._asleep = False
        self.idle_until_now()
        self._ahead.ran_s = self.env.now  # nothing was launched ahead of what comes now

    def _open_inbox(self, until_s: float = math.inf) -> None:
        """What came while the step before ran is seen by the plan after this one: that was made one step ahead.

        It was made once the host had launched the step before: what had come ``until_s`` then is in it.
        """
        count = bisect_right(self._inbox_s, until_s)
        for sequence in self._inbox[:count]:
            self.scheduler.add(sequence)
        del self._inbox[:count], self._inbox_s[:count]

    def idle_until_now(self) -> None:
        """Bill the pause since the last step."""
        if self.powered and self.env.now > self._since_s:
            self._pause(self.env.now - self._since_s)

    def _pause(self, seconds: float) -> None:
        energy_j = self.governor.pause(seconds)
        self.log.idle_j += energy_j
        self._note(seconds, 0, PAUSE, energy_j, self.governor.clock_hz)

    def _one(self, step: PlannedStep) -> Generator[simpy.Event, Any, None]:
        begin_s = self.env.now
        for sequence, _ in step.pieces:
            record = self.served[sequence.request.number]
            if record.started_s < 0:
                record.started_s = begin_s
        hold_s = self.host.seconds(step.sequences) + step.swapped_tokens * self.swap_s_per_token
        hold_s += self._ahead.behind_s(step, self.prices, self.governor.target_w, begin_s + hold_s)
        self._tell(max(0.0, self._ahead.ready_s - begin_s))
        if hold_s:
            self._pause(hold_s)
        parts = self.prices.joules(step.batch, self.governor.target_w) if step.pieces else None
        cost = self.governor.work(partial(self.prices.whole, step.batch))
        if self.log.window is not None:
            self._show(begin_s + hold_s, cost.time_s, step.batch)
        self._note(cost.time_s, 1, step.batch, cost.energy_j, cost.clock_hz)
        if self.clock is not None:
            self.clock.ran(1)
        yield self.env.timeout(begin_s + hold_s + cost.time_s - begin_s)  # rounded as the clock will be
        if not self.alive:
            self.log.idle_j += cost.energy_j  # burnt for nothing
            return
        self._share_j += self._bill(step, parts, cost.energy_j)
        count = step.batch.decoding - len(self._late)
        self._ran(self._waited_s + hold_s + cost.time_s, 0.0, 1, count)
        self._waited_s = 0.0
        if self._late:
            self._catch_up(self._late)
            self._late.clear()
        self._advance(step, 1)

    def _catch_up(self, sequences: Iterable[Sequence]) -> None:
        """They yield a token now, after a while without a seat."""
        for sequence in sequences:
            if sequence.last_token_s >= 0:
                self.log.gap(self.env.now - sequence.last_token_s, 1)
                sequence.last_token_s = -1.0

    def _even_steps(self, step: PlannedStep, steps: int) -> EvenSteps | None:
        """The steps in a row that move no limiter; None: none do."""
        if not self.governor.is_resting:
            return None
        batch = step.batch
        mean = batch.cached / batch.decoding
        longest = MAX_STRETCH if self.clock is None else CATCH_UP_STEPS
        steps = max(1, min(steps, longest, int(context_ends(mean + 1e-9)[1] - mean) + 1))
        last = self.prices.whole(batch.later(steps - 1), self.governor.target_w)
        first = self.prices.whole(batch, self.governor.target_w)  # remembered for a step by itself
        power_w = max(first.energy_j / first.time_s, last.energy_j / last.time_s) / self.governor.gpus
        if not self.governor.is_steady(power_w):
            return None
        return EvenSteps(count=steps, first=first, last=last, host_s=self.host.seconds(step.sequences))

    def _stretch(self, step: PlannedStep, row: EvenSteps) -> Generator[simpy.Event, Any, None]:
        """Steps of evenly growing cost, until they are done or somebody arrives (then until the step at hand is)."""
        self._tell(0.0)
        begin_s, steps, host_s, first = self.env.now, row.count, row.host_s, row.first
        arrived = self._arrived = self.env.event()
        whole_s = row.after_s(steps)

        def ended(_: simpy.Event) -> None:
            if not arrived.triggered:
                arrived.succeed()

        self.env.timeout(whole_s).callbacks.append(ended)
        yield arrived
        gone_s = self.env.now - begin_s
        if gone_s < whole_s:
            steps = row.done_after(gone_s)
            yield self.env.timeout(max(0.0, begin_s + row.after_s(steps) - self.env.now))
        self._ahead.ran_s = begin_s + row.after_s(steps - 1)
        busy_s, energy_j = row.after_s(steps) - steps * host_s, row.energy_j(steps)
        idle_j = self.governor.pause(steps * host_s) if host_s else 0.0
        self.governor.steady(Cost(time_s=busy_s, energy_j=energy_j))
        self.log.idle_j += idle_j
        clock_hz = (first.cycles + row.last.cycles) / (first.time_s + row.last.time_s)
        self._note(row.after_s(steps), steps, step.batch, energy_j + idle_j, clock_hz)
        if self.clock is not None:
            self.clock.ran(steps)
        if not self.alive:
            self.log.idle_j += energy_j
            return
        self.log.decode_j += energy_j
        self._share_j += energy_j / step.batch.decoding
        if self.log.window is not None:
            for number in range(steps):
                start_s, time_s = begin_s + row.after_s(number) + host_s, first.time_s + row.slope_s * number
                self._show(start_s, time_s, step.batch.later(number))
        self._ran(host_s + first.time_s, row.slope_s, steps, step.batch.decoding)
        self._advance(step, steps)

    def _ran(self, first_s: float, slope_s: float, steps: int, count: int) -> None:
        """So many sequences yielded a token in each of so many steps."""
        if self.untold is not None:
            self.untold.ran(first_s, slope_s, steps, count)
        elif count:
            self.log.gaps.append((first_s, slope_s, steps, count))

    def _tell(self, late_s: float) -> None:
        """What the step before has yielded is told, so long after its end."""
        if self.untold is not None:
            self.untold.tell(late_s, self.done)

    def _show(self, start_s: float, time_s: float, batch: Batch) -> None:
        if self.log.window is not None:
            step_run = RunStep(
                replica=self.number, start_s=start_s, time_s=time_s, batch=batch, prices=self.prices,
                target_w=self.governor.target_w,
            )  # fmt: skip
            self.log.ran(step_run)

    def _note(self, seconds: float, steps: int, batch: Batch, energy_j: float, clock_hz: float) -> None:
        """A row of the log that begins where the last one ended."""
        begin_s = self._since_s
        self._since_s += seconds
        self.busy_s += seconds if steps else 0.0
        self.log.stretches.append(
            stretch_of((
                self.number, begin_s, self._since_s, steps, batch.decoding, batch.prompt_tokens,
                self.scheduler.waiting, self.scheduler.pool.used, energy_j, self.governor.target_w, clock_hz, 0,
            ))
        )  # fmt: skip

    def _bill(self, step: PlannedStep, parts: Joules | None, energy_j: float) -> float:
        """Share a step's joules: what all tokens pass through by tokens, attention and head by whose they are.

        ``parts`` are None of steps without prompts. Returns the part of each sequence that decodes.
        """
        batch, spent_j = step.batch, 0.0
        if parts is not None:
            checked = batch.decoding * self.prices.each
            tokens, scored = checked + batch.prompt_tokens, checked + batch.ending
            a_token = parts.shared / tokens
            a_score = parts.head / scored if scored else 0.0
            scale = energy_j / parts.whole
            for (sequence, count), attention_j in zip(step.pieces, parts.prompts, strict=True):
                ends = sequence.computed + count == sequence.target
                mine_j = scale * (count * a_token + attention_j + ends * a_score)
                self.served[sequence.request.number].prefill_j += mine_j
                spent_j += mine_j
        self.log.prefill_j += spent_j
        self.log.decode_j += energy_j - spent_j
        return (energy_j - spent_j) / batch.decoding if batch.decoding else 0.0

    def _advance(self, step: PlannedStep, steps: int) -> None:
        self._settle(*self.scheduler.advance(step, steps))

    def _settle(self, first: list[Sequence], done: list[Sequence]) -> None:
        """Sequences that got their first token, and those that got their last one, are told and handed on."""
        now_s = self.env.now
        memory = self.scheduler.memory
        if memory.tiers is not None and memory.fresh:
            memory.tiers.store(memory.fresh)
            memory.fresh = []
        self._catch_up(first)
        for sequence in first:
            record = self.served[sequence.request.number]
            if record.first_token_s < 0:
                record.first_token_s = now_s
                if self.untold is not None:
                    self.untold.first.append(record)
            if self.handover is not None and sequence.generated < sequence.request.output_tokens:
                done.remove(sequence)
                self._forget(sequence)
                sequence.last_token_s = now_s
                self.handover(sequence)
        for sequence in done:
            record = self.served[sequence.request.number]
            record.done_s = max(now_s, record.first_token_s)
            record.hit_tokens += sequence.hit_tokens
            record.preemptions = sequence.preemptions
            self._forget(sequence)
            if self.untold is None:
                self.done()
            else:
                self.untold.done.append(record)

    def _forget(self, sequence: Sequence) -> None:
        self.outstanding_tokens -= sequence.request.input_tokens + sequence.request.output_tokens

    def kill(self) -> list[Sequence]:
        """The replica dies at once; its sequences, memory lost, are to be served elsewhere."""
        self.alive = False
        self.outstanding_tokens = 0
        self._tell(0.0)
        self._open_inbox()
        lost = list(self.scheduler.drain())
        self.wake()
        return lost

    def _joined(self, sequence: Sequence) -> None:
        sequence.decode_share_j = self._share_j
        if self.clock is not None:
            first_s = self.served[sequence.request.number].first_token_s
            self.clock.joined(sequence, first_s if first_s >= 0 else self.env.now, self.scheduler.step)
        if self._planning:
            self._late.append(sequence)

    def _left(self, sequence: Sequence) -> None:
        sequence.last_token_s = self.env.now
        self.served[sequence.request.number].decode_j += self._share_j - sequence.decode_share_j
