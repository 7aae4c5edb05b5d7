"""Nodes of a block as the kernels of one rank."""

from __future__ import annotations

from typing import Literal, assert_never

from workloads.einsum import Einsum
from workloads.families.context import attention_kernels
from workloads.families.eager import eager_kernels
from workloads.families.engine import engine_of, pointwise_kernels, product_kernels, routed_experts
from workloads.families.latent import latent_kernels
from workloads.families.moe import expert_kernels
from workloads.families.options import Options
from workloads.families.state_space import state_space_kernels
from workloads.kernels import Shape, elementwise_kernel, gemm_kernel
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
    engine = engine_of(stack.engine)
    match node:
        case Pointwise() if engine is not None:
            experts = any(isinstance(one, Experts) for one in shape.model.block.nodes)
            return pointwise_kernels(node, shape, engine, options.dtype, experts=experts) or _pointwise_kernels(
                node, shape, stack
            )
        case Gemm() if engine is not None:
            return product_kernels(node, shape, engine, options.dtype)
        case Experts() if engine is not None:
            assert load is not None
            return routed_experts(node, shape, load, engine, options.dtype)
        case Pointwise() | Attention() if stack.eager:
            return eager_kernels(node, shape, options.dtype)
        case Gemm():
            return _gemm_kernels(node, shape, stack, options)
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


def _gemm_kernels(node: Gemm, shape: Shape, stack: Stack, options: Options) -> list[Kernel]:
    groups = [node.ops] if stack.fused_weights or node.one_matrix else [(one,) for one in node.ops]
    kernels: list[Kernel] = []
    if options.dtype is DType.FP8:
        width = _input_width(node.ops[0].einsum, shape, node.ops[0].parallel)
        moved = shape.tokens * width * (DType.BF16.bytes + DType.FP8.bytes)
        kernels.append(elementwise_kernel(f"cast_{node.name}", Elementwise.CAST_FP8, shape.tokens, width, moved))
    for ops in groups:
        name = node.name if len(groups) == 1 else f"{ops[0].label.lower()}_gemm"
        kernels.append(gemm_kernel(name, ops, shape, options.dtype))
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


def _input_width(einsum: Einsum, shape: Shape, parallel: str | None) -> int:
    sizes = shape.local_sizes(parallel)
    tokens = sizes["b"] * sizes["s"]
    return einsum.input_elements(0, sizes) // tokens


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
