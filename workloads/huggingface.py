"""Hugging Face ``config.json``: the fields that size a decoder, checked, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from workloads.errors import WorkloadError
from workloads.model import ModelSpec, positive, with_block

DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
EXPERTS = frozenset({"qwen3_moe", "mixtral"})


def parse_config(text: str, *, where: str) -> ModelSpec:
    """A model from a configuration of a Llama-like decoder (Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE)."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}, line {error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: a configuration is an object, found {type(data).__name__}")
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in DENSE | EXPERTS:
        known = ", ".join(sorted(DENSE | EXPERTS))
        raise WorkloadError(f"{where}: model_type = {kind!r} is not supported; supported are {known}")

    _refuse_other_arithmetic(data, kind, where)

    def size(name: str, default: Any = None) -> int:
        value = data.get(name)
        return positive(default if value is None else value, name, where)

    heads = size("num_attention_heads")
    width = size("hidden_size")
    moe = kind in EXPERTS
    return with_block(
        ModelSpec(
            id=str(data.get("_name_or_path") or where),
            source=where,
            d_model=width,
            layers=size("num_hidden_layers"),
            q_heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", width // heads),
            d_ff=size("moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
            vocab=size("vocab_size"),
            experts=size("num_experts" if kind == "qwen3_moe" else "num_local_experts") if moe else 0,
            top_k=size("num_experts_per_tok") if moe else 0,
            tied_embeddings=bool(data.get("tie_word_embeddings", False)),
        )
    )


def _refuse_other_arithmetic(data: dict[str, Any], kind: str, where: str) -> None:
    """Fields that mean other kernels than the Llama-like layer has; absent ones mean the family's usual layer."""
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise WorkloadError(f"{where}: hidden_act = {activation!r}: gated layers are priced with 'silu' only")
    # Mistral and Mixtral slide whenever a window is given, the others only where they say so.
    slides = data.get("use_sliding_window", kind in ("mistral", "mixtral"))
    window = data.get("sliding_window")
    if slides and window is not None:
        raise WorkloadError(
            f"{where}: sliding_window = {window!r}: attention over a window is not modelled: "
            "set it to null for contexts within the window"
        )
    dense = data.get("mlp_only_layers")
    if dense:
        raise WorkloadError(f"{where}: mlp_only_layers = {dense!r}: all layers must be alike")
    step = data.get("decoder_sparse_step", 1)
    if step != 1:
        raise WorkloadError(f"{where}: decoder_sparse_step = {step!r}: all layers must be alike: only 1 is supported")
