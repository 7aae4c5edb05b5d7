"""Unions of time intervals: what was busy, counted once."""

from __future__ import annotations

from typing import Any

import numpy as np

from traces.records import Ints


def union(start: Any, end: Any) -> tuple[Ints, Ints]:
    """Disjoint, sorted intervals that cover what the given ones cover; empty ones vanish.

    >>> [part.tolist() for part in union([5, 0, 2, 9], [7, 3, 4, 9])]
    [[0, 5], [4, 7]]
    """
    start, end = np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64)
    start, end = start[end > start], end[end > start]
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    if not len(start):
        return start, end
    fresh = np.append(True, start[1:] > end[:-1])
    return start[fresh], end[np.append(fresh[1:], True)]


def length(start: Any, end: Any) -> int:
    """Length of the union.

    >>> length([5, 0, 2], [7, 3, 4])
    6
    """
    begins, ends = union(start, end)
    return int((ends - begins).sum())


def gaps(start: Any, end: Any) -> tuple[Ints, Ints]:
    """What the union leaves free between its first start and its last end.

    >>> [part.tolist() for part in gaps([5, 0, 2], [7, 3, 4])]
    [[4], [5]]
    """
    begins, ends = union(start, end)
    return ends[:-1], begins[1:]
