"""Speculative decoding: some tokens are drafted one after another, then checked by the model in one step.

The check is a step of decoding over all drafted tokens and one more: products, norms and experts see them as tokens of
their own, attention reads each sequence's cache once for all of them (their query heads are packed beside each other,
as serving kernels do). Drafts come from a smaller model, from one more layer of the model itself (EAGLE's head,
DeepSeek's MTP module: its last layer's like, after a product that joins token and hidden state, with the model's
head), or from what the text said before (n-grams, looked up by the host), which costs no GPU anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from workloads.errors import WorkloadError
from workloads.families.options import Options
from workloads.families.ragged_groups import packed
from workloads.families.transformer import Generation, build_program
from workloads.model import ModelSpec
from workloads.parallel import Layout
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import DType, GemmWork

# Another model, one more layer of the model itself, or the text so far.
Drafter = ModelSpec | Literal["layer", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How many tokens are drafted, and by what."""

    tokens: int
    draft: Drafter = "layer"


def tokens_a_step(acceptance: Sequence[float]) -> float:
    """Mean tokens of a sequence a step: ``acceptance`` of each drafted token is its chance if all before it passed.

    The token after the last one that passes is the model's own, so that there is at least one.

    >>> tokens_a_step([0.5, 0.5]), tokens_a_step([1.0] * 3), tokens_a_step([])
    (1.75, 4.0, 1.0)
    """
    reached = np.cumprod(np.array(acceptance, dtype=float))  # the chance that each drafted token passes
    return 1.0 + math.fsum(reached.tolist())


def build_speculative(
    model: ModelSpec, layout: Layout, *, batch: int, seq_len: int, options: Options, speculation: Speculation
) -> Program:
    """A step that drafts and checks: phases ``draft`` and ``verify``."""
    if layout.pp > 1 or layout.cp > 1:
        raise WorkloadError("speculation runs on tensor or expert groups: leave pp and cp at 1")
    if model.state_space or model.encoder is not None:
        raise WorkloadError(f"speculation checks tokens of decoders that attend: {model.id} has other layers")
    count = speculation.tokens
    checked = _decode(model, layout, batch * (count + 1), seq_len, options)
    match speculation.draft:
        case ModelSpec() as draft:
            check_draft(model, layout, draft)
            own = replace(options, precision=None, layers=None, adapters=None)  # the draft's checkpoint, all of it
            drafted = _decode(draft, layout, batch, seq_len, own)
        case "layer":
            drafted = own_layer(
                _decode(model, layout, batch, seq_len, replace(options, adapters=None)), model, batch // layout.dp
            )
        case "text":
            drafted = Program(ranks=(RankProgram(phases=(Phase(name="draft", segments=()),)),) * len(checked.ranks))
    known: dict[tuple[int, int], RankProgram] = {}
    ranks = []
    for small, large in zip(drafted.ranks, checked.ranks, strict=True):
        key = (id(small), id(large))
        if key not in known:
            drafts = small.phases[0].segments * count
            phases = (Phase(name="draft", segments=drafts),) if drafts else ()
            known[key] = RankProgram(phases=(*phases, _verify(large.phases[0].segments, count + 1)))
        ranks.append(known[key])
    return Program(ranks=tuple(ranks))


def _decode(model: ModelSpec, layout: Layout, batch: int, seq_len: int, options: Options) -> Program:
    return build_program(model, layout, phase="decode", batch=batch, seq_len=seq_len, options=options)


