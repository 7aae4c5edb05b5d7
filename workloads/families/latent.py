"""Multi-head latent attention: keys and values rebuilt in prefill, absorbed into queries and outputs in decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from workloads.errors import WorkloadError
from workloads.kernel_names import Elementwise
from workloads.kernels import Shape, elementwise_kernel, product_kernel, seen_keys, weighted_kernels
from workloads.ops import Indexer, LatentAttention, Op
from workloads.program import Kernel
from workloads.work import AttentionWork, DType


def latent_kernels(node: LatentAttention, shape: Shape, phase: Literal["prefill", "decode"]) -> list[Kernel]:
    """Kernels of one rank up to the attention's output, values of all its heads side by side.

    The latents and the rotary key are made, and in decode read, by every rank; only heads are split. In decode
    queries are carried into the latent space (``k_up``) and outputs back (``v_up``), a product for each head, so
    that attention reads ``kv_rank + rope_dim`` cached elements a token and layer and nothing else. Those products
    are in 16 bit in engines too, whatever the weights are stored in. Where tokens read some of the keys only, each its
    own, a prefill is absorbed too: every token is a sequence of one.
    """
    if node.top_keys and shape.context > node.top_keys:
        shape = _sparse(shape, node.top_keys, phase)
        absorbed = True
    else:
        absorbed = phase == "decode"
    model, latent = shape.model, shape.model.latent
    if latent is None:
        raise WorkloadError(f"{model.id}: latent attention without a [latent] table of sizes")
    if shape.layout.cp > 1:
        raise WorkloadError(f"cp = {shape.layout.cp}: latent attention of {model.id} is not split over tokens: use tp")
    tokens, element, heads = shape.tokens, DType.BF16.bytes, shape.q_heads
    key_dim = latent.nope_dim + latent.rope_dim
    rotary = heads + 1
    moved = 2 * tokens * rotary * latent.rope_dim * element
    normed = latent.q_rank + latent.kv_rank
    kernels = [
        *weighted_kernels("latent_down_gemm", node.down, shape),
        elementwise_kernel("latent_norm", Elementwise.RMSNORM, tokens, normed, 2 * tokens * normed * element),
        *weighted_kernels("q_up_gemm", node.q_up, shape),
        elementwise_kernel("rope", Elementwise.ROPE, tokens, rotary * latent.rope_dim, moved, blocks=tokens * rotary),
    ]
    if absorbed:
        cached = tokens * latent.cached_dim * (element + shape.precision.kv.bytes)
        if node.copies and phase == "decode":
            kernels.append(elementwise_kernel("copy_latent", Elementwise.COPY, tokens, latent.cached_dim, cached))
        kernels += [
            _product_per_head("absorb_k_gemm", node.k_up, shape),
            _absorbed_attention(node.name, shape),
            _product_per_head("absorb_v_gemm", node.v_up, shape),
        ]
        return kernels
    width = heads * key_dim
    kernels += [
        *weighted_kernels("kv_up_gemm", (node.k_up, node.v_up), shape),
        elementwise_kernel("concat_k", Elementwise.COPY, tokens, width, 2 * tokens * width * element),
        _rebuilt_attention(node.name, shape, key_dim),
    ]
    return kernels


def _sparse(shape: Shape, top_keys: int, phase: Literal["prefill", "decode"]) -> Shape:
    """Each token with the keys that it reads, a prompt's first ones with fewer."""
    if phase == "decode":
        return replace(shape, context=top_keys)
    read = seen_keys(shape.new_tokens, shape.context, top_keys)
    return replace(shape, batch=shape.tokens, new_tokens=1, context=read)


def indexer_kernels(node: Indexer, shape: Shape, phase: Literal["prefill", "decode"]) -> list[Kernel]:
    """Scores of all keys, summed over the indexer's heads on the chip, and the choice of the best.

    As one flash kernel whose scores and values have half a head each: the FLOPs of scores over whole heads, and every
    index key read once. Keys are cached in FP8; their products are priced in 16 bit, which are known.
    """
    half = node.head_dim // 2
    work = AttentionWork(
        batch=shape.batch,
        q_len=shape.new_tokens,
        kv_len=shape.context,
        q_heads=node.heads,
        kv_heads=1,
        head_dim=half,
        causal=phase == "prefill",
        kv_dtype=DType.FP8 if phase == "decode" else DType.BF16,
    )
    keys = shape.batch * shape.context * node.head_dim * work.kv_dtype.bytes
    queries = shape.tokens * node.heads * node.head_dim * DType.BF16.bytes
    # Scores in 32 bit, written and read; numbers of the chosen ones.
    scored = shape.batch * work.pairs
    chosen = shape.tokens * min(node.top_keys, shape.context)
    moved = DType.FP32.bytes * (2 * scored + chosen)
    return [
        Kernel(name=f"{node.name}_scores", work=work, flops=work.flops, bytes_moved=float(keys + queries)),
        elementwise_kernel(f"{node.name}_top_k", Elementwise.COPY, shape.tokens, shape.context, moved),
    ]


def _product_per_head(name: str, one: Op, shape: Shape) -> Kernel:
    """Tokens by head: queries (latent from their size) or outputs (values from the latent), one product a head."""
    assert shape.model.latent is not None
    into, out = shape.model.latent.nope_dim, shape.model.latent.kv_rank  # K up, read backwards
    if one.einsum.output[-1] == "h":
        into, out = shape.model.latent.kv_rank, shape.model.head_dim
    return product_kernel(name, shape.tokens, out, into, count=shape.local_sizes(one.parallel)["H"])


def _absorbed_attention(name: str, shape: Shape) -> Kernel:
    latent = shape.model.latent
    assert latent is not None
    kv = shape.precision.kv
    work = AttentionWork(
        batch=shape.batch,
        q_len=1,
        kv_len=shape.context,
        q_heads=shape.q_heads,
        kv_heads=1,
        head_dim=latent.cached_dim,
        v_head_dim=latent.kv_rank,
        causal=False,
        latent=True,
        kv_dtype=kv if kv.bits != DType.BF16.bits else DType.BF16,
    )
    per_key = latent.cached_dim + latent.kv_rank
    queries = shape.q_heads * per_key * DType.BF16.bytes
    moved = shape.batch * (shape.context * latent.cached_dim * kv.bytes + queries)
    return Kernel(name=name, work=work, flops=work.flops, bytes_moved=float(moved))


def _rebuilt_attention(name: str, shape: Shape, key_dim: int) -> Kernel:
    model = shape.model
    work = AttentionWork(
        batch=shape.batch,
        q_len=shape.new_tokens,
        kv_len=shape.context,
        q_heads=shape.q_heads,
        kv_heads=shape.q_heads,
        head_dim=key_dim,
        v_head_dim=model.head_dim,
        causal=True,
    )
    both = key_dim + model.head_dim
    moved = shape.batch * shape.q_heads * (shape.new_tokens + shape.context) * both * DType.BF16.bytes
    return Kernel(name=name, work=work, flops=work.flops, bytes_moved=float(moved))
