"""A replay on SimPy: streams, the SMs that a collective needs, collectives of several ranks, and the host.

The engine of :mod:`sim.engine` is not used: it computes durations from what runs beside what, and the durations of
a trace were measured with their neighbours running. Sharing would be charged twice.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from simpy.events import Event, Timeout

from hardware.laws.collective import CLUSTER_BLOCKS
from sim.engine.time import WholeTime
from sim.errors import DeadlockError
from sim.replay.sms import Grid, SmPool, course
from traces.capture import NONE
from traces.dag import Dag
from traces.records import Floats, Ints

NEVER = -(1 << 62)  # the end of work that nothing waits for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """What a replay needs of each row of work, and of the machine; times in nanoseconds.

    ``issue_ns``: when the host has launched it (``early``: before the trace began). ``blocks`` SMs are held if they
    are free, for as many rounds as ``tiles`` need on them (0: it keeps nobody out); blocks start ``cluster`` at a time
    and have ``own`` tiles by their number; where ``fetches``, a memset clears the counter of further ones. ``talks``: a
    collective, which cannot start where nothing is free; on a GPU with ``clusters`` in clusters of its own. ``lead_ns``
    passes after what it waited for, beyond ``pause_ns``; ``graph_lead_ns`` in a graph. ``clearing_ns`` of its own time
    pass before its blocks ask for SMs. Where it ``asks`` for none, each begins as its lead says.
    ``rounds``, where given, are those in which the durations were measured: in more of them, because a collective holds
    SMs, or fewer, a row takes so much longer or shorter.
    """

    dur_ns: Ints
    issue_ns: Ints
    early: NDArray[np.bool_]
    blocks: Ints
    tiles: Ints
    cluster: Ints
    own: Ints
    talks: NDArray[np.bool_]
    lead_ns: Ints
    graph_lead_ns: Ints
    clearing_ns: Ints
    fetches: NDArray[np.bool_]
    rank: Ints
    sms: int
    clusters: bool
    pause_ns: int
    asks: bool = True
    rounds: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """A blocking call of one rank, in the host's order.

    It returns ``lag_ns`` after the ``rows`` that it waits for have ended (at ``return_ns`` in the trace), at the
    earliest at ``call_ns``; what the host does afterwards shifts with it.
    """

    rank: int
    call_ns: int
    return_ns: int
    lag_ns: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """What a replay gives each row: start and end in nanoseconds, rounds of blocks (0 where it held no SMs)."""

    start_ns: Ints
    end_ns: Ints
    rounds: Floats


class _Meeting:
    """A collective on its way: ranks that are missing, and what fires when the last one is there."""

    __slots__ = ("missing", "together")

    def __init__(self, env: WholeTime) -> None:
        self.missing = 0
        self.together = Event(env)


def replay(dag: Dag, load: Load, host: Sequence[HostWait] = ()) -> Times:
    """Starts and ends of all rows of work.

    ``host`` in the order of ``return_ns``. Raises :class:`DeadlockError` where ranks meet in no common order.
    """
    return _Run(dag, load, host).run()


class _Run:
    """State of one replay."""

    def __init__(self, dag: Dag, load: Load, host: Sequence[HostWait]) -> None:
        self.env = env = WholeTime()
        self.dag, self.load = dag, load
        self.dur_ns, self.issue_ns, self.lead_ns = load.dur_ns.tolist(), load.issue_ns.tolist(), load.lead_ns.tolist()
        self.blocks, self.talks, self.clearing_ns = load.blocks.tolist(), load.talks.tolist(), load.clearing_ns.tolist()
        cluster = load.cluster.copy()
        if load.clusters:
            cluster[load.talks & (load.blocks % CLUSTER_BLOCKS == 0)] = CLUSTER_BLOCKS
        columns = (one.tolist() for one in (load.blocks, load.tiles, cluster, load.own))
        self.grids = [Grid(*sizes) for sizes in zip(*columns, strict=True)]
        self.rank, self.collective = load.rank.tolist(), dag.collective.tolist()
        self.start_ns, self.end_ns = ([NONE] * len(self.rank) for _ in range(2))
        self.rounds = [0.0] * len(self.rank)
        self.usual_rounds = [0.0] * len(self.rank) if load.rounds is None else load.rounds.tolist()
        self.wanted: dict[int, Event] = {}  # rows that somebody waits for
        self.before: dict[int, list[int]] = defaultdict(list)
        for before, after in zip(dag.before.tolist(), dag.after.tolist(), strict=True):
            self.before[after].append(before)
        self.meetings: dict[int, _Meeting] = defaultdict(lambda: _Meeting(env))
        for number in self.collective:
            if number != NONE:
                self.meetings[number].missing += 1
        ranks = np.unique(load.rank).tolist()
        self.pools = {rank: SmPool(env, load.sms) for rank in ranks}
        self.waits = {rank: [wait for wait in host if wait.rank == rank] for rank in ranks}
        self.shift_ns = {rank: [0] for rank in ranks}  # after so many waits, the host is later than in the trace by
        self.returned = {rank: [Event(env) for _ in self.waits[rank]] for rank in ranks}
        epoch = np.zeros(len(self.rank), dtype=np.int64)  # waits that had returned when the row was launched
        for rank in ranks:
            mine = load.rank == rank
            returns_ns = np.array([wait.return_ns for wait in self.waits[rank]])
            epoch[mine] = np.searchsorted(returns_ns, load.issue_ns[mine], side="right")
        self.epoch = epoch.tolist()

    def run(self) -> Times:
        """Run until nothing is left."""
        for queue in self.dag.queues:
            self.env.process(self._stream(queue.tolist()))
        for rank, waits in self.waits.items():
            if waits:
                self.env.process(self._host(rank))
        collecting = gc.isenabled()
        gc.disable()  # nothing the loop makes is cyclic
        try:
            self.env.run()
        finally:
            if collecting:
                gc.enable()
        if NONE in self.end_ns:
            stuck = self.end_ns.index(NONE)
            number = self.collective[stuck]
            raise DeadlockError(
                f"replay: {self.end_ns.count(NONE)} pieces of work never start, the first is number {stuck} of rank "
                f"{self.rank[stuck]} (collective {number}): ranks run their collectives in different orders: replay "
                "one rank with --rank"
            )
        return Times(
            start_ns=np.array(self.start_ns, dtype=np.int64),
            end_ns=np.array(self.end_ns, dtype=np.int64),
            rounds=np.array(self.rounds, dtype=np.float64),
        )

    def _stream(self, rows: list[int]) -> Generator[Event, None, None]:
        """Run a stream's work one after another: launch, waits, SMs, the other ranks, the end."""
        env, pause_ns, end_ns = self.env, self.load.pause_ns, self.end_ns
        rank = self.rank[rows[0]]
        pool, shift_ns = self.pools[rank], self.shift_ns[rank]
        free_ns = NEVER
        for row in rows:
            if (epoch := self.epoch[row]) >= len(shift_ns):
                yield self.returned[rank][epoch - 1]
            released_ns = free_ns
            for before in self.before.get(row, ()):
                if end_ns[before] == NONE:
                    yield self._end_of(before)
                released_ns = max(released_ns, end_ns[before])
            begin_ns = max(self.issue_ns[row] + shift_ns[epoch], released_ns + pause_ns + self.lead_ns[row])
            if begin_ns > env.now:
                yield Timeout(env, begin_ns - env.now)
            if talks := self.talks[row]:
                if self.load.asks:
                    yield from pool.room_for(self.grids[row])
                self._hold(row, pool, env.now + self.dur_ns[row])
            self.start_ns[row] = env.now
            if (number := self.collective[row]) != NONE:
                meeting = self.meetings[number]
                meeting.missing -= 1
                if meeting.missing:
                    if talks:
                        pool.spin(row)
                    yield meeting.together
                    if talks:
                        self._hold(row, pool, env.now + self.dur_ns[row])
                else:
                    meeting.together.succeed()
            dur_ns = self.dur_ns[row]
            if self.blocks[row] and not talks:
                if clearing_ns := min(self.clearing_ns[row], dur_ns):
                    yield Timeout(env, clearing_ns)
                dur_ns = self._run_blocks(row, pool, int(dur_ns - clearing_ns))
            if dur_ns:
                yield Timeout(env, dur_ns)
            pool.leave(row)
            end_ns[row] = free_ns = env.now
            if row in self.wanted:
                self.wanted.pop(row).succeed()

    def _hold(self, row: int, pool: SmPool, end_ns: int) -> None:
        """Blocks of a collective hold SMs until it ends; those that find none follow when others leave."""
        grid = self.grids[row]
        pool.leave(row)
        openings = pool.openings(grid, first=pool.room(grid) or grid.blocks)
        pool.take(row, [*openings, (end_ns, -sum(sms for _, sms in openings))], clustered=False)

    def _run_blocks(self, row: int, pool: SmPool, dur_ns: int) -> int:
        """Nanoseconds of work of ``dur_ns`` whose blocks start on the SMs that are free, and hold them from now on."""
        grid, usual = self.grids[row], self.usual_rounds[row]
        if not dur_ns or not (openings := pool.openings(grid)):
            return dur_ns
        self.rounds[row] = rounds = usual or pool.rounds(grid, openings, dur_ns)
        run = course(grid, openings, max(1, round(dur_ns / rounds)))
        end_ns = run.end_ns if usual else self.env.now + dur_ns
        pool.take(row, [(min(at_ns, end_ns), sms) for at_ns, sms in run.changes], clustered=grid.cluster > 1)
        return end_ns - self.env.now

    def _host(self, rank: int) -> Generator[Event, None, None]:
        """The blocking calls of one rank: each returns after its work, and shifts what the host does next."""
        env, shift_ns = self.env, self.shift_ns[rank]
        for wait, returned in zip(self.waits[rank], self.returned[rank], strict=True):
            done_ns = wait.call_ns + shift_ns[-1]
            for row in wait.rows:
                if self.end_ns[row] == NONE:
                    yield self._end_of(row)
                done_ns = max(done_ns, self.end_ns[row] + wait.lag_ns)
            if done_ns > env.now:
                yield Timeout(env, done_ns - env.now)
            shift_ns.append(done_ns - wait.return_ns)
            returned.succeed()

    def _end_of(self, row: int) -> Event:
        return self.wanted.setdefault(row, Event(self.env))