def build_speculative_generate(
    model: ModelSpec,
    layout: Layout,
    *,
    batch: int,
    generation: Generation,
    options: Options,
    speculation: Speculation,
) -> Program:
    """A prefill of the model and of what drafts, then drafts and a check for each step of ``generation``."""
    seq_len, contexts = generation.seq_len, generation.contexts
    programs = [_prompt(model, layout, batch, seq_len, options)]
    match speculation.draft:
        case ModelSpec() as draft:
            own = replace(options, precision=None, layers=None, lm_head=False, adapters=None)
            programs.append(_prompt(draft, layout, batch, seq_len, own))
        case "layer":
            unscored = _prompt(model, layout, batch, seq_len, replace(options, lm_head=False, adapters=None))
            programs.append(own_layer(unscored, model, batch // layout.dp * seq_len))
    steps = {
        context: build_speculative(
            model, layout, batch=batch, seq_len=context, options=options, speculation=speculation
        )
        for context in dict.fromkeys(contexts)
    }
    known: dict[tuple[int, ...], RankProgram] = {}
    ranks = []
    for number in range(len(programs[0].ranks)):
        parts = [program.ranks[number] for program in (*programs, *steps.values())]
        key = tuple(map(id, parts))
        if key not in known:
            prompt = [segment for part in parts[: len(programs)] for segment in part.phases[0].segments]
            step_of = {
                context: tuple(segment for phase in part.phases for segment in phase.segments)
                for context, part in zip(steps, parts[len(programs) :], strict=True)
            }
            phases = [Phase(name="prefill", segments=tuple(prompt))]
            phases += [Phase(name=f"decode {i + 1}", segments=step_of[c]) for i, c in enumerate(contexts)]
            known[key] = RankProgram(phases=tuple(phases))
        ranks.append(known[key])
    return Program(ranks=tuple(ranks))


def _prompt(model: ModelSpec, layout: Layout, batch: int, seq_len: int, options: Options) -> Program:
    return build_program(model, layout, phase="prefill", batch=batch, seq_len=seq_len, options=options)


def check_draft(model: ModelSpec, layout: Layout, draft: ModelSpec) -> None:
    """Raise where ``draft`` cannot draft for ``model``."""
    if layout.ep > 1:
        raise WorkloadError("speculation = 'draft_model' with ep: a draft runs on a tensor group: use 'mtp'")
    if draft.vocab != model.vocab:
        raise WorkloadError(
            f"draft_model = {draft.id}: drafts of {draft.vocab:,} kinds of tokens, the model "
            f"has {model.vocab:,}: give one of its family"
        )


def own_layer(program: Program, model: ModelSpec, tokens: int) -> Program:
    """One more layer in place of all of ``program``'s, over ``tokens`` of each rank."""
    known: dict[int, RankProgram] = {}
    for rank in program.ranks:
        if id(rank) not in known:
            (phase,) = rank.phases
            segments = _own_layer(model, phase.segments, tokens)
            known[id(rank)] = RankProgram(phases=(replace(phase, segments=segments),))
    return Program(ranks=tuple([known[id(rank)] for rank in program.ranks]))


def _own_layer(model: ModelSpec, segments: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """What comes before the layers, a product from twice the width, the last layer again, and what comes behind."""
    places = [place for place, segment in enumerate(segments) if segment.layers]
    if not places:
        return segments
    last = segments[places[-1]]
    return (
        *segments[: places[0]],
        *((Segment(name="join", kernels=(_join(model.d_model, tokens),)),) if tokens else ()),
        replace(last, repeat=1, first=last.first + last.repeat),
        *segments[places[-1] + 1 :],
    )


def _join(width: int, tokens: int) -> Kernel:
    moved = DType.BF16.bytes * (tokens * 3 * width + 2 * width * width)
    work = GemmWork(m=tokens, n=width, k=2 * width)
    return Kernel(name="join_gemm", work=work, flops=4.0 * tokens * width * width, bytes_moved=float(moved))


def _verify(segments: tuple[Segment, ...], each: int) -> Phase:
    """A step over ``each`` tokens a sequence, whose attention reads a sequence's cache once for all of them."""
    return Phase(
        name="verify",
        segments=tuple(replace(s, kernels=tuple(packed(kernel, each) for kernel in s.kernels)) for s in segments),
    )
