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
        "alone", "class_id", "earlier", "energy_j", "flow", "gpu", "held", "key", "op", "power_w", "rounds", "sms",
        "start_ps", "tiles", "wanted",
    )  # fmt: skip

    def __init__(self, op: int, class_id: int, gpu: Gpu, flow: Flow, wanted: float, now_ps: int) -> None:
        self.op = op
        self.class_id = class_id
        self.earlier: Entry | None = None  # blocks of the same kernel that started before these
        self.tiles, self.rounds = 0, 0  # of both together, where there are earlier ones
        self.alone = 0.0  # what the earlier ones would have to do by themselves
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
    """A kernel whose blocks started at different times: ended when its last part has."""

    __slots__ = ("energy_j", "parts", "start_ps")

    def __init__(self) -> None:
        self.parts = 1
        self.energy_j = 0.0
        self.start_ps = -1

    def ended(self, entry: Entry) -> bool:
        """Take in a part that has ended; the last one answers for all of them."""
        self.parts -= 1
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
        "state",
        "waiting",
    )

    def __init__(self, index: int, model: FluidModel, target: Target, pool_sms: float) -> None:
        self.index = index
        self.model = model
        self.free = pool_sms
        self.limit_w, self.clock_cap_hz = bounds(target, model.gpu.max_clock_hz)
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []
        self.state: GpuState | None = None
        self.integrated_ps = 0
        self.energy_j = 0.0
