"""The order of events of one engine run on one GPU: what ends, asks for SMs, starts and is dealt tiles, and when.

:class:`~sim.engine.noting.NotingCore` notes what runs at every instant; :func:`order_of` makes of it what does not
depend on the clock as long as the order holds: the causes of each instant, and what each changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sim.engine.fluid import FluidModel, Running
from sim.engine.noting import HeldBlocks, Noted, NotingCore
from sim.engine.record import Recorder
from sim.engine.resources.tiles import Dealing, last_round
from sim.engine.running import HeldClock
from sim.engine.state import Entry


class Deal(NamedTuple):
    """Blocks of a kernel start while others run: its tiles are dealt anew among ``begun``, the last of which starts.

    ``last``: blocks that are busy in each one's last round.
    """

    split: int
    begun: tuple[int, ...]
    slots: tuple[float, ...]
    last: tuple[float, ...]
    first: tuple[int, Dealing] | None  # of the kernel: its class, and how its tiles go to its blocks


class Tail(NamedTuple):
    """SMs that the last round of ``entry`` does not need are to be released: ``last`` of its time before its end."""

    entry: int
    last: float
    split_rounds: int  # of a kernel dealt in parts, whose last round lasts what its dealing says; else 0


class Instant(NamedTuple):
    """What happens at once, in the order in which the engine does it."""

    ends: tuple[int, ...]
    asks: tuple[tuple[int, int], ...]  # kernels ask for SMs so many ps after an earlier instant
    releases: tuple[int, ...]  # last rounds begin
    passed: tuple[int, ...]  # last rounds that have begun since the instant before, when no request waited
    quiet: bool  # last rounds that begin from now on come to no one's notice
    leaves: tuple[tuple[int, int], ...]  # of the ends, parts of kernels whose others go on: entry, split
    deals: tuple[Deal, ...]
    grows: tuple[tuple[int, float], ...]  # collectives get further SMs; the share of their blocks that ran
    runs: tuple[int, ...]  # entries, in the order of the running set
    number: int  # of the running set
    fills: tuple[float, ...] | None  # where tiles have been dealt
    tails: tuple[Tail, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """One run's order of events; ``sets`` are its different running sets, fills apart."""

    model: FluidModel
    target: HeldClock
    instants: tuple[Instant, ...]
    entries: int
    sets: tuple[Running, ...]
    length_ps: int
    energy_j: float


class OrderError(ValueError):
    """A run whose order is not taken down, and why."""


def order_of(core: NotingCore, target: HeldClock, records: Recorder) -> Order:
    """The order of a run that has ended, under ``target``; raises :class:`OrderError` where it cannot be followed."""
    graph = core.graph
    if graph.gpus > 1 or graph.partition_sms or graph.issue_ps is not None or core.between is not None:
        raise OrderError("several GPUs, partitions, launches or networks have times of their own")
    if any(len(members) > 1 for members in graph.collective_members):
        raise OrderError("kernels that wait for one another have no time of their own")
    noted = core.noted
    if noted[-1].running:
        noted.append(Noted(records.end_ps, [], queued=False, quiet=True))
    times = {now_ps: at for at, (now_ps, *_) in enumerate(noted)}
    if len(times) < len(noted):
        raise OrderError("an instant was resolved twice")
    made = _OrderMaker(core, noted, times)
    return Order(
        model=core.gpus[0].model,
        target=target,
        instants=tuple([made.instant(at) for at in range(len(noted))]),
        entries=len(made.entries),
        sets=tuple(made.sets.values()),
        length_ps=records.end_ps,
        energy_j=records.energy_j[0],
    )


