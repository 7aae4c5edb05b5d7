"""A run of the engine on one GPU that notes, at every instant, what runs from then on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sim.engine.core import Core
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.resources.tiles import Dealing, Part
from sim.engine.running import Target
from sim.engine.state import Entry


class HeldBlocks(NamedTuple):
    """A running kernel, or the part of one whose blocks started together, at one instant."""

    entry: Entry
    sms: float
    held: float
    fill: float
    part: Part
    dealing: Dealing | None
    tail_due: int | float


class Noted(NamedTuple):
    """What runs after an instant, whether requests wait, and whether SMs that come free are seen by no one."""

    now_ps: int
    running: list[HeldBlocks]
    queued: bool
    quiet: bool


class NotingCore(Core):
    """A run of one GPU that notes what runs after each instant, and whether requests wait for SMs."""

    def __init__(self, graph: KernelGraph, models: list[FluidModel], targets: Sequence[Target]) -> None:
        super().__init__(graph, models, targets)
        self.noted: list[Noted] = []

    def update(self, now_ps: int) -> None:
        """Resolve the instant and note it."""
        super().update(now_ps)
        gpu = self.gpus[0]
        pool = gpu.pools[0]
        running = [
            HeldBlocks(e, e.sms, e.held, e.fill, e.part, e.split.dealing if e.split is not None else None, e.tail_due)
            for e in gpu.running
        ]
        queued = bool(pool.put_queue)
        self.noted.append(Noted(now_ps, running, queued, not (queued or pool.partial)))
