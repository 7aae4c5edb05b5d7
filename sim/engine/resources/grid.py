"""How the blocks of a kernel are placed on SMs, and the progress of a running kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How the blocks of a kernel are placed on SMs: what a pool grants them by.

    ``sms`` is what all blocks ask for, ``tiles`` what they work through, ``cluster`` blocks start together. Where tiles
    stay ``whole``, blocks that start late queue by themselves, and each block has ``own_tiles`` by its number before it
    fetches any; else further SMs make the kernel faster. ``short`` blocks end so often that a request of higher
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


class Progress:
    """The progress of a running kernel: the share ``left`` at ``updated_ps``, shares per unit of time, and its end."""

    __slots__ = ("due_ps", "left", "rate", "updated_ps")
    left: float
    rate: float
    updated_ps: int
    due_ps: int


def room(grid: Grid, want: float, free: float, *, scattered: float, loose: bool = False) -> float:
    """SMs of ``free`` on which a collective starts that requests ``want``; its blocks start in clusters.

    ``scattered`` SMs are no two pairs of one GPC. ``loose``: the last round of a product in clusters freed them one by
    one, so that each further cluster of the collective needs four more: of 8 blocks the first four start on 8 SMs and
    the others when the product has ended (docs/laws.md, "Clusters of a collective").

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
