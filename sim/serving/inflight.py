"""What a scheduler speaks of: its limits, sequences on their way, and steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sim.serving.cost import Batch
from sim.serving.requests import Request

Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a replica's scheduler keeps to. ``prefill_only``: sequences leave with their first token, for others to
    go on with.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefix_caching: bool = True
    preemption: Preemption = "recompute"
    prefill_only: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request inside a replica. ``target`` tokens must be in memory before it can yield its next one."""

    request: Request
    target: int
    generated: int = 0
    computed: int = 0
    blocks: int = 0  # private ones
    pieces: list[int] = field(default_factory=list)  # hashed ones that it uses, from the start of its prompt
    hit_tokens: int = 0
    joined: int = -1  # the step since which it yields a token each; -1: it does not
    preemptions: int = 0
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

    @property
    def sequences(self) -> int:
        """Those that it computes anything of."""
        return self.batch.decoding + len(self.pieces)
