"""A replay: the rows of a trace as a kernel graph with recorded durations, run on the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.laws.terms import KernelTerms
from hardware.scheduling import scheduling
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.recorded import HostCall, RecordedCore, RecordedKernels
from sim.engine.recorded_driver import RecordedEngine
from sim.engine.resources.grid import Grid
from sim.errors import DeadlockError
from traces.capture import NONE
from traces.dag import Dag
from traces.records import Floats, Ints

NEVER = -(1 << 62)  # the end of work that nothing waits for
PS_PER_NS = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contest:
    """How rows and their neighbours come to SMs, where that is known; see ``RecordedKernels``.

    Rows that are ``closed`` leave room for no collective, whatever their grids.
    """

    rival: Ints
    via: Ints
    together: NDArray[np.bool_]
    finds: NDArray[np.bool_]
    tail: Floats
    closed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayRows:
    """What a replay needs of each row of work, and of the machine; times in nanoseconds.

    ``issue_ns``: when the host has launched it (``early``: before the trace began). ``blocks`` SMs are held if they
    are free, for as many rounds as ``tiles`` need on them (0: it keeps nobody out); blocks start ``cluster`` at a time
    and have ``own`` tiles by their number; where ``fetches``, a memset clears the counter of further ones. A row that
    ``is_collective`` cannot start where nothing is free; on a GPU with ``clusters`` in clusters of its own. ``lead_ns``
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
    is_collective: NDArray[np.bool_]
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
    contest: Contest | None = None


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
    """What a replay gives each row: start and end in nanoseconds, rounds of blocks (0 where it held no SMs).

    All rows went through SimPy, in so many ``events``.
    """

    start_ns: Ints
    end_ns: Ints
    rounds: Floats
    events: int


def replay(dag: Dag, load: ReplayRows, host: Sequence[HostWait] = ()) -> Times:
    """Starts and ends of all rows of work.

    ``host`` in the order of ``return_ns``. Raises :class:`DeadlockError` where ranks meet in no common order.
    """
    zero_ns = int(load.issue_ns.min(initial=0 if not len(load.rank) else np.iinfo(np.int64).max))
    graph, grids = graph_of(dag, load)
    core = RecordedCore(graph, grids, record_of(load, host, zero_ns), load.sms)
    try:
        events = RecordedEngine(core).run().events
    except DeadlockError as error:
        raise DeadlockError(
            f"replay: {error}: ranks run their collectives in different orders: replay one rank with --rank"
        ) from None
    return Times(
        start_ns=_ns(core.start_ps) + zero_ns,
        end_ns=_ns(core.end_ps) + zero_ns,
        rounds=np.array(core.rounds),
        events=events,
    )


def _ns(times_ps: Sequence[int]) -> Ints:
    return np.rint(np.array(times_ps, dtype=np.float64) / PS_PER_NS).astype(np.int64)


def graph_of(dag: Dag, load: ReplayRows) -> tuple[KernelGraph, list[Grid]]:
    """The rows as a kernel graph, a queue a stream, and how the blocks of each of its classes come to SMs."""
    ranks, gpu = np.unique(load.rank, return_inverse=True)
    queue = np.empty(len(load.rank), dtype=np.int64)
    for number, rows in enumerate(dag.queues):
        queue[rows] = number
    facts = scheduling()
    cluster = load.cluster.copy()
    if load.clusters:
        cluster[load.is_collective & (load.blocks % facts.collective_cluster == 0)] = facts.collective_cluster
    closed = np.zeros(len(queue), dtype=np.bool_) if load.contest is None else load.contest.closed
    sms = np.where(closed, load.sms, np.minimum(load.blocks, load.sms))
    columns = np.stack([load.is_collective, sms, np.maximum(load.tiles, np.where(closed, sms, 0)), cluster, load.own])
    kinds, op_class = np.unique(columns, axis=1, return_inverse=True)
    successors: dict[int, list[int]] = defaultdict(list)
    waits: dict[int, int] = defaultdict(int)
    for before, after in zip(dag.before.tolist(), dag.after.tolist(), strict=True):
        successors[before].append(after)
        waits[after] += 1
    members: list[list[int]] = [[] for _ in range(int(dag.collective.max(initial=NONE)) + 1)]
    for row in np.flatnonzero(dag.collective != NONE).tolist():
        members[dag.collective[row]].append(row)
    graph = KernelGraph(
        gpus=len(ranks),
        classes=tuple(_class_of(*kind) for kind in kinds.T[:, :3].tolist()),
        op_class=op_class.reshape(-1).tolist(),
        op_gpu=gpu.reshape(-1).tolist(),
        op_queue=queue.tolist(),
        op_segment=[0] * len(queue),
        op_collective=np.where(dag.collective == NONE, -1, dag.collective).tolist(),
        queue_gpu=tuple(int(gpu[rows[0]]) for rows in dag.queues),
        queue_stream=tuple(range(len(dag.queues))),
        queue_ops=tuple(rows.tolist() for rows in dag.queues),
        successors={before: tuple(after) for before, after in successors.items()},
        predecessor_count=dict(waits),
        collective_members=[tuple(rows) for rows in members],
        segments=(("trace", "", 0),),
    )
    return graph, [_grid_of(*kind) for kind in kinds.T.tolist()]


