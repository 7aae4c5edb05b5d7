"""What part of a step's time is each kernel's own, where kernels run side by side: parts and pauses sum to the step."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from traces.records import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTime:
    """Of each kernel: time that counts as its own, and the pause of the whole GPU that ended with it.

    ``after``: the pause behind the last kernel. All sum to the length of the step.
    """

    own: Floats
    pause: Floats
    after: float


def own_time(start: Floats, end: Floats, rank: Ints, begin: float, stop: float) -> OwnTime:
    """Share out the time from ``begin`` to ``stop``: each moment to the running kernel of the lowest ``rank``.

    Of equal ranks the one that started first has it.

    >>> shared = own_time(np.array([1.0, 2.0]), np.array([4.0, 6.0]), np.array([0, 1]), 0.0, 7.0)
    >>> shared.own.tolist(), shared.pause.tolist(), shared.after
    ([3.0, 2.0], [1.0, 0.0], 1.0)
    """
    own, pause = np.zeros(len(start)), np.zeros(len(start))
    order = np.argsort(start, kind="stable").tolist()
    start, end = np.clip(start, begin, stop), np.clip(end, begin, stop)
    running: list[tuple[int, float, int]] = []
    now, at = begin, 0
    while at < len(order) or running:
        if not running:
            first = order[at]
            pause[first] += start[first] - now
            now = float(start[first])
        while at < len(order) and start[order[at]] <= now:
            row = order[at]
            heapq.heappush(running, (int(rank[row]), float(start[row]), row))
            at += 1
        row = running[0][2]
        if end[row] <= now:
            heapq.heappop(running)
            continue
        until = float(end[row]) if at == len(order) else min(float(end[row]), float(start[order[at]]))
        own[row] += until - now
        now = until
    return OwnTime(own=own, pause=pause, after=stop - now)
