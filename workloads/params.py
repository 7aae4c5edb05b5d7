"""Weights of a model: those of every op, counted from its einsum."""

from __future__ import annotations

from typing import assert_never

from workloads.model import ModelSpec
from workloads.ops import Attention, Exchange, Experts, Gemm, LatentAttention, Node, Op, Pointwise, StateSpace
from workloads.work import DType, Elementwise


def weighted_ops(node: Node) -> tuple[Op, ...]:
    """The ops of a node that multiply by a weight."""
    match node:
        case Gemm():
            return tuple(one for one in node.ops if not one.einsum.of_activations)
        case LatentAttention():
            return (*node.down, *node.q_up, node.k_up, node.v_up)
        case Experts():
            return (node.router, *node.up, node.down, *(one for part in node.shared for one in weighted_ops(part)))
        case Attention() | StateSpace() | Pointwise() | Exchange():
            return ()
    assert_never(node)


def params(model: ModelSpec, *, active: bool = False) -> int:
    """Number of weights: those of all ops, norms, embeddings; ``active``: those that one token meets.

    >>> from workloads import load_model
    >>> f"{params(load_model('mixtral-8x7b')) / 1e9:.1f} {params(load_model('mixtral-8x7b'), active=True) / 1e9:.1f}"
    '46.7 12.9'
    """
    sizes = model.sizes()
    met = sizes | {"e": model.top_k} if active else sizes
    total = model.vocab * model.d_model * (1 if model.tied_embeddings else 2) + model.d_model
    if model.learned_positions:
        total += model.max_positions * model.d_model
    for _, block, layers in model.layer_groups(range(model.layers)):
        per_layer = 0
        for node in block.nodes:
            for one in weighted_ops(node):
                routed = isinstance(node, Experts) and one is not node.router
                per_layer += one.einsum.input_elements(1, met if routed else sizes)
            if isinstance(node, Pointwise) and node.op is Elementwise.ADD_RMSNORM:
                per_layer += model.d_model
            if isinstance(node, Pointwise) and node.op is Elementwise.LAYERNORM:
                per_layer += 2 * model.d_model
            if isinstance(node, Pointwise) and node.op is Elementwise.RMSNORM:
                per_layer += 2 * model.head_dim
            if isinstance(node, LatentAttention) and model.latent:
                per_layer += model.latent.q_rank + model.latent.kv_rank
        total += len(layers) * per_layer
    if model.vision:  # and the projector's two products
        total += params(model.vision.model) + model.d_model * (model.vision.model.d_model + model.d_model)
    return total


def facts(model: ModelSpec) -> dict[str, int | str | None]:
    """What a model's file says, worked out: weights, and bytes in the precision that the checkpoint stores.

    The KV cache is that of full attention over every layer that attends, and None for an encoder.

    >>> from workloads import load_model
    >>> facts(load_model("llama3-8b"))["kv_bytes_per_token"]
    131072
    """
    total = params(model)
    element = {"bf16": DType.BF16, "fp16": DType.FP16, "fp32": DType.FP32}[model.precision].bytes
    cached = model.cached_elements_per_token * model.attending(range(model.layers))
    return {
        "id": model.id,
        "family": model.family,
        "precision": model.precision,
        "parameters": total,
        "active_parameters": params(model, active=True),
        "weight_bytes": total * element,
        "kv_bytes_per_token": cached * element if model.causal else None,
        "layers": model.layers,
        "max_positions": model.max_positions or None,
        "window": model.window or None,
    }