def _class_of(is_collective: int, sms: int, tiles: int) -> KernelClass:
    """A kernel of given blocks; its time is not that of a law."""
    terms = KernelTerms(floor_s=0.0, blocks=max(1, tiles), cycles_per_block=0.0, sms_cap=float(sms))
    name = f"collective of {sms} blocks" if is_collective else f"kernel of {tiles} tiles on {sms} SMs"
    return KernelClass(name=name, family="traced", terms=terms, collective=bool(is_collective))


def _grid_of(is_collective: int, sms: int, tiles: int, cluster: int, own: int) -> Grid:
    return Grid(
        sms=float(sms),
        tiles=tiles,
        cluster=cluster,
        whole=not is_collective,
        own_tiles=own,
        collective=bool(is_collective),
        cluster_sms=scheduling().cluster_sms,
    )


def no_contest(rows: int) -> Contest:
    """Nothing is known: the pool's rules decide."""
    none, no = np.full(rows, NONE), np.zeros(rows, dtype=np.bool_)
    return Contest(rival=none, via=none, together=no, finds=no, tail=np.zeros(rows), closed=no)


def record_of(load: ReplayRows, host: Sequence[HostWait], zero_ns: int) -> RecordedKernels:
    """What the trace says of the rows, from ``zero_ns`` on."""
    ranks = np.unique(load.rank).tolist()
    epoch = np.zeros(len(load.rank), dtype=np.int64)  # waits that had returned when the row was launched
    calls = []
    for rank in ranks:
        waits = [wait for wait in host if wait.rank == rank]
        mine = load.rank == rank
        returns_ns = np.array([wait.return_ns for wait in waits])
        epoch[mine] = np.searchsorted(returns_ns, load.issue_ns[mine], side="right")
        calls.append([
            HostCall(
                call_ps=(wait.call_ns - zero_ns) * PS_PER_NS,
                return_ps=(wait.return_ns - zero_ns) * PS_PER_NS,
                lag_ps=wait.lag_ns * PS_PER_NS,
                ops=wait.rows,
            )
            for wait in waits
        ])  # fmt: skip

    contest = load.contest or no_contest(len(load.rank))

    def ps(column_ns: Ints) -> list[int]:
        return [value * PS_PER_NS for value in column_ns.tolist()]

    return RecordedKernels(
        dur_ps=ps(load.dur_ns),
        pause_ps=ps(load.lead_ns + load.pause_ns),
        launch_ps=ps(load.issue_ns - zero_ns),
        epoch=epoch.tolist(),
        clearing_ps=ps(load.clearing_ns),
        rounds=[0.0] * len(load.rank) if load.rounds is None else load.rounds.tolist(),
        at_once=(contest.finds | (not load.asks)).tolist(),
        rival=contest.rival.tolist(),
        via=contest.via.tolist(),
        together=contest.together.tolist(),
        tail=contest.tail.tolist(),
        calls=calls,
    )
