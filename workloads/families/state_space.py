"""Mamba-2 mixers (arXiv 2405.21060, section 6): chunks of products in prefill, one step in decode."""

from __future__ import annotations

from typing import Literal

from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, elementwise_kernel, product_kernel
from workloads.mixers import StateSpaceSizes
from workloads.ops import StateSpace
from workloads.program import Kernel
from workloads.work import DType

# States are kept in fp32: the public configurations of hybrids ask for it (mamba_ssm_cache_dtype).
STATE = DType.FP32


def state_space_kernels(node: StateSpace, shape: Shape, phase: Literal["prefill", "decode"]) -> list[Kernel]:
    """Convolution, scan and gated norm of one rank's heads, between the two products of the mixer.

    A prefill cuts the tokens into chunks: products within each (scores of the inputs with one another, then values),
    its contribution to the state, states passed on from chunk to chunk, and what each chunk reads from the state.
    """
    sizes, layout = shape.model.state_space, shape.layout
    assert sizes is not None
    heads, groups = sizes.heads // layout.tp, max(1, sizes.groups // layout.tp)
    inner, mixed = heads * sizes.head_dim, heads * sizes.head_dim + 2 * groups * sizes.state
    element, tokens, states = DType.BF16.bytes, shape.tokens, heads * sizes.head_dim * sizes.state
    moved = 2 * tokens * mixed * element
    kernels = []
    if sizes.conv:
        kernels.append(elementwise_kernel(f"conv_{node.name}", Elementwise.SILU_MUL, tokens, mixed, moved))
    if phase == "decode":
        moved = shape.batch * (2 * states * STATE.bytes + (3 * inner + 2 * groups * sizes.state) * element)
        kernels.append(
            elementwise_kernel("state_update", Elementwise.SILU_MUL, shape.batch * heads, states // heads, moved)
        )
    elif sizes.rule == "scan":
        # One fused kernel: input, gate, steps and output of each channel; states stay on the chip.
        moved = tokens * (4 * inner + 2 * groups * sizes.state) * element
        kernels.append(elementwise_kernel("selective_scan", Elementwise.SILU_MUL, tokens, inner, moved))
    else:
        chunk = min(sizes.chunk, shape.new_tokens)
        chunks = shape.batch * -(-shape.new_tokens // chunk)
        kernels += [
            product_kernel("chunk_scores", chunk, chunk, sizes.state, count=chunks * groups),
            *(_delta(chunk, sizes, chunks * heads) if sizes.rule == "delta" else ()),
            product_kernel("chunk_states", sizes.head_dim, sizes.state, chunk, count=chunks * heads),
            elementwise_kernel(
                "pass_states", Elementwise.COPY, chunks * heads, states // heads, 2 * chunks * states * STATE.bytes
            ),
            product_kernel("chunk_values", chunk, sizes.head_dim, chunk, count=chunks * heads),
            product_kernel("read_states", chunk, sizes.head_dim, sizes.state, count=chunks * heads),
        ]
    kernels.append(elementwise_kernel("gated_norm", Elementwise.RMSNORM, tokens, inner, 3 * tokens * inner * element))
    return kernels


def _delta(chunk: int, sizes: StateSpaceSizes, count: int) -> tuple[Kernel, ...]:
    """What the delta rule adds to a chunk: keys by keys, their triangle inverted, and keys and values through it.

    After the WY form of Yang et al. (arXiv 2406.06484, section 3.2); the inverse counts as one product.
    """
    return (
        product_kernel("delta_keys", chunk, chunk, sizes.state, count=count),
        product_kernel("delta_inverse", chunk, chunk, chunk, count=count),
        product_kernel("delta_apply", chunk, sizes.state + sizes.head_dim, chunk, count=count),
        product_kernel("delta_states", chunk, sizes.head_dim, sizes.state, count=count),
    )
