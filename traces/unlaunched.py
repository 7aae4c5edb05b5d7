"""Waits across streams that no call tells: of nodes of a graph, of work launched before the trace, and of everything
where the profiler recorded launches but no calls about events."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from traces.capture import NONE, Capture, Category
from traces.records import Floats, Ints

COINCIDENCE = 0.8  # the most that times alone can say
EVENT_CALL = re.compile("EventRecord|StreamWaitEvent")
HALF_SURE_NS = 4_000  # a stream wakes up 1 to 7 us after what it waited for


def unlaunched_waits(capture: Capture) -> tuple[Ints, Ints, Floats]:
    """Rows ``before`` and ``after``, and how sure each edge is, where such work runs on several streams of a rank.

    It was all launched at once, so that no host delays it: what begins later than the work before it on its stream
    ended has waited for something, and the last of other streams' such work to end by then is the best guess.
    The longer the pause in between, the less sure. Memsets clear what the next kernel of their stream counts with:
    nobody else waits for one.
    """
    work, calls = capture.work, capture.calls
    silent = (work.launch == NONE) | (work.graph != NONE) | ~np.isin(work.rank, _telling(capture))
    launched = np.full(len(work), np.iinfo(np.int64).min)
    known = silent & (work.launch != NONE)
    launched[known] = calls.start_ns[work.launch[known]]
    before: list[int] = []
    after: list[int] = []
    for rank in capture.ranks:
        rows = np.flatnonzero(silent & (work.rank == rank))
        if len(np.unique(work.stream[rows])) > 1:
            found = _last_to_end(
                work.stream[rows], work.start_ns[rows], work.end_ns[rows], launched[rows],
                work.category[rows] != Category.MEMSET,
            )  # fmt: skip
            before += rows[found[0]].tolist()
            after += rows[found[1]].tolist()
    first, second = np.array(before, dtype=np.int64), np.array(after, dtype=np.int64)
    pause_ns = work.start_ns[second] - work.end_ns[first]
    return first, second, np.minimum(HALF_SURE_NS / (HALF_SURE_NS + pause_ns), COINCIDENCE)


def _telling(capture: Capture) -> list[int]:
    """Ranks whose trace holds calls that record or await events."""
    about = np.array([EVENT_CALL.search(name) is not None for name in capture.names], dtype=bool)
    ranks = np.unique(capture.calls.rank[about[capture.calls.name]]).tolist() if len(capture.calls) else []
    return sorted({*ranks, *capture.waits.rank.tolist()})


def _last_to_end(
    stream: Ints, start_ns: Ints, end_ns: Ints, launched_ns: Ints, awaited: NDArray[np.bool_]
) -> tuple[list[int], list[int]]:
    """Pairs of places: the last work of another stream to end by the start of the second, which idled until then.

    Only work that is ``awaited`` comes first in a pair.
    """
    by_end = np.argsort(end_ns, kind="stable")
    by_end = by_end[awaited[by_end]]
    until = np.searchsorted(end_ns[by_end], start_ns, side="right")
    streams, ends, order = stream.tolist(), end_ns.tolist(), by_end.tolist()
    free_ns: dict[int, int] = {}
    before, after = [], []
    for place in np.argsort(start_ns, kind="stable").tolist():
        own = streams[place]
        since_ns = max(free_ns.get(own, launched_ns[place]), launched_ns[place])
        at = int(until[place]) - 1
        while at >= 0 and streams[order[at]] == own and ends[order[at]] > since_ns:
            at -= 1
        if at >= 0 and ends[order[at]] > since_ns and streams[order[at]] != own:
            before.append(order[at])
            after.append(place)
        free_ns[own] = max(free_ns.get(own, ends[place]), ends[place])
    return before, after
