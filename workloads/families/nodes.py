"""Nodes of a block as the kernels of one rank."""

from __future__ import annotations

import math
from typing import Literal, assert_never

from workloads.families.context import attention_kernels
from workloads.families.eager import eager_kernels
from workloads.families.engine import engine_of, own_where_small, pointwise_kernels, product_kernels, routed_experts
from workloads.families.latent import latent_kernels
from workloads.families.moe import expert_kernels
from workloads.families.options import Options
from workloads.families.state_space import state_space_kernels
from workloads.kernels import Shape, elementwise_kernel, exchange_kernel, gemm_kernel, weighted_kernels
from workloads.ops import Attention, Exchange, Experts, Gemm, LatentAttention, Node, Pointwise, StateSpace
from workloads.program import Kernel
from workloads.routing import ExpertLoad
from workloads.stack import Stack
from workloads.work import DType, Elementwise

PhaseName = Literal["prefill", "decode"]


def node_kernels(
    node: Node, shape: Shape, phase: PhaseName, load: ExpertLoad | None, stack: Stack, options: Options
) -> list[Kernel]:
    """What one node runs; ``load`` is that of the rank's experts where it has some."""
    engine = engine_of(stack.engine)
    if isinstance(node, Attention) and node.scores.parallel is None:
        shape = shape.heads_whole()
    match node:
        case Pointwise() if engine is not None:
            experts = any(isinstance(one, Experts) for one in shape.model.block.nodes)
            return pointwise_kernels(node, shape, engine, experts=experts) or _pointwise_kernels(node, shape, stack)
        case Gemm() if engine is not None and not node.ops[0].einsum.of_activations:
            return product_kernels(node, shape, engine)
        case Experts() if engine is not None:
            assert load is not None
            return routed_experts(node, shape, load, engine)
        case Pointwise() | Attention() if stack.eager:
            return eager_kernels(node, shape, options.dtype)
        case Gemm():
            return _gemm_kernels(node, shape, stack)
        case Pointwise():
            return _pointwise_kernels(node, shape, stack)
        case Attention():
            return attention_kernels(node, shape, phase, stack)
        case LatentAttention():
            return latent_kernels(node, shape, phase, stack)
        case StateSpace():
            return state_space_kernels(node, shape, phase)
        case Experts():
            assert load is not None
            return expert_kernels(node, shape, load, slots=(shape.model.experts + options.routing.slots_added))
        case Exchange():
            if shape.layout.tp == 1:
                return []
            exchanged = _exchange_kernel(node, shape)
            return [exchanged if engine is None else own_where_small(exchanged, engine)]
    assert_never(node)


def _exchange_kernel(node: Exchange, shape: Shape) -> Kernel:
    """A collective of the tensor group over whole 16-bit arrays."""
    sizes = shape.local_sizes(None)
    elements = sum(math.prod(sizes[axis] for axis in one) for one in node.axes)
    return exchange_kernel(node.name, shape.layout.tensor_ranks, elements, node.op)


def _gemm_kernels(node: Gemm, shape: Shape, stack: Stack) -> list[Kernel]:
    if not node.ops[0].einsum.of_activations:
        return weighted_kernels(node.name, node.ops, shape, fused=stack.fused_weights or node.one_matrix)
    kernels = []
    for one in node.ops:  # activations are 16 bits wide, whatever weights are
        name = node.name if len(node.ops) == 1 else f"{one.label.lower()}_gemm"
        kernels.append(gemm_kernel(name, (one,), shape, DType.BF16))
    return kernels


def _pointwise_kernels(node: Pointwise, shape: Shape, stack: Stack) -> list[Kernel]:
    model, element = shape.model, DType.BF16.bytes
    sizes = shape.local_sizes(node.parallel)
    tokens = sizes["b"] * sizes["s"]
    heads = sizes["H"] + sizes["K"]
    match node.op:
        case Elementwise.ADD_RMSNORM:
            width = model.d_model
            if stack.fused_add_norm:
                # reads x and the residual, writes both
                return [elementwise_kernel(node.name, node.op, tokens, width, 4 * tokens * width * element)]
            return [
                elementwise_kernel(f"{node.name}.add", node.op, tokens, width, 3 * tokens * width * element),
                elementwise_kernel(f"{node.name}.norm", node.op, tokens, width, 2 * tokens * width * element),
            ]
        case Elementwise.ROPE:
            moved = 2 * tokens * heads * model.head_dim * element  # in place: read and write
            return [
                elementwise_kernel(node.name, node.op, tokens, heads * model.head_dim, moved, blocks=tokens * heads)
            ]
        case Elementwise.RMSNORM:
            if not stack.qk_norm:
                return []
            moved = 2 * tokens * heads * model.head_dim * element  # in place
            return [elementwise_kernel(node.name, node.op, tokens * heads, model.head_dim, moved)]
        case Elementwise.SILU_MUL:
            width = sizes[node.axis]
            if stack.fused_gate:
                return [elementwise_kernel(node.name, node.op, tokens, width, 3 * tokens * width * element)]
            # silu reads and writes one array and costs what any activation does
            return [
                elementwise_kernel(f"{node.name}.silu", Elementwise.GELU, tokens, width, 2 * tokens * width * element),
                elementwise_kernel(f"{node.name}.mul", node.op, tokens, width, 3 * tokens * width * element),
            ]
        case Elementwise.GELU | Elementwise.GELU_TANH | Elementwise.RELU:
            width = sizes[node.axis]
            return [elementwise_kernel(node.name, node.op, tokens, width, 2 * tokens * width * element)]
        case _:
            width = model.d_model
            passes = 3 if node.op is Elementwise.ADD else 2
            return [elementwise_kernel(node.name, node.op, tokens, width, passes * tokens * width * element)]
