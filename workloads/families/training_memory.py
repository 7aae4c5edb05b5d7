"""What a rank must hold in a training step: weights, gradients, the optimiser's state, and what gradients read."""

from __future__ import annotations

from dataclasses import replace

from workloads.families.options import Options
from workloads.memory import MemoryLoad, MemoryNeed, memory_need
from workloads.model import ModelSpec
from workloads.parallel import Layout
from workloads.work import DType

# A 32-bit weight and two 32-bit moments of each parameter.
STATE_BYTES = 12
# What each way of sharding shares out.
_SHARDED = {
    "state": ("zero1", "zero2", "zero3"),
    "gradients": ("zero2", "zero3"),
    "weights": ("zero3",),
}


def training_need(model: ModelSpec, layout: Layout, held: MemoryLoad, options: Options | None = None) -> MemoryNeed:
    """Bytes of a rank: weights, 16-bit gradients, the optimiser's state; of every layer what its gradients read, kept
    from the forward pass.

    Per token: both norms' inputs and outputs, Q, K, V, attention's output, gate, up and their product; logits once.
    ZeRO-1 keeps a share of the state, ZeRO-2 of the gradients too, ZeRO-3 of the weights too, with two layers whole.
    """
    options = options or Options()
    lone = memory_need(model, layout, replace(held, new_tokens=held.context), options.precision)
    heads = (2 * model.q_heads + 2 * model.kv_heads) * model.head_dim
    wide = 3 * model.d_ff * max(model.top_k, 1) + 3 * model.shared_d_ff
    depth = held.layers / layout.pp
    kept = depth * (4 * model.d_model + (heads + wide) / layout.tp) + held.lm_head * model.vocab / layout.tp
    tokens = held.batch * held.context / (layout.dp * layout.cp * options.accumulate)
    ways = layout.dp * layout.cp
    whole = lone.weight_bytes
    parts = {name: ways if options.sharding in names else 1 for name, names in _SHARDED.items()}
    state = whole / DType.BF16.bytes * STATE_BYTES if options.optimizer == "adamw" else 0.0
    gathered = 2 * whole / max(depth, 1) if parts["weights"] > 1 else 0.0
    return MemoryNeed(
        weight_bytes=whole / parts["weights"] + gathered,
        kv_bytes=0.0,
        activation_bytes=tokens * kept * DType.BF16.bytes,
        gradient_bytes=whole / parts["gradients"],
        state_bytes=state / parts["state"],
    )
