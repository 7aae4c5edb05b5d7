"""What a rank must hold: weights, KV cache, activations, with the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.model import ModelSpec
from workloads.parallel import Layout
from workloads.work import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank."""

    weight_bytes: float
    kv_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    def __str__(self) -> str:
        """The sum written out, in GB (1e9 bytes).

        >>> print(MemoryNeed(weight_bytes=16e9, kv_bytes=8.6e9, activation_bytes=4e8))
        weights 16.0 + KV cache 8.6 + activations 0.4 = 25.0 GB a GPU
        """
        weights, kv, activations = (b / 1e9 for b in (self.weight_bytes, self.kv_bytes, self.activation_bytes))
        return (
            f"weights {weights:.1f} + KV cache {kv:.1f} + activations {activations:.1f} = "
            f"{self.bytes / 1e9:.1f} GB a GPU"
        )


def memory_need(
    model: ModelSpec,
    layout: Layout,
    *,
    batch: int,
    context: int,
    new_tokens: int,
    layers: int,
    lm_head: bool,
    dtype: DType,
) -> MemoryNeed:
    """Bytes per rank of ``layers`` layers over ``context`` tokens a sequence, ``new_tokens`` of them at once.

    Weights in ``dtype`` (embedding and head in 16 bit), KV cache in 16 bit; activations: residual, hidden,
    QKV and the wide feed-forward intermediate of one layer at a time.
    """
    kv_heads = max(1, model.kv_heads // layout.tp)  # copied where there are more ranks than heads
    attention = model.d_model * model.head_dim * (2 * model.q_heads / layout.tp + 2 * kv_heads)
    feed = 3.0 * model.d_model * model.d_ff
    feed = feed * model.experts / layout.ep if model.experts else feed / layout.tp
    weights = layers * (attention + feed) * dtype.bytes
    if lm_head:
        copies = 1 if model.tied_embeddings else 2
        weights += copies * model.vocab * model.d_model / layout.tp * DType.BF16.bytes
    kv = 2.0 * batch * context * kv_heads * model.head_dim * layers * DType.BF16.bytes
    tokens = batch * new_tokens
    wide = 3.0 * (model.d_ff * max(model.top_k, 1)) / layout.tp
    qkv = model.head_dim * (model.q_heads / layout.tp + 2 * kv_heads)
    activations = tokens * (3.0 * model.d_model + qkv + wide) * DType.BF16.bytes
    return MemoryNeed(weight_bytes=weights, kv_bytes=kv, activation_bytes=activations)
