"""Beginnings of prompts that outlive the GPUs' memory: in the host's, on its disks, in a store behind the network.

What a replica computes is written to its first tier at once, as serving engines' connectors do, so that the GPU's copy
can be forgotten any time; what a tier has no room for goes on to the next, the longest unused first. A prompt that
begins like one of a tier waits for its cache, which crosses the tier's ports (max-min among all that do), and goes on
behind it. Bytes on the host's links, disks and network cost time, not joules: no figure was measured.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import simpy

from hardware.network import Port
from sim.engine.resources.network import Network
from sim.scenario.machine import Machine

TierName = Literal["host", "disk", "remote"]
TIERS: tuple[TierName, ...] = get_args(TierName)


@dataclass(kw_only=True, slots=True, eq=False)
class Tier:
    """Room for ``pieces`` pieces of prompts, behind ports that are crossed on the way in and out.

    >>> tier = Tier(name="host", pieces=2, into=(), out=())
    >>> [tier.put(piece) for piece in (1, 2, 1, 3)], 1 in tier.held
    ([None, None, None, 2], True)
    """

    name: TierName
    pieces: int
    into: tuple[Port, ...]
    out: tuple[Port, ...]
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)  # the longest unused first

    def put(self, piece: int) -> int | None:
        """Keep a piece, or use it again; returns one that has no room any more."""
        self.held[piece] = None
        self.held.move_to_end(piece)
        return self.held.popitem(last=False)[0] if len(self.held) > self.pieces else None

    def touch(self, prefix: Sequence[int]) -> None:
        """Use the pieces of a prompt, its beginning last: it is of use to most."""
        for piece in reversed(prefix):
            if piece in self.held:
                self.held.move_to_end(piece)


@dataclass(kw_only=True, slots=True, eq=False)
class CacheTiers:
    """The tiers of one replica, the quickest first. ``piece_bytes``: the cache of a piece, of all ranks.

    A look at a prompt uses all of its pieces that are here; what is new comes behind.
    """

    env: simpy.Environment
    network: Network
    tiers: tuple[Tier, ...]
    piece_bytes: float
    piece_tokens: int
    found: Counter[TierName] = field(default_factory=Counter)  # pieces that came back from each
    _written: set[int] = field(default_factory=set)  # on their way into the first tier

    def holder(self, piece: int) -> Tier | None:
        """The quickest tier that has a piece."""
        return next((tier for tier in self.tiers if piece in tier.held), None)

    def matched(self, prefix: Sequence[int]) -> int:
        """How many pieces from the start of ``prefix`` are in any tier."""
        for number, piece in enumerate(prefix):
            if self.holder(piece) is None:
                return number
        return len(prefix)

    def touch(self, prefix: Sequence[int]) -> None:
        """A prompt that begins so is looked up."""
        for tier in self.tiers:
            tier.touch(prefix)

    def store(self, pieces: Sequence[int]) -> None:
        """Write pieces that were computed to the first tier, beside what the GPUs do."""
        fresh = [piece for piece in pieces if piece not in self.tiers[0].held and piece not in self._written]
        if fresh:
            self._written.update(fresh)
            self.env.process(self._write(fresh, 0))

    def load(self, pieces: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        """Bring pieces back, those of all tiers side by side."""
        by_tier: dict[int, int] = {}
        for piece in pieces:
            for place, tier in enumerate(self.tiers):
                if piece in tier.held:
                    by_tier[place] = by_tier.get(place, 0) + 1
                    break
        moves = []
        for place, count in by_tier.items():
            self.found[self.tiers[place].name] += count
            moves.append(self._move(count, self.tiers[place].out))
        yield self.env.all_of(moves)
        for piece in reversed(pieces):
            if piece not in self.tiers[0].held:
                self._keep(piece, 0)

    def _move(self, count: int, ports: tuple[Port, ...]) -> simpy.Event:
        return self.network.move(count * self.piece_bytes, [(port, 1.0) for port in ports])

    def _write(self, pieces: Sequence[int], place: int) -> Generator[simpy.Event, Any, None]:
        yield self._move(len(pieces), self.tiers[place].into)
        for piece in reversed(pieces):
            self._written.discard(piece)
            self._keep(piece, place)

    def _keep(self, piece: int, place: int) -> None:
        """A piece is in a tier now; one that has no room goes on to the next that has not got it."""
        out = self.tiers[place].put(piece)
        if out is not None and place + 1 < len(self.tiers) and out not in self.tiers[place + 1].held:
            self.env.process(self._write([out], place + 1))


def host_ports(machine: Machine, number: int, gpus: int) -> tuple[Port, Port]:
    """The links of a replica's GPUs to the host, towards them and away."""
    rate = gpus * machine.gpu.pcie_bytes_per_s
    return (
        Port(name=f"host to replica {number}", tier="host", bytes_per_s=rate),
        Port(name=f"replica {number} to host", tier="host", bytes_per_s=rate),
    )
