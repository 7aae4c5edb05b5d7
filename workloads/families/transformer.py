"""Decoder transformers: from the op tree of a model to the kernels of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workloads.errors import WorkloadError
from workloads.families.context import last_slice, own_shape
from workloads.families.encoder import encoder_segments
from workloads.families.images import image_segments
from workloads.families.layer_kernels import LayerKernels, schedule_of, with_settings
from workloads.families.nodes import PhaseName, node_kernels, placed_nodes
from workloads.families.options import Options, check_options, choice_of, positive, precision_in
from workloads.families.pipeline import StagePass, stage_segments
from workloads.kernels import Shape
from workloads.layer_passes.lower import lower_front
from workloads.layer_passes.overlap import Stage, overlap
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import RankSplit
from workloads.layout_checks import check_layout
from workloads.model import ModelSpec
from workloads.parallel import Layout
from workloads.placement import bind, groups_of, place_of
from workloads.positions import check_reach
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.routing import ExpertLoad, expert_loads
from workloads.stack import Stack, load_stack


def build_program(
    model: ModelSpec,
    layout: Layout,
    *,
    phase: PhaseName,
    batch: int,
    seq_len: int,
    options: Options | None = None,
) -> Program:
    """One step: a prefill of ``seq_len`` tokens a sequence, or one decode token over ``seq_len`` cached ones.

    >>> from workloads import load_model
    >>> program = build_program(load_model("llama3-70b"), Layout(tp=4), phase="decode", batch=8, seq_len=2048)
    >>> [kernel.name for kernel in program.ranks[0].phases[0].segments[0].kernels][:3]
    ['add_rmsnorm_attn', 'qkv_gemm', 'rope']
    """
    if phase not in ("prefill", "decode"):
        raise WorkloadError(f"phase = {phase!r}: known are 'prefill', 'decode'")
    if phase == "decode" and layout.sequence_parallel:
        raise WorkloadError("sequence_parallel: is for phase 'prefill', not 'decode'")
    return _program(model, layout, [(phase, phase, batch, seq_len)], options or Options())


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The lengths of a generation: tokens of a prompt, and cached tokens of each decode step behind it."""

    seq_len: int
    contexts: Sequence[int]

    @classmethod
    def of(cls, seq_len: int, output_len: int) -> Generation:
        """``output_len`` tokens: the prefill yields the first, each step one more over a context that grows by one.

        >>> Generation.of(64, 4).contexts
        range(64, 67)
        """
        positive("output_len", output_len)
        return cls(seq_len=seq_len, contexts=range(seq_len, seq_len + output_len - 1))


def build_generate(
    model: ModelSpec, layout: Layout, *, batch: int, generation: Generation, options: Options | None = None
) -> Program:
    """A prefill, which yields the first token, then the decode steps of ``generation``."""
    if layout.sequence_parallel:
        raise WorkloadError("sequence_parallel: is for phase 'prefill', not 'generate'")
    steps: list[tuple[str, PhaseName, int, int]] = [("prefill", "prefill", batch, generation.seq_len)]
    steps += [(f"decode {i + 1}", "decode", batch, tokens) for i, tokens in enumerate(generation.contexts)]
    return _program(model, layout, steps, options or Options())


