"""Nodes of a block as the kernels of one rank."""

from __future__ import annotations

from typing import Literal, assert_never

from workloads.families.context import attention_kernels
from workloads.families.eager import eager_kernels
from workloads.families.latent import latent_kernels
from workloads.families.moe import expert_kernels
from workloads.families.options import Options
from workloads.families.state_space import state_space_kernels
from workloads.kernels import Shape, elementwise_kernel, weighted_kernels
from workloads.ops import Attention, Experts, Gemm, LatentAttention, Node, Pointwise, StateSpace
from workloads.program import Kernel
from workloads.routing import ExpertLoad
from workloads.stack import Stack
from workloads.work import CollectiveOp, CollectiveWork, DType, Elementwise

PhaseName = Literal["prefill", "decode"]


def node_kernels(
    node: Node, shape: Shape, phase: PhaseName, load: ExpertLoad | None, stack: Stack, options: Options
) -> list[Kernel]:
    """What one node runs; ``load`` is that of the rank's experts where it has some."""
    match node:
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
    assert_never(node)


def _gemm_kernels(node: Gemm, shape: Shape, stack: Stack) -> list[Kernel]:
    kernels = weighted_kernels(node.name, node.ops, shape, fused=stack.fused_weights or node.one_matrix)
    if node.reduces and shape.layout.tp > 1:
        buffer = shape.tokens * shape.model.d_model * DType.BF16.bytes
        kernels.append(
            Kernel(
                name="all_reduce_attn" if node.name == "o_gemm" else f"all_reduce_{node.name.split('_')[0]}",
                work=CollectiveWork(
                    op=CollectiveOp.ALL_REDUCE,
                    ranks=shape.layout.tensor_ranks,
                    buffer_bytes=buffer,
                ),
                flops=0.0,
                bytes_moved=float(buffer),
            )
        )
    return kernels


def _pointwise_kernels(node: Pointwise, shape: Shape, stack: Stack) -> list[Kernel]:
    model, tokens, element = shape.model, shape.tokens, DType.BF16.bytes
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
            heads = shape.q_heads + shape.kv_heads
            moved = 2 * tokens * heads * model.head_dim * element  # in place: read and write
            return [
                elementwise_kernel(node.name, node.op, tokens, heads * model.head_dim, moved, blocks=tokens * heads)
            ]
        case Elementwise.RMSNORM:
            if not stack.qk_norm:
                return []
            heads = shape.q_heads + shape.kv_heads
            moved = 2 * tokens * heads * model.head_dim * element  # in place
            return [elementwise_kernel(node.name, node.op, tokens * heads, model.head_dim, moved)]
        case Elementwise.SILU_MUL:
            width = shape.local_sizes(node.axis)[node.axis]
            if stack.fused_gate:
                return [elementwise_kernel(node.name, node.op, tokens, width, 3 * tokens * width * element)]
            # silu reads and writes one array and costs what any activation does
            return [
                elementwise_kernel(f"{node.name}.silu", Elementwise.GELU, tokens, width, 2 * tokens * width * element),
                elementwise_kernel(f"{node.name}.mul", node.op, tokens, width, 3 * tokens * width * element),
            ]
        case Elementwise.GELU | Elementwise.GELU_TANH | Elementwise.RELU:
            width = shape.local_sizes(node.axis)[node.axis]
            return [elementwise_kernel(node.name, node.op, tokens, width, 2 * tokens * width * element)]
        case _:
            width = model.d_model
            passes = 3 if node.op is Elementwise.ADD else 2
            return [elementwise_kernel(node.name, node.op, tokens, width, passes * tokens * width * element)]
