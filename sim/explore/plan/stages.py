"""What a plan asks of a replica's prices, and those of one in pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sim.scenario.machine import Machine, machine_of
from sim.scenario.spec import Scenario
from sim.serving.cost import Batch, Cost
from sim.serving.parts import PartTable
from sim.serving.price import StepPrices
from sim.serving.spec import ServeSpec
from sim.serving.stages import Handoffs, handoffs, stage_prices


class StagedPrices(Protocol):
    """Steps on one replica."""

    @property
    def machine(self) -> Machine:
        """Its GPUs."""

    @property
    def world(self) -> int:
        """How many these are."""

    @property
    def batches(self) -> int:
        """Batches in flight at once."""

    @property
    def table(self) -> PartTable:
        """What its parts cost."""

    def whole(self, batch: Batch, target_w: float = ...) -> Cost:
        """A step with each GPU held at or below a power target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrices:
    """Steps through all ``stages``, each with a batch of its own in flight."""

    stages: tuple[StepPrices, ...]
    handoffs: Handoffs
    machine: Machine

    @property
    def world(self) -> int:
        """GPUs of all stages."""
        return sum(stage.world for stage in self.stages)

    @property
    def batches(self) -> int:
        """Batches in flight at once: one a stage."""
        return len(self.stages)

    @property
    def table(self) -> PartTable:
        """What parts cost, shared by the stages."""
        return self.stages[0].table

    def whole(self, batch: Batch, target_w: float = float("inf")) -> Cost:
        """From a plan to the next one of a batch among equal ones: through all stages, or, if that is longer, the
        turns of all batches on the slowest stage; a transfer holds up both its ends.
        """
        costs = [stage.whole(batch, target_w) for stage in self.stages]
        tokens = self.stages[0].programs.own_tokens(batch)
        moves = [self.handoffs.cost(tokens, stage) for stage in range(len(costs) - 1)]
        through = costs[0]
        for one in (*costs[1:], *moves):
            through += one
        held_s = [0.0, *(move.time_s for move in moves), 0.0]
        turns_s = [cost.time_s + held_s[at] + held_s[at + 1] for at, cost in enumerate(costs)]
        time_s = max(through.time_s, len(costs) * max(turns_s))
        return Cost(time_s=time_s, energy_j=through.energy_j, cycles=through.cycles)


def prices_of(spec: ServeSpec, group: Scenario) -> StagedPrices:
    """Those of a replica of ``spec``."""
    first, *others = stages = stage_prices(spec, group)
    if not others:
        return first
    return PipelinePrices(stages=tuple(stages), handoffs=handoffs(spec, group, 0), machine=machine_of(group))
