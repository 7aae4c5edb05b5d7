"""Configurations of public models of many families, abridged, with their published weights and KV bytes a token."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def gated(kind: str, *sizes: int, **more: Any) -> Config:
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size",
    )  # fmt: skip
    return {"model_type": kind} | dict(zip(names, sizes, strict=True)) | more


GPT_OSS_120B = gated(
    "gpt_oss", 2880, 36, 64, 8, 2880, 201088, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
    sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18, tie_word_embeddings=False,
    attention_bias=True, swiglu_limit=7.0, hidden_act="silu", initial_context_length=4096, experts_per_token=4,
    architectures=["GptOssForCausalLM"], max_position_embeddings=131072,
    rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False},
)  # fmt: skip
GEMMA_3_27B: Config = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
    "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "sliding_window": 1024,
        "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 262208,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16,
        "intermediate_size": 4304, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
LLAMA_4_MAVERICK: Config = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "boi_token_index": 200080,
    "eoi_token_index": 200081, "image_token_index": 200092, "tie_word_embeddings": False,
    "text_config": gated(
        "llama4_text", 5120, 48, 40, 8, 8192, 202048, head_dim=128, intermediate_size_mlp=16384,
        num_local_experts=128, num_experts_per_tok=1, interleave_moe_layer_step=2, no_rope_layers=[],
        attention_chunk_size=8192, use_qk_norm=False, for_llm_compressor=False, attn_temperature_tuning=4,
        floor_scale=8192, attn_scale=0.1, router_aux_loss_coef=0.001, hidden_act="silu", rope_theta=500000.0,
    ),
    "vision_config": {
        "model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34, "num_attention_heads": 16,
        "intermediate_size": 5632, "image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_dropout": 0.0,
        "multi_modal_projector_bias": False, "hidden_act": "gelu", "rope_theta": 10000, "norm_eps": 1e-5,
        "attention_dropout": 0.0, "initializer_range": 0.02, "num_channels": 3,
    },
}  # fmt: skip
QWEN3_NEXT = gated(
    "qwen3_next", 2048, 48, 16, 2, 5120, 151936, head_dim=256, full_attention_interval=4, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
    num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    decoder_sparse_step=1, mlp_only_layers=[], partial_rotary_factor=0.25, norm_topk_prob=True,
    use_sliding_window=False, tie_word_embeddings=False, architectures=["Qwen3NextForCausalLM"],
)  # fmt: skip
MINIMAX_TEXT_01 = gated(
    "minimax_text_01", 6144, 80, 64, 8, 9216, 200064, head_dim=128, num_local_experts=32, num_experts_per_tok=2,
    attn_type_list=[0, 0, 0, 0, 0, 0, 0, 1] * 10, rotary_dim=64, shared_intermediate_size=0, shared_moe_mode="sigmoid",
    layernorm_full_attention_alpha=3.5565588200778455, postnorm=True, tie_word_embeddings=False,
)  # fmt: skip
MINIMAX_M2 = gated(
    "minimax_m2", 3072, 62, 48, 8, 1536, 200064, head_dim=128, num_local_experts=256, num_experts_per_tok=8,
    attn_type_list=[1] * 62, rotary_dim=64, scoring_func="sigmoid", use_routing_bias=True, use_mtp=True,
    num_mtp_modules=3, mtp_transformer_layers=1, use_qk_norm=True, qk_norm_type="per_layer",
    shared_intermediate_size=0, tie_word_embeddings=False, architectures=["MiniMaxM2ForCausalLM"],
)  # fmt: skip
JAMBA = gated(
    "jamba", 4096, 32, 32, 8, 14336, 65536, attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2,
    expert_layer_offset=1, num_experts=16, num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    mamba_dt_rank=256, mamba_conv_bias=True, mamba_proj_bias=False, use_mamba_kernels=True, sliding_window=None,
    tie_word_embeddings=False, architectures=["JambaForCausalLM"], num_logits_to_keep=1,
)  # fmt: skip
NEMOTRON_3_NANO = gated(
    "nemotron_h", 2688, 52, 32, 2, 1856, 131072, head_dim=128, mamba_num_heads=64, mamba_head_dim=64, n_groups=8,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", ssm_state_size=128,
    conv_kernel=4, chunk_size=128, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
    n_shared_experts=1, moe_shared_expert_intermediate_size=3712, n_group=1, topk_group=1, mlp_hidden_act="relu2",
    mamba_hidden_act="silu", tie_word_embeddings=False, routed_scaling_factor=2.5, norm_topk_prob=True, expand=2,
)  # fmt: skip
QWEN_VL_72B: Config = gated(
    "qwen2_5_vl", 8192, 80, 64, 8, 29568, 152064, image_token_id=151655, video_token_id=151656,
    vision_start_token_id=151652, vision_end_token_id=151653, vision_token_id=151654, use_sliding_window=False,
    sliding_window=32768, max_window_layers=80, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
    tie_word_embeddings=False, architectures=["Qwen2_5_VLForConditionalGeneration"], max_position_embeddings=128000,
    vision_config={
        "hidden_size": 1280, "depth": 32, "intermediate_size": 3456, "num_heads": 16, "in_chans": 3, "patch_size": 14,
        "out_hidden_size": 8192, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
        "hidden_act": "silu", "model_type": "qwen2_5_vl",
    },
)  # fmt: skip
_QWEN3_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02,
}  # fmt: skip
QWEN3_VL_8B: Config = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
    "tie_word_embeddings": False, "text_config": gated("qwen3_vl_text", 4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "vision_config": _QWEN3_VISION | {"model_type": "qwen3_vl", "out_hidden_size": 4096},
}  # fmt: skip
QWEN3_VL_30B: Config = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe", "image_token_id": 151655,
    "tie_word_embeddings": False, "text_config": gated(
        "qwen3_vl_moe_text", 2048, 48, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
    ),
    "vision_config": _QWEN3_VISION | {"model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
}  # fmt: skip
PIXTRAL: Config = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_seq_length": 1,
    "image_token_index": 10, "projector_hidden_act": "gelu", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full", "text_config": {
        "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 131072,
        "is_composition": True, "max_position_embeddings": 1024000, "sliding_window": None,
    },
    "vision_config": {"model_type": "pixtral", "head_dim": 64, "hidden_act": "silu", "image_size": 1024,
                      "is_composition": True, "patch_size": 16, "rope_theta": 10000.0, "tie_word_embeddings": False},
}  # fmt: skip
LLAVA_NEXT: Config = {
    "architectures": ["LlavaNextForConditionalGeneration"], "model_type": "llava_next", "image_token_index": 32000,
    "image_grid_pinpoints": [[336, 672], [672, 336]], "use_image_newline_parameter": True, "vocab_size": 32064,
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
    "text_config": gated("mistral", 4096, 32, 32, 8, 14336, 32064, sliding_window=None),
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336,
                      "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
                      "projection_dim": 768, "vocab_size": 32000},
}  # fmt: skip
MISTRAL_SMALL_31: Config = {
    "model_type": "mistral3", "text_config": gated("mistral", 5120, 40, 32, 8, 32768, 131072, head_dim=128),
    "architectures": ["Mistral3ForConditionalGeneration"], "spatial_merge_size": 2, "vision_feature_layer": -1,
    "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24, "head_dim": 64,
                      "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 1540, "patch_size": 14},
}  # fmt: skip
WHISPER_TINY: Config = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 384, "encoder_layers": 4,
    "decoder_layers": 4, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536, "num_mel_bins": 80, "vocab_size": 51865, "max_source_positions": 1500,
    "max_target_positions": 448, "is_encoder_decoder": True, "num_hidden_layers": 4, "scale_embedding": False,
}  # fmt: skip
FLAN_T5_XL: Config = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 2048, "d_ff": 5120, "d_kv": 64,
    "num_layers": 24, "num_decoder_layers": 24, "num_heads": 32, "vocab_size": 32128, "is_encoder_decoder": True,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "relative_attention_num_buckets": 32,
    "dense_act_fn": "gelu_new", "is_gated_act": True, "dropout_rate": 0.1, "output_past": True, "n_positions": 512,
}  # fmt: skip
T5_BASE = {"model_type": "t5", "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 12, "num_heads": 12,
           "vocab_size": 32128}  # fmt: skip
_GLM = {
    "head_dim": 128, "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "attention_bias": True, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "architectures": ["Glm4MoeForCausalLM"], "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip

# Billions of weights (as the checkpoints have them: without layers that predict further tokens) and KV bytes a token.
PUBLISHED: dict[str, tuple[Config, float, int | None]] = {
    "gpt-oss-120b": (GPT_OSS_120B, 116.83, 73728),
    "gemma-3-27b": (GEMMA_3_27B, 27.43, 507904),
    "gemma-3-1b": (gated("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256, sliding_window=512), 1.0, 26624),
    "gemma-2-27b": (gated("gemma2", 4608, 46, 32, 16, 36864, 256000, head_dim=128, query_pre_attn_scalar=144,
                           final_logit_softcapping=30.0, attn_logit_softcapping=50.0, sliding_window=4096),
                    27.23, 376832),
    "phi-4": (gated("phi3", 5120, 40, 40, 10, 17920, 100352, tie_word_embeddings=False, sliding_window=None),
              14.66, 204800),
    "phi-4-mini": (gated("phi3", 3072, 32, 24, 8, 8192, 200064, tie_word_embeddings=True, sliding_window=262144,
                          partial_rotary_factor=0.75, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False,
                          mlp_bias=False), 3.836, 131072),
    "phi-3.5-moe": (gated("phimoe", 4096, 32, 32, 8, 6400, 32064, num_local_experts=16, num_experts_per_tok=2,
                           sliding_window=131072, lm_head_bias=True, attention_bias=True), 41.87, 131072),
    "llama-4-maverick": (LLAMA_4_MAVERICK, 401.6, 196608),
    "glm-4.5": (gated("glm4_moe", 5120, 92, 96, 8, 12288, 151552, first_k_dense_replace=3, n_routed_experts=160,
                       moe_intermediate_size=1536, use_qk_norm=True, **_GLM), 352.8, 376832),
    "glm-4.5-air": (gated("glm4_moe", 4096, 46, 96, 8, 10944, 151552, first_k_dense_replace=1, n_routed_experts=128,
                           moe_intermediate_size=1408, use_qk_norm=False, **_GLM), 106.85, 188416),
    "qwen3-next-80b": (QWEN3_NEXT, 79.67, 24576),
    "minimax-text-01": (MINIMAX_TEXT_01, 456.1, 40960),
    "minimax-m2": (MINIMAX_M2, 228.7, 253952),
    "jamba-v0.1": (JAMBA, 51.57, 16384),
    "falcon-40b": ({"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
                    "num_kv_heads": 8, "new_decoder_architecture": True, "vocab_size": 65024, "alibi": False,
                    "bias": False, "parallel_attn": True, "multi_query": True}, 41.84, 122880),
    "nemotron-3-nano": (NEMOTRON_3_NANO, 31.58, 6144),
    "qwen2.5-vl-72b": (QWEN_VL_72B, 73.4, 327680),
    "qwen3-vl-8b": (QWEN3_VL_8B, 8.77, 147456),
    "qwen3-vl-30b-a3b": (QWEN3_VL_30B, 31.07, 98304),
    "pixtral-12b": (PIXTRAL, 12.68, 163840),
    "llava-next-mistral": (LLAVA_NEXT, 7.57, 131072),
    "mistral-small-3.1": (MISTRAL_SMALL_31, 24.01, 163840),
    "granite-3.1-3b-a800m": (gated("granitemoe", 1536, 32, 24, 8, 512, 49155, num_local_experts=40,
                                    num_experts_per_tok=8, tie_word_embeddings=True), 3.3, 65536),
    "whisper-tiny": (WHISPER_TINY, 0.03776, 6144),
    "flan-t5-xl": (FLAN_T5_XL, 2.85, 196608),
    "t5-base": (T5_BASE, 0.2229, 36864),
    "phi-2": (gated("phi", 2560, 32, 32, 32, 10240, 51200, partial_rotary_factor=0.4, qk_layernorm=False),
              2.78, 327680),
}  # fmt: skip
