"""More configurations of public models, abridged: billions of weights and KV bytes a token, as published."""

from __future__ import annotations

from typing import Any

from tests.family_configs import Config, gated

_NEAR, _FAR = "sliding_attention", "full_attention"
_THREE_IN_FOUR = [_NEAR, _NEAR, _NEAR, _FAR]
_LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)


def _ernie(*sizes: int, **more: Any) -> Config:
    return gated(
        "ernie4_5_moe", *sizes, moe_layer_interval=1, moe_gate="topk", moe_capacity=[64, 64, 64], use_bias=False,
        architectures=["Ernie4_5_MoeForCausalLM"], moe_use_aux_free=True, rope_theta=500000.0, **more,
    )  # fmt: skip


def _gemma_3n(layers: int, width: int, shared: int, **more: Any) -> Config:
    config = gated("gemma3n_text", 2048, layers, 8, 2, 0, 262400, head_dim=256, num_kv_shared_layers=shared, **more)
    return config | {
        "intermediate_size": [width] * layers, "layer_types": ([_NEAR] * 4 + [_FAR]) * (layers // 5),
        "sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10), "final_logit_softcapping": 30.0,
    }  # fmt: skip


HUNYUAN_LARGE = gated(
    "hunyuan", 6400, 64, 80, 8, 18304, 129024, num_experts=16, moe_topk=1, num_shared_expert=1, use_cla=True,
    cla_share_factor=2, use_mixed_mlp_moe=True, use_qk_norm=True, tie_word_embeddings=True,
    architectures=["HunYuanForCausalLM"], capacity_factor=1.0, moe_drop_tokens=False, attention_head_dim=128,
)  # fmt: skip
PHI_4_MINI_FLASH = gated(
    "phi4flash", 2560, 32, 40, 20, 10240, 200064, mb_per_layer=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    sliding_window=[512 if i < 16 and i % 2 else None for i in range(32)], tie_word_embeddings=True,
    architectures=["Phi4FlashForCausalLM"], lm_head_bias=False, mlp_bias=False, mamba_dt_rank=160,
)  # fmt: skip
GEMMA_3N_E4B = _gemma_3n(35, 16384, 15)

RECENT: dict[str, tuple[Config, float, int]] = {
    "hunyuan-large": (HUNYUAN_LARGE, 389.0, 32 * 2 * 8 * 80 * 2),
    "phi-4-mini-flash": (PHI_4_MINI_FLASH, 3.85, 9 * 2 * 20 * 64 * 2),
    "gemma-3n-e4b": (GEMMA_3N_E4B, 6.87, 20 * 2 * 2 * 256 * 2),  # without images and sound
    "gemma-3n-e2b": (_gemma_3n(30, 8192, 10), 4.46, 20 * 2 * 2 * 256 * 2),
    "gemma-3n-e4b with its encoders": (
        {
            "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": GEMMA_3N_E4B,
            "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc"},
            "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 1536}, "vision_soft_tokens_per_image": 256,
        },
        7.85,
        20 * 2 * 2 * 256 * 2,
    ),
    "hunyuan-a13b": (gated("hunyuan_v1_moe", 4096, 32, 32, 8, 3072, 128167, num_experts=64, moe_topk=[8] * 32,
                            num_shared_expert=[1] * 32, moe_intermediate_size=[3072] * 32, use_cla=False,
                            cla_share_factor=2, use_mixed_mlp_moe=True, use_qk_norm=True, tie_word_embeddings=True,
                            head_dim=128), 80.39, 131072),
    "hunyuan-7b": (gated("hunyuan_v1_dense", 4096, 32, 32, 8, 14336, 128167, head_dim=128, use_qk_norm=True,
                          tie_word_embeddings=True, architectures=["HunYuanDenseV1ForCausalLM"]), 7.505, 131072),
    "smollm3-3b": (gated("smollm3", 2048, 36, 16, 4, 11008, 128256, no_rope_layers=[1, 1, 1, 0] * 9,
                          use_sliding_window=False, layer_types=[_FAR] * 36, pretraining_tp=2), 3.075, 73728),
    "olmo-2-7b": (gated("olmo2", 4096, 32, 32, 32, 11008, 100352, tie_word_embeddings=False), 7.299, 524288),
    "olmo-2-32b": (gated("olmo2", 5120, 64, 40, 8, 27648, 100352, tie_word_embeddings=False), 32.23, 262144),
    "olmo-3-7b": (gated("olmo3", 4096, 32, 32, 32, 11008, 100278, tie_word_embeddings=False, sliding_window=4096,
                         layer_types=_THREE_IN_FOUR * 8), 7.298, 524288),
    "olmoe-1b-7b": (gated("olmoe", 2048, 16, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8,
                           tie_word_embeddings=False, norm_topk_prob=False), 6.919, 131072),
    "seed-oss-36b": (gated("seed_oss", 5120, 64, 80, 8, 27648, 155136, head_dim=128, attention_bias=True,
                            attention_out_bias=False, tie_word_embeddings=False), 36.15, 262144),
    "exaone-4-32b": (gated("exaone4", 5120, 64, 40, 8, 27392, 102400, head_dim=128, sliding_window=4096,
                            sliding_window_pattern="LLLG", layer_types=_THREE_IN_FOUR * 16), 32.0, 262144),
    "exaone-4-1.2b": (gated("exaone4", 2048, 30, 32, 8, 4096, 102400, head_dim=64, sliding_window=None,
                             sliding_window_pattern=None, tie_word_embeddings=True), 1.28, 61440),
    "command-r": (gated("cohere", 8192, 40, 64, 64, 22528, 256000, logit_scale=0.0625, use_qk_norm=False),
                  34.98, 1310720),
    "command-r7b": (gated("cohere2", 4096, 32, 32, 8, 14336, 256000, head_dim=128, sliding_window=4096,
                           sliding_window_pattern=4, use_gated_activation=True, use_parallel_block=True),
                    8.03, 131072),
    "starcoder2-3b": (gated("starcoder2", 3072, 30, 24, 2, 12288, 49152, use_bias=True, sliding_window=4096,
                             hidden_act="gelu_pytorch_tanh", norm_type="layer_norm"), 3.03, 30720),
    "ernie-4.5-0.3b": (gated("ernie4_5", 1024, 18, 16, 2, 3072, 103424, head_dim=128, use_bias=False),
                       0.361, 18432),
    "ernie-4.5-21b": (_ernie(2560, 28, 20, 4, 12288, 103424, moe_intermediate_size=1536, moe_num_experts=64, moe_k=6,
                             moe_num_shared_experts=2, moe_layer_start_index=1, tie_word_embeddings=True),
                      21.83, 57344),
    "ernie-4.5-300b": (_ernie(8192, 54, 64, 8, 28672, 103424, moe_intermediate_size=3584, moe_num_experts=64, moe_k=8,
                              moe_layer_start_index=3, tie_word_embeddings=False), 299.5, 221184),
    "codestral-mamba-7b": ({
        "model_type": "mamba2", "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64,
        "intermediate_size": 8192, "n_groups": 8, "state_size": 128, "expand": 2, "vocab_size": 32768,
        "tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")], "time_step_rank": 256,
        "architectures": ["Mamba2ForCausalLM"]}, 7.29, 0),
    "falcon-11b": ({"model_type": "falcon", "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32,
                    "num_kv_heads": 8, "new_decoder_architecture": True, "ff_factor": 4, "num_ln_in_parallel_attn": 1,
                    "ffn_hidden_size": 16384, "vocab_size": 65024, "tie_word_embeddings": False}, 11.1, 245760),
    "t5-large": ({"architectures": ["T5WithLMHeadModel"], "model_type": "t5", "d_model": 1024, "d_ff": 4096, "d_kv": 64,
                  "num_layers": 24, "num_heads": 16, "vocab_size": 32128, "is_encoder_decoder": True}, 0.7377, 98304),
    "lfm2-1.2b": (gated("lfm2", 2048, 16, 32, 8, 0, 65536, block_ff_dim=12288, block_ffn_dim_multiplier=1.0,
                         full_attn_idxs=list(_LFM2_ATTENTION), conv_L_cache=3, conv_bias=False) | {
                             "intermediate_size": None}, 1.17, 12288),
    "lfm2-350m": (gated("lfm2", 1024, 16, 16, 8, 6656, 65536, layer_types=[
        _FAR if i in _LFM2_ATTENTION else "conv" for i in range(16)]), 0.354, 12288),
}  # fmt: skip
