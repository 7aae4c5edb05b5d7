"""Configurations whose layers differ in size, abridged: published billions of weights, KV bytes a token by hand."""

from __future__ import annotations

from tests.family_configs import Config

_GEMMA_4: Config = {
    "model_type": "gemma4_text", "vocab_size": 262144, "head_dim": 256, "global_head_dim": 512, "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "vocab_size_per_layer_input": 262144,
    "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None, "enable_moe_block": False,
    "final_logit_softcapping": 30.0, "max_position_embeddings": 262144,
}  # fmt: skip
_LARGE_TOWER = {
    "model_type": "gemma4_vision", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
}  # fmt: skip


def _gemma_4(layers: int, every: int, *, small: bool, **sizes: object) -> Config:
    types = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    own = {"num_hidden_layers": layers, "layer_types": types, "hidden_size_per_layer_input": 256 if small else 0,
           "attention_k_eq_v": not small, "sliding_window": 512 if small else 1024}  # fmt: skip
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": _GEMMA_4 | own | sizes,
        "vision_config": {"model_type": "gemma4_vision"} if small else _LARGE_TOWER,
        "audio_config": {"model_type": "gemma4_audio"} if small else None,
        "image_token_id": 258880,
    }


def _nas_block(group: int | None, width: float) -> Config:
    attention = {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False,
                 "num_sink_tokens": None, "window_length": None, "unshifted_sink": False}  # fmt: skip
    ffn = {"ffn_mult": width, "no_op": False, "replace_with_linear": False, "sparsify": None}
    return {"attention": attention, "ffn": ffn}


# Which layers have no attention, and how wide each feed-forward is, from the configuration of nvidia's 49B (v1).
_ATTENDS = (8, 5.25)
_NAS = [
    (8, 2.625), *[_ATTENDS] * 5, (None, 2.625), (None, 2.625), *[_ATTENDS] * 3, (None, 3.28125), *[_ATTENDS] * 30,
    *((None, width) for width in (1.3125, 2.625, 2.625, 1.3125, 5.25, 1.3125, 2.625, 1.3125, 1.3125, 1.3125)),
    _ATTENDS,
    *((None, width) for width in (1.3125, 1.0, 1.0, 1.3125, 1.0, 1.0, 1.0, 1.3125, 1.3125, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5,
                                  1.0, 0.5, 0.5)),
    *[_ATTENDS] * 9,
]  # fmt: skip
NEMOTRON_49B: Config = {
    "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": None, "intermediate_size": None, "vocab_size": 128256,
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "block_configs": [_nas_block(*one) for one in _NAS],
}  # fmt: skip

MIMO_V2_FLASH: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 152576,
    "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192,
    "v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "partial_rotary_factor": 0.334, "sliding_window": 128, "sliding_window_size": 128,
    "hybrid_layer_pattern": [int(i != 0 and (i + 1) % 6 != 0) for i in range(48)],
    "moe_layer_freq": [0] + [1] * 47, "intermediate_size": 16384, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "n_shared_experts": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "n_group": 1, "topk_group": 1, "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 3,
}  # fmt: skip


def _zamba_2(width: int, layers: int, hybrid: list[int], heads: int, groups: int) -> Config:
    return {
        "architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "hidden_size": width,
        "num_hidden_layers": layers, "layers_block_type": ["hybrid" if i in hybrid else "mamba" for i in range(layers)],
        "mamba_d_state": 64, "n_mamba_heads": heads, "mamba_ngroups": groups, "intermediate_size": 4 * width,
        "num_attention_heads": 32, "attention_hidden_size": 2 * width, "attention_head_dim": width // 16,
        "adapter_rank": 128, "num_mem_blocks": 2, "vocab_size": 32000, "hidden_act": "gelu", "use_mem_rope": True,
    }  # fmt: skip


ZAMBA2_7B = _zamba_2(3584, 81, [6, 11, *range(17, 78, 6)], 112, 2)

# Weights: the checkpoints' own totals (for Gemma 4 with their encoders; the cards say 5.1, 8, 25.2 and 30.7 of the
# language models); bytes: two of 16 bits of each head's key and value in each layer that keeps some.
UNEVEN: dict[str, tuple[Config, float, int]] = {
    "gemma-4-e2b": (
        _gemma_4(35, 5, small=True, hidden_size=1536, intermediate_size=6144, num_attention_heads=8,
                 num_key_value_heads=1, num_kv_shared_layers=20, use_double_wide_mlp=True),
        5.12, 4 * (12 * 256 + 3 * 512),
    ),
    "gemma-4-e4b": (
        _gemma_4(42, 6, small=True, hidden_size=2560, intermediate_size=10240, num_attention_heads=8,
                 num_key_value_heads=2, num_kv_shared_layers=18),
        8.0, 4 * 2 * (20 * 256 + 4 * 512),
    ),
    "gemma-4-26b-a4b": (
        _gemma_4(30, 6, small=False, hidden_size=2816, intermediate_size=2112, num_attention_heads=16,
                 num_key_value_heads=8, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128,
                 top_k_experts=8, moe_intermediate_size=704),
        25.2 + 0.575, 4 * (25 * 8 * 256 + 5 * 2 * 512),
    ),
    "gemma-4-31b": (
        _gemma_4(60, 6, small=False, hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
                 num_key_value_heads=16, num_global_key_value_heads=4),
        30.7 + 0.575, 4 * (50 * 16 * 256 + 10 * 4 * 512),
    ),
    "nemotron-super-49b": (NEMOTRON_49B, 49.87, 49 * 4 * 8 * 128),
    "mimo-v2-flash": (MIMO_V2_FLASH, 309, 2 * (192 + 128) * (9 * 4 + 39 * 8)),
    "zamba2-7b": (ZAMBA2_7B, 7.36, 13 * 4 * 32 * 224),
    "zamba2-2.7b": (_zamba_2(2560, 54, [6, 12, 18, 24, 30, 36, 42, 47, 51], 80, 1), 2.66, 9 * 4 * 32 * 160),
}  # fmt: skip
