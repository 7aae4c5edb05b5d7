"""Configurations that came out in 2026, abridged: what their keys change, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.family_configs import Config
from tests.family_configs_latest import LATEST
from tests.family_configs_uneven import UNEVEN
from tests.test_workloads_families import read
from workloads import Layout, Options, WorkloadError, build_program
from workloads.params import facts
from workloads.work import CollectiveWork, GemmWork, GroupedGemmWork

SUPER_PATTERN = (
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"  # 40 M, 40 E, 8 *
)
NEMOTRON_SUPER: Config = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096,
    "num_hidden_layers": 88, "hybrid_override_pattern": SUPER_PATTERN, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 2, "vocab_size": 131072, "intermediate_size": 2688, "moe_intermediate_size": 2688,
    "moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "n_routed_experts": 512,
    "n_shared_experts": 1, "num_experts_per_tok": 22, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "mamba_hidden_act": "silu", "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False, "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1,
}  # fmt: skip
KIMI_K2_5: Config = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "text_config": {
        "model_type": "kimi_k2", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "vocab_size": 163840, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
        "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                       "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}},
        },
    },
    "vision_config": {"vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_attention_heads": 16,
                      "vt_num_hidden_layers": 27, "patch_size": 14, "merge_kernel_size": [2, 2]},
}  # fmt: skip

# MiniCPM-V: the language model's keys stand among its own.
MINICPM_V: Config = {
    "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 2.6, "query_num": 64, "image_size": 448,
    "patch_size": 14, "slice_mode": True, "drop_vision_last_layer": False, "batch_vision_input": True,
    "slice_config": {"max_slice_nums": 9, "patch_size": 14, "model_type": "minicpmv"}, "hidden_size": 3584,
    "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "hidden_act": "silu", "vocab_size": 151666, "tie_word_embeddings": False, "use_sliding_window": False,
    "vision_config": {"model_type": "siglip", "hidden_size": 1152, "image_size": 980, "intermediate_size": 4304,
                      "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14},
}  # fmt: skip
_FOUR_FIVE = {
    "version": 4.5, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151748,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "billions", "kv"), [({}, 8.10, 28 * 4 * 4 * 128), (_FOUR_FIVE, 8.70, 36 * 4 * 8 * 128)]
)
def test_minicpm_v_is_qwen2_or_qwen3_by_its_version(change: Config, billions: float, kv: int) -> None:
    found = facts(read(MINICPM_V | change))
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=0.005)
    assert found["kv_bytes_per_token"] == kv


def test_another_minicpm_v_is_refused() -> None:
    with pytest.raises(WorkloadError, match="model_type = 'of another version' is not supported"):
        read(MINICPM_V | {"version": 3.0})
    with pytest.raises(WorkloadError, match="drop_vision_last_layer = True: for model_type 'minicpmv' only false"):
        read(MINICPM_V | {"drop_vision_last_layer": True})


def test_experts_of_nemotron_3_super_read_a_narrower_width() -> None:
    """120 billion, 12 of them active; 512 experts between 1,024 and 2,688; 8 layers cache 2 heads of 128."""
    found = facts(read(NEMOTRON_SUPER))
    experts, beside = 2 * 1024 * 2688, 2 * 4096 * 5376 + 2 * 4096 * 1024 + 4096 * 512
    mixer = 4096 * (2 * 8192 + 2 * 1024 + 128) + 8192 * 4096
    rest = 40 * mixer + 8 * 4096 * (2 * 4096 + 2 * 256) + 2 * 131072 * 4096
    assert found["parameters"] == pytest.approx(40 * (512 * experts + beside) + rest, rel=1e-4)
    assert found["active_parameters"] == pytest.approx(40 * (22 * experts + beside) + rest, rel=1e-3)
    assert found["parameters"] / 1e9 == pytest.approx(120.6, rel=0.01)
    assert found["kv_bytes_per_token"] == 8 * 4 * 2 * 128
    by_name = {"M": "mamba", "E": "moe", "*": "attention"}
    named = NEMOTRON_SUPER | {"layers_block_type": [by_name[one] for one in SUPER_PATTERN], "num_hidden_layers": None}
    named.pop("hybrid_override_pattern")
    assert facts(read(named)) == found


def test_rows_travel_to_experts_in_their_width() -> None:
    layout = Layout(ep=4, ep_mode="all_to_all")
    program = build_program(
        read(NEMOTRON_SUPER), layout, phase="prefill", batch=4, seq_len=64, options=Options(lm_head=False)
    )
    kernels = [one for segment in program.ranks[0].phases[0].segments for one in segment.kernels]
    sent = {one.work.buffer_bytes for one in kernels if isinstance(one.work, CollectiveWork)}
    assert sent == {4 * 64 * 22 * 1024 * 2}  # a rank has a batch of its own
    assert {(one.work.n, one.work.k) for one in kernels if isinstance(one.work, GroupedGemmWork)} == {
        (2688, 1024), (1024, 2688)}  # fmt: skip
    widths = {one.name: (one.work.n, one.work.k) for one in kernels if isinstance(one.work, GemmWork)}
    assert (widths["fc1_latent_gemm"], widths["fc2_latent_gemm"]) == ((1024, 4096), (4096, 1024))
    assert widths["up_shared_gemm"] == (5376, 4096)


@pytest.mark.parametrize("tp", [1, 2])
def test_sums_of_experts_of_another_width_are_reduced_in_it(tp: int) -> None:
    options = Options(lm_head=False)
    program = build_program(read(NEMOTRON_SUPER), Layout(tp=tp), phase="prefill", batch=1, seq_len=64, options=options)
    segments = program.ranks[0].phases[0].segments
    found = [one.work.buffer_bytes for segment in segments if segment.name.startswith("experts")
             for one in segment.kernels if isinstance(one.work, CollectiveWork)]  # fmt: skip
    assert set(found) == ({64 * 1024 * 2, 64 * 4096 * 2} if tp == 2 else set())


def test_kimi_k2_5_keeps_all_but_its_experts_in_16_bit() -> None:
    """60 layers of 384 experts in 4 bits with 16 for 32; 595 GB, as its checkpoint has."""
    found = facts(read(KIMI_K2_5))
    experts = 60 * 384 * 3 * 7168 * 2048
    assert found["parameters"] / 1e9 == pytest.approx(1026.4 + 0.47, rel=1e-3)
    assert found["weight_bytes"] == experts // 2 + experts // 16 + 2 * (found["parameters"] - experts)
    assert found["weight_bytes"] / 1e9 == pytest.approx(595, rel=0.01)
    assert found["kv_bytes_per_token"] == 61 * 576 * 2


def test_layers_of_glm_5_2_that_share_their_chosen_keys_have_no_indexer() -> None:
    config = LATEST["glm-5"][0]
    types = ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)]
    own: dict[str, Any] = {"index_topk_freq": 4, "indexer_types": types, "index_share_for_mtp_iteration": True,
                           "index_skip_topk_offset": 3, "indexer_rope_interleave": True}  # fmt: skip
    fewer = facts(read(config | own))["parameters"] - facts(read(config))["parameters"]
    heads, width, query = config.get("index_n_heads", 64), config["hidden_size"], config["q_lora_rank"]
    assert fewer == -types.count("shared") * (query * heads * 128 + width * (128 + heads))
    with pytest.raises(WorkloadError, match=r"index_topk_freq = 4.*give indexer_types"):
        read(config | {"index_topk_freq": 4})


def test_experts_beside_a_feed_forward_that_is_left_out_are_quantised() -> None:
    """Gemma 4 26B in NVFP4: its lists leave out ``mlp``, under which other families have their experts."""
    names = [f"model.language_model.layers.{i}.{part}*" for i in range(30) for part in ("mlp", "self_attn", "router")]
    table = {"quant_method": "modelopt", "quant_algo": "NVFP4",
             "ignore": ["lm_head", "model.embed_vision*", "model.vision_tower*", *names]}  # fmt: skip
    config = UNEVEN["gemma-4-26b-a4b"][0]
    found, plain = facts(read(config | {"quantization_config": table})), facts(read(config))
    experts = 30 * 128 * 3 * 2816 * 704
    assert plain["weight_bytes"] - found["weight_bytes"] == 2 * experts - experts // 2 - experts // 16
    everything = [*names, *(f"model.language_model.layers.{i}.experts*" for i in range(30))]
    with pytest.raises(WorkloadError, match="modelopt holds for none of this model's products"):
        read(config | {"quantization_config": table | {"ignore": everything, "kv_cache_quant_algo": "FP8"}})