def _program(
    model: ModelSpec, layout: Layout, steps: Iterable[tuple[str, PhaseName, int, int]], options: Options
) -> Program:
    stack = load_stack(options.stack)
    check_options(model, layout, options)
    _check_cut(model, layout, options)
    layers = model.layers if options.layers is None else options.layers
    precision = precision_in(model, options)
    shapes = []
    steps = list(steps)
    prompt = steps[0][3]
    for label, phase, batch, seq_len in steps:
        positive("batch", batch)
        positive("seq_len", seq_len)
        if phase == "decode" and not model.causal:
            raise WorkloadError(f"phase = 'decode': {model.id} is an encoder: use phase = 'prefill'")
        new_tokens = seq_len if phase == "prefill" else 1
        if phase == "prefill" and seq_len < layout.cp:
            raise WorkloadError(f"cp = {layout.cp}: a prompt of seq_len = {seq_len} fills at most {seq_len} ranks")
        check_reach(model, seq_len if phase == "prefill" else seq_len + 1)
        check_layout(
            model, layout, batch=batch, new_tokens=new_tokens, layers=layers, expert_copies=options.routing.replicas
        )
        share = batch // (layout.dp * layout.micro_batches)
        shape = Shape(
            model=model,
            layout=layout,
            batch=share,
            new_tokens=new_tokens,
            context=seq_len,
            precision=precision,
            source=model.encoder_tokens(options.source_len, prompt),
        )
        own = own_shape(shape, phase)
        if options.overlap == "two_batch" and own.batch % 2:
            raise WorkloadError(
                f"overlap = 'two_batch' cuts the {own.batch} sequences of a rank in two: give an even number"
            )
        shapes.append((label, phase, share, own))
    kernels = LayerKernels(stack, options)
    templates: dict[_Role, RankProgram] = {}
    bound: dict[tuple[_Role, tuple[object, ...]], RankProgram] = {}
    ranks = []
    for rank in range(layout.world):
        place, groups = place_of(layout, rank), groups_of(layout, rank)
        role = _Role(
            stage=place.stage,
            tail=place.context == last_slice(layout),
            member=place.member if layout.ep > 1 else 0,
            context_slice=0 if layout.cp_mode == "ulysses" else place.context,
        )
        if role not in templates:
            templates[role] = _role_program(role, shapes, layers, kernels)
        key = (role, tuple(groups.values()))
        if key not in bound:
            bound[key] = bind(templates[role], groups, ctas=options.comm_ctas, all_reduce=options.all_reduce)
        ranks.append(bound[key])
    return Program(ranks=tuple(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """What sets ranks apart besides whom they meet: stage, the last slice of a context, whose experts, place in a
    ring."""

    stage: int
    tail: bool
    member: int
    context_slice: int


def _role_program(
    role: _Role, shapes: list[tuple[str, PhaseName, int, Shape]], layers: int, kernels: LayerKernels
) -> RankProgram:
    phases = []
    stack, options = kernels.stack, kernels.options
    known: dict[tuple[PhaseName, int], tuple[Segment, ...]] = {}  # steps of equal context share their kernels
    previous: str | None = None
    for number, (label, phase, sequences, whole) in enumerate(shapes):
        shape = replace(whole, context_slice=role.context_slice)
        layout, model = shape.layout, shape.model
        mine = layout.stage_layers(layers, role.stage)
        # In a prefill the last slice of a context holds the tokens that are scored.
        head = options.lm_head and model.causal and role.stage == layout.pp - 1 and (phase == "decode" or role.tail)
        compute = known.get((phase, shape.context))
        if compute is None:
            load = loads_of(shape, options)[role.member]
            compute = _segments(shape, phase, mine, load, kernels)
            if head:
                compute = (*compute, Segment(name="lm_head", kernels=kernels.head(shape)))
            if role.stage == 0:
                compute = (*front_segments(shape, phase, stack, options), *compute)
            if model.encoder is not None and phase == "prefill" and role.stage == 0:
                compute = (*encoder_segments(shape, stack, options), *compute)
            if options.images and phase == "prefill" and role.stage == 0:
                compute = (*image_segments(shape, stack, options), *compute)
            known[phase, shape.context] = compute
        returns = number < len(shapes) - 1
        step = StagePass(
            shape=shape, sequences=sequences, stage=role.stage, label=label, previous=previous, returns=returns
        )
        phases.append(Phase(name=label, segments=tuple(stage_segments(step, compute))))
        previous = label
    return RankProgram(phases=tuple(phases))


def loads_of(shape: Shape, options: Options) -> tuple[ExpertLoad | None, ...]:
    """Expert load of each rank; one entry, None, for dense models: all ranks run the same program."""
    model, layout = shape.model, shape.layout
    if not model.experts:
        return (None,)
    if options.overlap == "two_batch":
        shape = replace(shape, batch=shape.batch // 2)
    batches = layout.own_batches
    loads = expert_loads(
        tokens=shape.tokens * batches,
        choice=choice_of(model),
        routing=options.routing,
        ranks=layout.ep,
        rows_per_rank=options.tokens_per_ep_rank,
    )
    return loads if layout.ep > 1 else loads[:1]


def _segments(
    shape: Shape, phase: PhaseName, layers: range, load: ExpertLoad | None, kernels: LayerKernels
) -> tuple[Segment, ...]:
    segments = []
    for name, block, mine in shape.model.layer_groups(layers):
        for precision, run in shape.precision.runs(mine):
            here = replace(shape, model=shape.model.of(block), precision=precision)
            made = tuple(kernels.of(block, here, phase, load))
            segments.append(Segment(name=name, kernels=made, repeat=len(run), first=run.start, layers=True))
    return tuple(segments)


def _check_cut(model: ModelSpec, layout: Layout, options: Options) -> None:
    """Refuse pieces of a product that no collective feeds or ends: they would change nothing."""
    asked = {name: one for name, one in options.overlap_ops if one.chunks > 1}
    if not asked:
        return
    cut: set[str] = set()
    for block in model.blocks:
        nodes = placed_nodes(with_settings(block, options), RankSplit.of(layout))
        steps = overlap(nodes, lambda node: schedule_of(node, layout, options))
        cut |= {node.name for step in steps if isinstance(step, Stage) for node in step.nodes}
    for name, one in asked.items():
        if name not in cut:
            remedy = "leave it out" if layout.sequence_parallel else "leave it out, or use sequence_parallel"
            raise WorkloadError(
                f"overlap_ops: {name} = {one.chunks} chunks: no collective feeds or ends it in this layout: {remedy}"
            )


def front_segments(shape: Shape, phase: PhaseName, stack: Stack, options: Options) -> tuple[Segment, ...]:
    """The embedding of a serving engine's step, whose vocabulary its ranks hold in slices."""
    if stack.engine is None:
        return ()
    nodes = shard(lower_front(), RankSplit.of(shape.layout))
    kernels = tuple(kernel for node in nodes for kernel in node_kernels(node, shape, phase, None, stack, options))
    return (Segment(name="embedding", kernels=kernels),)


def head_kernels(shape: Shape, stack: Stack, options: Options) -> tuple[Kernel, ...]:
    """Only the last token of each sequence is scored.

    A serving engine draws a token from its logits, and prepares the next step.
    """
    return LayerKernels(stack, options).head(shape)
