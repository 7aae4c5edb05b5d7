"""How the blocks of a kernel come to SMs, and how far a running kernel is: what pools and tiles both need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How the blocks of a kernel come to SMs: what a pool has to know of it.

    ``sms`` is what all blocks ask for, ``tiles`` what they work through, ``cluster`` blocks start together. Where tiles
    stay ``whole``, blocks that start late queue by themselves, and each block has ``own_tiles`` by its number before it
    fetches any; else further SMs make the kernel faster. ``short`` blocks end all the time, so that a request of higher
    priority gets their SMs at once. A ``collective`` starts on whole clusters near one another, once ``cluster_sms``
    are free.
    """

    sms: float
    tiles: int = 1
    sms_per_block: float = 1.0
    cluster: int = 1
    whole: bool = False
    own_tiles: int = 0
    short: bool = False
    collective: bool = False
    cluster_sms: float = 0.0


class Progress(Protocol):
    """How far a running kernel is: the share that is ``left`` at ``updated_ps``, shares a unit of time, its end."""

    left: float
    rate: float
    updated_ps: int
    due_ps: int


def room(grid: Grid, want: float, free: float, *, scattered: float, loose: bool = False) -> float:
    """SMs of ``free`` that a collective starts on, which wants ``want``; its blocks come in clusters.

    ``scattered`` ones are no two pairs of one GPC. ``loose``: the last round of a product in clusters left them one by
    one, so that each further cluster of the collective needs four more: of 8 blocks the first four start on 8 of them
    and the others when the product has ended. (All-gathers of 4 MiB that start in the last round of a product of 256
    tiles take 103 us, 45 beside it, where they take 48 to 60 alone; beside one of 224 tiles, which leaves 40 SMs, those
    of 8 MiB take 100, of which 83 beside it: 220 cases in records/h200-sxm-141gb/traces/chunks.)

    >>> twelve = Grid(sms=12.0, cluster=4, cluster_sms=6.0)
    >>> [room(twelve, 12.0, free, scattered=free) for free in (4.0, 6.0, 10.0, 12.0)]
    [0.0, 4.0, 8.0, 12.0]
    """
    if grid.cluster == 1:
        return min(want, free - free % grid.sms_per_block)
    size = grid.cluster * grid.sms_per_block
    if free < grid.cluster_sms:
        return want if want <= free - scattered and not loose else 0.0
    clusters = size * ((free - grid.cluster_sms) // size + 1.0)
    return want if want <= free and not loose else min(want, clusters)
