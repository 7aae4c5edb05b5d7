"""Single values of a trace as columns hold them: whole numbers of 64 bits, ``NONE`` for what is none."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from traces.capture import NONE

TIME_LIMIT_NS = 1 << 61  # sums and differences of two such times are numbers of 64 bits
WHOLE_LIMIT = 1 << 62


def whole(value: Any) -> int:
    """An integer, however it was written; ``NONE`` where there is none.

    >>> whole("7"), whole(7.0), whole("stream"), whole(float("inf")), whole(None)
    (7, 7, -1, -1, -1)
    """
    if type(value) is int:
        return value if -WHOLE_LIMIT < value < WHOLE_LIMIT else value & 0xFFFFFFFFFFFF
    try:
        return int(float(value)) if abs(float(value)) < WHOLE_LIMIT else NONE
    except (TypeError, ValueError, OverflowError):
        return NONE


@lru_cache(maxsize=1 << 16)
def product(*sizes: Any) -> int:
    """Blocks of a grid, threads of a block; ``NONE`` where a size is no number.

    >>> product(2, "3", 4), product(2, None, 1), product(2**31, 2**31, 2**31)
    (24, -1, -1)
    """
    found = [whole(size) for size in sizes]
    if not found or NONE in found:
        return NONE
    count = math.prod(max(1, number) for number in found)
    return count if count < WHOLE_LIMIT else NONE
