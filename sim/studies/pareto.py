"""Pareto fronts: the points that nothing beats in every objective."""

from __future__ import annotations

from collections.abc import Sequence


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the points that no other dominates (all objectives are to be small); equal points all stay.

    >>> front([(1.0, 5.0), (2.0, 2.0), (3.0, 3.0), (5.0, 1.0)])
    [0, 1, 3]
    """
    return [
        i
        for i, point in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, point, strict=True)) and other != point
            for j, other in enumerate(points)
            if j != i
        )
    ]
