"""Attention of one rank: alone, or with the tokens of a sequence spread over a context-parallel group."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from workloads.errors import WorkloadError
from workloads.families.engine import engine_attention, engine_of
from workloads.families.ring import Ring, RingLayout, ring_kernels
from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, attention_kernel, elementwise_kernel
from workloads.layer_passes.tree import KeyRounds
from workloads.ops import Attention
from workloads.parallel import Layout
from workloads.program import Kernel
from workloads.stack import Stack
from workloads.work import DType

Pass = Literal["prefill", "decode"]


def attention_kernels(node: Attention, shape: Shape, phase: Pass, stack: Stack) -> list[Kernel]:
    """The attention node of ``shape``'s rank, over its own keys or over whole sequences of some heads."""
    if node.keys == "heads":
        shape = inside_heads(shape, phase)
    return _local(node, shape, phase, stack)


def inside_heads(shape: Shape, phase: Pass) -> Shape:
    """A context group's step between its exchanges of tokens for heads: whole sequences, heads split as if tp were
    tp x cp, key/value heads on every rank that shares them (DeepSpeed Ulysses, arXiv 2309.14509)."""
    cp = shape.layout.cp
    whole = (
        replace(shape, new_tokens=shape.new_tokens * cp)
        if phase == "prefill"
        else replace(shape, batch=shape.batch * cp)
    )
    return replace(whole, layout=Layout(tp=shape.layout.tp * cp))


def whole_sequences(shape: Shape) -> Shape:
    """All tokens of a server's step of which ``shape`` has one rank's, with the heads that the rank takes for them."""
    layout = shape.layout
    return inside_heads(shape, "prefill") if layout.cp > 1 and layout.cp_mode == "ulysses" else shape


def own_shape(shape: Shape, phase: Pass) -> Shape:
    """What one rank of a context group holds outside attention: a slice of each prompt, or some of the sequences."""
    cp = shape.layout.cp
    if phase == "prefill":
        return replace(shape, new_tokens=shape.new_tokens // cp)
    return replace(shape, batch=shape.batch // cp)


def last_slice(layout: Layout) -> int:
    """The place in its context group of the rank that holds the last token of a prompt."""
    return 0 if layout.cp_mode == "zigzag" else layout.cp - 1


def _local(node: Attention, shape: Shape, phase: Pass, stack: Stack) -> list[Kernel]:
    engine = engine_of(stack.engine)
    if engine is not None:
        return engine_attention(node, shape, engine)
    heads = shape.kv_heads * shape.model.head_dim
    kernels: list[Kernel] = []
    if phase == "decode" and node.copies and not node.cross and not node.shared:
        cached = shape.tokens * heads * (DType.BF16.bytes + shape.precision.kv.bytes)
        kernels += [
            elementwise_kernel(name, Elementwise.COPY, shape.tokens, heads, cached) for name in ("copy_k", "copy_v")
        ]
    kernels.append(attention_kernel(node, shape))
    return kernels


def round_kernels(node: KeyRounds, shape: Shape) -> list[Kernel]:
    """Blocks of keys and values pass from rank to rank; the first leaves when the kernel before attention ends.

    Their ``after`` counts from the first of them; -1 is the kernel before it.
    """
    model, mode = shape.model, shape.layout.cp_mode
    assert mode != "ulysses" and mode != "all_gather"  # which no rounds are made of
    layout: RingLayout = "contiguous" if mode == "ring" else mode
    window = node.attention.window
    if window and shape.context > window:
        raise WorkloadError(f"cp_mode = '{mode}': attention over a window of {window} tokens: use cp_mode = 'ulysses'")
    ring = Ring(
        layout=layout,
        ranks=shape.layout.context_ranks,
        block=shape.new_tokens,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=model.head_dim,
        batch=shape.batch,
        merges=True,
        gather=node.gather,
    )
    return ring_kernels(ring, shape.context_slice, first=(-1,))
