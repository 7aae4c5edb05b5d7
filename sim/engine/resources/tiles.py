"""Tiles of a kernel whose blocks start at different times: how many each part processes, and for how long.

Some tiles are assigned to each block by its number; blocks that are free fetch further ones. A kernel that starts on
part of its SMs is split: its late blocks are a part of their own. Tiles are assigned anew whenever a part starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from sim.engine.resources.grid import Grid, Progress

if TYPE_CHECKING:
    from sim.engine.resources.sm_pool import Blocks

# Beyond so many rounds equal ones are computed at once.
MANY_ROUNDS = 100_000


@dataclass(slots=True)
class TileRounds:
    """Rounds of tiles that ``slots`` blocks fetch, free after ``ready`` rounds.

    ``last`` of them work in the last round, which takes ``lasts`` of one.
    """

    ready: float
    slots: float
    fetched: float = 0.0
    last: float = 0.0
    lasts: float = 1.0


def fetch(parts: Sequence[TileRounds], tiles: float, thin: float = 1.0) -> None:
    """Assign ``tiles`` to the first free of ``parts``; a last round of few tiles takes at least ``thin`` of one.

    >>> parts = [TileRounds(ready=2.0, slots=100.0), TileRounds(ready=2.4, slots=32.0)]
    >>> fetch(parts, 164)
    >>> [(part.ready, part.fetched, part.last) for part in parts]
    [(4.0, 132.0, 32.0), (3.4, 32.0, 32.0)]
    """
    ready = [(part.ready, order) for order, part in enumerate(parts)]
    heapify(ready)
    slots = sum([part.slots for part in parts])
    while tiles > 1e-6:
        if 0.0 < MANY_ROUNDS * slots < tiles and max(ready)[0] - ready[0][0] <= 1.0:  # equal rounds from here on
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


class Part(NamedTuple):
    """The part of a kernel that some of its blocks process: its rounds of tiles, all and those done, and its SMs.

    ``fetched`` tiles go beyond its blocks' own, the joules of ``billed`` ones are spent. In its last round, which takes
    ``lasts`` of one, ``last`` blocks are busy. ``fill``: tiles of a round that it goes through over the mean of the
    whole kernel's rounds.
    """

    rounds: float = 0.0
    gone: float = 0.0
    fetched: float = 0.0
    billed: float = 0.0
    last: float = 0.0
    lasts: float = 1.0
    fill: float = 1.0


WHOLE = Part()  # before any tile is assigned


class Dealing(NamedTuple):
    """How the tiles of a kernel go to its blocks.

    The whole has ``rounds`` of tiles; each block has ``own`` by its number, the last one only a share ``full`` of the
    blocks; ``fetched`` tiles go to blocks that are free. A last round of few tiles takes at least ``thin`` of a round.
    ``fill``: tiles of a full round over those of the mean round of the whole.
    """

    rounds: int
    own: int
    fetched: float
    full: float = 1.0
    thin: float = 1.0
    fill: float = 1.0


class Split:
    """A kernel whose blocks started at different times: it ends with its last part."""

    __slots__ = ("begun", "dealing", "energy_j", "own", "parts", "rounds", "start_ps")

    def __init__(self, dealing: Dealing) -> None:
        self.dealing = dealing
        self.rounds, self.own = dealing.rounds, dealing.own
        self.parts = 1
        self.begun: list[Blocks] = []
        self.energy_j = 0.0
        self.start_ps = -1

    def join(self, part: Blocks, now_ps: int) -> None:
        """Blocks of the kernel start: from now on they process their share of its tiles."""
        self.begun.append(part)
        share_out(self, part.grid.sms_per_block, now_ps)

    def ended(self, part: Blocks) -> bool:
        """Count a part that has ended; True for the last one."""
        self.parts -= 1
        self.begun.remove(part)
        if not self.parts:
            return True
        self.dealing = self.dealing._replace(fetched=self.dealing.fetched - part.part.fetched)
        return False


def split_of(blocks: Blocks) -> Split:
    """A kernel that begins on part of its SMs.

    Where memory bounds it, tiles of a last round of few tiles take the time of their arithmetic alone (docs/laws.md,
    "Late blocks").
    """
    grid = blocks.grid
    slots = grid.sms / grid.sms_per_block
    rounds = math.ceil(grid.tiles / slots - 1e-9)
    own = min(grid.own_tiles, rounds)
    fetched = max(0.0, grid.tiles - own * slots)
    fill = rounds * slots / grid.tiles if fetched else 1.0  # else every part goes through all rounds
    full = min(1.0, grid.tiles / slots - (own - 1))
    return Split(Dealing(rounds, own, fetched, full, blocks.thin(rounds), fill))


def share_out(split: Split, sms_per_block: float, now_ps: int) -> None:
    """Set the remaining time of each part of a kernel: its own tiles, then those that it fetches before the others.

    What a part has left is in units of the rounds that the whole kernel takes, all its blocks at once. Joules go by
    tiles: each part is billed for those it has still to do, evenly over the rounds that it still goes through.
    """
    before = []
    for part in split.begun:
        progress = part.progress
        assert progress is not None, "blocks with tiles of their own belong to a kernel whose progress is known"
        left = progress.left - progress.rate * (now_ps - progress.updated_ps)
        before.append((part.sms / sms_per_block, left if left > 0.0 else 0.0, part.part))
    after = deal(tuple(before), split.dealing)
    for part, dealt in zip(split.begun, after, strict=True):
        progress = part.progress
        assert progress is not None
        progress.left, part.part = dealt
        part.fill = part.part.fill
        progress.updated_ps = now_ps
        progress.due_ps = -1  # its end is another now


@lru_cache(maxsize=4096)  # equal ranks and layers have equal tiles
def deal(parts: tuple[tuple[float, float, Part], ...], dealing: Dealing) -> tuple[tuple[float, Part], ...]:
    """The share left of each part, and the part with its tiles assigned anew; ``parts``: slots, left, part."""
    rounds, own, pool, full, thin, fill = dealing
    turns: list[TileRounds] = []
    begun_parts: list[Part] = []
    for slots, left, part in parts:
        whole, before, fetched, billed, last, lasts, was = part
        gone = max(0.0, whole - left * rounds)
        begun = math.floor(gone + 1e-6) + 1
        billed += was / fill * slots * (gone - before)
        if not 0.0 < whole <= begun:  # else it is in its last round, which no other part changes
            whole = float(max(own, begun))
            fetched, last, lasts = slots * max(0, begun - own), slots * (full if whole == own else 1.0), 1.0
        pool -= fetched
        turns.append(TileRounds(whole - gone, slots))
        begun_parts.append(Part(whole, gone, fetched, billed, last, lasts, was))
    fetch(turns, pool, thin)
    dealt = []
    for turn, part in zip(turns, begun_parts, strict=True):
        whole, gone, fetched, billed, last, lasts, now = part
        if turn.fetched:
            whole, fetched, last, lasts = gone + turn.ready, fetched + turn.fetched, turn.last, turn.lasts
        if rounds > own:
            tiles = turn.slots * own + fetched - billed
            now = fill * tiles / (turn.slots * (whole - gone))
        dealt.append((turn.ready / rounds, Part(whole, gone, fetched, billed, last, lasts, now)))
    return tuple(dealt)


def begin_late(progress: Progress, share: float, now_ps: int) -> None:
    """Start blocks of a collective that have waited for SMs while a ``share`` of its blocks ran, in turns.

    Each block moves its own part of the data: the collective lasts until the late ones have moved theirs, unless its
    last turn has begun.

    >>> from types import SimpleNamespace
    >>> half = SimpleNamespace(left=0.75, rate=0.0, updated_ps=0)
    >>> begin_late(half, 0.5, 0), half.left
    (None, 1.0)
    >>> last = SimpleNamespace(left=0.25, rate=0.0, updated_ps=0)
    >>> begin_late(last, 0.5, 0), last.left
    (None, 0.5)
    """
    done = 1.0 - max(0.0, progress.left - progress.rate * (now_ps - progress.updated_ps))
    if done <= 0.0:
        return
    begun = math.ceil(done / share - 1e-9) * share
    progress.left = 1.0 if begun < 1.0 - 1e-9 else min(1.0, (1.0 - done) / share)
    progress.updated_ps = now_ps
    progress.due_ps = -1  # its end is another now


def last_round(grid: Grid, sms: float, part: Part, split: Split | None) -> tuple[float, float]:
    """The last round of a kernel on ``sms`` SMs, or of a ``part`` of a ``split`` one, as a share of the kernel's time,
    and the SMs that it needs."""
    if split is not None:
        return part.lasts / split.rounds, part.last * grid.sms_per_block
    tiles, slots = grid.tiles * sms / grid.sms, sms / grid.sms_per_block
    rounds = math.ceil(tiles / slots - 1e-9)
    return 1.0 / rounds, (tiles - (rounds - 1) * slots) * grid.sms_per_block
