"""NCCL over any number of ranks of one node: what its tuner takes, and the seconds of that.

Rings run in one of three protocols, and all-reduces may be added in switches. The library's tuner compares a line for
each, latency plus bytes over a rate, and takes the lowest (NCCL 2.27, src/graph/tuning.cc). What it then takes was
fitted to public tables of two and four GPUs of each architecture (``python -m hardware.calibrate.fit_nccl FILE``);
eight and more follow by the ring's steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from hardware.laws.nccl_data import LIBRARIES
from hardware.laws.nccl_paces import Library, ring_steps

Protocol = Literal["LL", "LL128", "Simple"]
RINGS = ("all_reduce", "all_gather", "reduce_scatter")

# Share of a ring's rate that the tuner takes for LL128 (120 of 128 bytes, less some).
LL128_SHARE = 0.92
# Latency and latency a step (s) that the tuner takes for a ring over NVLink.
TUNED_S: Mapping[Protocol, tuple[float, float]] = {
    "LL": (6.6e-6, 0.6e-6),
    "LL128": (14.0e-6, 1.9e-6),
    "Simple": (8.4e-6, 3.4e-6),
}
# What the tuner takes for the addition in a switch: its latency, and of the rate of n channels, which load a GPU's link
# n + 1 times (one each, two for the one whose sums it leads), five sixths.
TUNED_ADDED_S, TUNED_ADDED_SHARE = 25e-6, 5.0 / 6.0


@lru_cache(maxsize=4096)
def protocols(
    op: str, world: int, slower_link: float = 1.0, name: str = "hopper"
) -> tuple[tuple[Protocol, float], ...]:
    """Protocols that the tuner takes for a ring as buffers grow, each with the bytes from which on it takes it.

    ``slower_link``: how many times slower than Hopper's the GPU's links are; ``name``: the library's architecture.

    >>> [(name, round(first / 1e6, 1)) for name, first in protocols("all_gather", 8)]
    [('LL', 0.0), ('LL128', 4.6), ('Simple', 23.2)]
    """
    lines = _lines(op, world, slower_link, LIBRARIES[name])
    taken: list[tuple[Protocol, float]] = [("LL", 0.0)]
    while True:
        latency_s, byte_s = lines[taken[-1][0]]
        crossings = [
            ((later[0] - latency_s) / (byte_s - later[1]), name) for name, later in lines.items() if later[1] < byte_s
        ]
        if not crossings:
            return tuple(taken)
        first, found = min(crossings)
        taken.append((found, first))


def _lines(op: str, world: int, slower_link: float, library: Library) -> dict[Protocol, tuple[float, float]]:
    """Latency and seconds a byte that the tuner takes for each protocol."""
    steps, rate = ring_steps(op, world), _ring_rate(slower_link, library)
    rates = {"LL": min(library.low_bytes_per_s, 0.5 * rate), "LL128": LL128_SHARE * rate, "Simple": rate}
    return {name: (base_s + steps * step_s, steps / world / rates[name]) for name, (base_s, step_s) in TUNED_S.items()}


def _ring_rate(slower_link: float, library: Library) -> float:
    return library.ring_bytes_per_s * library.slower_link / slower_link


@lru_cache(maxsize=4096)
def added_from(world: int, slower_link: float = 1.0, name: str = "hopper") -> float:
    """Bytes from which on the tuner has all-reduces added in the switch, where there is one that adds.

    Infinite for so few ranks that rings carry a byte as fast by the tuner's lines.

    >>> round(added_from(8) / 2**20, 2), added_from(2)
    (1.1, inf)
    """
    library = LIBRARIES[name]
    added_byte_s = (world + 1.0) / (TUNED_ADDED_SHARE * world * _ring_rate(slower_link, library))
    lines = _lines("all_reduce", world, slower_link, library).values()
    if min(byte_s for _, byte_s in lines) <= added_byte_s * (1.0 + 1e-9):
        return math.inf
    return max((TUNED_ADDED_S - latency_s) / (byte_s - added_byte_s) for latency_s, byte_s in lines)


def protocol(op: str, world: int, buffer_bytes: float, slower_link: float = 1.0, name: str = "hopper") -> Protocol:
    """The protocol of one ring.

    >>> [protocol("all_reduce", 8, size * 2**20) for size in (1, 8, 512)]
    ['LL', 'LL128', 'Simple']
    """
    return [taken for taken, first in protocols(op, world, slower_link, name) if first <= buffer_bytes][-1]


def ring_seconds(
    op: str,
    world: int,
    buffer_bytes: float,
    slower_link: float = 1.0,
    name: str = "hopper",
    library: Library | None = None,
) -> float:
    """Seconds of a ring of ``world`` ranks in the protocol that the tuner takes, its launch apart.

    Where the next protocol is quicker than the one before it was at its last byte, that one's time stands: more bytes
    never take less. ``library``: other paces than those shipped for ``name``.
    """
    taken = protocols(op, world, slower_link, name)
    lasts = [*(first for _, first in taken[1:]), buffer_bytes]
    paces = library or LIBRARIES[name]
    return max(
        _protocol_seconds(paces, protocol, op, world, min(last, buffer_bytes), slower_link / paces.slower_link)
        for (protocol, first), last in zip(taken, lasts, strict=True)
        if first <= buffer_bytes
    )


def _protocol_seconds(
    paces: Library, taken: Protocol, op: str, world: int, buffer_bytes: float, slower_link: float
) -> float:
    match taken:
        case "LL":
            return paces.low.seconds(op, world, buffer_bytes, paces.channels, slower_link)
        case "LL128":
            return paces.dense.seconds(op, world, buffer_bytes, paces.simple, slower_link)
        case "Simple":
            return paces.simple.seconds(op, world, buffer_bytes, slower_link)


def level_from(op: str, world: int, buffer_bytes: float, slower_link: float = 1.0, name: str = "hopper") -> float:
    """The least bytes for which a ring takes as long as for ``buffer_bytes``: of the same round of LL, or of a protocol
    that starts quicker than the one before it ended.

    >>> [round(level_from("all_gather", 8, size * 2**20) / 2**20, 2) for size in (0.5, 1.0, 64.0)]
    [0.03, 0.75, 64.0]
    """
    paces = LIBRARIES[name]
    first = next(first for _, first in reversed(protocols(op, world, slower_link, name)) if first <= buffer_bytes)
    last = buffer_bytes
    if first:
        last_s, own_s = (ring_seconds(op, world, size, slower_link, name) for size in (first, buffer_bytes))
        if own_s > last_s:
            return buffer_bytes
        last = first
    return paces.low.level_from(world, last, paces.channels)


def pairs_seconds(
    world: int, buffer_bytes: float, slower_link: float = 1.0, name: str = "hopper", library: Library | None = None
) -> float:
    """Seconds of an all-to-all of ``world`` ranks with ``buffer_bytes`` each, a part for every rank."""
    paces = library or LIBRARIES[name]
    message = buffer_bytes / world
    return min(
        pace.base_s
        + message * pace.message_byte_s
        + slower_link / paces.slower_link * message * (world - 1) * pace.sent_byte_s
        for pace in paces.pairs
    )
