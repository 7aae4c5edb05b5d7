"""Tiles of a kernel dealt at many clocks at once: to the last bit what :func:`sim.engine.resources.tiles.deal` gives.

How many rounds have begun and who fetches next are whole decisions: one clock makes them, the others are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.engine.resources.tiles import MANY_ROUNDS, Dealing

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Share(NamedTuple):
    """The part of a kernel that some of its blocks process: a :class:`Part` at many clocks, or the same at all."""

    rounds: Any = 0.0
    gone: Any = 0.0
    fetched: float = 0.0
    billed: Any = 0.0
    last: float = 0.0
    lasts: Any = 1.0
    fill: Any = 1.0


WHOLE = Share()  # before any tile is dealt


class TilesOverClocks(NamedTuple):
    """How the tiles of a kernel go to its blocks: a :class:`Dealing` at many clocks, of which ``thin`` varies."""

    dealing: Dealing
    thin: Floats

    def without(self, part: Share) -> TilesOverClocks:
        """What is left for the others when a part has ended."""
        return TilesOverClocks(self.dealing._replace(fetched=self.dealing.fetched - part.fetched), self.thin)


def deal_at(
    parts: Sequence[tuple[float, Any, Share]], tiles: TilesOverClocks, held: Flags, last: Sequence[float]
) -> list[tuple[Any, Share]]:
    """The share left of each part, and the part with its tiles dealt anew; ``parts``: slots, left, part.

    ``held`` falls where the clocks decide otherwise than the first of those that give ``last`` blocks of each part in
    its last round.
    """
    while held.any():
        column = int(held.argmax())
        dealt, agreed = _as_at(column, parts, tiles)
        if [part.last for _, part in dealt] == list(last):
            for each in agreed:
                held &= each
            return dealt
        held[column] = False
    return [(left, part) for _, left, part in parts]


def _as_at(
    column: int, parts: Sequence[tuple[float, Any, Share]], tiles: TilesOverClocks
) -> tuple[list[tuple[Any, Share]], list[Flags]]:
    """Dealt by the decisions at one clock, and where others decide alike."""
    rounds, own, pool, full, _, fill = tiles.dealing
    agreed: list[Flags] = []
    turns: list[Any] = []
    begun_parts: list[Share] = []
    for slots, left, part in parts:
        if part is WHOLE and isinstance(left, float):  # it starts
            gone, begun, ends, billed = 0.0, 1.0, False, 0.0
        else:
            gone = np.maximum(0.0, part.rounds - left * rounds)
            begun_at = np.floor(gone + 1e-6)
            begun = begun_at.item(column) + 1.0
            agreed.append(begun_at + 1.0 == begun)
            ends = 0.0 < _at(part.rounds, column) <= begun
            if not isinstance(part.rounds, float):
                agreed.append((part.rounds <= begun) == ends)
            billed = part.billed + part.fill / fill * slots * (gone - part.gone)
        if ends:  # in its last round, which no other part changes
            part = Share(part.rounds, gone, part.fetched, billed, part.last, part.lasts, part.fill)
        else:
            whole = float(max(own, begun))
            last = slots * (full if whole == own else 1.0)
            part = Share(whole, gone, slots * max(0.0, begun - own), billed, last, 1.0, part.fill)
        pool -= part.fetched
        turns.append(part.rounds - gone)
        begun_parts.append(part)
    fetched = _fetch(column, turns, [slots for slots, _, _ in parts], pool, tiles.thin, agreed)
    dealt = []
    for ready, part, (slots, _, _), (more, last, lasts) in zip(turns, begun_parts, parts, fetched, strict=True):
        if more:
            part = Share(part.gone + ready, part.gone, part.fetched + more, part.billed, last, lasts, part.fill)
        if rounds > own:
            left_tiles = slots * own + part.fetched - part.billed
            part = part._replace(fill=fill * left_tiles / (slots * (part.rounds - part.gone)))
        dealt.append((ready / rounds, part))
    return dealt, agreed


def _at(value: Any, column: int) -> float:
    return value if isinstance(value, float) else value.item(column)


def _fetch(
    column: int, turns: list[Any], slots: Sequence[float], tiles: float, thin: Floats, agreed: list[Flags]
) -> list[tuple[float, float, Any]]:
    """As :func:`sim.engine.resources.tiles.fetch` assigns tiles to the first free part, at one clock for all.

    Returns the tiles that each has fetched, its blocks in the last round, and how long that lasts.
    """
    fetched: list[tuple[float, float, Any]] = [(0.0, 0.0, 1.0)] * len(turns)
    if tiles > MANY_ROUNDS * sum(slots):
        agreed.append(np.zeros(len(thin), dtype=bool))
        return fetched
    ready = [(_at(turn, column), order) for order, turn in enumerate(turns)]
    while tiles > 1e-6:
        _, first = min(ready)
        mine = turns[first]
        for other, turn in enumerate(turns):
            if other != first and not (isinstance(mine, float) and isinstance(turn, float)):
                agreed.append(mine <= turn if first < other else mine < turn)
        last = min(slots[first], tiles)
        tiles -= last
        lasts = 1.0 if last == slots[first] else np.maximum(thin, last / slots[first])
        fetched[first] = fetched[first][0] + last, last, lasts
        turns[first] = mine + lasts
        ready[first] = (_at(turns[first], column), first)
    return fetched
