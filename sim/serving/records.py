"""What a served run leaves behind: one record a request, one row a stretch of equal steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inputs.tuples import maker_of
from sim.serving.adapters import AdapterSlots
from sim.serving.cost import Batch
from sim.serving.price import StepPrices
from sim.serving.requests import Request


@dataclass(kw_only=True, slots=True)
class Served:
    """What happened to one request (s since the start, J over all GPUs that worked for it)."""

    request: Request
    replica: int = -1
    received_s: float = -1.0  # by the engine, after its way through the front end
    started_s: float = -1.0  # its first piece begins
    first_token_s: float = -1.0
    done_s: float = -1.0
    hit_tokens: int = 0
    fetched_tokens: int = 0  # of its beginning, from tiers outside the GPUs' memory,
    fetch_s: float = 0.0  # while it waited for them
    preemptions: int = 0
    moves: int = 0  # to another replica, after losing its own
    prefill_j: float = 0.0
    decode_j: float = 0.0
    transfer_j: float = 0.0  # of its KV cache, from the replica of its prompt to the one that goes on


class Stretch(NamedTuple):
    """``steps`` equal steps in a row on one replica (mean figures); 0 steps: a pause, or a batch on its way to the next
    stage.

    A tuple: a long run leaves some millions of them, which are a table's rows as they are.
    """

    replica: int
    start_s: float
    end_s: float
    steps: int
    decoding: int
    prompt_tokens: int
    waiting: int
    blocks: int
    energy_j: float
    target_w: float
    clock_hz: float  # mean SM clock
    stage: int = 0  # of a pipeline, whose stages have rows of their own


stretch_of = maker_of(Stretch)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTransfer:
    """The KV cache of request ``number`` on its way between replicas (J of all ranks, beside those of stretches)."""

    number: int
    start_s: float
    end_s: float
    energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """One step of a replica whose kernels are to be shown: what it computed from when, in how long, under what."""

    replica: int
    start_s: float
    time_s: float
    batch: Batch
    prices: StepPrices
    target_w: float
    stage: int = 0


@dataclass(kw_only=True, slots=True)
class Log:
    """All that a run writes down; single steps only between the seconds of ``window``."""

    window: tuple[float, float] | None = None
    run_steps: list[RunStep] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    transfers: list[CacheTransfer] = field(default_factory=list)
    # Times between tokens of a request: the first of so many, by how much each is longer, and how many requests saw it.
    gaps: list[tuple[float, float, int, int]] = field(default_factory=list)
    prefill_j: float = 0.0
    decode_j: float = 0.0
    idle_j: float = 0.0
    fleet_looks: list[tuple[float, float, tuple[float, ...]]] = field(default_factory=list)  # s, W of all, W of caps
    starts: int = 0  # of replicas, while serving
    adapter_slots: list[AdapterSlots] = field(default_factory=list)  # of each replica, where there are adapters
    fetched: Counter[str] = field(default_factory=Counter)  # tokens that came back from each tier
    unanswered: int = 0  # requests of the file that got no output token, and are left out

    @property
    def transfer_j(self) -> float:
        """What moving KV caches took; no stretch holds it."""
        return sum(transfer.energy_j for transfer in self.transfers)

    def ran(self, step: RunStep) -> None:
        """A step was run; kept if it lies in the window."""
        if self.window is not None and step.start_s < self.window[1] and step.start_s + step.time_s > self.window[0]:
            self.run_steps.append(step)

    def gap(self, seconds: float, count: int) -> None:
        """``count`` requests waited ``seconds`` for their next token."""
        self.gaps.append((seconds, 0.0, 1, count))

    def each_gap(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Times between tokens of a request one by one (s), and how many requests saw each."""
        if not self.gaps:
            return np.empty(0), np.empty(0, dtype=np.int64)
        columns = list(zip(*self.gaps, strict=True))
        first_s, more_s = np.array(columns[0]), np.array(columns[1])
        steps, counts = np.array(columns[2]), np.array(columns[3])
        number = np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps)
        return np.repeat(first_s, steps) + np.repeat(more_s, steps) * number, np.repeat(counts, steps)
