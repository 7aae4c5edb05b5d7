"""Weights of a model: those of every op, counted from its einsum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, assert_never

from workloads.kernel_names import Elementwise
from workloads.model import ModelSpec
from workloads.ops import Attention, Block, Experts, Gemm, Indexer, LatentAttention, Node, Op, Pointwise, StateSpace
from workloads.precision import Precision, plain, resolve
from workloads.work import DType


def weighted_ops(node: Node) -> tuple[Op, ...]:
    """The ops of a node that multiply by a weight of their own."""
    match node:
        case Gemm(tied=True):
            return ()
        case Gemm():
            return tuple(one for one in node.ops if not one.einsum.of_activations)
        case LatentAttention():
            return (*node.down, *node.q_up, node.k_up, node.v_up)
        case Experts():
            return (node.router, *node.up, node.down, *(one for part in node.shared for one in weighted_ops(part)))
        case Attention() | Indexer() | StateSpace() | Pointwise():
            return ()
    assert_never(node)


def weight_shape(one: Op, sizes: Mapping[str, int]) -> tuple[int, int, int]:
    """How many matrices the weight of an op is (experts), and of what rows and depth.

    >>> from workloads.ops import op
    >>> weight_shape(op("bskm,emf->bskf", label="up"), {"e": 8, "m": 4096, "f": 14336})
    (8, 14336, 4096)
    """
    einsum = one.einsum
    axes = einsum.inputs[1]
    count = math.prod(sizes[axis] for axis in axes if axis in einsum.selected)
    rows = math.prod(sizes[axis] for axis in axes if axis in einsum.output)
    depth = math.prod(sizes[axis] for axis in axes if axis in einsum.contracted)
    return count, rows, depth


def params(model: ModelSpec, *, active: bool = False) -> int:
    """Number of weights: those of all ops, norms, embeddings; ``active``: those that one token meets.

    >>> from workloads import load_model
    >>> f"{params(load_model('mixtral-8x7b')) / 1e9:.1f} {params(load_model('mixtral-8x7b'), active=True) / 1e9:.1f}"
    '46.7 12.9'
    """
    total = model.extra_parameters
    total += model.vocab * model.d_model * (1 if model.tied_embeddings else 2) + model.d_model
    if model.learned_positions:
        total += model.max_positions * model.d_model
    for _, block, layers in model.layer_groups(range(model.layers)):
        total += len(layers) * _block_params(model.of(block), block, active)
    total += sum(deep * wide for deep, wide, _ in model.front)
    if model.vision:
        total += params(model.vision.model) + sum(one * other for one, other in model.vision.projector)
        total += model.vision.extra_parameters
    if model.encoder:
        total += params(model.encoder)
    return total


def layer_params(model: ModelSpec, layer: int) -> int:
    """Weights of one layer."""
    ((_, block, _),) = model.layer_groups(range(layer, layer + 1))
    return _block_params(model.of(block), block, active=False)


def _block_params(model: ModelSpec, block: Block, active: bool) -> int:
    sizes, found = model.sizes(), 0
    met = sizes | {"e": model.top_k} if active else sizes
    for node in block.nodes:
        for one in weighted_ops(node):
            routed = isinstance(node, Experts) and one is not node.router
            found += one.einsum.input_elements(1, met if routed else sizes)
        match node:
            case Pointwise(op=Elementwise.ADD_RMSNORM):
                found += model.d_model
            case Pointwise(op=Elementwise.LAYERNORM):
                found += 2 * model.d_model
            case Pointwise(op=Elementwise.RMSNORM):
                found += 2 * model.head_dim
            case LatentAttention() if model.latent:
                found += model.latent.q_rank + model.latent.kv_rank
            case _:
                pass
    return found


def weight_bytes(model: ModelSpec, precision: Precision) -> int:
    """Bytes of all weights: those of the layers with their scales and zero points, the others as ``params`` counts.

    >>> from workloads import load_model
    >>> weight_bytes(load_model("llama3-8b"), plain(DType.BF16)) / params(load_model("llama3-8b"))
    2.0
    """
    quantised, counted = 0, 0
    for _, block, layers in model.layer_groups(range(model.layers)):
        sizes = model.of(block).sizes()
        for stored, run in precision.runs(layers):
            for one in (one for node in block.nodes for one in weighted_ops(node)):
                count, rows, depth = weight_shape(one, sizes)
                quantised += len(run) * count * stored.of(one).weights.bytes_of(rows, depth)
                counted += len(run) * count * rows * depth
    if precision.head is not None and not model.tied_embeddings:
        quantised += precision.head.weights.bytes_of(model.vocab, model.d_model)
        counted += model.vocab * model.d_model
    return quantised + (params(model) - counted) * precision.base.bytes


def facts(model: ModelSpec) -> dict[str, Any]:
    """What a model's file says, worked out: weights, and bytes in the precision that the checkpoint stores.

    Layers that predict further tokens count where the published total counts them. The KV cache is that of full
    attention over every layer that attends, and None for an encoder.

    >>> from workloads import load_model
    >>> facts(load_model("llama3-8b"))["kv_bytes_per_token"]
    131072
    """
    drafts = model.draft_parameters if model.drafts_published else 0
    base = DType(model.precision)
    stored = resolve(model.quantised, dtype=base) if base.bits == 16 else plain(base)
    if model.quantised is not None and base.bits > 16:
        stored = replace(model.quantised, base=base)
    cache = base if model.quantised is None or model.quantised.kv.bits == DType.BF16.bits else stored.kv
    cached = sum(one.cached_elements_per_token * count for one, count in model.caching(range(model.layers)))
    return {
        "id": model.id,
        "family": model.family,
        "precision": str(stored.product.weights),
        "parameters": params(model) + drafts,
        "active_parameters": params(model, active=True),
        "weight_bytes": weight_bytes(model, stored) + _draft_bytes(model, drafts, stored),
        "kv_bytes_per_token": cached * cache.bytes if model.causal else None,
        "layers": model.layers,
        "max_positions": model.max_positions or None,
        "window": max(model.windows, default=None),
        "quantisation": stored.method or None,
        "activations": str(stored.product.activations),
        "kv_cache": cache.value if model.causal else None,
        "not_quantised": base.value,
    } | ({"draft_parameters": model.draft_parameters} if model.draft_parameters else {})


def _draft_bytes(model: ModelSpec, drafts: int, stored: Precision) -> int:
    """Layers that predict further tokens are stored as the others are."""
    return stored.product.weights.bytes_of(drafts // model.d_model, model.d_model) if drafts else 0
