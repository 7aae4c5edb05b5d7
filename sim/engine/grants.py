"""Arithmetic of blocks and tiles: how many SMs a collective's clusters start on, who fetches which tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

# Tiles that a block takes by its number, before it fetches any. Products beside held SMs take the rounds that follow
# from it, 139 of 147 within 5 % (records/h200-sxm-141gb/placement).
OWN_TILES = 2
# SMs that must be free before a collective's clusters of four blocks start: two neighbouring pairs of one GPC, of which
# two free pairs of 66 are none, three are (the same records).
CLUSTER_SMS = 6

# Rounds beyond which those that are all alike are not gone through one by one.
MANY_ROUNDS = 100_000


def room(
    want: float, free: float, *, scattered: float, cluster: int, sms_per_block: float = 1.0, loose: bool = False
) -> float:
    """SMs of ``free`` that a collective starts on, which wants ``want``; its blocks come ``cluster`` at a time.

    ``scattered`` ones are no two pairs of one GPC. ``loose``: the last round of a product in clusters left them one by
    one, so that each further cluster of the collective needs four more: of 8 blocks the first four start on 8 of them
    and the others when the product has ended. (All-gathers of 4 MiB that start in the last round of a product of 256
    tiles take 103 us, 45 beside it, where they take 48 to 60 alone; beside one of 224 tiles, which leaves 40 SMs, those
    of 8 MiB take 100, of which 83 beside it: 220 cases in records/h200-sxm-141gb/traces/chunks.)

    >>> [room(12.0, free, scattered=free, cluster=4) for free in (4.0, 6.0, 10.0, 12.0)]
    [0.0, 4.0, 8.0, 12.0]
    """
    if cluster == 1:
        return min(want, free - free % sms_per_block)
    size = cluster * sms_per_block
    if free < CLUSTER_SMS:
        return want if want <= free - scattered and not loose else 0.0
    clusters = size * ((free - CLUSTER_SMS) // size + 1.0)
    return want if want <= free and not loose else min(want, clusters)


@dataclass(slots=True)
class Turns:
    """What ``slots`` blocks fetch that are ready after ``ready`` rounds; ``last`` are busy in the last (``lasts``)."""

    ready: float
    slots: float
    fetched: float = 0.0
    last: float = 0.0
    lasts: float = 1.0


def fetch(parts: Sequence[Turns], tiles: float, thin: float = 1.0) -> None:
    """Hand ``tiles`` to whichever of ``parts`` is ready first; a last round of few takes ``thin`` of one at least.

    >>> parts = [Turns(ready=2.0, slots=100.0), Turns(ready=2.4, slots=32.0)]
    >>> fetch(parts, 164)
    >>> [(part.ready, part.fetched, part.last) for part in parts]
    [(4.0, 132.0, 32.0), (3.4, 32.0, 32.0)]
    """
    ready = [(part.ready, order) for order, part in enumerate(parts)]
    heapify(ready)
    slots = sum(part.slots for part in parts)
    while tiles > 1e-6:
        if (
            0.0 < MANY_ROUNDS * slots < tiles and max(ready)[0] - ready[0][0] <= 1.0
        ):  # from here on each in turn, for long
            rounds = tiles // slots - 1.0
            for part in parts:
                part.ready, part.fetched = part.ready + rounds, part.fetched + rounds * part.slots
            ready = [(at + rounds, order) for at, order in ready]
            tiles -= rounds * slots
        part = parts[ready[0][1]]
        part.last = min(part.slots, tiles)
        part.fetched += part.last
        tiles -= part.last
        part.lasts = 1.0 if part.last == part.slots else max(thin, part.last / part.slots)
        part.ready += part.lasts
        heapreplace(ready, (part.ready, ready[0][1]))
