"""One step of a server: prompts in pieces and running sequences, side by side in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workloads.errors import WorkloadError
from workloads.families.adapters import adapter_kernels
from workloads.families.context import whole_sequences
from workloads.families.engine import engine_of, written_keys
from workloads.families.nodes import PhaseName, node_kernels, placed_nodes
from workloads.families.options import Options, check_options, positive, precision_in
from workloads.families.ragged_attention import spread_attention
from workloads.families.ragged_groups import Group, SharedTokens, gathered_rows, group_attention, tokens_of
from workloads.families.transformer import front_segments, head_kernels, loads_of
from workloads.kernels import Shape
from workloads.layer_passes.overlap import BesideExchange, Stage
from workloads.layer_passes.stack import stacked
from workloads.layer_passes.tree import Grouped, RankSplit
from workloads.layout_checks import check_served
from workloads.model import ModelSpec
from workloads.ops import Attention, Gemm, Indexer, LatentAttention
from workloads.parallel import Layout
from workloads.placement import bind, groups_of
from workloads.positions import check_reach
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.routing import ExpertLoad
from workloads.stack import Stack, load_stack


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedStep:
    """Groups of sequences, and how many of them are ``scored`` by the vocabulary head (their next tokens come of it).

    ``tokens`` replaces those of the groups that a rank has: without groups the step has no attention, with 0 nothing
    but attention and the ``rows`` of adapters that options may name. ``shared`` replaces the groups' own tokens of
    prompts that ranks of a context group exchange.
    """

    groups: Sequence[Group] = ()
    scored: int = 0
    tokens: int | None = None
    shared: SharedTokens | None = None


def build_ragged(
    model: ModelSpec, layout: Layout, asked: RaggedStep, *, options: Options | None = None, stage: int = 0
) -> Program:
    """One step: products over all tokens at once, attention group by group, the head for the sequences it scores.

    Of a pipeline it is the work of the ranks of one ``stage``: the embedding is on the first, the head on the last.

    >>> from workloads import load_model
    >>> groups = [Group(phase="decode", sequences=8, new_tokens=1, context=900),
    ...           Group(phase="prefill", sequences=1, new_tokens=504, context=504)]
    >>> step = build_ragged(load_model("llama3-8b"), Layout(), RaggedStep(groups=groups, scored=8))
    >>> [k.name for k in step.ranks[0].phases[0].segments[0].kernels][:7]
    ['add_rmsnorm_attn', 'qkv_gemm', 'rope', 'copy_k', 'copy_v', 'attention', 'attention']
    """
    options = options or Options()
    stack = load_stack(options.stack)
    check_options(model, replace(layout, cp=1, dcp=1), options)
    if model.state_space or not model.causal or model.encoder is not None:
        raise WorkloadError(f"{model.id}: serving is known for decoders whose every layer is alike, not for this model")
    if layout.dp > 1 or layout.sequence_parallel:
        raise WorkloadError("a server's step runs on stages of tensor- or expert-parallel groups: leave dp at 1")
    check_spread(model, layout)
    tokens, shared = asked.tokens, asked.shared
    if tokens is None:
        tokens = tokens_of(layout, asked.groups)
        positive("tokens", tokens)
    check_served(model, layout, layers=options.layers, expert_copies=options.routing.replicas)
    precision = precision_in(model, options)
    whole = Shape(model=model, layout=layout, batch=max(tokens, 1), new_tokens=1, context=1, precision=precision)
    loads = loads_of(whole, options)
    if shared is None:
        shared = SharedTokens.of(layout, asked.groups) if layout.cache_shards > 1 else SharedTokens()
    step = _Step(groups=tuple(asked.groups), shared=shared, scored=asked.scored, dense=tokens > 0)
    templates = [_rank(whole, stage, step, load, stack, options) for load in loads]
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


def build_spread(
    model: ModelSpec, layout: Layout, *, phase: PhaseName, batch: int, seq_len: int, options: Options
) -> Program:
    """A prefill of ``seq_len`` tokens a sequence, or one decode token over as many cached ones, where the tokens of
    caches are spread over ranks: a server's step of ``batch`` equal sequences.

    >>> from workloads import load_model
    >>> layout = Layout(cp=2, cp_mode="all_gather")
    >>> step = build_spread(load_model("llama3-8b"), layout, phase="decode", batch=8, seq_len=900, options=Options())
    >>> [k.name for k in step.ranks[0].phases[0].segments[0].kernels][5:9]
    ['attention', 'all_gather_lse', 'correct_out', 'all_reduce_out']
    """
    positive("batch", batch)
    positive("seq_len", seq_len)
    check_reach(model, seq_len if phase == "prefill" else seq_len + 1)
    named = f"dcp = {layout.dcp}" if layout.dcp > 1 else "cp_mode = 'all_gather'"
    others = {
        "pp": layout.pp > 1,
        "overlap": options.overlap != "chunks" or options.overlap_chunks > 1 or bool(options.overlap_ops),
        "images": options.images > 0,
        "tokens_per_ep_rank": options.tokens_per_ep_rank is not None,
    }
    for name, there in others.items():
        if there:
            raise WorkloadError(f"{name}: not known beside {named}: leave one of them out")
    new_tokens = seq_len if phase == "prefill" else 1
    group = Group(phase=phase, sequences=batch, new_tokens=new_tokens, context=seq_len)
    program = build_ragged(model, layout, RaggedStep(groups=[group], scored=batch), options=options)
    named_ranks: dict[int, RankProgram] = {}
    for rank in program.ranks:
        if id(rank) not in named_ranks:
            (step,) = rank.phases
            named_ranks[id(rank)] = RankProgram(phases=(replace(step, name=phase),))
    return Program(ranks=tuple(named_ranks[id(rank)] for rank in program.ranks))


def check_spread(model: ModelSpec, layout: Layout) -> None:
    """Refuse models for which context parallelism is not known: caches, or sequences, spread over ranks."""
    if layout.cp * layout.dcp == 1:
        return
    named = f"cp = {layout.cp}" if layout.cp > 1 else f"dcp = {layout.dcp}"
    nodes = [node for block in model.blocks for node in block.nodes]
    if any(isinstance(node, Indexer) for node in nodes):
        raise WorkloadError(f"{named}: {model.id} chooses the keys that it reads: their shards are not known")
    if any(isinstance(node, Attention) and node.scores.parallel is None for node in nodes):
        raise WorkloadError(f"{named}: heads of {model.id} are not split over ranks: use cp = 1, dcp = 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A :class:`RaggedStep` whose tokens are counted; ``dense``: what is done to all of a rank's tokens too."""

    groups: tuple[Group, ...]
    shared: SharedTokens
    scored: int
    dense: bool


