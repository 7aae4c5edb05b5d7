"""When blocks of a kernel end, whose rounds of tiles take equal time, on SMs that become free one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush

from sim.engine.resources.grid import Grid
from sim.engine.resources.tiles import TileRounds, fetch

Opening = tuple[int, int]  # the time (ps) at which a number of SMs becomes free for a kernel


@dataclass(frozen=True, slots=True)
class Course:
    """When a kernel ends; and for each time at which blocks of it started: their end, and how many have a last tile."""

    end_ps: float
    stints: tuple[tuple[float, int], ...]


def own_rounds(grid: Grid, block: int) -> int:
    """Tiles that are assigned to block number ``block`` from the start."""
    return max(0, min(grid.own_tiles, -int(-(grid.tiles - block) // grid.sms)))


def course(grid: Grid, openings: Sequence[Opening], round_ps: float) -> Course:
    """The ends of a kernel's blocks, with tiles of ``round_ps`` each, on SMs that become free one after another.

    Blocks that start before the first of the kernel's blocks have ended fetch tiles together with these; later ones
    work through their own tiles only. Blocks without an SM start on those that blocks of the same kernel free.

    >>> product = Grid(sms=132, tiles=512, cluster=2, whole=True, own_tiles=2)
    >>> [course(product, [(0, free)], 10.0).end_ps for free in (132, 128, 124)]
    [40.0, 50.0, 60.0]
    >>> course(product, [(0, 124), (22, 8)], 10.0).end_ps
    42.0
    """
    begin_ps, blocks = openings[0][0], int(grid.sms)
    fetched = grid.tiles - min(grid.tiles, grid.own_tiles * blocks)
    admitted = 1
    while True:
        turns, owned = [], []
        first = 0
        for since_ps, slots in openings[:admitted]:
            owned.append((first, own_rounds(grid, first)))
            turns.append(TileRounds(ready=(since_ps - begin_ps) / round_ps + owned[-1][1], slots=slots))
            first += slots
        fetch(turns, fetched)
        stints = [
            (begin_ps + turn.ready * round_ps, _busy(grid, turn, own)) for turn, own in zip(turns, owned, strict=True)
        ]
        exits = sorted(exits_of(openings, stints, round_ps))
        if admitted == len(openings) or openings[admitted][0] >= exits[0][0]:
            break
        admitted += 1
    for since_ps, slots in openings[admitted:]:
        stints.append((since_ps + round_ps * own_rounds(grid, first), slots))
        exits.append((stints[-1][0], slots))
        first += slots
    end_ps = max(end for end, _ in stints)
    if grid.own_tiles and first < blocks:
        end_ps = max(end_ps, _rest_ps(grid, exits, first, round_ps))
    return Course(end_ps, tuple(stints))


@lru_cache(maxsize=4096)
def rounds_alone(grid: Grid, sms: int) -> float:
    """Rounds of a kernel that gets a number of SMs and later only those that its own blocks free."""
    return course(grid, [(0, sms)], 1.0).end_ps


def _busy(grid: Grid, turn: TileRounds, owned: tuple[int, int]) -> int:
    """Blocks with a tile in the last round, of those that started together."""
    first, rounds = owned
    slots = int(turn.slots)
    if turn.fetched or not rounds:
        return int(turn.last) or slots
    return min(slots, grid.tiles - (rounds - 1) * int(grid.sms) - first)


def exits_of(
    openings: Sequence[Opening], stints: Sequence[tuple[float, int]], round_ps: float
) -> Iterator[tuple[float, int]]:
    """How many SMs blocks free and when: those without a tile in the last round one round before the end."""
    for (_, slots), (end_ps, busy) in zip(openings, stints, strict=False):
        if busy < slots:
            yield end_ps - round_ps, slots - busy
        yield end_ps, busy


def _rest_ps(grid: Grid, exits: Sequence[tuple[float, int]], first: int, round_ps: float) -> float:
    """When blocks without an SM end if they start only on SMs that blocks of the same kernel free."""
    free = list(exits)
    heapify(free)
    found, end_ps = 0, 0.0
    while first < grid.sms and free:
        moment_ps, slots = heappop(free)
        found += slots
        if starts := min(int(grid.sms) - first, found - found % grid.cluster):
            end_ps = moment_ps + round_ps * own_rounds(grid, first)
            heappush(free, (end_ps, starts))
            found -= starts
            first += starts
    return end_ps
