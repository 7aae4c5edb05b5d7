"""The GPUs of one pipeline stage, and what a batch takes on its way to those of the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import simpy

import workloads
from hardware.cluster import Cluster
from sim.scenario.layout import layout_of
from sim.scenario.machine import Machine, machine, machine_of, nodes_of, policy_of
from sim.scenario.spec import Scenario
from sim.scenario.speculation import SPECULATION_FIELDS
from sim.serving.adapters import AdapterSlots
from sim.serving.buckets import bracketing_sizes
from sim.serving.cost import Cost
from sim.serving.launched import LaunchedAhead
from sim.serving.power import ReplicaGovernor
from sim.serving.price import StepPrices
from sim.serving.spec import ServeSpec
from sim.serving.transfers import sent, waiting_w


def stage_machine(group: Scenario) -> Machine:
    """The GPUs of one stage of ``group``; their links are awake though they may be the only one."""
    alone = machine_of(group.model_copy(update={"pp": 1}))
    return replace(machine_of(group), world=alone.world, cluster=alone.cluster)


def stage_prices(spec: ServeSpec, group: Scenario) -> list[StepPrices]:
    """What each stage of a replica does of a step; of one stage all of it, and what drafts tokens that it checks."""
    if group.pp == 1:
        return [_whole_prices(spec, group)]
    shared: dict[str, Any] = {"machine": stage_machine(group), "sampling": spec.sampling, "attention": spec.attention}
    draft = None
    if group.speculation is not None:  # EAGLE's layer is on the last stage, which has the head
        alone = group.model_copy(update={"layers": 1, "pp": 1, "lora_adapters": 0})
        draft = StepPrices(scenario=alone, layer=True, **shared | {"sampling": "greedy"})
    last = group.pp - 1
    return [
        StepPrices(scenario=group, stage=stage, draft=draft if stage == last else None, **shared)
        for stage in range(group.pp)
    ]


def _whole_prices(spec: ServeSpec, group: Scenario) -> StepPrices:
    shared: dict[str, Any] = {"machine": machine_of(group), "attention": spec.attention}
    draft = None
    bare = {"lora_adapters": 0}  # adapters are the model's alone
    match group.speculation:
        case "draft_model":
            model, layout = workloads.load_model(group.model), layout_of(group)
            workloads.check_draft(model, layout, workloads.load_model(str(group.draft_model)))
            plain = dict.fromkeys(SPECULATION_FIELDS[:2]) | {"acceptance": None, "draft_tokens": 3} | bare
            # the draft's own checkpoint: what is asked of the model's types is not asked of it
            own = plain | {"model": group.draft_model, "dtype": "bf16", "weight_dtype": None, "kv_dtype": None}
            draft = StepPrices(scenario=group.model_copy(update=own), sampling="greedy", **shared)
        case "eagle" | "mtp":
            draft = StepPrices(
                scenario=group.model_copy(update={"layers": 1} | bare), sampling="greedy", layer=True, **shared
            )
    return StepPrices(scenario=group, sampling=spec.sampling, draft=draft, **shared)


@dataclass(kw_only=True, slots=True, eq=False)
class ReplicaStage:
    """One stage: its GPUs do one thing at a time, in the order in which batches ask for their ``turn``.

    Its limiters and its rows of the log have seen the time up to ``since_s``.
    """

    number: int
    prices: StepPrices
    governor: ReplicaGovernor
    turn: simpy.Resource
    ahead: LaunchedAhead
    adapters: AdapterSlots | None = None
    since_s: float = 0.0
    began_s: float = -math.inf  # when its last step began


@dataclass(kw_only=True, eq=False)
class Handoffs:
    """What batches take between the stages of a replica of ``group`` whose first GPU is ``first`` of the ``cluster``.

    Each rank sends the residual stream to its counterpart of the next stage, as ``wattline simulate`` has it; both
    wait for one another, and neither computes meanwhile.
    """

    group: Scenario
    machine: Machine  # all GPUs of the server
    first: int
    _known: dict[tuple[int, bool], Cost] = field(default_factory=dict)

    @cached_property
    def waiting_w(self) -> float:
        """What a GPU draws above idle that waits for its counterpart."""
        return waiting_w(self.machine, self._ranks(0))

    def cost(self, tokens: int, stage: int) -> Cost:
        """From ``stage`` to the next one; joules of all ranks of both."""
        low, high = bracketing_sizes(tokens)
        cost = self._at(low, stage)
        return cost if tokens == low else cost.toward(self._at(high, stage), (tokens - low) / (high - low))

    def _at(self, tokens: int, stage: int) -> Cost:
        ranks = self._ranks(stage)
        key = (tokens, self._cluster.same_node(ranks))
        known = self._known.get(key)
        if known is None:
            layout = layout_of(self.group)
            count = workloads.stage_bytes(workloads.load_model(self.group.model), layout, tokens)
            one = sent(self.machine, count, ranks, name="send")
            cycles = one.time_s * self.machine.model.max_clock_hz
            known = Cost(time_s=one.time_s, energy_j=layout.stage_ranks * one.energy_j, cycles=cycles)
            self._known[key] = known
        return known

    @property
    def _cluster(self) -> Cluster:
        return self.machine.cluster

    def _ranks(self, stage: int) -> tuple[int, int]:
        """A pair that hands over: one that crosses nodes, if any does, for a stage has come when its last part has."""
        each = layout_of(self.group).stage_ranks
        begin = self.first + stage * each
        pairs = [(begin + rank, begin + each + rank) for rank in range(each)]
        return next((pair for pair in pairs if not self._cluster.same_node(pair)), pairs[0])


def handoffs(spec: ServeSpec, group: Scenario, replica: int) -> Handoffs:
    """Those of a replica by its number; replicas fill one node after another."""
    whole = machine(group.gpu, spec.gpus, policy_of(group), nodes=nodes_of(group), profile=group.profile)
    return Handoffs(group=group, machine=whole, first=sum(spec.gpus_of(other) for other in range(replica)))
