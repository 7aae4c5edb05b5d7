"""Which real kernel is which predicted one: the alignment of two sequences that has most in common."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sim.compare.roles import family_of
from sim.compare.sides import StepKernel
from traces.classify import COMMUNICATION

# What a pair is worth: of one role, of one class where a name says no more, and up to CLOSE for like durations.
SAME_ROLE, SAME_CLASS, CLOSE = 3.0, 1.5, 0.9

Pairs = list[tuple[int, int]]


def align(real: Sequence[StepKernel], predicted: Sequence[StepKernel]) -> tuple[Pairs, float]:
    """Pairs of places in both sequences, each in order, and what they are worth together.

    Communication is aligned by itself: beside computation its order is a matter of microseconds.
    """
    pairs: Pairs = []
    worth = 0.0
    for communication in (False, True):
        ours, theirs = (
            [at for at, kernel in enumerate(side) if (kernel.cls == COMMUNICATION) == communication]
            for side in (real, predicted)
        )
        found, value = _best([real[at] for at in ours], [predicted[at] for at in theirs])
        pairs += [(ours[a], theirs[b]) for a, b in found]
        worth += value
    return sorted(pairs), worth


def value_of(real: StepKernel, predicted: StepKernel) -> float:
    """What it is worth to take the two for one; 0: they are not."""
    if family_of(real.cls) != family_of(predicted.cls):
        return 0.0
    if real.role and predicted.role:
        if real.role != predicted.role:
            return 0.0
        base = SAME_ROLE
    else:
        base = SAME_ROLE if real.role == predicted.role and real.cls == predicted.cls else SAME_CLASS
    apart = abs(math.log(max(real.duration_us, 0.1) / max(predicted.duration_us, 0.1)))
    return base + CLOSE * math.exp(-apart)


def _best(real: Sequence[StepKernel], predicted: Sequence[StepKernel]) -> tuple[Pairs, float]:
    """Dynamic programming over prefixes of both."""
    keys: dict[tuple[str, str, float], int] = {}

    def kind(kernel: StepKernel) -> int:
        return keys.setdefault((kernel.cls, kernel.role, round(kernel.duration_us, 1)), len(keys))

    rows, columns = [kind(k) for k in real], [kind(k) for k in predicted]
    of_row, of_column = dict(zip(rows, real, strict=True)), dict(zip(columns, predicted, strict=True))
    values = {(a, b): value_of(one, other) for a, one in of_row.items() for b, other in of_column.items()}
    total = np.zeros((len(real) + 1, len(predicted) + 1))
    for i, a in enumerate(rows):
        pair = np.array([values[a, b] for b in columns])
        # Without this row, or with it on any column: then the best so far from the left.
        with_row = np.where(pair > 0.0, total[i, :-1] + pair, 0.0)
        total[i + 1, 1:] = np.maximum.accumulate(np.maximum(total[i, 1:], with_row))
    pairs: Pairs = []
    i, j = len(real), len(predicted)
    while i and j:
        if total[i, j] == total[i - 1, j]:
            i -= 1
        elif total[i, j] == total[i, j - 1]:
            j -= 1
        else:
            pairs.append((i - 1, j - 1))
            i, j = i - 1, j - 1
    return pairs[::-1], float(total[-1, -1])
