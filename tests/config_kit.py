"""Configurations of public models, and their weights counted by hand: nothing of the product is used here."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 128000, "eos_token_id": 128001, "initializer_range": 0.02, "pretraining_tp": 1, "use_cache": True,
    "attention_dropout": 0.0, "transformers_version": "4.43.0",
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                     "original_max_position_embeddings": 8192},
}  # fmt: skip
MISTRAL: Config = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000,
    "hidden_act": "silu", "sliding_window": 4096, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
    "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 40960, "use_sliding_window": False,
}  # fmt: skip
PHI3: Config = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064,
    "sliding_window": 2047, "max_position_embeddings": 4096, "tie_word_embeddings": False, "resid_pdrop": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config",
                 "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
}  # fmt: skip
GRANITE: Config = {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "hidden_size": 4096, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12800, "vocab_size": 49155,
    "tie_word_embeddings": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0,
    "attention_multiplier": 0.0078125, "max_position_embeddings": 131072,
}  # fmt: skip
MIXTRAL: Config = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 6144, "num_hidden_layers": 56,
    "num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 16384, "vocab_size": 32768,
    "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 65536,
}  # fmt: skip
QWEN2_MOE: Config = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "vocab_size": 151936,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_MOE: Config = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_position_embeddings": 40960,
}  # fmt: skip
DEEPSEEK: Config = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
    "vocab_size": 102400, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1,
    "topk_group": 1, "scoring_func": "softmax", "max_position_embeddings": 163840,
}  # fmt: skip
KIMI: Config = DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1, "vocab_size": 163840,
    "q_lora_rank": 1536, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0,
}  # fmt: skip
GPT2: Config = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25,
    "n_inner": None, "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024, "activation_function": "gelu_new",
}  # fmt: skip
OPT: Config = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 7168, "num_hidden_layers": 48,
    "num_attention_heads": 56, "ffn_dim": 28672, "vocab_size": 50272, "do_layer_norm_before": True,
    "word_embed_proj_dim": 7168, "activation_function": "relu", "max_position_embeddings": 2048,
}  # fmt: skip
BERT: Config = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12,
    "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522, "hidden_act": "gelu",
    "type_vocab_size": 2, "max_position_embeddings": 512,
}  # fmt: skip
# Billions of weights and bytes of the 16-bit KV cache a token, as published (shared/cases/models.json).
PUBLISHED: dict[str, tuple[Config, float, int | None]] = {
    "llama-3.1-8b": (LLAMA, 8.03, 131072),
    "mistral-7b-v0.1": (MISTRAL, 7.242, 131072),
    "qwen2.5-7b": (QWEN2, 7.616, 57344),
    "qwen3-0.6b": (QWEN3, 0.596, 114688),
    "phi-3-mini": (PHI3, 3.82, 393216),
    "granite-3.1-8b": (GRANITE, 8.17, 163840),
    "mixtral-8x22b": (MIXTRAL, 140.63, 229376),
    "qwen1.5-moe": (QWEN2_MOE, 14.3, 196608),
    "qwen3-235b": (QWEN3_MOE, 235.094, 192512),
    "deepseek-v2-lite": (DEEPSEEK, 15.706, 31104),
    "kimi-k2": (KIMI, 1026.4, 70272),
    "gpt2-xl": (GPT2, 1.5576, 307200),
    "opt-30b": (OPT, 29.97, 1376256),
    "bert-base": (BERT, 0.1095, None),
}


# What transformers 4.57 fills in where a file leaves a key out.
FILLED: dict[str, Config] = {
    "mistral": {"num_key_value_heads": 8}, "qwen2": {"num_key_value_heads": 32}, "mixtral": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128}, "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3_moe": {"num_key_value_heads": 4}, "granite": {}, "phi3": {}, "llama": {},
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 0, "first_k_dense_replace": 0},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "kimi_k2": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
}  # fmt: skip


def kv_bytes(config: Config, fp32: bool) -> int | None:
    """Bytes of the KV cache a token, of full attention in every layer; None for an encoder."""
    config = FILLED.get(config["model_type"], {}) | config
    element = 4 if fp32 else 2
    match config["model_type"]:
        case "bert":
            return None
        case "gpt2":
            return int(element * 2 * config["n_layer"] * config["n_embd"])
        case "opt":
            return int(element * 2 * config["num_hidden_layers"] * config["hidden_size"])
        case "deepseek_v2" | "deepseek_v3" | "kimi_k2":
            return int(element * config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"]))
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return int(element * 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size)


def outside(config: Config) -> int:
    """Weights that no linear layer holds: embedding, head, positions, routers."""
    config = FILLED.get(config["model_type"], {}) | config
    alone = config["model_type"] in ("gpt2", "opt", "bert")
    tied = config.get("tie_word_embeddings") in ((None, True) if alone else (True,))
    width = config.get("n_embd") or config["hidden_size"]
    rows = config["vocab_size"] * (1 if tied else 2)
    if alone:
        most = {"gpt2": ("n_positions", 1024), "opt": ("max_position_embeddings", 2048)}
        name, usual = most.get(config["model_type"], ("max_position_embeddings", 512))
        return int(width * (rows + (config.get(name) or usual)))
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    layers = config["num_hidden_layers"] - (config.get("first_k_dense_replace") or 0)
    return int(width * (rows + experts * layers))


def count(config: Config) -> int:
    """Weights of a configuration as transformers 4.57 would make them, large matrices only (norms and biases are
    under 0.2 %)."""
    kind = config["model_type"]
    config = FILLED.get(kind, {}) | config
    if kind in ("gpt2", "opt", "bert"):
        names = {
            "gpt2": ("n_embd", "n_layer", "n_inner", "n_positions", 1024),
            "opt": ("hidden_size", "num_hidden_layers", "ffn_dim", "max_position_embeddings", 2048),
            "bert": ("hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings", 512),
        }
        width, layers, wide, positions, most = names[kind]  # fmt: skip
        d, inner = config[width], config.get(wide) or 4 * config[width]
        rows = config["vocab_size"] * (1 if config.get("tie_word_embeddings") in (None, True) else 2)
        return config[layers] * (4 * d * d + 2 * d * inner) + d * (rows + (config.get(positions) or most))
    d, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    total = d * vocab * (1 if config.get("tie_word_embeddings") else 2)
    if "kv_lora_rank" in config:
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        q = config.get("q_lora_rank")
        queries = d * heads * (nope + rope) if not q else d * q + q * heads * (nope + rope)
        attention = queries + d * (rank + rope) + rank * heads * (nope + value) + heads * value * d
        expert = 3 * d * config["moe_intermediate_size"]
        dense = config.get("first_k_dense_replace") or 0
        shared = (config.get("n_shared_experts") or 0) * expert
        sparse = config["n_routed_experts"] * (expert + d) + shared
        return total + layers * attention + dense * 3 * d * config["intermediate_size"] + (layers - dense) * sparse
    size = config.get("head_dim") or d // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * d * size * (heads + kv_heads)
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        return int(total + layers * (attention + 3 * d * config["intermediate_size"]))
    inner = config["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or 0
    apart = set(config.get("mlp_only_layers") or ())
    dense = sum((i + 1) % config.get("decoder_sparse_step", 1) != 0 or i in apart for i in range(layers))
    sparse = (layers - dense) * (experts * d + 3 * d * (experts * inner + shared))
    return int(total + layers * attention + sparse + (dense and dense * 3 * d * config["intermediate_size"]))
