"""Pareto fronts: the points that nothing beats in every objective."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the points that no other dominates (all objectives are to be small); equal points all stay.

    >>> front([(1.0, 5.0), (2.0, 2.0), (3.0, 3.0), (5.0, 1.0)])
    [0, 1, 3]
    """
    if not points:
        return []
    # In lexicographic order a point can only be dominated by an earlier one; equal points are one.
    distinct, which = np.unique(np.array(points, dtype=float), axis=0, return_inverse=True)
    kept = np.empty_like(distinct)
    count = 0
    on_front = np.zeros(len(distinct), dtype=bool)
    for i, point in enumerate(distinct):
        if not (kept[:count] <= point).all(axis=1).any():
            kept[count] = point
            count += 1
            on_front[i] = True
    return np.flatnonzero(on_front[which.ravel()]).tolist()
