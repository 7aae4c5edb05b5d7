"""The longest chain of work that had to happen one after another: what to speed up first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import numpy as np

from traces.capture import NONE, Capture
from traces.classify import Classes
from traces.collectives import match_collectives
from traces.edges import edges_of, stream_order
from traces.records import Ints

ROWS_LIMIT = 200_000  # networkx needs about 1 kB and 10 us a node
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
        return CriticalPath(length_us=0.0, by_class={}, first=(), rows=np.empty(0, dtype=np.int64), skipped=why)
    work = capture.work
    weight_ns = work.dur_ns.copy()
    collective = match_collectives(capture, classes)
    members = np.flatnonzero(collective != NONE)
    if len(members):
        least = np.full(int(collective.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(least, collective[members], work.dur_ns[members])
        weight_ns[members] = least[collective[members]]
    graph: nx.DiGraph[object] = nx.DiGraph()
    graph.add_weighted_edges_from(_edges(capture, weight_ns, collective))
    _drop_idle_calls(graph)
    source = "start"
    for node in [node for node, degree in graph.in_degree() if degree == 0]:
        graph.add_edge(source, node, weight=float(weight_ns[node]) if isinstance(node, int) else 0.0)
    graph.add_edges_from(
        (source, row, {"weight": float(weight_ns[row])}) for row in range(len(work)) if row not in graph
    )
    path = nx.dag_longest_path(graph, weight="weight", default_weight=0)
    by_class: Counter[str] = Counter()
    names: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for before, node in pairwise(path):
        time_us = graph[before][node]["weight"] / 1e3
        if not time_us:
            continue
        if isinstance(node, int):
            by_class[classes.labels[classes.index[node]]] += time_us
            names[capture.names[work.name[node]]] += time_us
            count[capture.names[work.name[node]]] += 1
        else:
            by_class["host"] += time_us
    return CriticalPath(
        length_us=sum(by_class.values()),
        by_class=dict(by_class.most_common()),
        first=[OnPath(name=name, count=count[name], time_us=time_us) for name, time_us in names.most_common(top)],
        rows=np.array([node for node in path if isinstance(node, int)], dtype=np.int64),
    )


def _drop_idle_calls(graph: nx.DiGraph[object]) -> None:
    """Leave out host calls that no work waits for."""
    wanted: set[object] = set()
    for node in reversed(list(nx.topological_sort(graph))):
        if isinstance(node, int) or any(after in wanted for after in graph.successors(node)):
            wanted.add(node)
    graph.remove_nodes_from([node for node in graph if node not in wanted])


def _edges(capture: Capture, weight_ns: Ints, collective: Ints) -> list[tuple[object, object, float]]:
    work, calls = capture.work, capture.calls
    dependencies = edges_of(capture)
    found: list[tuple[object, object, float]] = [
        (a, b, float(weight_ns[b]))
        for a, b in zip(dependencies.before.tolist(), dependencies.after.tolist(), strict=True)
    ]
    # Where a kernel begins in the tail of the one before (programmatic dependent launch), its rest comes after that.
    before, after = stream_order(capture)
    tails = (work.start_ns[after] < work.end_ns[before]) & (work.end_ns[after] > work.end_ns[before])
    rest_ns = np.minimum(work.end_ns[after] - work.end_ns[before], weight_ns[after])[tails]
    found += zip(before[tails].tolist(), after[tails].tolist(), rest_ns.astype(float).tolist(), strict=True)
    # The last to arrive starts a collective: what is before one member is before all.
    group: dict[int, list[int]] = {}
    for row in np.flatnonzero(collective != NONE).tolist():
        group.setdefault(int(collective[row]), []).append(row)
    for a, b in zip(dependencies.before.tolist(), dependencies.after.tolist(), strict=True):
        number = int(collective[b])
        if number != NONE and int(collective[a]) == NONE:
            found += [
                (a, other, float(weight_ns[other]))
                for other in group[number] if other != b and work.end_ns[a] <= work.end_ns[other] - weight_ns[other]
            ]  # fmt: skip
    return found + _host_edges(capture, weight_ns) if len(calls) else found


def _host_edges(capture: Capture, weight_ns: Ints) -> list[tuple[object, object, float]]:
    """Host calls in order on their thread, launches to their work, work to the call that waited for it."""
    work, calls = capture.work, capture.calls
    launching = np.zeros(len(calls), dtype=bool)
    launching[work.launch[work.launch != NONE]] = True
    ends = calls.start_ns + calls.dur_ns
    blocks = np.array([BLOCKING in name for name in capture.names])[calls.name]
    # A call that its own work ends within (a copy to pageable memory) blocked as well.
    own = work.launch != NONE
    blocks[work.launch[own][work.end_ns[own] <= ends[work.launch[own]]]] = True
    kept = np.flatnonzero(launching | blocks)
    order = kept[np.lexsort((calls.start_ns[kept], calls.thread[kept], calls.rank[kept]))]
    found: list[tuple[object, object, float]] = []
    for before, after in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        if calls.rank[before] == calls.rank[after] and calls.thread[before] == calls.thread[after]:
            begin = ends[before] if blocks[before] else calls.start_ns[before]
            pause = max(0, int(calls.start_ns[after] - begin))
            found.append((("done" if blocks[before] else "call", before), ("call", after), float(pause)))
    found += [(("call", call), ("done", call), 0.0) for call in np.flatnonzero(blocks).tolist()]
    before, after = stream_order(capture)
    free_ns = np.full(len(work), np.iinfo(np.int64).min)
    free_ns[after] = work.end_ns[before]
    empty = own & (free_ns <= ends[work.launch])
    for row in np.flatnonzero(empty).tolist():
        found.append((("call", int(work.launch[row])), row, float(weight_ns[row])))
    for rank in capture.ranks:
        rows = np.flatnonzero(work.rank == rank)
        rows = rows[np.argsort(work.end_ns[rows], kind="stable")]
        for call in np.flatnonzero(blocks & (calls.rank == rank)).tolist():
            place = int(np.searchsorted(work.end_ns[rows], ends[call], side="right")) - 1
            if place >= 0 and work.end_ns[rows[place]] > calls.start_ns[call]:
                found.append((int(rows[place]), ("done", call), 0.0))
    return found
