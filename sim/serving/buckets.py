"""The rows and contexts at which parts of a step are run; between them their cost is linear."""

from __future__ import annotations

import math
from bisect import bisect_left

from workloads.families.ragged_attention import Group

CONTEXTS = [0, *(round(128 * 2 ** (i / 4)) for i in range(60))]


def chunk_group(tokens: int, context: int) -> Group:
    """New tokens of one sequence, ``context`` in all."""
    return Group(phase="prefill" if tokens > 1 else "decode", sequences=1, new_tokens=tokens, context=context)


def bracketing_sizes(tokens: int) -> tuple[int, int]:
    """The sizes between which the cost of ``tokens`` rows is linear: tile edges, ever further apart.

    >>> bracketing_sizes(37), bracketing_sizes(300), bracketing_sizes(2100)
    ((37, 37), (289, 304), (2049, 2112))
    """
    if tokens <= 256:
        return tokens, tokens
    width = 16 if tokens <= 1024 else 64
    low = (tokens - 1) // width * width + 1
    return low, low + width - 1


def context_ends(context: float) -> tuple[int, int]:
    """The contexts between which the cost of attention is linear.

    >>> context_ends(300)
    (256, 304)
    """
    at = bisect_left(CONTEXTS, context)
    if at >= len(CONTEXTS) or CONTEXTS[at] == context:
        exact = math.ceil(context)
        return exact, exact
    return (CONTEXTS[at - 1] if at else 0), CONTEXTS[at]
