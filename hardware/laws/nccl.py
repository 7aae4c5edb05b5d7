"""NCCL over any number of ranks of one node: the protocol that its tuner takes, and the seconds of that protocol.

Rings run in one of three protocols. The library's tuner compares a line for each, latency plus bytes over a rate, and
takes the lowest (NCCL 2.27, src/graph/tuning.cc). What it then takes was fitted to public tables of two and four
GPUs (``python -m hardware.calibrate.fit_nccl FILE``); eight and more follow by the ring's steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Protocol = Literal["LL", "LL128", "Simple"]
RINGS = ("all_reduce", "all_gather", "reduce_scatter")

# What the tuner takes for the rate of a ring on Hopper's 18 links (24 channels of 15 GB/s), the most that LL reaches
# within a node, and the share of a ring's rate that LL128 reaches (120 of 128 bytes, less some). Those of Ampere and
# Blackwell are in proportion to their links (240 and 87.7, 720 and 282 GB/s).
TUNED_BYTES_PER_S, TUNED_LL_BYTES_PER_S, LL128_SHARE = 360e9, 141e9, 0.92
# Latency and latency a step (s) that the tuner takes for a ring over NVLink.
TUNED_S: Mapping[Protocol, tuple[float, float]] = {
    "LL": (6.6e-6, 0.6e-6),
    "LL128": (14.0e-6, 1.9e-6),
    "Simple": (8.4e-6, 3.4e-6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slower:
    """How many times slower than an H100's a GPU's links are, and the latencies of its steps."""

    link: float = 1.0
    steps: float = 1.0


AS_FITTED = Slower()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPace:
    """Seconds of a ring in one protocol: ``base_s`` and ``step_s`` a step, and each byte of the buffer.

    A chunk is 1/n of a rank's buffer. It is sent by its owner, passed on by n - 2 ranks and kept by the last:
    ``ends`` are the seconds a byte of the first and the last together, ``middle`` those of a rank between them.
    """

    base_s: float
    step_s: float
    ends: Mapping[str, float]
    middle: Mapping[str, float]

    def seconds(self, op: str, world: int, buffer_bytes: float, slower: Slower) -> float:
        """Seconds of ``op``: latencies of its steps, and its bytes."""
        byte_s = slower.link * (self.ends[op] + (world - 2) * self.middle[op]) / world
        return slower.steps * (self.base_s + self.step_s * ring_steps(op, world)) + byte_s * buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPace:
    """Seconds of exchanges between all pairs: ``base_s``, each byte of one message, and each byte that a rank sends."""

    base_s: float
    message_byte_s: float
    sent_byte_s: float


# Both by ``python -m hardware.calibrate.fit_nccl`` on two and four H100s (aiconfigurator-core 0.12.0, nccl table,
# Apache-2.0; NCCL 2.27.3 and 2.29.2, 16-bit floats). Eight GPUs from 1 MiB on, in no fit: mean error 4 %, largest 14 %.
_SIMPLE = RingPace(
    base_s=15.17e-6,
    step_s=2.63e-6,
    ends={"all_reduce": 6.61e-12, "all_gather": 4.13e-12, "reduce_scatter": 4.22e-12},
    middle={"all_reduce": 5.27e-12, "all_gather": 2.86e-12, "reduce_scatter": 2.71e-12},
)
RING: Mapping[Protocol, RingPace] = {
    "LL": RingPace(
        base_s=4.92e-6,
        step_s=0.86e-6,
        ends={"all_reduce": 15.48e-12, "all_gather": 10.48e-12, "reduce_scatter": 9.37e-12},
        middle={"all_reduce": 8.54e-12, "all_gather": 6.29e-12, "reduce_scatter": 4.46e-12},
    ),
    "LL128": RingPace(
        base_s=13.82e-6,
        step_s=_SIMPLE.step_s * TUNED_S["LL128"][1] / TUNED_S["Simple"][1],
        ends={op: byte_s / LL128_SHARE for op, byte_s in _SIMPLE.ends.items()},
        middle={op: byte_s / LL128_SHARE for op, byte_s in _SIMPLE.middle.items()},
    ),
    "Simple": _SIMPLE,
}
# A channel a pair, several of them, and all: whichever is the quickest.
PAIRS = (
    PairPace(base_s=6.56e-6, message_byte_s=134.08e-12, sent_byte_s=24.25e-12),
    PairPace(base_s=12.89e-6, message_byte_s=0.35e-12, sent_byte_s=3.88e-12),
    PairPace(base_s=27.75e-6, message_byte_s=0.42e-12, sent_byte_s=3.05e-12),
)
# Latencies over a Hopper's, one figure an architecture, by the same command from two and four A100s (2.27.3) and B200s
# (2.27.3 to 2.29.2). Eight of them from 1 MiB on: mean errors of 7 to 9 and 6 to 9 % (16 to 20 and 17 to 22 with 1).
SLOWER_STEPS = {"ampere": 1.62, "blackwell": 1.53}


def ring_steps(op: str, world: int) -> int:
    """Steps of the ring: 2 (n - 1) for all-reduce, n - 1 for its halves and all-to-all, 1 for send/recv."""
    return {"all_reduce": 2 * (world - 1), "sendrecv_ring": 1, "send": 1}.get(op, world - 1)


@lru_cache(maxsize=4096)
def protocols(op: str, world: int, slower_link: float = 1.0) -> tuple[tuple[Protocol, float], ...]:
    """Protocols that the tuner takes for a ring as buffers grow, each with the bytes from which on it takes it.

    ``slower_link``: how many times slower than Hopper's the GPU's links are.

    >>> [(name, round(first / 1e6, 1)) for name, first in protocols("all_gather", 8)]
    [('LL', 0.0), ('LL128', 4.6), ('Simple', 23.2)]
    """
    steps = ring_steps(op, world)
    rates = {"LL": TUNED_LL_BYTES_PER_S, "LL128": LL128_SHARE * TUNED_BYTES_PER_S, "Simple": TUNED_BYTES_PER_S}
    lines = {
        name: (base_s + steps * step_s, steps / world * slower_link / rates[name])
        for name, (base_s, step_s) in TUNED_S.items()
    }
    taken: list[tuple[Protocol, float]] = [("LL", 0.0)]
    while True:
        latency_s, byte_s = lines[taken[-1][0]]
        crossings = [
            ((later[0] - latency_s) / (byte_s - later[1]), name) for name, later in lines.items() if later[1] < byte_s
        ]
        if not crossings:
            return tuple(taken)
        first, name = min(crossings)
        taken.append((name, first))


def protocol(op: str, world: int, buffer_bytes: float, slower_link: float = 1.0) -> Protocol:
    """The protocol of one ring.

    >>> [protocol("all_reduce", 8, size * 2**20) for size in (1, 8, 512)]
    ['LL', 'LL128', 'Simple']
    """
    return [name for name, first in protocols(op, world, slower_link) if first <= buffer_bytes][-1]


def ring_seconds(
    op: str, world: int, buffer_bytes: float, slower: Slower = AS_FITTED, paces: Mapping[Protocol, RingPace] = RING
) -> float:
    """Seconds of a ring of ``world`` ranks in the protocol that the tuner takes, its launch apart.

    Where the next protocol is quicker than the one before it was at its last byte, that one's time stands: more bytes
    never take less.
    """
    taken = protocols(op, world, slower.link)
    lasts = [*(first for _, first in taken[1:]), buffer_bytes]
    return max(
        paces[name].seconds(op, world, min(last, buffer_bytes), slower)
        for (name, first), last in zip(taken, lasts, strict=True)
        if first <= buffer_bytes
    )


def pairs_seconds(
    world: int, buffer_bytes: float, slower: Slower = AS_FITTED, paces: tuple[PairPace, ...] = PAIRS
) -> float:
    """Seconds of an all-to-all of ``world`` ranks with ``buffer_bytes`` each, a part for every rank."""
    message = buffer_bytes / world
    return min(
        slower.steps * (pace.base_s + message * pace.message_byte_s)
        + slower.link * message * (world - 1) * pace.sent_byte_s
        for pace in paces
    )
