"""Long generations by buckets of context: decode steps of nearly equal context run as the middle step of their bucket.

A decode step over c tokens takes time and energy that grow with c, at most in proportion to it (weights and
launches do not grow). Steps within +-1/128 of a common context therefore differ from it by less than 0.8 % each,
and those below and above cancel. The bound that a run states is tighter: it is computed from the steps that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# Widest group of contexts that share one step, as a share of the context; generations up to this many steps are exact.
WIDTH = 1.0 / 64.0
EXACT_STEPS = 128


def bucket_contexts(first: int, steps: int) -> list[int]:
    """The context that each of ``steps`` decode steps runs with, the first of which has ``first`` tokens cached.

    >>> bucket_contexts(100, 4), bucket_contexts(320, 10)
    ([100, 101, 102, 103], [322, 322, 322, 322, 322, 327, 327, 327, 327, 327])
    """
    contexts: list[int] = []
    start, end = first, first + steps
    while start < end:
        size = min(max(1, int(start * WIDTH)), end - start)
        size -= 1 - size % 2 if size > 1 else 0  # odd: the middle is a step of the group
        contexts += [start + size // 2] * size
        start += size
    return contexts


def error_bound(costs: Sequence[float], counts: Sequence[int], total: float) -> float:
    """Largest relative error of ``total`` when the cost of each bucket's step stands for ``counts`` steps around it.

    Costs grow with the context, so the steps of one half of a group lie between the step that ran and its neighbour;
    the two halves err in opposite directions, so that the larger one bounds both.

    >>> round(error_bound([10.0, 10.2, 10.4], [3, 3, 3], 100.0), 6)
    0.006
    """
    rises = [abs(b - a) for a, b in pairwise(costs)]
    around = zip([0.0, *rises], [*rises, 0.0], strict=True)
    halves = [count // 2 * max(rise) for count, rise in zip(counts, around, strict=True)]
    return sum(halves) / total
