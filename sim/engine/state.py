"""What a run keeps while it lasts: flows, each rank's part of them, GPUs; and what it asks of a driver."""

from __future__ import annotations

from typing import Protocol

from sim.engine.fluid import FluidModel
from sim.engine.running import GpuState, Target, bounds


class Driver(Protocol):
    """What the core asks of whoever keeps the clock."""

    def arm(self, flows: list[Flow], due_ps: int) -> None:
        """Call ``core.due(flows, now)`` at ``due_ps``; earlier arms of these flows are void."""

    def finished(self, op: int) -> None:
        """The kernel is done: its queue may go on, its successors lose one predecessor."""

    def want_settle(self) -> None:
        """Call ``core.settle(now)`` at the end of this instant."""


class Flow:
    """A running kernel: one progress shared by every rank that takes part."""

    __slots__ = ("collective", "due_ps", "entries", "left", "missing", "rate", "release_due_ps", "updated_ps")

    def __init__(self, collective: int, missing: int) -> None:
        self.collective = collective
        self.entries: list[Entry] = []
        self.left = 1.0
        self.rate = 0.0
        self.updated_ps = 0
        self.due_ps = -1
        self.release_due_ps = -1
        self.missing = missing


class Entry:
    """One rank's part of a flow: the SMs it holds and the joules it has burnt."""

    __slots__ = (
        "billed", "class_id", "energy_j", "fetched", "fill", "flow", "gone", "gpu", "held", "key", "last", "lasts",
        "op", "power_w", "rounds", "sms", "split", "start_ps", "wanted",
    )  # fmt: skip

    def __init__(self, op: int, class_id: int, gpu: Gpu, flow: Flow, wanted: float, now_ps: int) -> None:
        self.op = op
        self.class_id = class_id
        self.split: Split | None = None  # what the parts of the same kernel share
        self.rounds, self.gone = 0.0, 0.0  # of a part: all, and those behind it
        self.fetched, self.billed = 0.0, 0.0  # tiles it fetches, and those whose joules are spent
        self.last, self.lasts = 0.0, 1.0  # blocks that are busy in its last round, and how many rounds that one takes
        self.fill = 1.0  # tiles of a round it goes through over the mean of the whole kernel's rounds
        self.gpu = gpu
        self.flow = flow
        self.wanted = wanted
        self.sms = 0.0  # SMs that set the pace
        self.held = 0.0  # SMs out of the pool (fewer once the tail has let some go)
        self.energy_j = 0.0
        self.power_w = 0.0
        self.start_ps = now_ps
        self.key = (0, now_ps, op)


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
        self.begun: list[Entry] = []
        self.energy_j = 0.0
        self.start_ps = -1

    def ended(self, entry: Entry) -> bool:
        """Take in a part that has ended; the last one answers for all of them."""
        self.parts -= 1
        self.begun.remove(entry)
        self.fetched -= entry.fetched
        self.energy_j += entry.energy_j
        self.start_ps = entry.start_ps if self.start_ps < 0 else min(self.start_ps, entry.start_ps)
        if not self.parts:
            entry.energy_j, entry.start_ps = self.energy_j, self.start_ps
        return not self.parts


class Gpu:
    """One GPU's run state."""

    __slots__ = (
        "clock_cap_hz",
        "energy_j",
        "free",
        "index",
        "integrated_ps",
        "limit_w",
        "model",
        "running",
        "scattered",
        "state",
        "waiting",
    )

    def __init__(self, index: int, model: FluidModel, target: Target, pool_sms: float) -> None:
        self.index = index
        self.model = model
        self.free = pool_sms
        self.scattered = 0.0  # of the free ones: left over by a product's clusters, no two pairs of one GPC
        self.limit_w, self.clock_cap_hz = bounds(target, model.gpu.max_clock_hz)
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []
        self.state: GpuState | None = None
        self.integrated_ps = 0
        self.energy_j = 0.0
