"""What a scheduler speaks of: its limits, sequences on their way, and steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sim.serving.cost import Batch
from sim.serving.requests import Request

Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a replica's scheduler keeps to. ``prefill_only``: sequences leave with their first token, for others to
    go on with. ``batch_seqs``: sequences in one of several batches in flight at most. ``tells_longest``: of the running
    sequences, for attention that waits for it.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    preemption: Preemption = "recompute"
    prefill_only: bool = False
    checked_tokens: int = 1  # of a running sequence in a step: those that were drafted, and one more
    batch_seqs: float = math.inf
    max_loras: int = 0  # adapters that sequences with a seat may ask for; 0: there are none
    tells_longest: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request inside a replica. ``target`` tokens must be in memory before it can yield its next one."""

    request: Request
    target: int
    generated: int = 0
    computed: int = 0
    under_way: int = 0  # tokens in steps that are not done: pieces of a prompt may follow one another in a pipeline
    blocks: int = 0  # private ones
    pieces: list[int] = field(default_factory=list)  # hashed ones that it uses, from the start of its prompt
    hit_tokens: int = 0
    encoded: int = 0  # of its images, the first so many,
    images_read: int = 0  # of which so many have been read whole
    looked_up: bool = False  # whether tiers outside the GPUs' memory were asked for its beginning
    joined: int = -1  # the step since which it yields a token each; -1: it does not
    preemptions: int = 0
    passing: Iterator[int] | None = None  # how many drafted tokens pass, step by step
    kept: Literal["nowhere", "host", "here"] = "nowhere"  # while it waits: where what it has computed lies
    last_token_s: float = -1.0  # when it lost its seat, -1 while it has one
    decode_share_j: float = 0.0  # the running joules a sequence at the time it joined

    @property
    def order(self) -> tuple[int, float, int]:
        """First come, first served within a priority."""
        return (-self.request.priority, self.request.arrival_s, self.request.number)


class PlannedStep(NamedTuple):
    """One step as planned: its batch, the pieces by sequence, and tokens that move to or from host memory before it."""

    batch: Batch
    pieces: tuple[tuple[Sequence, int], ...]
    swapped_tokens: int
    adapters: frozenset[int] = frozenset()  # that it asks for

    @property
    def sequences(self) -> int:
        """Those that it computes anything of."""
        return self.batch.decoding + len(self.pieces)
