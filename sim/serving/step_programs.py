"""The kernels of a server's step and of its parts, as programs of one group of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import assert_never

import workloads
from sim.build.program import routing_of
from sim.errors import ScenarioError
from sim.scenario.adapters import adapters_in
from sim.scenario.layout import layout_of
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.serving.buckets import chunk_group
from sim.serving.cost import Batch, Part
from workloads.families.ragged import Group
from workloads.program import Program, RankProgram
from workloads.work import AttentionWork

# A step of so many tokens has all kernels of its layers (few choices of experts are not sorted).
MANY_TOKENS = 1024
# Patches of the least image: those of one token, in every family.
MERGED = 4


@dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """Programs of ``scenario``'s steps, of a pipeline what ``stage`` does of them.

    ``layer``: not the model's own steps, but one more layer of it that drafts their tokens.
    """

    scenario: Scenario
    stage: int = 0
    layer: bool = False

    @property
    def each(self) -> int:
        """Tokens of a decoding sequence in a step: those that were drafted, and one more."""
        drafted = self.scenario.speculation is not None and not self.layer
        return self.scenario.draft_tokens + 1 if drafted else 1

    @cached_property
    def scores(self) -> bool:
        """True where the head is: on the last stage."""
        return self.stage == self.scenario.pp - 1

    def step(self, batch: Batch) -> Program:
        """All kernels of ``batch``, its decoding sequences at their mean context."""
        groups = [chunk_group(chunk.tokens, chunk.context) for chunk in batch.chunks]
        if batch.decoding:
            mean = round(batch.cached / batch.decoding)
            groups.insert(0, Group(phase="decode", sequences=batch.decoding, new_tokens=self.each, context=mean))
        adapted = (batch.adapted, batch.adapters)
        return self._ragged(groups, batch.decoding * self.each + batch.ending, None, adapted=adapted)

    @cached_property
    def sees(self) -> bool:
        """Whether images are encoded here: not for what drafts."""
        return not self.layer and workloads.load_model(self.scenario.model).vision is not None

    def images(self, count: int, patches: int) -> Program:
        """So many images through the encoder."""
        model = workloads.load_model(self.scenario.model)
        options = replace(self._options(model), images=1)
        layout = layout_of(self.scenario)
        return workloads.build_images(model, layout, count=count, patches=max(patches, MERGED), options=options)

    @cached_property
    def image_launches(self) -> int:
        """Kernels that the host launches for the images of a size."""
        segments = self.images(1, MANY_TOKENS).ranks[0].phases[0].segments
        return sum(len(segment.kernels) * segment.repeat for segment in segments)

    def layers_of(self, groups: Sequence[Group]) -> Program:
        """The layers of a step that computes ``groups``, less its head."""
        return self._ragged(groups, 0, None)

    def part(self, part: Part, rows: int, context: int) -> Program:
        """One part of a step, over so many ``rows``; of adapters ``context`` is how many there are, of images
        how many patches each has."""
        match part:
            case "shared":
                return self._ragged([], 0, rows)
            case "head":
                return self._ragged([], rows, 0)
            case "decode":
                seen = max(context, 1)
                return self._ragged([Group(phase="decode", sequences=rows, new_tokens=self.each, context=seen)], 0, 0)
            case "chunk":
                return self._ragged([chunk_group(rows, rows + context)], 0, 0)
            case "adapters":
                return self._ragged([], 0, 0, adapted=(rows, context))
            case "images":
                return self.images(rows, context)
        assert_never(part)

    @cached_property
    def launches(self) -> tuple[int, int, bool]:
        """Layers, kernels that the host launches for each, and whether these have experts."""
        parts = self.part("shared", MANY_TOKENS, 0).ranks[0].phases[0].segments
        segments = [segment for segment in parts if segment.layers]
        layers = sum(segment.repeat for segment in segments)
        # attention, which a step with prompts has once, whatever it attends to
        kernels = sum(len(segment.kernels) * segment.repeat for segment in segments) // layers + 1
        return layers, kernels, workloads.load_model(self.scenario.model).experts > 0

    @cached_property
    def adapter_launches(self) -> int:
        """Kernels of adapters that the host launches for a layer."""
        segments = self.part("adapters", MANY_TOKENS, 1).ranks[0].phases[0].segments
        return sum(len(segment.kernels) * segment.repeat for segment in segments) // self.launches[0]

    @cached_property
    def attention_heads(self) -> tuple[int, int, int]:
        """Layers, KV heads of a rank, and bytes that a head reads of one token; raises without fused attention."""
        segments = self.part("decode", 1, 1).ranks[0].phases[0].segments
        works = [kernel.work for segment in segments for kernel in segment.kernels]
        fused = [work for work in works if isinstance(work, AttentionWork) and not work.latent]
        if not fused:
            raise ScenarioError(
                f"measured for fused attention over keys and values, which {self.scenario.model} on stack "
                f"'{self.scenario.stack}' has not"
            )
        if len({(work.kv_heads, work.head_dim, work.v_head_dim) for work in fused}) > 1:
            raise ScenarioError(f"measured for layers of equal heads: those of {self.scenario.model} differ")
        layers = sum(segment.repeat for segment in segments)
        return layers, fused[0].kv_heads, 2 * fused[0].head_dim * fused[0].kv_dtype.bytes

    def _ragged(
        self, groups: Sequence[Group], scored: int, tokens: int | None, adapted: tuple[int, int] = (0, 0)
    ) -> Program:
        scenario, (rows, distinct) = self.scenario, adapted
        model = workloads.load_model(scenario.model)
        options = replace(self._options(model), adapters=adapters_in(scenario, distinct=distinct, rows=rows))
        program = workloads.build_ragged(
            model, layout_of(scenario), groups=groups, scored=scored, tokens=tokens, options=options,
            stage=self.stage,
        )  # fmt: skip
        if not self.layer:
            return program
        count = sum(group.sequences * group.new_tokens for group in groups) if tokens is None else tokens
        return workloads.own_layer(program, model, count)

    def _options(self, model: workloads.ModelSpec) -> workloads.Options:
        scenario = self.scenario
        return workloads.Options(
            layers=scenario.layers,
            lm_head=scenario.lm_head,
            dtype=workloads.DType(scenario.dtype),
            precision=precision_of(scenario, model),
            stack=scenario.stack,
            routing=routing_of(scenario),
            all_reduce=workloads.AllReduce(scenario.all_reduce),
        )


def joined(first: Program, second: Program) -> Program:
    """One program after another, rank by rank."""
    ranks = zip(first.ranks, second.ranks, strict=True)
    return Program(ranks=tuple(RankProgram(phases=(*one.phases, *other.phases)) for one, other in ranks))
