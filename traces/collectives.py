"""Which communication kernels of several ranks are one collective, and who waited for whom."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
import numpy as np

from traces.capture import NONE, Capture
from traces.classify import COMMUNICATION, Classes
from traces.records import Ints

ALIGNED_SHARE = 0.5  # so many of a group's collectives meet in time where its ranks' clocks agree
MANY_RANKS = 64  # beyond them, only ranks next to one another are tried as a group

Queue = Mapping[int, Sequence[int]]  # by rank, rows of one operation in the order that they ran


def match_collectives(capture: Capture, classes: Classes) -> Ints:
    """For each row of work, the number of its collective over ranks, or -1.

    Ranks run the collectives of one group in the same order (NCCL requires it): the n-th of a group and
    operation on one rank is the n-th on the others. Where ranks disagree on how many there were (a window cut
    them), the first or the last ones are matched, whichever meet in time more often. The group is what the kernel's
    arguments say, else the only one that ``distributedInfo.pg_config`` gives its rank, else the ranks whose kernels
    meet. Kernels whose intervals do not meet are no collective, unless those of a stated group hardly ever do: then the
    clocks of its files differ.
    """
    work = capture.work
    rows = np.flatnonzero(classes.is_class(COMMUNICATION))
    configured = {rank: _configured(capture.metadata.get(rank, {})) for rank in capture.ranks}
    queues: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in rows.tolist():  # work is ordered by rank and start
        message = capture.collectives[work.collective[row]] if work.collective[row] != NONE else None
        rank = int(work.rank[row])
        groups = configured[rank]
        if message is not None and (message.group or message.ranks):
            group = f"{message.group} {message.ranks or groups.get(message.group, '')}"
        else:
            group = next(iter(groups.values())) if len(set(groups.values())) == 1 else ""
        both = message is not None and message.operation == "send"  # a send and its receive, under names of their own
        queues[group, "send" if both else capture.names[work.name[row]]][rank].append(row)
    number = np.full(len(work), NONE, dtype=np.int64)
    count = 0
    for (group, _), by_rank in queues.items():
        for members in _matched(capture, by_rank, stated=bool(group)):
            number[members] = count
            count += 1
    return number


def _configured(known: Mapping[str, Any]) -> dict[str, str]:
    """Ranks of the process groups of a file, by name; of those with more than one rank."""
    info = known.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    found = {}
    for group in groups if isinstance(groups, list) else []:
        if not isinstance(group, dict):
            continue
        ranks = group.get("ranks")
        if isinstance(ranks, str):
            try:
                ranks = json.loads(ranks)
            except ValueError:
                continue
        if isinstance(ranks, list) and len(ranks) > 1:
            found[str(group.get("pg_name", ""))] = str(ranks)
    return found


def _matched(capture: Capture, by_rank: Queue, *, stated: bool) -> list[list[int]]:
    """Rows of each collective of one operation."""
    if len(by_rank) < 2:
        return []
    members, met = _in_order(capture, by_rank)
    if met.mean() >= ALIGNED_SHARE:
        return list(members[met].tolist())
    parts = _meeting(capture, by_rank)
    if len(parts) > 1 or not stated:
        found = [_in_order(capture, {rank: by_rank[rank] for rank in part}) for part in parts if len(part) > 1]
        together = [members[met] for members, met in found]
        if together or not stated:
            return [row for some in together for row in some.tolist()]
    return list(members.tolist())


def _in_order(capture: Capture, by_rank: Queue) -> tuple[Ints, Any]:
    """The n-th rows of all ranks, a line a collective, counted from the end or from the start; which lines meet."""
    work = capture.work
    common = min(len(mine) for mine in by_rank.values())
    last = np.array([mine[len(mine) - common :] for mine in by_rank.values()]).T
    first = np.array([mine[:common] for mine in by_rank.values()]).T
    meets = [work.start_ns[rows].max(axis=1) <= work.end_ns[rows].min(axis=1) for rows in (last, first)]
    return (last, meets[0]) if meets[0].sum() >= meets[1].sum() else (first, meets[1])


def _meeting(capture: Capture, by_rank: Queue) -> list[list[int]]:
    """Ranks in groups whose kernels meet in time."""
    ranks = sorted(by_rank)
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(ranks)
    for place, one in enumerate(ranks):
        others = ranks[place + 1 :] if len(ranks) <= MANY_RANKS else ranks[place + 1 : place + 2]
        for other in others:
            _, met = _in_order(capture, {one: by_rank[one], other: by_rank[other]})
            if met.mean() >= ALIGNED_SHARE:
                graph.add_edge(one, other)
    return [sorted(part) for part in nx.connected_components(graph)]


def waiting_ns(capture: Capture, collective: Ints) -> Ints:
    """How long each row waited inside its collective for the last rank to arrive (0 outside collectives)."""
    work = capture.work
    waited = np.zeros(len(work), dtype=np.int64)
    rows = np.flatnonzero(collective != NONE)
    if not len(rows):
        return waited
    last_ns = np.full(int(collective.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last_ns, collective[rows], work.start_ns[rows])
    waited[rows] = np.clip(last_ns[collective[rows]] - work.start_ns[rows], 0, work.dur_ns[rows])
    return waited
