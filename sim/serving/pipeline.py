"""One replica in pipeline stages: as many batches in flight as it has stages, each of its own sequences.

A batch passes the stages one after another and goes on when its tokens are back. Batches take turns, and one that has
nothing to do loses its turn, as in vLLM 0.24 (``next_decode_eligible_step`` of its scheduler). As many turns are
scheduled ahead as there are batches, and one more where the host plans ahead: a prompt that comes later waits for the
next. A sequence is in one batch at a time; pieces of a long prompt may follow one another in several. All share one
queue, one pool of KV blocks and the seats of the replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import simpy

from sim.serving.adapters import AdapterSlots
from sim.serving.cost import Batch, Cost, StepCost
from sim.serving.inflight import PlannedStep, Sequence
from sim.serving.power import ReplicaGovernor
from sim.serving.records import RunStep, Stretch
from sim.serving.replica import Replica
from sim.serving.scheduler import Scheduler
from sim.serving.stages import Handoffs, ReplicaStage


@dataclass(kw_only=True, slots=True, eq=False)
class BatchSlot:
    """A place for one batch in flight, and the sequences that are in it."""

    scheduler: Scheduler
    free: bool = True
    returned_s: float = 0.0  # when its last batch was done
    share_j: float = 0.0  # what a sequence has burnt that has been decoding in it since the start
    late: list[Sequence] = field(default_factory=list)  # come back to yield tokens in the batch at hand
    planning: bool = False


@dataclass(kw_only=True, slots=True, eq=False)
class PipelineReplica(Replica):
    """A replica whose ``stages`` work on different batches, one in each of ``slots``."""

    stages: list[ReplicaStage]
    handoffs: Handoffs
    slots: list[BatchSlot]
    _turn: int = 0
    _pending: deque[bool] = field(default_factory=deque)  # turns that are not over, in order: whether each has a batch
    _over_s: deque[float] = field(init=False)  # when the turns before were over, the last one last
    _came: deque[tuple[float, Sequence]] = field(default_factory=deque)  # since the last turn was scheduled, and when
    _woken_s: float = 0.0  # when the first request came after a time without any

    def __post_init__(self) -> None:
        Replica.__post_init__(self)
        self._over_s = deque([-math.inf] * self._scheduled_ahead, maxlen=self._scheduled_ahead)
        for slot in self.slots:
            self._listen(slot)

    def _listen(self, slot: BatchSlot) -> None:
        def joined(sequence: Sequence) -> None:
            sequence.decode_share_j = slot.share_j
            if slot.planning:
                slot.late.append(sequence)

        def left(sequence: Sequence) -> None:
            sequence.last_token_s = self.env.now
            self.served[sequence.request.number].decode_j += slot.share_j - sequence.decode_share_j

        slot.scheduler.joined, slot.scheduler.left = joined, left
        slot.scheduler.fetch = self._send_for

    def take_slots(self, slots: list[AdapterSlots]) -> None:
        """Where its adapters lie, on each of its stages."""
        for stage, own in zip(self.stages, slots, strict=True):
            stage.adapters = own

    def power_on(self) -> None:
        """From nothing to idle; it does not serve yet."""
        self.powered = True
        for stage in self.stages:
            if stage.adapters is not None:
                stage.adapters.held.clear()
            stage.since_s = self.env.now
            stage.governor = ReplicaGovernor(machine=stage.governor.machine, gpus=stage.governor.gpus)

    @property
    def _scheduled_ahead(self) -> int:
        """Turns in the engine's queue."""
        return len(self.slots) + self.host.plans_ahead

    @property
    def _busy(self) -> bool:
        return any(slot.scheduler.busy for slot in self.slots)

    def add(self, sequence: Sequence) -> None:
        """A sequence comes to this replica."""
        self.outstanding_tokens += sequence.request.input_tokens + sequence.request.output_tokens
        self.served[sequence.request.number].replica = self.number
        if not self._busy and not self._came:
            self._woken_s = self.env.now
        self._came.append((self.env.now, sequence))
        self.wake()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Take one turn after another, as far as batches are back, whenever something has come or come back."""
        while self.alive:
            skipped = 0  # turns in a row without anything to do: after so many, a turn has seen all that has come
            while skipped <= self._scheduled_ahead + len(self.slots):
                slot = self.slots[self._turn % len(self.slots)]
                if not slot.free or len(self._pending) >= self._scheduled_ahead:
                    break
                self._open_inbox(self._scheduled_s())
                if not self._busy and not self._came:
                    break
                step = self._plan(slot)
                self._turn += 1
                self._pending.append(step is not None)
                if step is None:
                    skipped += 1
                    self._skip()
                else:
                    skipped, slot.free = 0, False
                    self.env.process(self._pass(slot, step))
            if self._retiring and not self.scheduler.busy and not self.scheduler.loading:
                self.idle_until_now()
                self.powered = self._retiring = False
            self._arrived = self.env.event()
            yield self._arrived

    def _scheduled_s(self) -> float:
        """When the next turn was scheduled: there was room in the queue, and something to do."""
        return max(self._over_s[len(self._pending)], self._woken_s)

    def _open_inbox(self, until_s: float = math.inf) -> None:
        """What has come ``until_s`` is seen by the next plan."""
        while self._came and self._came[0][0] <= until_s:
            self.scheduler.add(self._came.popleft()[1])

    def _skip(self) -> None:
        """Turns without a batch are over with the turn before them."""
        while self._pending and not self._pending[0]:
            self._pending.popleft()
            self._over_s.append(self.env.now)

    def _plan(self, slot: BatchSlot) -> PlannedStep | None:
        slot.planning = True
        step = slot.scheduler.plan()
        slot.planning = False
        return step if step.sequences else None

    def kill(self) -> list[Sequence]:
        """The replica dies at once; its sequences, memory lost, are to be served elsewhere."""
        self.alive = False
        self.outstanding_tokens = 0
        self._open_inbox()
        lost = [sequence for slot in self.slots for sequence in slot.scheduler.drain()]
        self.wake()
        return lost

    @property
    def governors(self) -> list[ReplicaGovernor]:
        """The limiters of each stage's GPUs."""
        return [stage.governor for stage in self.stages]

    def show(self) -> None:
        """Somebody wants to know what it draws: pauses of stages that no batch has are billed until now."""
        for stage in self.stages:
            if not stage.turn.count:
                self._rest(stage, self.env.now, spinning_since_s=self.env.now)

    def idle_until_now(self) -> None:
        """Bill the pauses since each stage's last work."""
        for stage in self.stages:
            self._rest(stage, self.env.now, spinning_since_s=self.env.now)

    def _pass(self, slot: BatchSlot, step: PlannedStep) -> Generator[simpy.Event, Any, None]:
        """``step`` through all stages."""
        planned_s, spent, parts = self.env.now, [], []
        tokens = self.prices.programs.own_tokens(step.batch)
        before: tuple[ReplicaStage, simpy.resources.resource.Request] | None = None
        for stage in self.stages:
            turn = stage.turn.request()
            yield turn
            if not self.alive:
                break
            if before is None:
                self._rest(stage, self.env.now, spinning_since_s=self.env.now)
                yield from self._begin(stage, step)
            else:
                spent += yield from self._hand_on(before[0], stage, step, tokens, planned_s)
                before[0].turn.release(before[1])
            if stage.adapters is not None and (missing := stage.adapters.missing(step.adapters)):
                yield from stage.adapters.bring(missing, step.adapters)
                self._rest(stage, self.env.now, spinning_since_s=self.env.now)
            ready_s = max(self.env.now, stage.began_s + self.host.stage_s)
            behind_s = stage.ahead.behind_s(step, stage.prices, stage.governor.target_w, ready_s)
            if hold_s := ready_s - self.env.now + behind_s:
                yield self.env.timeout(hold_s)
                self._rest(stage, self.env.now, spinning_since_s=self.env.now)
            if self.caps is not None:
                stage.governor.limit(self.caps.prefill if step.pieces else self.caps.decode)
            stage.began_s = self.env.now
            parts.append(stage.prices.step(step.batch, stage.governor.target_w) if step.pieces else None)
            cost = self._computed(stage, step)
            spent.append(cost.energy_j)
            yield self.env.timeout(cost.time_s)
            before = stage, turn
        else:
            stage.turn.release(turn)
        self._returned(slot, step, sum(spent), parts)

    def _begin(self, stage: ReplicaStage, step: PlannedStep) -> Generator[simpy.Event, Any, None]:
        """What the host does before a step, and tokens that come back from its memory."""
        for sequence, _ in step.pieces:
            record = self.served[sequence.request.number]
            record.started_s = self.env.now if record.started_s < 0 else record.started_s
        if hold_s := self.host.seconds(step.sequences) + step.swapped_tokens * self.swap_s_per_token:
            yield self.env.timeout(hold_s)
            self._rest(stage, self.env.now, spinning_since_s=self.env.now)

    def _hand_on(
        self, source: ReplicaStage, to: ReplicaStage, step: PlannedStep, tokens: int, planned_s: float
    ) -> Generator[simpy.Event, Any, list[float]]:
        """What ``source`` computed crosses the links; until both were ready, the one that was waited for the other."""
        now_s = self.env.now
        self._rest(source, now_s, spinning_since_s=source.since_s)
        self._rest(to, now_s, spinning_since_s=planned_s)
        cost = self.handoffs.cost(tokens, source.number)
        half = Cost(time_s=cost.time_s, energy_j=cost.energy_j / 2, cycles=cost.cycles)
        for stage in (source, to):
            stage.governor.spend(half.time_s, half.energy_j / half.time_s / stage.governor.gpus)
            self._row(stage, half.time_s, 0, step.batch, half)
        yield self.env.timeout(cost.time_s)
        return [cost.energy_j]

    def _computed(self, stage: ReplicaStage, step: PlannedStep) -> Cost:
        begin_s, prices = self.env.now, stage.prices
        cost = stage.governor.work(partial(prices.whole, step.batch))
        if self.log.window is not None:
            run = RunStep(
                replica=self.number, start_s=begin_s, time_s=cost.time_s, batch=step.batch, prices=prices,
                target_w=stage.governor.target_w, stage=stage.number,
            )  # fmt: skip
            self.log.ran(run)
        self._row(stage, cost.time_s, 1, step.batch, cost)
        return cost

    def _rest(self, stage: ReplicaStage, until_s: float, *, spinning_since_s: float) -> None:
        """Bill a pause of ``stage``: it idles, and from then on waits in a transfer for its counterpart."""
        if not self.powered or until_s <= stage.since_s:
            return
        governor = stage.governor
        spin_s = max(0.0, until_s - max(stage.since_s, spinning_since_s))
        idle_s = until_s - stage.since_s - spin_s
        energy_j = governor.pause(idle_s) if idle_s else 0.0
        if spin_s:
            power_w = governor.idle_w + self.handoffs.waiting_w
            governor.spend(spin_s, power_w)
            energy_j += power_w * spin_s * governor.gpus
        self.log.idle_j += energy_j
        cost = Cost(time_s=until_s - stage.since_s, energy_j=energy_j, cycles=0.0)
        self._row(stage, cost.time_s, 0, Batch(), cost, clock_hz=governor.clock_hz)

    def _row(
        self, stage: ReplicaStage, seconds: float, steps: int, batch: Batch, cost: Cost, clock_hz: float | None = None
    ) -> None:
        begin_s = stage.since_s
        stage.since_s += seconds
        self.busy_s += seconds / len(self.stages) if steps else 0.0
        self.log.stretches.append(
            Stretch(
                replica=self.number,
                start_s=begin_s,
                end_s=stage.since_s,
                steps=steps,
                decoding=batch.decoding,
                prompt_tokens=batch.prompt_tokens,
                waiting=self.scheduler.waiting,
                blocks=self.scheduler.pool.used,
                energy_j=cost.energy_j,
                target_w=stage.governor.target_w,
                clock_hz=clock_hz or cost.clock_hz,
                stage=stage.number,
            )
        )

    def _returned(self, slot: BatchSlot, step: PlannedStep, energy_j: float, parts: list[Any]) -> None:
        """Tokens are back: the batch can be planned anew."""
        self._pending.popleft()
        self._over_s.append(self.env.now)
        self._skip()
        if not self.alive:
            self.log.idle_j += energy_j  # burnt for nothing
            return
        joules = reduce(StepCost.plus, parts).joules() if step.pieces else None
        slot.share_j += self._bill(step, joules, energy_j)
        if count := step.batch.decoding - len(slot.late):
            self.log.gap(self.env.now - slot.returned_s, count)
        self._catch_up(slot.late)
        slot.late.clear()
        slot.free, slot.returned_s = True, self.env.now
        self._settle(*slot.scheduler.advance(step))
        self.wake()


def batch_slots(first: Scheduler, count: int) -> list[BatchSlot]:
    """As many batches in flight, the first of them planned by ``first``."""
    schedulers = [first, *(first.beside() for _ in range(count - 1))]
    for one in schedulers:
        one.memory, one.loading = first.memory, first.loading  # what one batch computed the others may use
        one.peers = tuple(other for other in schedulers if other is not one)
    return [BatchSlot(scheduler=one) for one in schedulers]
