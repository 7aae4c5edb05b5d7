"""One step of a server: prompts in pieces and running sequences, side by side in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workloads.errors import WorkloadError
from workloads.families.adapters import adapter_kernels
from workloads.families.context import attention_kernels
from workloads.families.engine import engine_of, paged_attention, written_keys
from workloads.families.latent import latent_kernels
from workloads.families.nodes import PhaseName, node_kernels, placed_nodes
from workloads.families.options import Options, check_options, positive, precision_in
from workloads.families.transformer import front_segments, head_kernels, loads_of
from workloads.kernels import Shape
from workloads.layer_passes.overlap import BesideExchange, Stage
from workloads.layer_passes.stack import stacked
from workloads.layer_passes.tree import RankSplit
from workloads.model import ModelSpec
from workloads.ops import Attention, Gemm, LatentAttention
from workloads.parallel import Layout, check_layout
from workloads.placement import bind, groups_of
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.routing import ExpertLoad
from workloads.stack import Stack, load_stack
from workloads.work import AttentionWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences of a batch that attend alike: each has ``new_tokens`` that see ``context`` tokens, themselves included
    in a prefill. Several new tokens of one that decodes are a drafted text that is checked.
    """

    phase: PhaseName
    sequences: int
    new_tokens: int
    context: int


def build_ragged(
    model: ModelSpec,
    layout: Layout,
    *,
    groups: Sequence[Group],
    scored: int,
    tokens: int | None = None,
    options: Options | None = None,
    stage: int = 0,
) -> Program:
    """One step over ``groups``: products over all tokens at once, attention group by group, ``scored`` rows of the
    vocabulary head (sequences whose next token this step yields).

    ``tokens`` replaces the groups' sum: with no groups it builds a step without its attention, 0 one without all else
    but the ``rows`` of adapters that ``options`` may name.
    Of a pipeline it is what the ranks of one ``stage`` do: the embedding is on the first, the head on the last.

    >>> from workloads import load_model
    >>> groups = [Group(phase="decode", sequences=8, new_tokens=1, context=900),
    ...           Group(phase="prefill", sequences=1, new_tokens=504, context=504)]
    >>> step = build_ragged(load_model("llama3-8b"), Layout(), groups=groups, scored=8)
    >>> [k.name for k in step.ranks[0].phases[0].segments[0].kernels][:7]
    ['add_rmsnorm_attn', 'qkv_gemm', 'rope', 'copy_k', 'copy_v', 'attention', 'attention']
    """
    options = options or Options()
    stack = load_stack(options.stack)
    check_options(model, layout, options)
    if model.state_space or not model.causal or model.encoder is not None:
        raise WorkloadError(f"{model.id}: serving is known for decoders whose every layer is alike, not for this model")
    if layout.dp * layout.cp > 1 or layout.sequence_parallel:
        raise WorkloadError("a server's step runs on stages of tensor- or expert-parallel groups: leave dp, cp at 1")
    if tokens is None:
        tokens = sum(group.sequences * group.new_tokens for group in groups)
        positive("tokens", tokens)
    check_layout(
        model, layout, batch=max(tokens, 1), new_tokens=1, layers=options.layers, expert_copies=options.routing.replicas
    )
    precision = precision_in(model, options)
    whole = Shape(model=model, layout=layout, batch=max(tokens, 1), new_tokens=1, context=1, precision=precision)
    loads = loads_of(whole, options)
    templates = [_rank(whole, stage, groups, scored, load, stack, options, dense=tokens > 0) for load in loads]
    alone = replace(layout, pp=1)
    return Program(
        ranks=tuple(
            bind(
                templates[rank % len(templates)],
                groups_of(alone, rank),
                ctas=options.comm_ctas,
                all_reduce=options.all_reduce,
            )
            for rank in range(layout.stage_ranks)
        )
    )


def _rank(
    whole: Shape,
    stage: int,
    groups: Sequence[Group],
    scored: int,
    load: ExpertLoad | None,
    stack: Stack,
    options: Options,
    *,
    dense: bool,
) -> RankProgram:
    layers = whole.model.layers if options.layers is None else options.layers
    engine = engine_of(stack.engine)
    mine = whole.layout.stage_layers(layers, stage)
    segments = list(front_segments(whole, "prefill", stack, options)) if dense and stage == 0 else []
    runs = [
        (name, block, precision, run)
        for name, block, alike in whole.model.layer_groups(mine)
        for precision, run in whole.precision.runs(alike)
    ]
    for name, block, precision, run in runs:
        kernels: list[Kernel] = []
        stored = replace(whole, model=whole.model.of(block), precision=precision)
        for node in stacked(placed_nodes(block, RankSplit.of(whole.layout)), stack):
            assert not isinstance(node, Stage | BesideExchange)  # nothing overlaps in a server's step
            match node:
                case Attention() | LatentAttention():
                    if dense and engine is not None and isinstance(node, Attention):
                        kernels += written_keys(node, stored, engine)
                    for group in groups:
                        kernels += _attention(node, stored, group, stack)
                case _ if dense:
                    kernels += node_kernels(node, stored, "prefill", load, stack, options)
                case Gemm():
                    kernels += adapter_kernels(node, stored.over(node.group), options.adapters)
        if kernels:
            segments.append(Segment(name=name, kernels=tuple(kernels), repeat=len(run), first=run.start, layers=True))
    if options.lm_head and scored and stage == whole.layout.pp - 1:
        segments.append(Segment(name="lm_head", kernels=head_kernels(replace(whole, batch=scored), stack, options)))
    return RankProgram(phases=(Phase(name="step", segments=tuple(segments)),))


def _attention(node: Attention | LatentAttention, whole: Shape, group: Group, stack: Stack) -> list[Kernel]:
    if group.phase == "decode" and group.new_tokens > 1:
        each = replace(group, sequences=group.sequences * group.new_tokens, new_tokens=1)
        return [packed(kernel, group.new_tokens) for kernel in _attention(node, whole, each, stack)]
    shape = replace(whole, batch=group.sequences, new_tokens=group.new_tokens, context=group.context)
    engine = engine_of(stack.engine)
    if isinstance(node, Attention) and engine is not None:
        return [paged_attention(node, shape, engine)]
    if isinstance(node, Attention):
        return attention_kernels(node, shape, group.phase, stack)
    return latent_kernels(node, shape, group.phase)


def packed(kernel: Kernel, each: int) -> Kernel:
    """An attention kernel over ``each`` tokens of every sequence, taken for sequences of their own, that reads a
    sequence's cache once for all of them; other kernels as they are."""
    work = kernel.work
    if not isinstance(work, AttentionWork):
        return kernel
    once = replace(work, batch=work.batch // each, q_heads=work.q_heads * each)
    return replace(kernel, work=once, bytes_moved=kernel.bytes_moved / each)
