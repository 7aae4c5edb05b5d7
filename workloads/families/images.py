"""Images before a prefill: the encoder's layers and the projector of a vision-language model."""

from __future__ import annotations

from dataclasses import replace

from workloads.errors import WorkloadError
from workloads.families.nodes import kernels_of, node_kernels, placed_nodes
from workloads.families.options import Options, check_options, precision_in
from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, stored_kernel
from workloads.layer_passes.stack import stacked
from workloads.layer_passes.streams import streamed
from workloads.layer_passes.tree import RankSplit
from workloads.model import ModelSpec, Vision
from workloads.ops import Block, Pointwise, op
from workloads.parallel import Layout
from workloads.placement import bind, groups_of
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.stack import Stack, load_stack

_GELU = Pointwise(name="projector_gelu", op=Elementwise.GELU)
_PROJECTION = op("bsm,mf->bsf", label="projector")


def image_segments(shape: Shape, stack: Stack, options: Options) -> tuple[Segment, ...]:
    """Images of all sequences through the encoder, and what the language model reads of them through its projector."""
    vision = shape.model.vision
    assert vision is not None
    if shape.context < options.images * vision.tokens:
        raise WorkloadError(
            f"seq_len = {shape.context} has no room for images = {options.images} of {vision.tokens} tokens each: "
            f"give at least {options.images * vision.tokens}"
        )
    return _encoder(shape, vision, shape.batch * options.images, stack, options)


def build_images(model: ModelSpec, layout: Layout, *, count: int, patches: int, options: Options) -> Program:
    """A tensor group encodes ``count`` images of ``patches`` each.

    >>> from workloads import load_model
    >>> model = load_model("llava-1.5-7b")
    >>> step = build_images(model, Layout(), count=2, patches=577, options=Options(images=1))
    >>> [segment.name for segment in step.ranks[0].phases[0].segments]
    ['patches', 'vision layer', 'projector']
    """
    check_options(model, layout, options)
    assert model.vision is not None
    vision = model.vision
    if vision.grid is not None:
        vision = replace(vision, patches=patches, tokens=patches // vision.grid.merge**2)
    shape = Shape(model=model, layout=layout, batch=1, new_tokens=1, context=1, precision=precision_in(model, options))
    segments = _encoder(shape, vision, count, load_stack(options.stack), options)
    rank = RankProgram(phases=(Phase(name="images", segments=segments),))
    alone = replace(layout, pp=1)
    bound = (
        bind(rank, groups_of(alone, number), ctas=options.comm_ctas, all_reduce=options.all_reduce)
        for number in range(layout.stage_ranks)
    )
    return Program(ranks=tuple(bound))


def _encoder(shape: Shape, vision: Vision, count: int, stack: Stack, options: Options) -> tuple[Segment, ...]:
    """``count`` images through the encoder of ``vision`` and its projector."""
    options = replace(options, adapters=None)  # the language model's
    patches, precision = vision.patches, shape.precision.of_images
    images = replace(shape, model=vision.model, batch=count, new_tokens=patches, context=patches, precision=precision)
    product = precision.product
    split = RankSplit.of(shape.layout)

    def run(block: Block) -> list[Kernel]:
        here = replace(images, model=vision.model.of(block))
        steps = stacked(placed_nodes(block, split), stack)
        return streamed(steps, kernels_of(here, "prefill", None, stack, options))

    layers = tuple(
        Segment(
            name=f"vision {name}",
            kernels=tuple(run(block)),
            repeat=len(which),
            first=which.start,
        )
        for name, block, which in vision.model.layer_groups(range(vision.model.layers))
    )
    read = replace(images, new_tokens=vision.tokens)
    projector: list[Kernel] = []
    for i, (deep, wide) in enumerate(vision.projector):
        if i and i == len(vision.projector) - 1:
            between = replace(read, model=replace(vision.model, d_ff=deep), layout=Layout())
            projector += node_kernels(_GELU, between, "prefill", None, stack, options)
        own = replace(read, model=replace(vision.model, d_model=deep, d_ff=wide))
        projector.append(stored_kernel(f"projector_{i}", (_PROJECTION,), own, product))
    read = images if vision.grid is not None else read  # every patch, less that of a class
    embed = stored_kernel("embed_patches", (op("bsv,vm->bsm", label="patches"),), read, product)
    return (
        Segment(name="patches", kernels=(embed,)),
        *layers,
        Segment(name="projector", kernels=tuple(projector)),
    )
