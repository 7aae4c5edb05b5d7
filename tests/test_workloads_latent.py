"""DeepSeek-V3: latent attention, shared and dense parts, grouped routing; and what decode over a latent costs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hardware.catalog import load_gpu
from hardware.laws.latent import latent_base_terms
from hardware.laws.price import gemm_terms
from hardware.laws.sizes import GemmSizes, LatentSizes
from hardware.laws.terms import time_s
from hardware.profile import profile_for
from tests.transformer_kit import build, layer
from workloads import Layout, WorkloadError, load_model, params
from workloads.huggingface import parse_config
from workloads.memory import MemoryLoad, memory_need
from workloads.model_file import parse_model
from workloads.program import Program
from workloads.work import AttentionWork, CollectiveWork, GemmWork

# The fields of its config.json that size the model (arXiv 2412.19437, section 4.2).
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu", "moe_layer_freq": 1, "topk_method": "noaux_tc",
}  # fmt: skip


def segments(program: Program) -> dict[str, int]:
    return {segment.name: segment.repeat for segment in program.ranks[0].phases[0].segments}


def gemms(program: Program, segment: int = 1) -> dict[str, tuple[int, int, int, int]]:
    kernels = program.ranks[0].phases[0].segments[segment].kernels
    return {k.name: (k.work.m, k.work.n, k.work.k, k.work.count) for k in kernels if isinstance(k.work, GemmWork)}


def test_the_config_is_the_catalogs_model() -> None:
    mine, theirs = parse_config(json.dumps(CONFIG), where="c"), load_model("deepseek-v3")
    assert (mine.sizes(), mine.latent, mine.parts, mine.pattern) == (
        theirs.sizes(), theirs.latent, theirs.parts, theirs.pattern,
    )  # fmt: skip
    assert (mine.route_groups, mine.top_groups, params(mine)) == (8, 4, params(theirs))


def test_v2_lite_has_no_query_latent() -> None:
    # deepseek-ai/DeepSeek-V2-Lite: 15.7B parameters, 2.4B active (model card).
    lite = {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 102400, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    }  # fmt: skip
    model = parse_config(json.dumps(CONFIG | lite), where="c")
    assert params(model) / 1e9 == pytest.approx(15.7, rel=0.01)
    assert params(model, active=True) / 1e9 == pytest.approx(2.4, rel=0.12)  # 2.66 with both embeddings
    assert (model.latent is not None and model.latent.q_rank, model.route_groups) == (0, 0)


def test_matrix_products_of_a_prefill_by_hand() -> None:
    program = build("deepseek-v3", seq_len=1024)
    assert segments(program) == {"dense layer": 3, "layer": 58, "lm_head": 1}
    assert gemms(program, 0) == {
        "latent_down_gemm": (1024, 1536 + 512 + 64, 7168, 1),
        "q_up_gemm": (1024, 128 * (128 + 64), 1536, 1),
        "kv_up_gemm": (1024, 128 * (128 + 128), 512, 1),
        "o_gemm": (1024, 7168, 128 * 128, 1),
        "gate_up_gemm": (1024, 2 * 18432, 7168, 1),
        "down_gemm": (1024, 7168, 18432, 1),
    }
    experts = gemms(program)
    assert experts["router_gemm"] == (1024, 256, 7168, 1)
    assert experts["gate_up_shared_gemm"] == (1024, 2 * 2048, 7168, 1)
    attention = layer(build("deepseek-v3", seq_len=1024))["attention"]
    assert isinstance(attention.work, AttentionWork)
    assert (attention.work.head_dim, attention.work.v_head_dim, attention.work.mean_head_dim) == (192, 128, 160)
    assert attention.flops == 2 * 128 * (1024 * 1025 / 2) * (192 + 128)


def test_decode_absorbs_the_projections_and_reads_576_elements_a_token() -> None:
    found = gemms(build("deepseek-v3", "decode", batch=16, seq_len=4096), 0)
    assert (found["absorb_k_gemm"], found["absorb_v_gemm"]) == ((16, 512, 128, 128), (16, 128, 512, 128))
    assert "kv_up_gemm" not in found
    work = build("deepseek-v3", "decode", batch=16, seq_len=4096).ranks[0].phases[0].segments[0]
    attention = next(k for k in work.kernels if k.name == "attention")
    queries = 16 * 128 * (576 + 512) * 2
    assert attention.bytes_moved - queries == 16 * 4096 * 576 * 2


def test_heads_split_over_ranks_and_latents_do_not() -> None:
    whole, split = build("deepseek-v3", "decode", batch=4), build("deepseek-v3", "decode", batch=4, tp=8, ep=8,
        ep_mode="all_reduce")  # fmt: skip
    one, many = gemms(whole, 0), gemms(split, 0)
    assert many["latent_down_gemm"] == one["latent_down_gemm"]
    assert many["q_up_gemm"][1] * 8 == one["q_up_gemm"][1] and many["absorb_k_gemm"][3] * 8 == one["absorb_k_gemm"][3]
    shared = gemms(split)["down_shared_gemm"]
    assert shared == (4, 7168, 2048 // 8, 1)  # split like a feed-forward: it joins the experts' all-reduce
    names = [k.name for k in split.ranks[0].phases[0].segments[1].kernels if isinstance(k.work, CollectiveWork)]
    assert names == ["all_reduce_attn", "all_reduce_ff"]


def test_memory_of_weights_and_cache() -> None:
    model = load_model("deepseek-v3")
    need = memory_need(
        model,
        Layout(ep=32, ep_mode="all_to_all"),
        MemoryLoad(batch=2, context=1000, new_tokens=1, layers=61, lm_head=False),
    )
    assert need.kv_bytes == 2 * 1000 * 576 * 61 * 2
    routed = 58 * 256 * 3 * 7168 * 2048
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    rest = params(model) - routed - norms - 2 * 129280 * 7168
    assert need.weight_bytes == 2 * (rest + routed // 32)


def test_products_by_head_read_an_input_each() -> None:
    gpu = load_gpu("h100-sxm-80gb")
    one, many = (
        gemm_terms(profile_for(gpu), gpu, GemmSizes(m=64, n=512 * 128 // c, k=128, dtype="bf16", count=c))
        for c in (1, 128)
    )
    assert many.hbm_bytes - one.hbm_bytes == 127 * 64 * 128 * 2
    assert (many.blocks, many.core_energy_j) == (one.blocks, one.core_energy_j)


@pytest.mark.parametrize(
    ("batch", "heads", "published", "unit"),
    [
        # FlashMLA's README (H800 SXM5): 660 TFLOP/s bound by compute, 3000 GB/s bound by memory.
        (132, 128, 660e12, "flops"),
        (132, 16, 3000e9, "bytes"),
    ],
)
def test_latent_decode_reaches_what_flash_mla_publishes(batch: int, heads: int, published: float, unit: str) -> None:
    gpu = load_gpu("h100-sxm-80gb")
    profile = profile_for(gpu)
    sizes = LatentSizes(batch=batch, kv_len=8192, q_heads=heads, cached_dim=576, v_dim=512)
    terms = latent_base_terms(profile.decode, profile.prefill, sizes, gpu)
    rate = 2 * batch * heads * 8192 * (576 + 512) if unit == "flops" else batch * 8192 * 576 * 2
    # That card, an H800, shares the H100's 700 W; under them attention runs at 1577 MHz on the chip (duty.jsonl).
    seconds = time_s(terms, sms=132, sm_clock_hz=1.577e9)
    assert rate / seconds == pytest.approx(published, rel=0.07)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("q_rank = 1536", "q_rnak = 1"), "m: latent: unknown key 'q_rnak': did you mean 'q_rank'?"),
        (("kv_rank = 512\n", ""), "m: latent.kv_rank is missing: give a positive whole number"),
        (("top_groups = 4", "top_groups = 9"),
         "deepseek-v3: route_groups = 8 with top_groups = 9: groups must divide the 256 experts, and the best ones "
         "hold top_k = 8"),
        (("dense_d_ff = 18432\n", ""),
         "m: dense_layers = 3, layers = 61: give both dense_layers and dense_d_ff, dense_layers below layers"),
        (("experts = 256\ntop_k = 8\n", ""),
         "m: dense_d_ff = 18432, dense_layers = 3, route_groups = 8: is for a mixture of experts: give experts"),
    ],
)  # fmt: skip
def test_a_latent_model_is_read_strictly(change: tuple[str, str], message: str) -> None:
    from importlib.resources import files

    text = (files("workloads") / "data" / "deepseek-v3.toml").read_text(encoding="utf-8")
    assert change[0] in text
    with pytest.raises(WorkloadError) as error:
        parse_model(text.replace(*change), where="m")
    assert str(error.value) == message


def test_heads_are_normed_where_the_stack_runs_it() -> None:
    # The reference stack's qwen3 was measured without the kernel (list of kernels in the measurement notes).
    assert "qk_norm" not in layer(build("qwen3-8b"))
    kernel = layer(build("qwen3-8b", seq_len=512, stack="paged-kv"))["qk_norm"]
    assert kernel.bytes_moved == 2 * 512 * (32 + 8) * 128 * 2
    assert "qk_norm" not in layer(build("llama3-8b", stack="paged-kv"))
