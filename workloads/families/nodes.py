"""Placed nodes of a layer as the kernels of one rank: the last of the passes, and all of them one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, assert_never

from workloads.families.adapters import adapter_kernels
from workloads.families.context import attention_kernels, inside_heads, round_kernels
from workloads.families.eager import eager_kernels
from workloads.families.engine import engine_of, engine_part, own_where_small, pointwise_kernels, product_kernels
from workloads.families.latent import indexer_kernels, latent_kernels
from workloads.families.moe import expert_kernels, travel_kernel
from workloads.families.options import Options
from workloads.families.state_space import state_space_kernels
from workloads.kernel_names import Elementwise
from workloads.kernels import (
    Shape,
    elementwise_kernel,
    exchange_kernel,
    gemm_kernel,
    permute_kernel,
    quantise_kernel,
    stored_kernel,
    weighted_kernels,
)
from workloads.layer_passes.lower import lower
from workloads.layer_passes.rounds import in_rounds
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import (
    Combine,
    Embedding,
    Exchange,
    ExpertAct,
    ExpertRouter,
    ExpertRows,
    Grouped,
    Head,
    Join,
    KeyRounds,
    LastTokens,
    Permute,
    Placed,
    RankSplit,
    SampleToken,
    StageEnd,
    elements_of,
)
from workloads.ops import WIDE, Attention, Block, Gemm, Indexer, LatentAttention, Pointwise, StateSpace, width_of
from workloads.precision import Product
from workloads.program import Kernel
from workloads.routing import ExpertLoad
from workloads.stack import Stack
from workloads.work import DType

PhaseName = Literal["prefill", "decode"]


def placed_nodes(block: Block, split: RankSplit) -> tuple[Placed, ...]:
    """The nodes of a layer, spelled out and with their collectives."""
    return in_rounds(shard(lower(block.nodes, split), split))


def kernels_of(
    shape: Shape, phase: PhaseName, load: ExpertLoad | None, stack: Stack, options: Options
) -> Callable[[Placed], list[Kernel]]:
    """:func:`node_kernels` of one step of one rank."""
    return lambda node: node_kernels(node, shape, phase, load, stack, options)


def node_kernels(
    node: Placed, shape: Shape, phase: PhaseName, load: ExpertLoad | None, stack: Stack, options: Options
) -> list[Kernel]:
    """What one node runs; ``load`` is that of the rank's experts where it has some."""
    engine = engine_of(stack.engine)
    match node:
        case Attention() if node.scores.parallel is None:
            shape = shape.heads_whole()
        case Gemm(source="encoder") if phase == "decode":
            return []  # cached since the prefill
        case Gemm(source="encoder"):
            shape = replace(shape, new_tokens=shape.source)
        case Gemm() | Pointwise():
            shape = shape.over(node.group)
    match node:
        case Pointwise() if engine is not None:
            return pointwise_kernels(node, shape, engine, experts=bool(shape.model.routed)) or _pointwise_kernels(
                node, shape
            )
        case Gemm() if engine is not None and not node.ops[0].einsum.of_activations:
            return [*product_kernels(node, shape, engine), *adapter_kernels(node, shape, options.adapters)]
        case ExpertRouter() | ExpertRows() | Grouped() | ExpertAct() | Combine() if engine is not None:
            assert load is not None
            return [*engine_part(node, shape, load, engine), *adapter_kernels(node, shape, options.adapters)]
        case Pointwise() | Attention() if stack.eager:
            return eager_kernels(node, shape, options.dtype)
        case Gemm():
            return [*_gemm_kernels(node, shape), *adapter_kernels(node, shape, options.adapters)]
        case Pointwise():
            return _pointwise_kernels(node, shape)
        case Attention():
            return attention_kernels(node, shape, phase, stack)
        case LatentAttention():
            return [*adapter_kernels(node, shape, options.adapters), *latent_kernels(node, shape, phase)]
        case Indexer():
            return indexer_kernels(node, shape, phase)
        case StateSpace():
            return state_space_kernels(node, shape, phase)
        case ExpertRouter() | ExpertRows() | Grouped() | ExpertAct() | Combine() | Join():
            assert load is not None
            kernels = expert_kernels(node, shape, load, slots=shape.model.experts + options.routing.slots_added)
            return [*kernels, *adapter_kernels(node, shape, options.adapters)]
        case LastTokens() | StageEnd():
            return []
        case Embedding():
            return [_embedding_kernel(node, shape)]
        case Head():
            return _head_kernels(node, shape, stack)
        case SampleToken():
            assert engine is not None
            return engine_part(node, shape, load, engine)
        case KeyRounds():
            return round_kernels(node, shape)
        case Permute():
            elements = elements_of(node.axes, inside_heads(shape, phase).local_sizes("H"))
            return [permute_kernel(node.name, shape.tokens, elements // shape.tokens)]
        case Exchange(travel="away" | "home"):
            assert load is not None
            return [travel_kernel(node, shape, load)]
        case Exchange():
            exchanged = _exchange_kernels(node, shape, phase)
            return exchanged if engine is None else [own_where_small(one, engine) for one in exchanged]
    assert_never(node)


def _exchange_kernels(node: Exchange, shape: Shape, phase: PhaseName) -> list[Kernel]:
    """A collective over whole 16-bit arrays, if there is anyone to meet; heads for tokens over a rank's own arrays."""
    if node.group == "context":
        elements = node.elements(inside_heads(shape, phase).local_sizes("H"))
        return [exchange_kernel(node.name, shape.layout.context_ranks, elements, node.op)]
    ranks = shape.layout.ranks if node.group == "experts" else shape.layout.tensor_ranks
    if len(ranks) == 1:
        return []
    return [exchange_kernel(node.name, ranks, node.elements(shape.local_sizes(node.parallel)), node.op)]


def _embedding_kernel(node: Embedding, shape: Shape) -> Kernel:
    """Reads and writes a row a token; with several ranks each clears the rows of tokens that others hold."""
    width, passes = shape.model.d_model, 2 if shape.layout.tp == 1 else 3
    moved = passes * DType.BF16.bytes * shape.tokens * width
    return elementwise_kernel(node.name, Elementwise.GATHER, shape.tokens, width, moved)


def _head_kernels(node: Head, shape: Shape, stack: Stack) -> list[Kernel]:
    """The vocabulary padded up to the ranks. A head that no scheme quantises is a 16-bit product, in fp32 runs too."""
    product = shape.precision.head or Product.of(DType.BF16)
    head = stored_kernel(node.name, (node.op,), shape, product)
    if product.activations.plain or stack.engine is not None:
        return [head]
    return [quantise_kernel(node.name, shape.tokens, shape.model.d_model, product), head]


def _gemm_kernels(node: Gemm, shape: Shape) -> list[Kernel]:
    if not node.ops[0].einsum.of_activations:
        return weighted_kernels(node.name, node.ops, shape, fused=node.fused)
    kernels = []
    for one in node.ops:  # activations are 16 bits wide, whatever weights are
        name = node.name if len(node.ops) == 1 else f"{one.label.lower()}_gemm"
        kernels.append(gemm_kernel(name, (one,), shape, DType.BF16))
    return kernels


# How often a pointwise kernel moves each element; a norm with a sum reads x and the residual and writes both.
_PASSES = {Elementwise.ADD_RMSNORM: 4, Elementwise.SILU_MUL: 3, Elementwise.ADD: 3}


def _pointwise_kernels(node: Pointwise, shape: Shape) -> list[Kernel]:
    model, element = shape.model, DType.BF16.bytes
    sizes = shape.local_sizes(node.parallel)
    tokens = sizes["b"] * sizes["s"]
    heads = sizes["H"] + (0 if node.queries else sizes["K"])
    passes = node.passes or _PASSES.get(node.op, 2)
    rows, blocks = tokens, None
    match node.op:
        case Elementwise.ROPE:  # in place
            width, blocks = heads * model.head_dim, tokens * heads
        case Elementwise.RMSNORM:
            rows, width = tokens * heads, model.head_dim
        case op if op in WIDE:
            width = width_of(node, sizes)
        case _:
            width = model.d_model
    moved = passes * rows * width * element
    return [elementwise_kernel(node.name, node.op, rows, width, moved, blocks=blocks)]
