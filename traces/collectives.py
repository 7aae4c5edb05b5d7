"""Which communication kernels of several ranks are one collective, and who waited for whom."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import networkx as nx
import numpy as np

from traces.capture import NONE, Capture
from traces.classify import COMMUNICATION, Classes
from traces.records import Ints

ALIGNED_SHARE = 0.5  # so many of a group's collectives meet in time where its ranks' clocks agree
MANY_RANKS = 64  # beyond them, only ranks next to one another are tried as a group
# Ranks leave a collective together: where their ends lie so much further apart than a collective of some of them has
# them, it was several at once. Ends of one differ by up to 50 us (eight ranks of a public A100 trace).
APART_NS, APART_SHARE, APART_TIMES = 1_000, 0.02, 4
PAIRED_WITHIN = 8  # rows by their ends, among which the other half of a transfer is looked for
RANKS_LIMIT = 1 << 16
SEND, TRANSFERS = "send", {"send", "recv", "isend", "irecv", "receive"}
SEND_KERNEL = re.compile("send_?recv|ncclSend|ncclRecv", re.IGNORECASE)

Queue = Mapping[int, Sequence[int]]  # by rank, rows of one operation in the order that they ran
Groups = Sequence[frozenset[int]]  # of ranks, as files name them, the largest first


def match_collectives(capture: Capture, classes: Classes) -> Ints:
    """For each row of work, the number of its collective over ranks, or -1.

    Ranks run the collectives of one group in the same order (NCCL requires it): the n-th of a group and
    operation on one rank is the n-th on the others. Where ranks disagree on how many there were (a window cut
    them), the first or the last ones are matched, whichever meet in time more often. The group is what the kernel's
    arguments say, else the ones that ``distributedInfo.pg_config`` gives its rank, told apart by who leaves together,
    else the ranks whose kernels meet. Kernels whose intervals do not meet are no collective, unless those of a stated
    group hardly ever do: then the clocks of its files differ. A send and a receive are one where both end together.
    """
    work = capture.work
    rows = np.flatnonzero(classes.is_class(COMMUNICATION))
    configured = {rank: _configured(capture, rank) for rank in capture.ranks}
    queues: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in rows.tolist():  # work is ordered by rank and start
        message = capture.collectives[work.collective[row]] if work.collective[row] != NONE else None
        rank = int(work.rank[row])
        groups = configured[rank]
        if message is not None and (message.group or message.ranks):
            ranks = message.ranks if message.ranks.strip("[] ") else ""
            group = f"{message.group} {ranks or groups.get(message.group, '')}"
        else:
            group = next(iter(groups.values())) if len(set(groups.values())) == 1 else ""
        both = message is not None and message.operation in TRANSFERS  # under names of their own in ours
        queues[group, SEND if both else capture.names[work.name[row]]][rank].append(row)
    stated = {frozenset(json.loads(ranks)) for groups in configured.values() for ranks in groups.values()}
    known = sorted({group & set(capture.ranks) for group in stated}, key=lambda group: (-len(group), sorted(group)))
    number = np.full(len(work), NONE, dtype=np.int64)
    count = 0
    mates: set[tuple[int, int]] = set()  # two ranks of a smaller group: they split layers, and send each other nothing
    for (group, name), by_rank in sorted(queues.items(), key=lambda queue: _is_transfer(queue[0][1])):
        matched = _matched(capture, by_rank, known, stated=bool(group), mates=mates if _is_transfer(name) else None)
        for members in matched:
            number[members] = count
            count += 1
        if not _is_transfer(name):
            parts = {tuple(sorted(work.rank[members].tolist())) for members in matched}
            mates |= {pair for part in parts if len(part) < len(capture.ranks) for pair in combinations(part, 2)}
    return number


def _is_transfer(name: str) -> bool:
    return name == SEND or SEND_KERNEL.search(name) is not None


def _configured(capture: Capture, rank: int) -> dict[str, str]:
    """Ranks of the process groups that a rank's file names, by name; of those with more than one rank.

    PyTorch leaves out the ranks of a group of all.
    """
    info = capture.metadata.get(rank, {}).get("distributedInfo")
    if not isinstance(info, dict):
        return {}
    groups = info.get("pg_config")
    if isinstance(groups, str):
        groups = _parsed(groups)
    found = {}
    for group in groups if isinstance(groups, list) else []:
        if not isinstance(group, dict):
            continue
        ranks = group.get("ranks")
        if isinstance(ranks, str):
            ranks = _parsed(ranks)
        if ranks == [] and type(world := info.get("world_size")) is int and world <= RANKS_LIMIT:
            ranks = list(range(world))
        if isinstance(ranks, list) and len(ranks) > 1 and all(type(one) is int for one in ranks):
            found[str(group.get("pg_name", ""))] = str(ranks)
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _matched(
    capture: Capture, by_rank: Queue, known: Groups, *, stated: bool, mates: set[tuple[int, int]] | None
) -> list[list[int]]:
    """Rows of each collective of one operation."""
    if len(by_rank) < 2:
        return []
    if not stated and len(by_rank) > 2:
        apart = _told_apart(capture, by_rank, known)
        halves = mates is not None and min(map(len, apart), default=0) <= 2  # of transfers, not of an all-to-all
        if not halves and 2 * sum(map(len, apart)) >= sum(map(len, by_rank.values())):
            return apart
    members, met = _in_order(capture, by_rank)
    if met.mean() >= ALIGNED_SHARE:
        return list(members[met].tolist())
    if mates is not None and len(by_rank) > 2 and (pairs := _ending_in_pairs(capture, by_rank, known, mates)):
        return pairs
    parts = _meeting(capture, by_rank)
    if len(parts) > 1 or not stated:
        found = [_in_order(capture, {rank: by_rank[rank] for rank in part}) for part in parts if len(part) > 1]
        together = [members[met] for members, met in found]
        if together or not stated:
            return [row for some in together for row in some.tolist()]
    return list(members.tolist())


def _told_apart(capture: Capture, by_rank: Queue, known: Groups) -> list[list[int]]:
    """The collectives of ranks that ran equally many, by who left together."""
    found = []
    for count in {len(mine) for mine in by_rank.values()}:  # stages of a pipeline differ
        lines = np.array([mine for mine in by_rank.values() if len(mine) == count]).T
        found += [part for line in lines.tolist() for part in _leaving_together(capture, line, known)]
    return found


def _leaving_together(capture: Capture, rows: list[int], known: Groups) -> list[list[int]]:
    """The collectives that the n-th kernels of several ranks were: those that end together, of a known group."""
    work = capture.work
    rows = sorted(rows, key=lambda row: work.end_ns[row])
    gaps = np.diff(work.end_ns[rows])
    cuts = np.flatnonzero(gaps > max(APART_NS, APART_SHARE * float(work.dur_ns[rows].min())))
    parts = [part.tolist() for part in np.split(np.array(rows), cuts + 1)]
    spread_ns = max(int(work.end_ns[part].max() - work.end_ns[part].min()) for part in parts)
    # Where somebody leaves alone, or groups are no closer than their members, clocks differ and nothing is told apart.
    if len(cuts) and (min(map(len, parts)) < 2 or gaps[cuts].min() < APART_TIMES * spread_ns):
        parts = [rows]
    found = []
    for part in parts:
        of_rank = {int(work.rank[row]): row for row in part}
        found += [
            [of_rank.pop(rank) for rank in sorted(group)]
            for group in known or [frozenset(of_rank)]
            if group <= of_rank.keys()
        ]
    return [some for some in found if len(some) > 1 and work.start_ns[some].max() <= work.end_ns[some].min()]


def _ending_in_pairs(capture: Capture, by_rank: Queue, known: Groups, mates: set[tuple[int, int]]) -> list[list[int]]:
    """A send and its receive: rows of two ranks that meet, the closest ends first.

    Ranks of one known group come before others, and ``mates`` last.
    """
    work = capture.work
    rows = np.concatenate([np.asarray(mine) for mine in by_rank.values()])
    rows = rows[np.argsort(work.end_ns[rows], kind="stable")]
    found = []
    for step in range(1, min(PAIRED_WITHIN, len(rows))):
        first, second = rows[:-step], rows[step:]
        meets = (work.rank[first] != work.rank[second]) & (work.start_ns[second] <= work.end_ns[first])
        found.append(np.stack([first[meets], second[meets]]))
    pairs = np.concatenate(found, axis=1).T.tolist()

    partners = {pair for group in known if len(group) < len(capture.ranks) for pair in combinations(sorted(group), 2)}

    def unlikely(pair: list[int]) -> tuple[bool, bool, int]:
        low, high = sorted(work.rank[pair].tolist())
        return (low, high) in mates, (low, high) not in partners, int(work.end_ns[pair[1]] - work.end_ns[pair[0]])

    taken: set[int] = set()
    best = []
    for one, other in sorted(pairs, key=unlikely):
        if one not in taken and other not in taken:
            taken |= {one, other}
            best.append([one, other])
    return best


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
