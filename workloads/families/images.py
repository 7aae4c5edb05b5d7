"""Images before a prefill: the encoder's layers and the projector of a vision-language model."""

from __future__ import annotations

from dataclasses import replace

from workloads.errors import WorkloadError
from workloads.families.nodes import kernels_of, node_kernels, placed_nodes
from workloads.families.options import Options
from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, stored_kernel
from workloads.layer_passes.stack import stacked
from workloads.layer_passes.streams import streamed
from workloads.layer_passes.tree import RankSplit
from workloads.ops import Block, Pointwise, op
from workloads.parallel import Layout
from workloads.program import Kernel, Segment
from workloads.stack import Stack

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
    count, patches = shape.batch * options.images, vision.patches
    precision = shape.precision.of_images
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
    embed = stored_kernel("embed_patches", (op("bsv,vm->bsm", label="patches"),), read, product)
    return (
        Segment(name="patches", kernels=(embed,)),
        *layers,
        Segment(name="projector", kernels=tuple(projector)),
    )
