"""The encoder of an encoder-decoder model, once a sequence before the decoder's prefill."""

from __future__ import annotations

from dataclasses import replace

from workloads.families.nodes import kernels_of, placed_nodes
from workloads.families.options import Options
from workloads.kernels import Shape, product_kernel
from workloads.layer_passes.stack import stacked
from workloads.layer_passes.streams import streamed
from workloads.layer_passes.tree import RankSplit
from workloads.program import Segment
from workloads.stack import Stack


def encoder_segments(shape: Shape, stack: Stack, options: Options) -> tuple[Segment, ...]:
    """What stands before the encoder's layers (convolutions, as products over their windows), and the layers."""
    encoder = shape.model.encoder
    assert encoder is not None
    read = replace(shape, model=encoder, new_tokens=shape.source, context=shape.source)
    split = replace(RankSplit.of(shape.layout), rows=False)
    segments = []
    if encoder.front:
        products = (
            product_kernel(f"front_{i}", rows * read.tokens, wide, deep)
            for i, (deep, wide, rows) in enumerate(encoder.front)
        )
        segments.append(Segment(name="front of the encoder", kernels=tuple(products)))
    for name, block, layers in encoder.layer_groups(range(encoder.layers)):
        nodes = stacked(placed_nodes(block, split), stack)
        here = replace(read, model=encoder.of(block))
        kernels = streamed(nodes, kernels_of(here, "prefill", None, stack, options))
        words = "encoder layer" if name == "layer" else f"encoder {name}"
        segments.append(Segment(name=words, kernels=tuple(kernels), repeat=len(layers), first=layers.start))
    return tuple(segments)
