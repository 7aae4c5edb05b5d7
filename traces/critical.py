"""The longest chain of work that had to happen one after another: what to speed up first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.capture import NONE, Capture
from traces.classify import Classes
from traces.collectives import match_collectives
from traces.edges import edges_of, stream_order
from traces.records import Ints

ROWS_LIMIT = 2_000_000  # a few hundred bytes and microseconds a row
BLOCKING = "Synchronize"


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
    before, after, cost_ns = _edges(capture, weight_ns, collective)
    first_ns = np.zeros(len(work) + 2 * len(capture.calls), dtype=np.int64)
    first_ns[: len(work)] = weight_ns
    path = _longest(first_ns, before, after, cost_ns, ends=len(work))
    if path is None:
        return _no_path("its times contradict one another: some work waited for what came after it")
    nodes, time_ns = path
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


def _longest(first_ns: Ints, before: Ints, after: Ints, cost_ns: Ints, *, ends: int) -> tuple[Ints, Ints] | None:
    """Nodes of the longest path to one of the first ``ends`` and what each adds; None where edges go in a circle.

    A node that nothing comes before adds its ``first_ns``, others what the edge to them costs. Most nodes have one edge
    before them and choose nothing: sums along such chains are taken at once, and only where edges meet is a path
    searched.
    """
    nodes = len(first_ns)
    edges_in = np.bincount(after, minlength=nodes)
    parent, total_ns = np.arange(nodes), np.zeros(nodes, dtype=np.int64)
    single = edges_in[after] == 1
    parent[after[single]], total_ns[after[single]] = before[single], cost_ns[single]
    head = parent.copy()  # of each node's chain: jumps double until all have arrived
    for _ in range(nodes.bit_length()):
        further = head[head]
        if (further == head).all():
            break
        total_ns += total_ns[head]
        head = further
    if (edges_in[head] == 1).any():
        return None
    meets = np.flatnonzero(~single)
    heads = np.flatnonzero(edges_in != 1)
    number = np.empty(nodes, dtype=np.int64)
    number[heads] = np.arange(len(heads))
    found = _between_heads(
        first_ns[heads], number[head[before[meets]]], number[after[meets]], total_ns[before[meets]] + cost_ns[meets]
    )
    if found is None:
        return None
    length_ns, best = found
    length_ns = length_ns[number[head]] + total_ns
    chosen = parent.copy()  # the node before each on its longest path; itself where there is none
    entered = heads[best != NONE]
    chosen[entered] = before[meets[best[best != NONE]]]
    way = memoryview(chosen.data)  # single items of an array are slow
    node = int(np.argmax(length_ns[:ends]))
    path = [node]
    while (earlier := way[node]) != node:
        path.append(earlier)
        node = earlier
    rows = np.array(path[::-1], dtype=np.int64)
    return rows, np.diff(length_ns[rows], prepend=0)


def _between_heads(first_ns: Ints, before: Ints, after: Ints, cost_ns: Ints) -> tuple[Ints, Ints] | None:
    """Longest length to each node, and the edge (-1: none) that it ends with; None where edges go in a circle.

    In plain lists: a graph library takes ten times as long for the same pass.
    """
    order = np.argsort(before, kind="stable")
    targets, costs, edges = after[order].tolist(), cost_ns[order].tolist(), order.tolist()
    begins = np.searchsorted(before[order], np.arange(len(first_ns) + 1)).tolist()
    left = np.bincount(after, minlength=len(first_ns)).tolist()
    ready = [node for node, count in enumerate(left) if not count]
    length, best = [NONE] * len(left), [NONE] * len(left)
    for node in ready:
        length[node] = int(first_ns[node])
    for node in ready:  # which grows
        reached = length[node]
        for edge in range(begins[node], begins[node + 1]):
            target = targets[edge]
            if reached + costs[edge] > length[target]:
                length[target], best[target] = reached + costs[edge], edges[edge]
            left[target] -= 1
            if not left[target]:
                ready.append(target)
    if len(ready) < len(left):
        return None
    return np.array(length, dtype=np.int64), np.array(best, dtype=np.int64)


def _edges(capture: Capture, weight_ns: Ints, collective: Ints) -> tuple[Ints, Ints, Ints]:
    """Edges as columns: from, to, what the latter costs then. Rows of work first, then calls begun, then calls done."""
    work, calls = capture.work, capture.calls
    dependencies = edges_of(capture)
    before, after = dependencies.before, dependencies.after
    parts = [(before, after, weight_ns[after])]
    # Where a kernel begins in the tail of the one before (programmatic dependent launch), its rest comes after that.
    first, second = stream_order(capture)
    tails = (work.start_ns[second] < work.end_ns[first]) & (work.end_ns[second] > work.end_ns[first])
    rest_ns = np.minimum(work.end_ns[second] - work.end_ns[first], weight_ns[second])
    parts.append((first[tails], second[tails], rest_ns[tails]))
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
        parts.append((first, second, weight_ns[second]))
    if len(calls):
        parts += _host_edges(capture, weight_ns)
    first, second, cost = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return first, second, cost


def _host_edges(capture: Capture, weight_ns: Ints) -> list[tuple[Ints, Ints, Ints]]:
    """Host calls in order on their thread, launches to their work, work to the call that waited for it."""
    work, calls = capture.work, capture.calls
    begun, done = len(work), len(work) + len(calls)
    launched = np.flatnonzero(work.launch != NONE)
    launching = np.zeros(len(calls), dtype=bool)
    launching[work.launch[launched]] = True
    ends = calls.start_ns + calls.dur_ns
    blocks = np.array([BLOCKING in name for name in capture.names])[calls.name]
    # A call that its own work ends within (a copy to pageable memory) blocked as well.
    blocks[work.launch[launched][work.end_ns[launched] <= ends[work.launch[launched]]]] = True
    kept = np.flatnonzero(launching | blocks)
    order = kept[np.lexsort((calls.start_ns[kept], calls.thread[kept], calls.rank[kept]))]
    same = (calls.rank[order][1:] == calls.rank[order][:-1]) & (calls.thread[order][1:] == calls.thread[order][:-1])
    earlier, later = order[:-1][same], order[1:][same]
    since = np.where(blocks[earlier], ends[earlier], calls.start_ns[earlier])
    blocking = np.flatnonzero(blocks)
    first, second = stream_order(capture)
    free_ns = np.full(len(work), np.iinfo(np.int64).min)
    free_ns[second] = work.end_ns[first]
    empty = launched[free_ns[launched] <= ends[work.launch[launched]]]  # the launch found its stream empty
    found = [
        (np.where(blocks[earlier], done, begun) + earlier, begun + later, np.maximum(calls.start_ns[later] - since, 0)),
        (begun + blocking, done + blocking, np.zeros(len(blocking), dtype=np.int64)),
        (begun + work.launch[empty], empty, weight_ns[empty]),
    ]
    for rank in capture.ranks:
        rows = np.flatnonzero(work.rank == rank)
        rows = rows[np.argsort(work.end_ns[rows], kind="stable")]
        mine = np.flatnonzero(blocks & (calls.rank == rank))
        place = np.searchsorted(work.end_ns[rows], ends[mine], side="right") - 1
        waited = (place >= 0) & (work.end_ns[rows[place]] > calls.start_ns[mine])
        found.append((rows[place[waited]], done + mine[waited], np.zeros(int(waited.sum()), dtype=np.int64)))
    return found
