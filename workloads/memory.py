"""What a rank must hold: weights, KV cache, activations, with the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from inputs.same import Same
from workloads.kernels import Shape
from workloads.model import ModelSpec
from workloads.ops import Experts, Indexer
from workloads.parallel import Layout
from workloads.params import params, weight_shape, weighted_ops
from workloads.precision import Precision, resolve
from workloads.work import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank."""

    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    gradient_bytes: float = 0.0
    state_bytes: float = 0.0  # of the optimiser

    @property
    def bytes(self) -> float:
        """All of it."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.gradient_bytes + self.state_bytes

    def plus(self, other: MemoryNeed) -> MemoryNeed:
        """Both at once; activations of one at a time."""
        return replace(
            self,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes=self.kv_bytes + other.kv_bytes,
            activation_bytes=max(self.activation_bytes, other.activation_bytes),
        )

    def __str__(self) -> str:
        """The sum written out, in GB (1e9 bytes).

        >>> print(MemoryNeed(weight_bytes=16e9, kv_bytes=8.6e9, activation_bytes=4e8))
        weights 16.0 + KV cache 8.6 + activations 0.4 = 25.0 GB a GPU
        """
        weights, kv, activations = (b / 1e9 for b in (self.weight_bytes, self.kv_bytes, self.activation_bytes))
        second = f"gradients {self.gradient_bytes / 1e9:.1f}" if self.gradient_bytes else f"KV cache {kv:.1f}"
        if self.state_bytes:
            second += f" + optimizer {self.state_bytes / 1e9:.1f}"
        return f"weights {weights:.1f} + {second} + activations {activations:.1f} = {self.bytes / 1e9:.1f} GB a GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLoad:
    """What GPUs hold: ``layers`` layers, ``batch`` sequences of ``context`` tokens, ``new_tokens`` of each at once."""

    batch: int
    context: int
    new_tokens: int = 1
    layers: int
    lm_head: bool
    expert_replicas: int = 0
    source_len: int | None = None


def memory_need(model: ModelSpec, layout: Layout, held: MemoryLoad, precision: Precision | None = None) -> MemoryNeed:
    """Bytes of the fullest rank.

    Weights and KV cache as ``precision`` has them (None: the checkpoint's, else bf16), with scales and zero points, the
    embedding in 16 bit; activations: residual, hidden, QKV and the wide feed-forward intermediate of one layer at a
    time, in 16 bit, and what waits between stages. Replicas share the batch, stages the layers (embedding on the first,
    head on the last), a context group the tokens and, in its KV cache, the heads.
    """
    return max(stage_needs(model, layout, held, precision), key=lambda need: need.bytes)


def stage_needs(
    model: ModelSpec, layout: Layout, held: MemoryLoad, precision: Precision | None = None
) -> list[MemoryNeed]:
    """Bytes of a rank of each stage, see :func:`memory_need`."""
    stored = precision or resolve(model.quantised, dtype=DType.BF16)
    return [_stage_need(Same(model), layout, stage, held, stored) for stage in range(layout.pp)]


@lru_cache(maxsize=1024)  # scenarios that differ in their power policy ask for the same
def _stage_need(one: Same[ModelSpec], layout: Layout, stage: int, held: MemoryLoad, precision: Precision) -> MemoryNeed:
    model = one.held
    context, source = held.context, model.encoder_tokens(held.source_len, held.context)
    mine = layout.stage_layers(held.layers, stage)
    weights = float(_layer_bytes(Same(model), layout, mine, precision, held.expert_replicas))
    if held.lm_head:
        ends = (stage == 0) + (stage == layout.pp - 1)  # embedding, head
        copies = 1 if model.tied_embeddings and layout.pp == 1 else ends
        if precision.head is not None and copies == ends and stage == layout.pp - 1:
            copies -= 1
            weights += precision.head.weights.bytes_of(model.vocab, model.d_model) / layout.tp
        weights += copies * model.vocab * model.d_model / layout.tp * DType.BF16.bytes
    weights += model.extra_parameters * held.layers / model.layers / layout.pp / layout.tp * DType.BF16.bytes
    if model.vision and stage == 0:
        weights += params(model.vision.model) / layout.tp * precision.widest.bits / 8
    if model.encoder:
        weights += params(model.encoder) / layout.tp * precision.widest.bits / 8
    sequences = held.batch / layout.dp
    kv_heads = max(1, model.kv_heads // layout.tp)  # copied where there are more ranks than heads
    kept = sum(tokens * _cached(one, layout) for one, tokens in model.caching(mine, context))
    kv = 1.0 * sequences * kept * precision.kv.bytes
    kv += sequences * model.crossing(mine) * source * _cached(model, layout) * precision.kv.bytes
    kv += sequences * _index_keys(model, mine, context) * DType.FP8.bytes
    if model.state_space:  # fp32 states, as long as the sequence is served
        kv += sequences * model.mixing(mine) * model.state_space.cached_elements / layout.tp * DType.FP32.bytes
    tokens = sequences / layout.micro_batches * held.new_tokens / layout.cp
    wide = 3.0 * (model.d_ff * max(model.top_k, 1)) / layout.tp
    qkv = model.head_dim * (model.q_heads / layout.tp + 2 * kv_heads)
    waiting = 0
    if layout.pp > 1:  # inputs and outputs of micro-batches: all of them, or the one at hand
        buffers = layout.micro_batches if layout.pp_schedule == "gpipe" else 1
        waiting = buffers * ((stage > 0) + (stage < layout.pp - 1))
    if layout.spreads or layout.cp_mode == "all_gather":  # all ranks' queries and partial outputs, and of cp new keys
        if layout.spreads and not model.latent:
            ranks, new_keys = max(layout.cp, layout.dcp), 2 * kv_heads * layout.cp * (layout.cp > 1)
            qkv += model.head_dim * (new_keys + 2 * model.q_heads / layout.tp * ranks)
    elif layout.cp_mode != "ulysses":  # two blocks of keys and values, and the 32-bit sum of outputs
        qkv += model.head_dim * (4 * kv_heads + 2 * model.q_heads / layout.tp)
    activations = tokens * ((3.0 + waiting) * model.d_model + qkv + wide) * DType.BF16.bytes
    return MemoryNeed(weight_bytes=weights, kv_bytes=kv, activation_bytes=activations)


def _cached(model: ModelSpec, layout: Layout) -> float:
    """Elements that a rank caches of a token in a layer."""
    if model.latent:
        return model.latent.cached_dim / layout.cache_shards
    by_heads = layout.cp if layout.cp_mode == "ulysses" else 1
    return max(1, model.kv_heads // (layout.tp * by_heads)) / layout.cache_shards * model.key_and_value


def _index_keys(model: ModelSpec, layers: range, context: int) -> int:
    """Elements of the keys that indexers cache, the same on every rank."""
    return context * sum(
        len(run) * node.head_dim
        for _, block, run in model.layer_groups(layers)
        for node in block.nodes
        if isinstance(node, Indexer)
    )


@lru_cache(maxsize=256)
def _layer_bytes(of: Same[ModelSpec], layout: Layout, layers: range, precision: Precision, expert_replicas: int) -> int:
    """Bytes of the weights of one rank's share of ``layers`` layers (norms left out)."""
    model = of.held
    # An expert of all tokens is split over the ranks that hold the same tokens, see layer_passes.lower.
    ways = {"all_reduce": layout.ep, "all_to_all": 1, None: layout.tp}[layout.ep_mode]
    total = 0
    runs = [
        (block, stored, run) for _, block, mine in model.layer_groups(layers) for stored, run in precision.runs(mine)
    ]
    for block, stored, run in runs:
        shape = Shape(model=model.of(block), layout=layout, batch=1, new_tokens=1, context=1)
        split = replace(shape, layout=replace(layout, tp=ways))
        for node in block.nodes:
            for one in weighted_ops(node):
                sizes = (split if isinstance(node, Experts) else shape).local_sizes(one.parallel)
                if isinstance(node, Experts) and one is not node.router:
                    sizes["f"] = shape.local_sizes("f" if layout.ep == 1 else None)["f"]  # whole experts, or slices
                    sizes["e"] = (model.experts + expert_replicas) // layout.ep
                count, rows, depth = weight_shape(one, sizes)
                total += len(run) * count * stored.of(one).weights.bytes_of(rows, depth)
    return total