def _rank(
    whole: Shape, stage: int, step: _Step, load: ExpertLoad | None, stack: Stack, options: Options
) -> RankProgram:
    layers = whole.model.layers if options.layers is None else options.layers
    engine = engine_of(stack.engine)
    dense, layout = step.dense, whole.layout
    mine = layout.stage_layers(layers, stage)
    segments = list(front_segments(whole, "prefill", stack, options)) if dense and stage == 0 else []
    # Of caches that are spread over ranks attention itself knows; else heads are exchanged for tokens around it.
    split = RankSplit.of(replace(layout, cp=1) if layout.cache_shards > 1 else layout)
    runs = [
        (name, block, precision, run)
        for name, block, alike in whole.model.layer_groups(mine)
        for precision, run in whole.precision.runs(alike)
    ]
    for name, block, precision, run in runs:
        kernels: list[Kernel] = []
        stored = replace(whole, model=whole.model.of(block), precision=precision)
        for node in stacked(placed_nodes(block, split), stack):
            assert not isinstance(node, Stage | BesideExchange)  # nothing overlaps in a server's step
            match node:
                case Attention() | LatentAttention():
                    kernels += adapter_kernels(node, stored, options.adapters)
                    attends = whole_sequences(stored)
                    if dense and engine is not None and isinstance(node, Attention):
                        kernels += written_keys(node, attends, engine)
                    if layout.cache_shards > 1:
                        kernels += spread_attention(node, stored, step.groups, step.shared, stack)
                        continue
                    for group in step.groups:
                        kernels += group_attention(node, attends, group, stack)
                case _ if dense:
                    kernels += node_kernels(node, stored, "prefill", load, stack, options)
                case Gemm():
                    kernels += adapter_kernels(node, stored.over(node.group), options.adapters)
                case Grouped():
                    kernels += adapter_kernels(node, stored, options.adapters)
        if kernels:
            segments.append(Segment(name=name, kernels=tuple(kernels), repeat=len(run), first=run.start, layers=True))
    last = options.lm_head and stage == layout.pp - 1
    if last and dense and (rows := gathered_rows(layout, whole.tokens, whole.model.d_model)):
        segments.append(Segment(name="gather", kernels=rows))
    if last and step.scored:
        head = head_kernels(replace(whole, batch=step.scored), stack, options)
        segments.append(Segment(name="lm_head", kernels=head))
    return RankProgram(phases=(Phase(name="step", segments=tuple(segments)),))
