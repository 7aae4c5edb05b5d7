"""Attention of one rank: alone, or with the tokens of a sequence spread over a context-parallel group."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, assert_never

from workloads.errors import WorkloadError
from workloads.families.engine import engine_attention, engine_of
from workloads.families.ring import Ring, RingLayout, ring_kernels
from workloads.kernels import Shape, attention_kernel, elementwise_kernel, exchange_kernel, permute_kernel
from workloads.ops import Attention
from workloads.parallel import Layout
from workloads.program import Kernel
from workloads.stack import Stack
from workloads.work import DType, Elementwise

Pass = Literal["prefill", "decode"]


def attention_kernels(node: Attention, shape: Shape, phase: Pass, stack: Stack) -> list[Kernel]:
    """The attention node of ``shape``'s rank, with the exchanges that its layout needs.

    Their ``after`` counts from the first of them; -1 is the kernel before it.
    """
    if shape.layout.cp == 1:
        return _local(node, shape, phase, stack)
    window = node.window or shape.model.usual_window
    if window and shape.context > window and shape.layout.cp_mode != "ulysses":
        raise WorkloadError(
            f"cp_mode = '{shape.layout.cp_mode}': attention over a window of {window} tokens: use cp_mode = 'ulysses'"
        )
    match shape.layout.cp_mode:
        case "ulysses":
            return _ulysses(node, shape, phase, stack)
        case "ring":
            return _ring(shape, "contiguous")
        case "striped" | "zigzag":
            return _ring(shape, shape.layout.cp_mode)
    assert_never(shape.layout.cp_mode)


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
    if phase == "decode" and stack.kv_copies:
        cached = shape.tokens * heads * (DType.BF16.bytes + shape.precision.kv.bytes)
        kernels += [
            elementwise_kernel(name, Elementwise.COPY, shape.tokens, heads, cached) for name in ("copy_k", "copy_v")
        ]
    kernels.append(attention_kernel(node, shape))
    return kernels


def _ulysses(node: Attention, shape: Shape, phase: Pass, stack: Stack) -> list[Kernel]:
    """All-to-all from rows to heads, attention over whole sequences, all-to-all back; a copy sorts each by rank.

    Inside, heads are split over tp x cp ranks as if tp were that large; key/value heads are sent to every rank
    that shares them (DeepSpeed Ulysses, arXiv 2309.14509, and its use with grouped queries).
    """
    layout, model = shape.layout, shape.model
    cp, ranks = layout.cp, layout.context_ranks
    whole = (
        replace(shape, new_tokens=shape.new_tokens * cp)
        if phase == "prefill"
        else replace(shape, batch=shape.batch * cp)
    )
    inside = replace(whole, layout=Layout(tp=layout.tp * cp))
    out_width = shape.q_heads * model.head_dim
    sent_width = cp * (inside.q_heads + 2 * inside.kv_heads) * model.head_dim
    return [
        permute_kernel("permute_qkv", shape.tokens, sent_width),
        exchange_kernel("all_to_all_qkv", ranks, shape.tokens * sent_width),
        *_local(node, inside, phase, stack),
        exchange_kernel("all_to_all_out", ranks, shape.tokens * out_width),
        permute_kernel("permute_out", shape.tokens, out_width),
    ]


def _ring(shape: Shape, layout: RingLayout) -> list[Kernel]:
    """Blocks of keys and values pass from rank to rank; the first leaves when the kernel before attention ends."""
    model = shape.model
    ring = Ring(
        layout=layout,
        ranks=shape.layout.context_ranks,
        block=shape.new_tokens,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=model.head_dim,
        batch=shape.batch,
        merges=True,
    )
    return ring_kernels(ring, shape.context_slice, first=(-1,))
