"""Tiles of a kernel whose blocks start at different times: which part of it works through how many, and how long.

Each block has some tiles by its number; further ones go to whoever is free. A kernel that starts on part of its SMs is
split: its late blocks are a part of their own. Parts are dealt their tiles anew whenever one begins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from sim.engine.grants import OWN_TILES, Turns, fetch

if TYPE_CHECKING:
    from sim.engine.resources.sm_pool import Blocks


class Progress(Protocol):
    """How far a running kernel is: the share that is ``left`` at ``updated_ps``, shares a unit of time, its end."""

    left: float
    rate: float
    updated_ps: int
    due_ps: int


class Split:
    """A kernel whose blocks started at different times: ended when its last part has.

    The whole has ``rounds`` of tiles; each block has ``own`` by its number, the last of which ``full`` of the blocks
    have at all; ``fetched`` tiles go to whoever is free. A last, thin round takes ``thin`` of a round's time at least.
    ``fill``: tiles of a full round over those of the mean round of the whole.
    """

    __slots__ = ("begun", "energy_j", "fetched", "fill", "full", "own", "parts", "rounds", "start_ps", "thin")

    def __init__(self, *, rounds: int, own: int, fetched: float, full: float, thin: float, fill: float) -> None:
        self.rounds, self.own, self.fetched, self.full, self.thin = rounds, own, fetched, full, thin
        self.fill = fill
        self.parts = 1
        self.begun: list[Blocks] = []
        self.energy_j = 0.0
        self.start_ps = -1

    def ended(self, part: Blocks) -> bool:
        """Take in a part that has ended; True of the last one."""
        self.parts -= 1
        self.begun.remove(part)
        self.fetched -= part.fetched
        return not self.parts


def split_of(blocks: Blocks) -> Split:
    """A kernel that begins on part of its SMs.

    Where memory sets the pace, tiles of a last, thin round take the time of their arithmetic alone (28 us after 86 in a
    product of 128 rows, waiting.jsonl).
    """
    grid = blocks.grid
    slots = grid.sms / grid.sms_per_block
    rounds = math.ceil(grid.tiles / slots - 1e-9)
    own = min(OWN_TILES, rounds)
    fetched = max(0.0, grid.tiles - own * slots)
    return Split(
        rounds=rounds,
        own=own,
        fetched=fetched,
        full=min(1.0, grid.tiles / slots - (own - 1)),
        thin=blocks.thin(rounds),
        fill=rounds * slots / grid.tiles if fetched else 1.0,  # else every part goes through all rounds
    )


def share_out(split: Split, sms_per_block: float, now_ps: int) -> None:
    """Set how long each part of a kernel still runs: its own tiles, then what it fetches before the others do.

    What a part has left is in units of the rounds that the whole kernel takes, all its blocks at once. Joules go by
    tiles: each part is billed for those it has still to do, evenly over the rounds that it still goes through.
    """
    pool = split.fetched
    turns: list[Turns] = []
    for part in split.begun:
        progress = part.progress
        assert progress is not None, "blocks with tiles of their own belong to a kernel whose progress is known"
        progress.left = max(0.0, progress.left - progress.rate * (now_ps - progress.updated_ps))
        progress.updated_ps = now_ps
        slots, before = part.sms / sms_per_block, part.gone
        part.gone = max(0.0, part.rounds - progress.left * split.rounds)
        begun = math.floor(part.gone + 1e-6) + 1
        part.billed += part.fill / split.fill * slots * (part.gone - before)
        if not 0.0 < part.rounds <= begun:  # else it is in its last round, which no other part changes
            part.fetched = slots * max(0, begun - split.own)
            part.rounds = float(max(split.own, begun))
            part.last, part.lasts = slots * (split.full if part.rounds == split.own else 1.0), 1.0
        pool -= part.fetched
        turns.append(Turns(ready=part.rounds - part.gone, slots=slots))
    fetch(turns, pool, split.thin)
    for turn, part in zip(turns, split.begun, strict=True):
        if turn.fetched:
            part.fetched += turn.fetched
            part.rounds, part.last, part.lasts = part.gone + turn.ready, turn.last, turn.lasts
        progress = part.progress
        assert progress is not None
        progress.left = turn.ready / split.rounds
        if split.rounds > split.own:
            tiles = turn.slots * split.own + part.fetched - part.billed
            part.fill = split.fill * tiles / (turn.slots * (part.rounds - part.gone))
        progress.due_ps = -1  # its end is another now


def begin_late(progress: Progress, share: float, now_ps: int) -> None:
    """Blocks of a collective start that have waited for SMs, while a ``share`` of its blocks ran, in turns.

    Each block moves its own part of the data, which nobody does for it: the collective lasts until the late ones have
    done theirs. Only where the last turn has begun nothing is left for them.

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


def last_round(blocks: Blocks) -> tuple[float, float]:
    """What the last round of a kernel, or of a part of one, is of the kernel's time, and the SMs that it needs."""
    grid = blocks.grid
    if blocks.split is not None:
        return blocks.lasts / blocks.split.rounds, blocks.last * grid.sms_per_block
    tiles, slots = grid.tiles * blocks.sms / grid.sms, blocks.sms / grid.sms_per_block
    rounds = math.ceil(tiles / slots - 1e-9)
    return 1.0 / rounds, (tiles - (rounds - 1) * slots) * grid.sms_per_block
