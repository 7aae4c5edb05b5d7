"""Where experts live: in order, or replicated and balanced by their expected load."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Experts by rank; an expert that stands in several slots shares its rows evenly among them."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def shares(self) -> Floats:
        """Share of each expert's rows (rows of the array) that each rank (columns) gets."""
        table = np.zeros((1 + max(expert for rank in self.ranks for expert in rank), len(self.ranks)))
        for number, rank in enumerate(self.ranks):
            np.add.at(table, (list(rank), number), 1.0)
        return np.asarray(table / table.sum(axis=1, keepdims=True))

    def rows_by_rank(self, rows: NDArray[np.floating]) -> list[Floats]:
        """Rows of each slot, rank by rank, for rows of each expert; whole rows stay whole."""
        copies = np.bincount([expert for rank in self.ranks for expert in rank], minlength=len(rows))
        seen = np.zeros(len(rows), dtype=np.int64)
        found = []
        for rank in self.ranks:
            mine = []
            for expert in rank:
                if copies[expert] == 1:
                    mine.append(rows[expert])
                else:
                    first = np.round(rows[expert] * seen[expert] / copies[expert])
                    seen[expert] += 1
                    mine.append(np.round(rows[expert] * seen[expert] / copies[expert]) - first)
            found.append(np.asarray(mine, dtype=np.float64))
        return found


@lru_cache(maxsize=256)
def contiguous_placement(experts: int, ranks: int) -> Placement:
    """An equal run of experts on each rank.

    >>> contiguous_placement(4, 2).ranks
    ((0, 1), (2, 3))
    """
    each = experts // ranks
    return Placement(ranks=tuple(tuple(range(rank * each, (rank + 1) * each)) for rank in range(ranks)))


@lru_cache(maxsize=1024)
def balanced_placement(expected: tuple[float, ...], replicas: int, ranks: int) -> Placement:
    """Greedy: each copy goes to the expert whose copies carry most; then, heaviest first, to the lightest rank.

    After the public description of DeepSeek's load balancer (arXiv 2412.19437, section 3.4: redundant experts).
    Ranks hold equal numbers of slots, and two copies of an expert only where no other rank has room.

    >>> balanced_placement((4.0, 1.0, 1.0, 1.0), 2, 2).ranks
    ((0, 0, 3), (0, 1, 2))
    """
    copies = [1] * len(expected)
    heap = [(-load, expert) for expert, load in enumerate(expected)]
    heapq.heapify(heap)
    for _ in range(replicas):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        heapq.heappush(heap, (-expected[expert] / copies[expert], expert))
    slots = sorted(
        ((expected[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)),
        key=lambda slot: (-slot[0], slot[1]),
    )
    room = len(slots) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    carried = [0.0] * ranks
    for load, expert in slots:
        open_ = [rank for rank in range(ranks) if len(held[rank]) < room]
        rank = min(open_, key=lambda r: (expert in held[r], carried[r], r))
        held[rank].append(expert)
        carried[rank] += load
    return Placement(ranks=tuple(tuple(sorted(mine)) for mine in held))
