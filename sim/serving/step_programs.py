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
from sim.serving.cost import Batch, Chunk, Part
from workloads.families.ragged import RaggedStep
from workloads.families.ragged_groups import Group
from workloads.program import Program, RankProgram
from workloads.work import AttentionWork

# A step of so many tokens has all kernels of its layers (few choices of experts are not sorted).
MANY_TOKENS = 1024
# Patches of the least image: those of one token, in every family.
MERGED = 4
NONE_SHARED = workloads.SharedTokens()


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
    def layout(self) -> workloads.Layout:
        """How the model is split."""
        return layout_of(self.scenario)

    @property
    def parting(self) -> int:
        """Ranks that have two parts of each prompt's new tokens; 1: a rank has them all."""
        return self.layout.cp if self.layout.cp_mode == "all_gather" else 1

    def own_tokens(self, batch: Batch) -> int:
        """Tokens of ``batch`` that one rank has: all, or of a context group its part."""
        if self.layout.cp == 1:
            return batch.decoding * self.each + batch.prompt_tokens
        prompts = [chunk.tokens for chunk in batch.chunks if chunk.tokens > 1]
        alone = len(batch.chunks) - len(prompts)  # attend as sequences that decode do
        return workloads.own_tokens(self.layout, decoding=batch.decoding * self.each + alone, prompts=prompts)

    def own_adapted(self, batch: Batch) -> int:
        """Those of its own tokens that ask for an adapter, as large a part as of all."""
        if self.layout.cp == 1:
            return batch.adapted
        tokens = batch.decoding * self.each + batch.prompt_tokens
        return -(-batch.adapted * self.own_tokens(batch) // tokens)

    def shared_tokens(self, chunks: Sequence[Chunk]) -> workloads.SharedTokens:
        """New tokens of these pieces of prompts that ranks exchange."""
        if self.layout.cache_shards == 1:
            return NONE_SHARED
        return workloads.SharedTokens.of(self.layout, [chunk_group(one.tokens, one.context) for one in chunks])

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
        adapted = (self.own_adapted(batch), batch.adapters, None)
        scored = batch.decoding * self.each + batch.ending
        return self._ragged(RaggedStep(groups=groups, scored=scored), adapted)

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
        return self._ragged(RaggedStep(groups=groups))

    def part(self, part: Part, rows: int, context: int) -> Program:
        """One part of a step, over so many ``rows``; of adapters ``context`` is how many there are, of images
        how many patches each has."""
        match part:
            case "shared":
                return self._ragged(RaggedStep(tokens=rows))
            case "head":
                return self._ragged(RaggedStep(scored=rows, tokens=0))
            case "decode":
                seen = max(context, 1)
                group = Group(phase="decode", sequences=rows, new_tokens=self.each, context=seen)
                return self._ragged(RaggedStep(groups=[group], tokens=0))
            case "chunk":
                group = chunk_group(rows, rows + context)
                return self._ragged(RaggedStep(groups=[group], tokens=0, shared=NONE_SHARED))
            case "gathered":
                return self._ragged(RaggedStep(tokens=0, shared=workloads.SharedTokens(new=rows)))
            case "combined":
                return self._ragged(RaggedStep(tokens=0, shared=workloads.SharedTokens(cached=rows)))
            case "adapters":
                return self.adapters_beside(rows, context, rows)
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

    def exchange_launches(self, chunks: Sequence[Chunk]) -> int:
        """Kernels that the host launches for a layer to exchange what ranks share of these pieces of prompts."""
        shared = self.shared_tokens(chunks)
        if not shared.new:
            return 0
        kernels = self._exchange_kernels["gathered"]
        if shared.cached:
            kernels += self._exchange_kernels["combined"] + 1  # and attention over what is cached
        return kernels

    @cached_property
    def _exchange_kernels(self) -> dict[str, int]:
        """Kernels of a layer, by part."""
        found = {}
        parts: tuple[Part, Part] = ("gathered", "combined")
        for part in parts:
            segments = self.part(part, MANY_TOKENS, 0).ranks[0].phases[0].segments
            found[str(part)] = sum(len(one.kernels) * one.repeat for one in segments) // self.launches[0]
        return found

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

    def adapters_beside(self, rows: int, distinct: int, tokens: int) -> Program:
        """The adapters of a step in which ``rows`` of ``tokens`` ask for ``distinct``."""
        return self._ragged(RaggedStep(tokens=0), (rows, distinct, tokens))

    def _ragged(self, step: RaggedStep, adapted: tuple[int, int, int | None] = (0, 0, None)) -> Program:
        """``adapted``: tokens that ask for adapters, how many of these, and all tokens (None: the step's)."""
        scenario, (rows, distinct, tokens) = self.scenario, adapted
        model = workloads.load_model(scenario.model)
        adapters = adapters_in(scenario, distinct=distinct, rows=rows, tokens=tokens)
        options = replace(self._options(model), adapters=adapters)
        program = workloads.build_ragged(model, self.layout, step, options=options, stage=self.stage)
        if not self.layer:
            return program
        count = workloads.tokens_of(self.layout, step.groups) if step.tokens is None else step.tokens
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
