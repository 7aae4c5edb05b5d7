"""Seconds of NCCL's kernels within a node, by protocol: what a block, a step, a round and a byte of them take.

A ring cuts a buffer into as many parts as ranks. A part is sent by its owner, passed on by n - 2 ranks and kept by the
last; an all-reduce goes round twice. ``ends`` are the first and the last together (in an all-reduce also the rank where
sums turn into results), ``middle`` those of one rank between them, both ways round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Threads of a block times the bytes that each carries a round in LL (512 and 8), and the fewest threads of a block over
# the most (96 of 512). The library takes one more channel for each part of so many bytes, and below one fewer threads
# (NCCL 2.27, src/enqueue.cc, topoGetAlgoInfo: 8 bytes a thread and rank).
LL_ROUND_BYTES, LEAST_THREADS = 4096, 96 / 512
# What a step of LL128 takes at least: its proportion to Simple in NCCL's tuner, of what Simple takes on a Hopper. What
# the tuner leaves to LL128 is longer, and no row shows it.
LL128_STEP_S = 1.48e-6


def laps(op: str) -> int:
    """How often a ring goes round."""
    return 2 if op == "all_reduce" else 1


def ring_steps(op: str, world: int) -> int:
    """Steps of the ring: 2 (n - 1) for all-reduce, n - 1 for its halves and all-to-all, 1 for send/recv."""
    return {"all_reduce": 2 * (world - 1), "sendrecv_ring": 1, "send": 1}.get(op, world - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPace:
    """LL: all threads of all channels carry a round at once, and a part of a round takes as long as a whole one.

    ``launch_s`` and ``step_s`` are those of blocks of no threads; ``block_s`` and ``full_s`` what all 512 add to them.
    The latency of a step hides its first round; ``ends`` and ``middle`` are seconds of each further one.
    """

    launch_s: float
    block_s: float
    step_s: float
    full_s: Mapping[str, float]
    ends: Mapping[str, float]
    middle: Mapping[str, float]

    def seconds(self, op: str, world: int, buffer_bytes: float, channels: int, slower_link: float) -> float:
        """Seconds of ``op``; rounds take longer over slower links than those of the fit."""
        part = buffer_bytes / world / LL_ROUND_BYTES
        threads = min(max(part, LEAST_THREADS), 1.0)
        further = max(-(-part // channels) - 1.0, 0.0)
        steps_s = ring_steps(op, world) * self.hop_s(op, threads)
        round_s = max(slower_link, 1.0) * (self.ends[op] + (world - 2) * self.middle[op])
        return self.launch_s + self.block_s * threads + steps_s + further * round_s

    def level_from(self, world: int, buffer_bytes: float, channels: int) -> float:
        """The bytes from which on ``buffer_bytes`` take as long as they do: those beyond the round before."""
        whole = float(world * LL_ROUND_BYTES)
        rounds = max(-(-buffer_bytes // (whole * channels)), 1.0)
        return min(max((rounds - 1.0) * whole * channels, whole), buffer_bytes)

    def hop_s(self, op: str, threads: float = 1.0) -> float:
        """Seconds of a step in one round, of a share of a block's threads."""
        return self.step_s + self.full_s[op] * threads


@dataclass(frozen=True, slots=True, kw_only=True)
class SimplePace:
    """Simple: a base, a latency a step, and seconds a byte of the buffer's n-th part.

    A part goes in two slices: the next rank starts on the first when the fence after it is seen, ``fence_s`` later (0:
    hidden wherever the tuner takes Simple).
    """

    base_s: float
    step_s: float
    fence_s: float
    ends: Mapping[str, float]
    middle: Mapping[str, float]

    def seconds(self, op: str, world: int, buffer_bytes: float, slower_link: float) -> float:
        """Seconds of ``op``."""
        return self.base_s + self.along(
            op, world, slower_link * buffer_bytes, lambda s: max(s + self.step_s, s / 2.0 + self.fence_s)
        )

    def along(self, op: str, world: int, buffer_bytes: float, step_s: Callable[[float], float]) -> float:
        """Seconds of all steps: ``step_s`` of the seconds that a step's bytes take, and the bytes of the last rank."""
        part, times = buffer_bytes / world, laps(op)
        end_s, middle_s = part * self.ends[op] / (times + 1), part * self.middle[op] / times
        return times * (step_s(end_s) + (world - 2) * step_s(middle_s)) + end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePace:
    """LL128: a base, and Simple's bytes at ``share`` of its rate, which hide the latencies of the steps."""

    base_s: float
    share: float

    def seconds(self, op: str, world: int, buffer_bytes: float, simple: SimplePace, slower_link: float) -> float:
        """Seconds of ``op``."""
        carried = slower_link * buffer_bytes / self.share
        return self.base_s + simple.along(op, world, carried, lambda s: max(s, LL128_STEP_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPace:
    """Seconds of exchanges between all pairs: ``base_s``, each byte of one message, and each byte that a rank sends."""

    base_s: float
    message_byte_s: float
    sent_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """NCCL on one architecture.

    ``slower_link`` is how many times slower than a Hopper's the links were on which it was measured. Its tuner takes
    ``ring_bytes_per_s`` for the rate of a ring over them and ``low_bytes_per_s`` for the most that LL reaches.
    ``pairs`` are a channel a pair, several of them, and all: whichever is the quickest. ``added_ctas`` blocks add in
    switches.
    """

    slower_link: float
    channels: int
    ring_bytes_per_s: float
    low_bytes_per_s: float
    added_ctas: int
    low: LowPace
    dense: DensePace
    simple: SimplePace
    pairs: tuple[PairPace, ...]
