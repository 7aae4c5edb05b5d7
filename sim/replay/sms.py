"""The SMs of a GPU in a replay: which blocks find room when, and how long the others make a kernel last.

Who gets which SMs, and what a block fetches, are the engine's rules (:mod:`sim.engine.grants`). Here all ends are
known beforehand, so that a kernel's whole course is worked out as it starts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from simpy.events import Event, Timeout

from sim.engine.grants import Turns, fetch, room
from sim.engine.time import WholeTime

MOST_NS = 1 << 60  # whoever has not come by then never will
Change = tuple[int, int]  # at which moment (ns) so many SMs more, or fewer, are free or held


@dataclass(frozen=True, slots=True)
class Grid:
    """``tiles`` of a kernel on at most ``blocks`` SMs, ``cluster`` blocks at a time; each has ``own`` by its number.

    ``own`` is 0 where tiles are blocks themselves: they go to whichever SM is free.
    """

    blocks: int
    tiles: int
    cluster: int = 1
    own: int = 0

    def own_rounds(self, block: int) -> int:
        """Tiles that block number ``block`` has by its number."""
        return sum(block + turn * self.blocks < self.tiles for turn in range(self.own))


@dataclass(frozen=True, slots=True)
class Course:
    """A kernel's end, and how many SMs it takes (or gives back) when."""

    end_ns: int
    changes: tuple[Change, ...]


def course(grid: Grid, openings: Sequence[Change], round_ns: int) -> Course:
    """The course of ``grid``, rounds of ``round_ns``, on SMs that open one after another; the first of them now.

    Blocks that have found no SM take what opens, or what blocks of the same kernel leave: with ``own`` tiles the
    kernel lasts until they have done those.

    >>> product = Grid(blocks=132, tiles=512, cluster=2, own=2)
    >>> [course(product, [(0, free)], 10).end_ns for free in (132, 128, 124)]
    [40, 50, 60]
    >>> course(product, [(0, 124), (22, 8)], 10).end_ns
    42
    """
    now_ns, (since, open_) = openings[0][0], zip(*openings, strict=True)
    admitted = 1
    while True:
        parts, firsts = [], []
        first = 0
        for since_ns, slots in zip(since[:admitted], open_[:admitted], strict=True):
            parts.append(Turns(ready=(since_ns - now_ns) / round_ns + grid.own_rounds(first), slots=slots))
            firsts.append(first)
            first += slots
        fetched = grid.tiles - min(grid.tiles, grid.own * grid.blocks)
        fetch(parts, fetched)
        ends = [now_ns + round(part.ready * round_ns) for part in parts]
        exits = _exits(grid, parts, ends, firsts, round_ns)
        if admitted == len(openings) or since[admitted] >= exits[0][0]:
            break
        admitted += 1
    changes = [(since_ns, slots) for since_ns, slots in openings[:admitted]]
    changes += [(moment, -slots) for moment, slots in exits]
    end_ns = max(moment for moment, _ in exits)
    if not grid.own or first >= grid.blocks:
        return Course(end_ns, tuple(changes))
    free = [*exits, *openings[admitted:]]
    heapify(free)
    found = 0
    while first < grid.blocks and free:
        moment, slots = heappop(free)
        found += slots
        starts = min(grid.blocks - first, found - found % grid.cluster)
        if starts:
            ends_ns = moment + round_ns * grid.own_rounds(first)
            changes += [(moment, starts), (ends_ns, -starts)]
            heappush(free, (ends_ns, starts))
            end_ns = max(end_ns, ends_ns)
            found -= starts
            first += starts
    return Course(end_ns, tuple(changes))


def _exits(
    grid: Grid, parts: Sequence[Turns], ends: Sequence[int], firsts: Sequence[int], round_ns: int
) -> list[Change]:
    """SMs that each part leaves, when: a round before its end those without a tile in its last round."""
    exits: list[Change] = []
    for part, end_ns, first in zip(parts, ends, firsts, strict=True):
        slots = int(part.slots)
        busy = int(part.last)
        if not part.fetched and (turns := grid.own_rounds(first)):
            busy = min(slots, grid.tiles - (turns - 1) * grid.blocks - first)
        if 0 < busy < slots:
            exits.append((end_ns - round_ns, slots - busy))
        exits.append((end_ns, busy or slots))
    return sorted(exits)


