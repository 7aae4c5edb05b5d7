"""What the parts of a server's step cost at the sizes and power targets at which the engine runs them, and between.

Beside attention and products these are what ranks exchange of prompts, low-rank adapters, and images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import get_args

import workloads
from sim.run.plan import Plan, classifier
from sim.run.work import Work
from sim.scenario.machine import Machine
from sim.scenario.partition import Partitions
from sim.scenario.spec import Scenario
from sim.serving.buckets import bracketing_parts, bracketing_sizes, cached_ends, context_ends, tile_of_tokens
from sim.serving.cost import NOTHING, Batch, Chunk, Cost, Part
from sim.serving.parts import PartTable, table_of
from sim.serving.step_programs import StepPrograms
from workloads.program import Program

# Power targets at which parts are run: the fast limit and this share of it less each time; between them cost is linear.
TARGET_STEP = 0.03
TARGET_STEPS = 26


@dataclass(kw_only=True, eq=False)
class PartPrices:
    """Prices of the parts of steps on one group of GPUs. ``scenario`` says model, layout, stack and machine.

    Of a pipeline, what ``stage`` does of a step on its own GPUs, which ``machine`` is. ``layer``: these are prices of
    what drafts tokens, one more layer of the model.
    """

    scenario: Scenario
    machine: Machine
    partitions: Partitions | None = None  # of each GPU's SMs, of which steps run on that of the first stream
    layer: bool = False
    stage: int = 0
    programs: StepPrograms = field(init=False)
    each: int = field(init=False)  # as the programs'
    _places: dict[float, tuple[int, float]] = field(default_factory=dict)
    _known_rows: dict[tuple[Part, int, int, int], Cost] = field(default_factory=dict)  # by part, rows, target, context
    # By rows, adapters, all tokens of the step, and target.
    _known_adapted: dict[tuple[int, int, int, int], Cost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = StepPrograms(scenario=self.scenario, stage=self.stage, layer=self.layer)
        self.each = self.programs.each

    @property
    def world(self) -> int:
        """GPUs that run a step: those of the stage."""
        return self.scenario.world // self.scenario.pp

    @cached_property
    def _named(self) -> dict[Part, tuple[str, Callable[[int, int], Work]]]:
        """Parts by what tells them from those of other stages, and what lays them out."""
        label = f" {self.stage + 1}/{self.scenario.pp}" if self.scenario.pp > 1 else ""
        return {part: (part + label, partial(self._part_work, part)) for part in get_args(Part)}

    @cached_property
    def table(self) -> PartTable:
        """What its parts cost, shared by all prices of such GPUs."""
        same = self.scenario.model_copy(update={"acceptance": None})  # what passes changes no price
        return table_of(same, self.machine, self.partitions)

    def targets(self, target_w: float) -> tuple[int, float]:
        """The target that is run at or below ``target_w``, and how far it is to the next one."""
        known = self._places.get(target_w)
        if known is None:
            wanted = min(1.0, target_w / self.machine.limits.fast_limit_w) if target_w < math.inf else 1.0
            at = max(0, min(math.ceil((1.0 - wanted) / TARGET_STEP - 1e-9), TARGET_STEPS))
            share = (wanted - (1.0 - at * TARGET_STEP)) / TARGET_STEP if 0 < at < TARGET_STEPS else 0.0
            known = self._places[target_w] = (at, share)
        return known

    def target_w(self, target: int) -> float:
        """The power target (W) that is run in so many steps below the fast limit."""
        return self._targets_w[target]

    @cached_property
    def _targets_w(self) -> list[float]:
        return [(1.0 - target * TARGET_STEP) * self.machine.limits.fast_limit_w for target in range(TARGET_STEPS + 1)]

    @property
    def sms(self) -> int:
        """SMs of a GPU that steps run on."""
        cut = self.partitions
        return self.machine.gpu.sms if cut is None else cut.sms[cut.of_stream(0)][1]

    def _prompts(self, batch: Batch, target: int) -> tuple[Cost, ...]:
        """The attention of each piece of a prompt, and its share of the images that are encoded in the step."""
        own = [self._chunk(chunk, target) for chunk in batch.chunks]
        if self._spread > 1:
            own = [cost + self._exchanged(chunk, batch, target) for cost, chunk in zip(own, batch.chunks, strict=True)]
        if not self.programs.sees:
            return tuple(own)
        for patches, count in batch.images.items():
            cost = self._encoded(count, patches, target)
            for place, chunk in enumerate(batch.chunks):
                if chunk.images and chunk.patches == patches:
                    own[place] += NOTHING.toward(cost, chunk.images / count)
        return tuple(own)

    def _exchanged(self, chunk: Chunk, batch: Batch, target: int) -> Cost:
        """A piece's share of what ranks exchange once for all of a step's prompts."""
        cost, mine, all_of_them = NOTHING, *map(self.programs.shared_tokens, ([chunk], batch.chunks))
        if mine.new and self.scenario.cp > 1:
            cost += NOTHING.toward(self._rows("gathered", all_of_them.new, target), mine.new / all_of_them.new)
        if mine.cached and self._combines:
            cost += NOTHING.toward(self._rows("combined", all_of_them.cached, target), mine.cached / all_of_them.cached)
        return cost

    @cached_property
    def _spread(self) -> int:
        """Ranks over which the tokens of a cache are spread."""
        return self.programs.layout.cache_shards

    @cached_property
    def _combines(self) -> bool:
        """Whether prompts' outputs over caches of several ranks are added up: latents are gathered instead."""
        return workloads.load_model(self.scenario.model).latent is None

    def _encoded(self, count: int, patches: int, target: int) -> Cost:
        """Images through the encoder."""
        low, high = context_ends(patches)
        cost = self._part("images", count, low, target)
        return (
            cost
            if patches <= low
            else cost.toward(self._part("images", count, high, target), (patches - low) / (high - low))
        )

    def _adapted(self, batch: Batch, target: int) -> Cost:
        """The low-rank adapters of a step; what drafts has none."""
        if not batch.adapters or not self.scenario.lora_adapters:
            return NOTHING
        rows, tokens = self.programs.own_adapted(batch), self.programs.own_tokens(batch)
        if rows == tokens:
            return self._rows("adapters", rows, target, batch.adapters)
        return self._adapted_beside(rows, batch.adapters, max(rows, tile_of_tokens(tokens)), target)

    def _adapted_beside(self, rows: int, adapters: int, tokens: int, target: int) -> Cost:
        """Adapters of a step with tokens that ask for none, too."""
        known = self._known_adapted.get((rows, adapters, tokens, target))
        if known is None:
            name = f"{self._named['adapters'][0]} of {tokens}"

            def run(asked: int) -> Cost:
                return self.table.cost(name, asked, adapters, self._targets_w[target], self._beside_of(tokens))

            low, high = bracketing_sizes(rows)
            known = run(low)
            if rows > low:
                known = known.toward(run(high), (rows - low) / (high - low))
            self._known_adapted[rows, adapters, tokens, target] = known
        return known

    def _beside_of(self, tokens: int) -> Callable[[int, int], Work]:
        """What lays out adapters beside others by rows and adapters."""
        return lambda rows, adapters: self._work(self.programs.adapters_beside(rows, adapters, tokens))

    def _chunk(self, chunk: Chunk, target: int) -> Cost:
        before = chunk.context - chunk.tokens
        if not before:  # a prompt from its beginning
            known = self._known_rows.get(("chunk", chunk.tokens, target, 0))
            return known or self._rows("chunk", chunk.tokens, target)
        low, high = cached_ends(before, self._spread)
        cost = self._rows("chunk", chunk.tokens, target, low)
        if before <= low:
            return cost
        return cost.toward(self._rows("chunk", chunk.tokens, target, high), (before - low) / (high - low))

    def _rows(self, part: Part, rows: int, target: int, context: int = 0) -> Cost:
        """A part's cost, linear between the numbers of rows at which it is run."""
        known = self._known_rows.get((part, rows, target, context))
        if known is None:
            size, ranks = rows, self.programs.parting
            low, high = bracketing_sizes(size)
            if part == "chunk" and ranks > 1 and rows > 1:
                size = self.programs.shared_tokens([Chunk(rows, rows)]).new  # as it is filled up
                low, high = bracketing_parts(size, ranks)
            known = self._part(part, low, context, target)
            if size > low:
                known = known.toward(self._part(part, high, context, target), (size - low) / (high - low))
            self._known_rows[part, rows, target, context] = known
        return known

    def _part(self, part: Part, rows: int, context: int, target: int) -> Cost:
        name, work_of = self._named[part]
        return self.table.cost(name, rows, context, self._targets_w[target], work_of)

    def _part_work(self, part: Part, rows: int, context: int) -> Work:
        return self._work(self.programs.part(part, rows, context))

    def _plan(self, program: Program) -> Plan:
        return self.table.plan(self._work(program))

    def _work(self, program: Program) -> Work:
        eager = self.scenario.launch == "eager"
        issue_s = self.machine.profile.launch.host_issue_s if eager else None
        classify = classifier(self.machine, eager=eager)
        return Work(program=program, tokens=1, classify=classify, issue_s=issue_s, partitions=self.partitions)
