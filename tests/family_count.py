"""Weights and KV bytes of families by formulas of their own: nothing of the product, nor of its files, is used here."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]
# What transformers 4.57, or the published checkpoints, have where a key is left out.
FILLED: dict[str, Config] = {
    "gpt_oss": {"head_dim": 64},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True,
                    "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216, "vocab_size": 262208},
    "glm4_moe": {"head_dim": 128, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8},
    "minimax_text_01": {"head_dim": 128, "num_key_value_heads": 8},
    "phimoe": {"num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
              "expert_layer_offset": 1, "num_experts": 16, "num_experts_per_tok": 2, "mamba_d_state": 16,
              "mamba_d_conv": 4, "mamba_expand": 2},
}  # fmt: skip


def attends(config: Config, layer: int) -> bool:
    """Whether a layer has attention."""
    match config["model_type"]:
        case "minimax_text_01":
            types = config.get("attn_type_list")
            return bool((layer + 1) % 8 == 0 if types is None else types[layer] == 1)
        case "jamba":
            return bool(layer % config["attn_layer_period"] == config["attn_layer_offset"])
    return True


def weights_and_cache(config: Config) -> tuple[int, int]:
    """Large matrices (norms, biases and sinks are under half a percent), and bytes of a 16-bit cache a token."""
    given = {key: value for key, value in config.items() if value is not None}
    config = FILLED[config["model_type"]] | given
    kind, d, layers = config["model_type"], config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    size = config.get("head_dim", d // heads)
    attending = sum(attends(config, layer) for layer in range(layers))
    total = config["vocab_size"] * d * (1 if config.get("tie_word_embeddings") else 2)
    total += attending * d * size * (2 * heads + 2 * kv_heads)
    wide = config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("n_routed_experts", config.get("num_local_experts", config.get("num_experts", 0)))
    feed = 3 * d * wide * experts + d * experts if experts else 3 * d * wide
    sparse = layers
    match kind:
        case "gpt_oss":
            feed += experts * (1 + 2 * wide + d)  # biases, which count in narrow models
        case "minimax_text_01":
            total += (layers - attending) * 5 * d * heads * size
        case "glm4_moe":
            dense = min(config["first_k_dense_replace"], layers)
            sparse = layers - dense
            total += dense * 3 * d * config["intermediate_size"] + sparse * 3 * d * wide * config["n_shared_experts"]
        case "jamba":
            inner, state = config["mamba_expand"] * d, config["mamba_d_state"]
            rank = config.get("mamba_dt_rank", "auto")
            rank = -(-d // 16) if rank == "auto" else rank
            mixer = 3 * d * inner + inner * (rank + 2 * state) + rank * inner + inner * (state + config["mamba_d_conv"])
            chosen = [i for i in range(layers) if i % config["expert_layer_period"] == config["expert_layer_offset"]]
            sparse = len(chosen) if experts > 1 else 0
            total += (layers - attending) * mixer + (layers - sparse) * 3 * d * config["intermediate_size"]
    return total + sparse * feed, attending * 4 * kv_heads * size