class SmPool:
    """The SMs of one GPU: who holds how many until when; collectives wait here for theirs."""

    def __init__(self, env: WholeTime, sms: int) -> None:
        self.env, self.sms = env, sms
        self.scattered = 0  # free ones that a product's clusters left over: no two pairs of one GPC
        self.clustered: set[int] = set()  # products whose last round leaves SMs pair by pair
        self.holders: dict[int, Sequence[Change]] = {}
        self.spinning: dict[int, int] = {}  # rows that wait for other ranks, since when

    def changes(self) -> Iterator[Change]:
        """Who holds how many SMs from when, and gives them back when.

        When a spinning one does nobody knows: not before it has lasted as its own row says, else as long again.
        """
        now_ns = self.env.now
        for row, changes in self.holders.items():
            if (began_ns := self.spinning.get(row)) is None:
                yield from changes
            else:
                *taken, (end_ns, sms) = changes
                yield from taken
                yield max(end_ns, 2 * now_ns - began_ns, now_ns + 1), sms

    def free(self) -> int:
        """SMs that nobody holds now."""
        now_ns = self.env.now
        return self.sms - sum(sms for moment, sms in self.changes() if moment <= now_ns)

    def room(self, grid: Grid) -> int:
        """SMs that a collective of ``grid`` can start on now."""
        free, loose = self.free(), self.loose()
        return int(room(grid.blocks, free, scattered=self.scattered, cluster=grid.cluster, loose=loose))

    def loose(self) -> bool:
        """Whether some of the free SMs were left by the last round of a product in clusters that still runs."""
        now_ns = self.env.now
        left = (self.holders[row] for row in self.clustered)
        return any(any(sms < 0 and moment <= now_ns for moment, sms in changes) for changes in left)

    def room_for(self, grid: Grid) -> Generator[Event, None, None]:
        """Wait until a collective of ``grid`` can start, or nobody holds any SMs."""
        env = self.env
        while self.holders and self.room(grid) <= 0:
            moments = [moment for moment, _ in self.changes() if moment > env.now]
            if not moments or env.now > MOST_NS:
                return
            yield Timeout(env, min(moments) - env.now)

    def openings(self, grid: Grid, first: int | None = None) -> tuple[Change, ...]:
        """SMs of ``grid``, when: ``first``, or what is free, now (nothing where nothing is); then what others leave."""
        now_ns = self.env.now
        if not self.holders:
            return ((now_ns, min(grid.blocks, self.sms)),)
        later: dict[int, int] = {}
        free = self.sms
        for moment, sms in self.changes():
            if moment <= now_ns:
                free -= sms
            else:
                later[moment] = later.get(moment, 0) - sms
        taken = min(grid.blocks, free - free % grid.cluster) if first is None else min(first, grid.blocks)
        if taken <= 0:
            return ()
        found = [(now_ns, taken)]
        if taken == grid.blocks:
            return tuple(found)
        moments = sorted(later)
        levels = []
        for moment in moments:
            free += later[moment]
            levels.append(free)
        for place in range(len(levels) - 2, -1, -1):
            levels[place] = min(levels[place], levels[place + 1])  # others have a claim on the rest
        for moment, level in zip(moments, levels, strict=True):
            if (more := min(grid.blocks, level - level % grid.cluster) - taken) > 0:
                found.append((moment, more))
                taken += more
        return tuple(found)

    def rounds(self, grid: Grid, openings: Sequence[Change], dur_ns: int) -> float:
        """Rounds of tiles in which work of ``dur_ns`` goes, to a nanosecond of a round."""
        now_ns, sms = openings[0]
        most = max(1, -(-grid.tiles // sms))
        if sms >= grid.blocks or dur_ns < 2 * most:
            return most
        times_ns = range(dur_ns // (most + grid.own), dur_ns + 1)
        at = bisect_left(times_ns, dur_ns, key=lambda round_ns: course(grid, openings, round_ns).end_ns - now_ns)
        return dur_ns / times_ns[min(at, len(times_ns) - 1)]

    def take(self, row: int, changes: Sequence[Change], *, clustered: bool) -> None:
        """Hold SMs as ``changes`` say."""
        self.holders[row] = changes
        if clustered:
            self.clustered.add(row)
            self.scattered = self.free()

    def spin(self, row: int) -> None:
        """Hold on until other ranks are there, which is when ``row`` takes or leaves its SMs anew."""
        self.spinning[row] = self.env.now

    def leave(self, row: int) -> None:
        """Hold none any more."""
        self.spinning.pop(row, None)
        self.clustered.discard(row)
        if self.holders.pop(row, None) is not None:
            self.scattered = 0
