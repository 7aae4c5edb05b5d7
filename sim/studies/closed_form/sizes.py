"""What a scenario's work amounts to, counted from the model's sizes: the inputs of the closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import workloads
from sim.layout import layout_of
from sim.scenario import Scenario

BYTES = 2  # bf16: weights, activations, KV cache
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """One pass (a prefill, or a decode step) over a layout. Quantities are of the whole batch and all GPUs' shares.

    ``micro_batches`` parts of the batch go through ``pp`` stages; weights are read once for each part. ``attention``
    counts FLOPs in prefill and bytes of the KV cache in decode.
    """

    gpus: int
    tp: int
    pp: int
    micro_batches: int
    layers: int
    gemm_flops: float
    weight_bytes: float
    attention: float
    activation_bytes: float

    @classmethod
    def of(cls, scenario: Scenario, phase: Phase) -> Sizes:
        """Sizes of ``scenario``, whose ``seq_len`` is the input length in prefill, the cached length in decode.

        >>> sizes = Sizes.of(Scenario.of(model="llama3-8b", phase="decode", tp=2, batch=4, seq_len=1000), "decode")
        >>> round(sizes.weight_bytes / 1e9, 1), sizes.attention  # 8.0e9 weights less the embedding; 1000 x 4 x 128 KiB
        (15.0, 524288000.0)
        """
        model = workloads.load_model(scenario.model)
        layout = layout_of(scenario)
        new_tokens = scenario.seq_len if phase == "prefill" else 1
        tokens = scenario.batch * new_tokens
        head = model.vocab * model.d_model
        embeddings = head * (1 if model.tied_embeddings else 2)
        active = workloads.params(model, active=True) - embeddings
        stored = workloads.params(model) - embeddings
        if model.experts:
            # Of the experts, a micro-batch reads those that at least one of its tokens chose.
            chosen = model.top_k / model.experts
            experts = (stored - active) / (1.0 - chosen)
            read = stored - experts * (1.0 - chosen) ** (tokens / layout.micro_batches)
        else:
            read = float(stored)
        if phase == "prefill":
            # Causal: half of the square; two products of two FLOPs an element.
            attention = 2.0 * scenario.batch * scenario.seq_len**2 * model.q_heads * model.head_dim * model.layers
        else:
            attention = float(
                scenario.batch * scenario.seq_len * model.cached_elements_per_token * model.layers * BYTES
            )
        return cls(
            gpus=scenario.world,
            tp=max(scenario.tp, scenario.ep),
            pp=scenario.pp,
            micro_batches=layout.micro_batches,
            layers=model.layers,
            gemm_flops=2.0 * (active * tokens + head * scenario.batch),
            weight_bytes=(read + head) * BYTES,
            attention=attention,
            activation_bytes=float(tokens * model.d_model * model.layers * BYTES),
        )
