"""Hugging Face ``config.json``: the fields that size a model, checked, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from workloads.errors import WorkloadError
from workloads.hybrid import HYBRID, hybrid_model
from workloads.layer_norm import LAYER_NORM, layer_norm_model
from workloads.mixers import Latent
from workloads.model import ModelSpec, positive, with_block
from workloads.vision import VISION_LANGUAGE, vision_language_model

DENSE = frozenset({"llama", "mistral", "qwen2", "qwen3"})
EXPERTS = frozenset({"qwen3_moe", "mixtral"})
LATENT = frozenset({"deepseek_v2", "deepseek_v3"})
KNOWN = DENSE | EXPERTS | LATENT | LAYER_NORM | HYBRID | VISION_LANGUAGE


def parse_config(text: str, *, where: str) -> ModelSpec:
    """A model from its configuration: Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, DeepSeek-V2/V3, GPT-2, OPT,
    BERT, ViT, Nemotron-H, LLaVA.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{where}, line {error.lineno}: not valid JSON: {error.msg}") from None
    if not isinstance(data, dict):
        raise WorkloadError(f"{where}: a configuration is an object, found {type(data).__name__}")
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in KNOWN:
        known = ", ".join(sorted(KNOWN))
        raise WorkloadError(f"{where}: model_type = {kind!r} is not supported; supported are {known}")

    if kind in VISION_LANGUAGE:
        return vision_language_model(data, where=where)
    if kind in HYBRID:
        return hybrid_model(data, where=where)
    if kind in LAYER_NORM:
        return layer_norm_model(data, where=where)
    _refuse_other_arithmetic(data, kind, where)

    def size(name: str, default: Any = None) -> int:
        value = data.get(name)
        return positive(default if value is None else value, name, where)

    heads = size("num_attention_heads")
    width = size("hidden_size")
    fields: dict[str, Any] = {}
    if kind in EXPERTS:
        fields |= {
            "experts": size("num_experts" if kind == "qwen3_moe" else "num_local_experts"),
            "top_k": size("num_experts_per_tok"),
        }
    if kind in LATENT:
        fields |= _latent_fields(data, size)
    return with_block(
        ModelSpec(
            id=str(data.get("_name_or_path") or where),
            source=str(data.get("_source") or where),
            d_model=width,
            layers=size("num_hidden_layers"),
            q_heads=heads,
            kv_heads=heads if kind in LATENT else size("num_key_value_heads", heads),
            head_dim=size("v_head_dim" if kind in LATENT else "head_dim", width // heads),
            d_ff=size("intermediate_size" if kind in DENSE | {"mixtral"} else "moe_intermediate_size"),
            vocab=size("vocab_size"),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            tied_embeddings=bool(data.get("tie_word_embeddings", False)),
            **fields,
        )
    )


def _latent_fields(data: dict[str, Any], size: Callable[..., int]) -> dict[str, Any]:
    """Latent attention, shared and dense parts of DeepSeek-V2/V3; ``q_lora_rank`` null means none."""
    fields: dict[str, Any] = {
        "latent": Latent(
            q_rank=size("q_lora_rank") if data.get("q_lora_rank") is not None else 0,
            kv_rank=size("kv_lora_rank"),
            nope_dim=size("qk_nope_head_dim"),
            rope_dim=size("qk_rope_head_dim"),
        ),
        "experts": size("n_routed_experts"),
        "top_k": size("num_experts_per_tok"),
    }
    if data.get("n_shared_experts"):
        fields["shared_d_ff"] = size("n_shared_experts") * size("moe_intermediate_size")
    if data.get("first_k_dense_replace"):
        fields |= {"dense_layers": size("first_k_dense_replace"), "dense_d_ff": size("intermediate_size")}
    if data.get("topk_method", "noaux_tc") != "greedy" and (data.get("n_group") or 1) > 1:
        fields |= {"route_groups": size("n_group"), "top_groups": size("topk_group")}
    return fields


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
    for name in ("decoder_sparse_step", "moe_layer_freq"):
        step = data.get(name, 1)
        if step != 1:
            raise WorkloadError(f"{where}: {name} = {step!r}: all layers must be alike: only 1 is supported")
