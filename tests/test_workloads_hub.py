"""Folders as hubs have them: parameters and cache of public checkpoints, quantised ones by what they store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config_kit import Config
from workloads import load_model
from workloads.params import facts

COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
          "max_position_embeddings": 131072, "attention_bias": False}  # fmt: skip


def like(kind: str, sizes: tuple[int, ...], **more: Any) -> Config:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
             "vocab_size")  # fmt: skip
    return COMMON | {"model_type": kind} | dict(zip(names, sizes, strict=True)) | more


def deepseek(kind: str, **more: Any) -> Config:
    return like(
        kind, (7168, 61, 128, 128, 18432, 129280), moe_intermediate_size=2048, n_routed_experts=256,
        num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=3, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_group=8, topk_group=4, topk_method="noaux_tc",
        scoring_func="sigmoid", num_nextn_predict_layers=1, moe_layer_freq=1, **more,
    )  # fmt: skip


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def packed(weights: Config, activations: Config | None, ignore: list[str]) -> Config:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    kind = "float-quantized" if activations else "pack-quantized"
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}, "ignore": ignore}


NVFP4 = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                          "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]}}  # fmt: skip
NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
SCOUT_TEXT = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "vocab_size": 202048,
    "attention_chunk_size": 8192, "no_rope_layers": [],
}  # fmt: skip
SCOUT_EYE = {
    "model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34, "num_attention_heads": 16,
    "intermediate_size": 5632, "image_size": 336, "patch_size": 14, "num_channels": 3, "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096,
}  # fmt: skip

# Configuration, billions of parameters as published, bytes of the cache a token, stored type, files beside.
HUB: dict[str, tuple[Config, float, int, str, Config]] = {
    "mistral-large-2407": (like("mistral", (12288, 88, 96, 8, 28672, 32768), sliding_window=None), 122.6, 360448,
                           "bf16", {}),
    "ministral-8b": (like("mistral", (4096, 36, 32, 8, 12288, 131072), sliding_window=32768), 8.02, 147456, "bf16", {}),
    "qwen2-57b-a14b": (like("qwen2_moe", (3584, 28, 28, 4, 18944, 151936), moe_intermediate_size=2560, num_experts=64,
                            shared_expert_intermediate_size=20480, num_experts_per_tok=8), 57.41, 57344, "bf16", {}),
    "phi-4-mini": (like("phi3", (3072, 32, 24, 8, 8192, 200064), tie_word_embeddings=True, sliding_window=262144,
                        partial_rotary_factor=0.75), 3.836, 131072, "bf16", {}),
    "gemma-2b": (like("gemma", (2048, 18, 8, 1, 16384, 256000), head_dim=256, tie_word_embeddings=True,
                      hidden_act="gelu"), 2.506, 18432,
                 "bf16", {}),
    "nemotron-nano-9b-v2": (like(
        "nemotron_h", (4480, 56, 40, 8, 15680, 131072), hybrid_override_pattern=NANO, head_dim=128, mamba_num_heads=128,
        mamba_head_dim=80, ssm_state_size=128, n_groups=8, chunk_size=128), 8.89, 16384, "bf16", {}),
    "deepseek-v3.1": (deepseek("deepseek_v3", quantization_config=BLOCKS), 671.0, 70272, "fp8_e4m3_block128", {}),
    "deepseek-r1-fp4": (deepseek("deepseek_v3"), 671.0, 35136, "nvfp4", {"hf_quant_config.json": NVFP4}),
    "kimi-k2-thinking": (
        deepseek("kimi_k2", quantization_config=packed(
            INT4, None, ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                         r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]))
        | {"n_routed_experts": 384, "num_attention_heads": 64, "first_k_dense_replace": 1, "n_group": 1,
           "vocab_size": 163840}, 1026.0, 70272, "int4_g32", {}),
    "minimax-m2": (like(
        "minimax_m2", (3072, 62, 48, 8, 1536, 200064), head_dim=128, num_local_experts=256, num_experts_per_tok=8,
        use_qk_norm=True, quantization_config=BLOCKS | {"modules_to_not_convert": [
            "gate", "e_score_correction_bias", "lm_head"]}), 228.7, 253952, "fp8_e4m3_block128", {}),
    "llama-4-maverick-fp8": ({
        "model_type": "llama4", "text_config": SCOUT_TEXT, "vision_config": SCOUT_EYE, "torch_dtype": "bfloat16",
        "quantization_config": packed(
            FLOAT8 | {"strategy": "channel"}, FLOAT8 | {"strategy": "token", "dynamic": True},
            ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model", "Llama4TextAttention"]),
    }, 401.6, 196608, "fp8_e4m3_channel", {}),
    "llama-3.1-8b-awq-beside": (like("llama", (4096, 32, 32, 8, 14336, 128256)), 8.03, 131072, "int4_g128_zero", {
        "quant_config.json": {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", HUB)
def test_a_folder_of_a_hub_is_read_as_what_it_stores(tmp_path: Path, name: str) -> None:
    config, billions, cache, stored, beside = HUB[name]
    for file, data in ({"config.json": config} | beside).items():
        (tmp_path / file).write_text(json.dumps(data), encoding="utf-8")
    found = facts(load_model(str(tmp_path)))
    assert found["parameters"] == pytest.approx(billions * 1e9, rel=0.01)
    assert (found["kv_bytes_per_token"], found["precision"]) == (cache, stored)
