"""The longest chain of work that had to happen one after another: what to speed up first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.capture import NONE, Capture
from traces.classify import Classes
from traces.collectives import match_collectives
from traces.edges import edges_of, stream_order
from traces.records import Ints

ROWS_LIMIT = 2_000_000  # a few hundred bytes and microseconds a row
BLOCKING = "Synchronize"
Places = NDArray[np.signedinteger[Any]]  # of nodes: half the room of numbers of 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPath:
    """One kernel name's part of the critical path."""

    name: str
    count: int
    time_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Length of the path, its parts in microseconds by kernel class (``host``: launching), the names that matter.

    ``skipped`` says why there is none.
    """

    length_us: float
    by_class: dict[str, float]
    first: Sequence[OnPath]
    rows: Ints
    skipped: str = ""


def critical_path(capture: Capture, classes: Classes, *, top: int = 5) -> CriticalPath:
    """The longest path through stream order, waits, launches and collectives.

    A piece of work weighs its duration, a collective the least duration over its ranks (it begins at the last
    arrival), a launch the time since the host's call before it, and a blocking call nothing beyond what it
    waited for. A launch holds up work only where the stream was empty when it came, and the path ends in work. Idle
    time that no edge explains is on no path, so the path is at most the span.
    """
    if len(capture.work) > ROWS_LIMIT:
        why = f"{len(capture.work):,} rows: cut the trace below {ROWS_LIMIT:,} with --window or --rank"
        return _no_path(why)
    work = capture.work
    weight_ns = work.dur_ns.copy()
    collective = match_collectives(capture, classes)
    members = np.flatnonzero(collective != NONE)
    if len(members):
        least = np.full(int(collective.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, collective[members], work.dur_ns[members])
        weight_ns[members] = least[collective[members]]
    nodes, time_ns = _longest(_graph(capture, weight_ns, collective))
    on_gpu = nodes < len(work)
    rows, row_ns = nodes[on_gpu], time_ns[on_gpu]
    by_class = Counter(dict(zip(classes.labels, _sums(classes.index[rows], row_ns, len(classes.labels)), strict=True)))
    by_class["host"] += int(time_ns[~on_gpu].sum())
    name_ns = _sums(work.name[rows], row_ns, len(capture.names))
    count = np.bincount(work.name[rows[row_ns > 0]], minlength=len(capture.names))
    most = sorted((n for n in range(len(name_ns)) if name_ns[n]), key=lambda n: -name_ns[n])[:top]
    return CriticalPath(
        length_us=sum(by_class.values()) / 1e3,
        by_class={cls: total_ns / 1e3 for cls, total_ns in by_class.most_common() if total_ns},
        first=[OnPath(name=capture.names[n], count=int(count[n]), time_us=name_ns[n] / 1e3) for n in most],
        rows=rows,
    )


def _sums(index: Ints, values: Ints, many: int) -> list[int]:
    """Sums of ``values`` by ``index``, exact as integers."""
    sums = np.zeros(many, dtype=np.int64)
    np.add.at(sums, index, values)
    return list(sums.tolist())


def _no_path(why: str) -> CriticalPath:
    return CriticalPath(length_us=0.0, by_class={}, first=(), rows=np.empty(0, dtype=np.int64), skipped=why)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Graph:
    """Rows of work, then calls begun, then blocking calls done; edges cost what the node behind them takes then.

    A node that nothing comes before adds its ``first_ns``. ``place``: its place in the order of time.
    """

    first_ns: Ints
    place: Places
    before: Places
    after: Places
    cost_ns: Ints
    ends: int  # a path ends in one of the first so many nodes


def _longest(graph: _Graph) -> tuple[Ints, Ints]:
    """Nodes of the longest path and what each adds.

    Most nodes have one edge before them and choose nothing: sums along such chains are taken at once, and only where
    edges meet is a path searched, in the order of time. An edge against it is none.
    """
    nodes = len(graph.place)
    before, after, cost_ns = graph.before, graph.after, graph.cost_ns
    if not (forward := graph.place[before] < graph.place[after]).all():
        before, after, cost_ns = before[forward], after[forward], cost_ns[forward]
    edges_in = np.minimum(np.bincount(after, minlength=nodes), 2).astype(np.int8)
    parent, total_ns = np.arange(nodes, dtype=np.int32), np.zeros(nodes, dtype=np.int64)
    single = edges_in[after] == 1
    parent[after[single]], total_ns[after[single]] = before[single], cost_ns[single]
    head = parent.copy()  # of each node's chain: jumps double until all have arrived
    for _ in range(nodes.bit_length()):
        further = head[head]
        if (further == head).all():
            break
        total_ns += total_ns[head]
        head = further
    meets = np.flatnonzero(~single).astype(np.int32)
    meets = meets[np.argsort(graph.place[after[meets]], kind="stable")]
    # Single items of an array are slow, lists of numbers large: a view is neither.
    length_ns = np.where(edges_in == 0, graph.first_ns, NONE)
    best = np.full(nodes, NONE, dtype=np.int32)
    reached, entered = length_ns.data, best.data
    chain_ns = total_ns[before[meets]] + cost_ns[meets]
    columns = head[before[meets]], after[meets], chain_ns, meets
    for source, target, chain, edge in zip(*(column.data for column in columns), strict=True):
        if (length := reached[source] + chain) > reached[target]:
            reached[target], entered[target] = length, edge
    length_ns = length_ns[head] + total_ns
    met = np.flatnonzero(best != NONE)
    parent[met] = before[best[met]]
    way = parent.data  # the node before each on its longest path; itself where there is none
    node = int(np.argmax(length_ns[: graph.ends]))
    path = [node]
    while (earlier := way[node]) != node:
        path.append(earlier)
        node = earlier
    rows = np.array(path[::-1], dtype=np.int64)
    return rows, np.diff(length_ns[rows], prepend=0)


def _graph(capture: Capture, weight_ns: Ints, collective: Ints) -> _Graph:
    """What comes before what: streams, waits, collectives, and the host."""
    work = capture.work
    dependencies = edges_of(capture)
    before, after = dependencies.before, dependencies.after
    del dependencies
    parts = [_part(before, after, weight_ns[after])]
    # Where a kernel begins in the tail of the one before (programmatic dependent launch), its rest comes after that.
    first, second = stream_order(capture)
    tails = (work.start_ns[second] < work.end_ns[first]) & (work.end_ns[second] > work.end_ns[first])
    rest_ns = np.minimum(work.end_ns[second] - work.end_ns[first], weight_ns[second])
    parts.append(_part(first[tails], second[tails], rest_ns[tails]))
    # The last to arrive starts a collective: what is before one member is before all.
    group: dict[int, list[int]] = {}
    for row in np.flatnonzero(collective != NONE).tolist():
        group.setdefault(int(collective[row]), []).append(row)
    joins = (collective[after] != NONE) & (collective[before] == NONE)
    pairs = [
        (a, other)
        for a, b in zip(before[joins].tolist(), after[joins].tolist(), strict=True)
        for other in group[int(collective[b])]
        if other != b and work.end_ns[a] <= work.end_ns[other] - weight_ns[other]
    ]
    if pairs:
        first, second = np.array(pairs, dtype=np.int64).T
        parts.append(_part(first, second, weight_ns[second]))
    times_ns = [work.end_ns]
    if len(capture.calls):
        parts += _host_edges(capture, weight_ns, times_ns)
    first, second, cost = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    in_time = np.argsort(np.concatenate(times_ns), kind="stable")
    place = np.empty(len(in_time), dtype=np.int32)
    place[in_time] = np.arange(len(place), dtype=np.int32)
    first_ns = np.append(weight_ns, np.zeros(len(place) - len(work), dtype=np.int64))
    return _Graph(first_ns=first_ns, place=place, before=first, after=second, cost_ns=cost, ends=len(work))


def _part(before: Places, after: Places, cost_ns: Ints) -> tuple[Places, Places, Ints]:
    """Some edges; ``ROWS_LIMIT`` nodes have small numbers."""
    return before.astype(np.int32), after.astype(np.int32), cost_ns


def _host_edges(capture: Capture, weight_ns: Ints, times_ns: list[Ints]) -> list[tuple[Places, Places, Ints]]:
    """Host calls in order on their thread, launches to their work, work to the call that waited for it.

    ``times_ns`` gets those of the calls that launch or block, as they begin, and of those that block, as they end.
    """
    work, calls = capture.work, capture.calls
    launched = np.flatnonzero(work.launch != NONE)
    launching = np.zeros(len(calls), dtype=bool)
    launching[work.launch[launched]] = True
    ends = calls.start_ns + calls.dur_ns
    blocks = np.array([BLOCKING in name for name in capture.names])[calls.name]
    # A call that its own work ends within (a copy to pageable memory) blocked as well.
    blocks[work.launch[launched][work.end_ns[launched] <= ends[work.launch[launched]]]] = True
    kept, blocking = np.flatnonzero(launching | blocks), np.flatnonzero(blocks)
    begun, done = np.full((2, len(calls)), NONE, dtype=np.int32)
    begun[kept] = len(work) + np.arange(len(kept))
    done[blocking] = len(work) + len(kept) + np.arange(len(blocking))
    times_ns += [calls.start_ns[kept], ends[blocking]]
    order = kept[np.lexsort((calls.start_ns[kept], calls.thread[kept], calls.rank[kept]))]
    same = (calls.rank[order][1:] == calls.rank[order][:-1]) & (calls.thread[order][1:] == calls.thread[order][:-1])
    earlier, later = order[:-1][same], order[1:][same]
    returned = blocks[earlier] & (ends[earlier] < calls.start_ns[later])  # a call within another follows its begin
    since = np.where(returned, ends[earlier], calls.start_ns[earlier])
    first, second = stream_order(capture)
    free_ns = np.full(len(work), np.iinfo(np.int64).min)
    free_ns[second] = work.end_ns[first]
    empty = launched[free_ns[launched] <= ends[work.launch[launched]]]  # the launch found its stream empty
    found = [
        _part(np.where(returned, done[earlier], begun[earlier]), begun[later], calls.start_ns[later] - since),
        _part(begun[blocking], done[blocking], np.zeros(len(blocking), dtype=np.int64)),
        _part(begun[work.launch[empty]], empty, weight_ns[empty]),
    ]
    for rank in capture.ranks:
        rows = np.flatnonzero(work.rank == rank)
        rows = rows[np.argsort(work.end_ns[rows], kind="stable")]
        mine = np.flatnonzero(blocks & (calls.rank == rank))
        place = np.searchsorted(work.end_ns[rows], ends[mine], side="right") - 1
        waited = (place >= 0) & (work.end_ns[rows[place]] > calls.start_ns[mine])
        found.append(_part(rows[place[waited]], done[mine[waited]], np.zeros(int(waited.sum()), dtype=np.int64)))
    return found