class _OrderMaker:
    """Makes the instants of an order one after another."""

    def __init__(self, core: NotingCore, noted: Sequence[Noted], times: dict[int, int]) -> None:
        self._core, self._noted = core, noted
        self.entries: dict[int, int] = {}  # number by identity; the notes keep the objects alive
        self._objects: list[Entry] = []
        self._ends: list[list[int]] = [[] for _ in noted]
        self._end_of_op: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, here in enumerate(noted):
            for one in here.running:
                if id(one.entry) not in self.entries:
                    self.entries[id(one.entry)] = len(self._objects)
                    self._objects.append(one.entry)
                last[self.entries[id(one.entry)]] = at
        for number, entry in enumerate(self._objects):
            at = last[number] + 1
            self._ends[at].append(number)
            self._end_of_op[entry.op] = max(at, self._end_of_op.get(entry.op, 0))
        self._asks = self._all_asks(times)
        self.sets: dict[tuple[tuple[int, float], ...], Running] = {}
        self._numbers: dict[tuple[tuple[int, float], ...], int] = {}
        self._splits: dict[int, int] = {}
        self._begun: list[list[int]] = []  # parts of each split
        self._before: dict[int, HeldBlocks] = {}  # what ran after the last instant, by number

    def _all_asks(self, times: dict[int, int]) -> list[set[tuple[int, int]]]:
        """When kernels ask for SMs a while after their turn has come."""
        core, graph = self._core, self._core.graph
        before: dict[int, list[int]] = {}
        for op, successors in graph.successors.items():
            for successor in successors:
                before.setdefault(successor, []).append(op)
        asks: list[set[tuple[int, int]]] = [set() for _ in self._noted]
        for ops in graph.queue_ops:
            turn = 0
            for op in ops:
                lead_ps = core.lead_ps[graph.op_class[op]]
                if lead_ps:
                    ready = max((self._end_of_op[one] for one in before.get(op, ())), default=0)
                    ready = max(turn, ready)
                    at = times.get(self._noted[ready].now_ps + lead_ps)
                    if at is None:
                        raise OrderError("a request for SMs was seen at no instant")
                    asks[at].add((ready, lead_ps))
                turn = self._end_of_op[op]
        return asks

    def instant(self, at: int) -> Instant:
        """The one after those made before."""
        now_ps, running, queued, quiet = self._noted[at]
        before, numbers, ends = self._before, self.entries, self._ends[at]
        releases: list[int] = []
        grows: list[tuple[int, float]] = []
        runs: list[int] = []
        fresh: list[HeldBlocks] = []
        dealt = False
        passed = [number for number in ends if 0 <= before[number].tail_due < now_ps]
        after: dict[int, HeldBlocks] = {}
        for one in running:
            entry = one.entry
            number = numbers[id(entry)]
            runs.append(number)
            after[number] = one
            was = before.get(number)
            if one.dealing is not None:
                dealt = True
                if was is None:
                    fresh.append(one)
            if was is not None:
                if 0 <= was.tail_due <= now_ps:
                    (releases if was.tail_due == now_ps else passed).append(number)
                if one.sms > was.sms and entry.grid.collective:
                    grows.append((number, was.held / entry.wanted))
        self._before = after
        leaves = self._leave(ends) if ends and self._begun else ()
        if at and not (ends or self._asks[at] or releases):
            raise OrderError("an instant without a cause")
        key = tuple([(one.entry.class_id, one.sms) for one in running])
        if key not in self._numbers:
            self._numbers[key] = len(self.sets)
            self.sets[key] = tuple([(*both, False, one.fill) for both, one in zip(key, running, strict=True)])
        return Instant(
            ends=tuple(ends),
            asks=tuple(sorted(self._asks[at])),
            releases=tuple(releases),
            passed=tuple(passed),
            quiet=quiet,
            leaves=leaves,
            deals=tuple(self._deals(fresh, after)) if fresh else (),
            grows=tuple(grows),
            runs=tuple(runs),
            number=self._numbers[key],
            fills=tuple([one.fill for one in running]) if dealt else None,
            tails=tuple(self._tails(running)) if queued else (),
        )

    def _leave(self, ends: Sequence[int]) -> tuple[tuple[int, int], ...]:
        leaves = []
        for number in ends:
            split = self._splits.get(id(self._objects[number].split))
            if split is not None:
                self._begun[split].remove(number)
                leaves.append((number, split))
        return tuple(leaves)

    def _deals(self, fresh: Sequence[HeldBlocks], running: Mapping[int, HeldBlocks]) -> Iterable[Deal]:
        """Of kernels of which blocks start now."""
        dealt = set()
        for one in fresh:
            split, first = one.entry.split, None
            assert split is not None and one.dealing is not None
            if id(split) not in self._splits:
                self._splits[id(split)] = len(self._begun)
                self._begun.append([])
                first = one.entry.class_id, one.dealing
            number = self._splits[id(split)]
            if number in dealt:
                raise OrderError("two parts of a kernel started at once")
            dealt.add(number)
            begun = self._begun[number]
            begun.append(self.entries[id(one.entry)])
            parts = [running[part] for part in begun]
            yield Deal(
                split=number,
                begun=tuple(begun),
                slots=tuple([part.sms / part.entry.grid.sms_per_block for part in parts]),
                last=tuple([part.part.last for part in parts]),
                first=first,
            )

    def _tails(self, running: Sequence[HeldBlocks]) -> Iterable[Tail]:
        """What :meth:`SmPool.arm_tails` looks at."""
        for one in running:
            if one.entry.grid.whole and one.held >= one.sms:
                split = one.entry.split
                last, needed = last_round(one.entry.grid, one.sms, one.part, split)
                if needed < one.held:
                    yield Tail(self.entries[id(one.entry)], last, 0 if split is None else split.rounds)
