"""Mamba-2 mixers (arXiv 2405.21060, section 6): chunks of products in prefill, one step in decode."""

from __future__ import annotations

from typing import Literal

from workloads.kernels import Shape, elementwise_kernel
from workloads.ops import StateSpace
from workloads.program import Kernel
from workloads.work import DType, Elementwise, GemmWork

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
    kernels = [elementwise_kernel(f"conv_{node.name}", Elementwise.SILU_MUL, tokens, mixed, moved)]
    if phase == "decode":
        moved = shape.batch * (2 * states * STATE.bytes + (3 * inner + 2 * groups * sizes.state) * element)
        kernels.append(
            elementwise_kernel("state_update", Elementwise.SILU_MUL, shape.batch * heads, states // heads, moved)
        )
    else:
        chunk = min(sizes.chunk, shape.new_tokens)
        chunks = shape.batch * -(-shape.new_tokens // chunk)
        kernels += [
            _products("chunk_scores", chunks * groups, chunk, chunk, sizes.state),
            _products("chunk_states", chunks * heads, sizes.head_dim, sizes.state, chunk),
            elementwise_kernel(
                "pass_states", Elementwise.COPY, chunks * heads, states // heads, 2 * chunks * states * STATE.bytes
            ),
            _products("chunk_values", chunks * heads, chunk, sizes.head_dim, chunk),
            _products("read_states", chunks * heads, chunk, sizes.head_dim, sizes.state),
        ]
    kernels.append(elementwise_kernel("gated_norm", Elementwise.RMSNORM, tokens, inner, 3 * tokens * inner * element))
    return kernels


def _products(name: str, count: int, m: int, n: int, k: int) -> Kernel:
    return Kernel(
        name=name,
        work=GemmWork(m=m, n=n, k=k, count=count),
        flops=2.0 * count * m * n * k,
        bytes_moved=float(DType.BF16.bytes * count * (m * k + n * k + m * n)),
    )
