"""The rows and contexts at which parts of a step are run; between them their cost is linear."""

from __future__ import annotations

import math
from bisect import bisect_left

from hardware.laws.adapters import DOWN_ROWS, FEW_TOKENS, UP_ROWS
from workloads.families.ragged_groups import Group

FEW_TILES = 8  # of keys: another one more shows
TILE = 128  # queries, and keys, of a tile of flash attention
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


def bracketing_parts(tokens: int, ranks: int) -> tuple[int, int]:
    """:func:`bracketing_sizes` of a prompt that ``ranks`` share in two parts each: edges of their tiles of queries and
    of the keys that a part sees on average as well.

    >>> bracketing_parts(2468, 2), bracketing_parts(2464, 2)
    ((2460, 2496), (2460, 2496))
    """
    low, high = bracketing_sizes(tokens)
    if low == high:
        return low, high
    each = 2 * ranks
    part = tokens // each
    tile, keys = (part - 1) // TILE, (-(-(each + 1) * part // 2) - 1) // TILE
    first = max(-(-low // each), tile * TILE + 1, 2 * TILE * keys // (each + 1) + 1)
    last = min(high // each, (tile + 1) * TILE, 2 * TILE * (keys + 1) // (each + 1))
    return each * first, each * last


def tile_of_tokens(tokens: int) -> int:
    """The most tokens of a step whose adapters are launched alike: whole tiles of them, with the splits of so many.

    >>> [tile_of_tokens(tokens) for tokens in (1, 33, 100, 127, 128, 129, 300)]
    [32, 64, 127, 127, 128, 192, 320]
    """
    if tokens < FEW_TOKENS:
        return min(-(-tokens // DOWN_ROWS) * DOWN_ROWS, FEW_TOKENS - 1)
    return -(-tokens // UP_ROWS) * UP_ROWS


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


def cached_ends(cached: int, ranks: int) -> tuple[int, int]:
    """:func:`context_ends` of what ``ranks`` have cached of a prompt, for its new tokens: edges of tiles where a rank
    has few.

    >>> cached_ends(777, 1), cached_ends(777, 2)
    ((724, 861), (769, 1024))
    """
    tile = (-(-cached // ranks) - 1) // TILE
    if ranks == 1 or not 0 <= tile < FEW_TILES:
        return context_ends(cached)
    return ranks * tile * TILE + 1, ranks * (tile + 1) * TILE
