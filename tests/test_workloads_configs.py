"""Hugging Face configurations: right, or refused by the name of the key (precision: ``test_workloads_quantised``)."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.config_kit import (
    BERT,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    PHI3,
    PUBLISHED,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    Config,
    count,
)  # fmt: skip
from tests.transformer_kit import build
from workloads import WorkloadError, load_model, params
from workloads.huggingface import parse_config
from workloads.model import ModelSpec
from workloads.params import facts
from workloads.program import Kernel
from workloads.work import AttentionWork

SHARED = os.environ.get("WATTLINE_SHARED")


def read(config: Config, **change: Any) -> Any:
    return parse_config(json.dumps(config | change), where="c.json")


def refusal(config: Config, **change: Any) -> str:
    with pytest.raises(WorkloadError) as error:
        read(config, **change)
    return str(error.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_configurations_have_their_published_sizes(name: str) -> None:
    config, billions, kv_bytes = PUBLISHED[name]
    found = facts(read(config))
    assert found["parameters"] == pytest.approx(billions * 1e9, rel=0.01)
    assert found["parameters"] == pytest.approx(count(config), rel=0.003)
    assert found["kv_bytes_per_token"] == kv_bytes
    assert found["family"] == config["model_type"]


@pytest.mark.skipif(SHARED is None, reason="WATTLINE_SHARED names no folder of cases")
def test_every_configuration_of_the_cases_is_right() -> None:
    cases = Path(str(SHARED)) / "cases"
    known = json.loads((cases / "models.json").read_text(encoding="utf-8"))
    for name, right in known.items():
        found = facts(load_model(str(cases / "models" / name)))
        if (
            name == "nemotron3-nano-30b"
        ):  # cut down to 4 of its 52 layers: its published size is in test_workloads_families
            assert (found["parameters"], found["kv_bytes_per_token"]) == (2_102_994_048, 2 * 2 * 2 * 128)
            continue
        assert found["parameters"] == pytest.approx(right["parameters_billion"] * 1e9, rel=0.01), name
        if right["kv_bytes_per_token"] is not None:
            assert found["kv_bytes_per_token"] == right["kv_bytes_per_token"], name


# -- precision --------------------------------------------------------------------------------------------------


def test_stored_types_of_16_and_32_bits_are_read() -> None:
    assert [read(LLAMA, torch_dtype=name).precision for name in ("float16", "bfloat16", "float32", None)] == [
        "fp16", "bf16", "fp32", "bf16",
    ]  # fmt: skip
    assert facts(read(GPT2, torch_dtype="float32"))["weight_bytes"] == 4 * params(read(GPT2))


# -- keys that change the work ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"sliding_window": 4096}, "key 'sliding_window' = 4096 is not understood for model_type 'llama'"),
        (LLAMA, {"attn_logit_softcapping": 50.0}, "key 'attn_logit_softcapping' = 50.0 is not understood"),
        (LLAMA, {"final_logit_softcapping": 30.0}, "key 'final_logit_softcapping' = 30.0 is not understood"),
        (LLAMA, {"index_topk": 2048}, "key 'index_topk' = 2048 is not understood"),
        (LLAMA, {"attention_sinks": True}, "key 'attention_sinks' = True is not understood"),
        (LLAMA, {"num_local_experts": 8}, "key 'num_local_experts' = 8 is not understood"),
        (LLAMA, {"vision_config": {"hidden_size": 1280}}, "key 'vision_config' = {'hidden_size': 1280} is not"),
        (LLAMA, {"text_config": {}}, "key 'text_config' = {} is not understood"),
        (LLAMA, {"residual_multiplier": 0.22}, "key 'residual_multiplier' = 0.22 is not understood"),
        (LLAMA, {"kv_lora_rank": 512}, "key 'kv_lora_rank' = 512 is not understood"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: for model_type 'llama' only 1 leaves"),
        (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder = True: for model_type 'llama' only false leaves"),
        (LLAMA, {"use_sliding_window": True}, "use_sliding_window = True: for model_type 'llama' only false"),
        (LLAMA, {"layer_types": ["linear_attention"] * 32}, "layer_types = ['linear_attention', 'linear_attention'"),
        (LLAMA, {"layer_types": ["full_attention"] * 31}, "layer_types = ['full_attention', 'full_attention'"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 32}, "layer_types = ['sliding_attention', 'sliding_attenti"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu': for model_type 'llama' only silu or swish leaves"),
        (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false': give true or false"),
        (LLAMA, {"architectures": ["Gemma2ForCausalLM"]}, "architectures = ['Gemma2ForCausalLM']: model_type 'llama'"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures = ['LlamaForSequenceClass"),
        (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM': give a list"),
        (LLAMA, {"auto_map": {"AutoModel": "modeling_x.XModel"}}, "auto_map = 'modeling_x.XModel': code of the"),
        (LLAMA, {"auto_map": {"AutoModel": "a.LlamaMoEForCausalLM"}}, "auto_map = 'a.LlamaMoEForCausalLM': code of"),
        (LLAMA, {"auto_map": {"AutoModel": "o/r--a.LlamaSparseModel"}}, "auto_map = 'o/r--a.LlamaSparseModel': code"),
        (LLAMA, {"head_dim": None, "hidden_size": 4100}, "hidden_size = 4100, num_attention_heads = 32: 4100 is"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters = {'partial_rotary_factor':"),
        (MIXTRAL, {"num_experts": 16}, "key 'num_experts' = 16 is not understood for model_type 'mixtral'"),
        (MIXTRAL, {"shared_expert_intermediate_size": 16}, "key 'shared_expert_intermediate_size' = 16 is not"),
        (QWEN2_MOE, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        (DEEPSEEK, {"index_n_heads": 64}, "key 'index_n_heads' = 64 is not understood for model_type 'deepseek_v2'"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq = 2: for model_type 'deepseek_v2' only 1 leaves"),
        (DEEPSEEK, {"topk_method": "best"}, "topk_method = 'best': for model_type 'deepseek_v2' only greedy or"),
        (DEEPSEEK, {"qk_head_dim": 128}, "qk_head_dim = 128, qk_nope_head_dim = 128, qk_rope_head_dim = 64: qk"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True: for model_type 'gpt2' only false leaves"),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key': for"),
        (BERT, {"architectures": ["BertForQuestionAnswering"]}, "architectures = ['BertForQuestionAnswering']"),
    ],
)  # fmt: skip
def test_what_changes_the_work_is_refused_by_name(config: Config, change: Config, message: str) -> None:
    assert refusal(config, **change).startswith(f"c.json: {message}")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (QWEN3, "head_dim"), (QWEN3, "num_key_value_heads"), (MISTRAL, "num_key_value_heads"),
        (QWEN2, "num_key_value_heads"), (MIXTRAL, "num_key_value_heads"), (QWEN3_MOE, "head_dim"),
        (DEEPSEEK, "q_lora_rank"), (DEEPSEEK, "n_shared_experts"), (DEEPSEEK, "first_k_dense_replace"),
    ],
)  # fmt: skip
def test_a_key_whose_default_is_another_model_must_be_there(config: Config, key: str) -> None:
    assert refusal({name: value for name, value in config.items() if name != key}) == (
        f"c.json: {key} is missing: give it: what transformers fills in is not what its absence says"
    )


def test_what_changes_nothing_is_accepted() -> None:
    whole = read(LLAMA)
    same = read(
        LLAMA, temperature=0.6, id2label={"0": "A"}, layer_types=["full_attention"] * 32, sliding_window=None,
        index_topk=None, chunk_size_feed_forward=0, is_decoder=False, pruned_heads={}, partial_rotary_factor=1.0,
        activation="swiglu", is_llama_config=True, rope_interleaved=False,
        auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}, attention_bias=True,
    )  # fmt: skip
    assert same == whole


def test_infinity_stands_where_pythons_json_writes_it_and_nowhere_else() -> None:
    """Configurations of Mamba-2 hold ``"time_step_limit": [0.0, Infinity]``."""
    text = '{"model_type": "mamba2", "hidden_size": %s, "time_step_limit": [0.0, %s]}'
    for size, limit, message in (
        ("Infinity", "Infinity", "c.json: hidden_size = inf: give a finite number"),
        ("64", "NaN", "c.json: time_step_limit.1 = nan: give a finite number"),
    ):
        with pytest.raises(WorkloadError, match=re.escape(message)):
            parse_config(text % (size, limit), where="c.json")
    with pytest.raises(WorkloadError, match="Infinity is no number of JSON"):
        parse_config('{"model_type": "llama", "hidden_size": Infinity}', where="c.json")


def test_one_key_twice_is_no_configuration() -> None:
    text = json.dumps(LLAMA)[:-1] + ', "hidden_size": 8192}'
    with pytest.raises(WorkloadError) as error:
        parse_config(text, where="c.json")
    assert str(error.value) == "c.json: not valid JSON: key 'hidden_size' stands twice"


# -- windows and positions --------------------------------------------------------------------------------------


def test_a_window_is_exact_in_contexts_within_it_and_limits_what_is_read_beyond() -> None:
    window, whole = read(MISTRAL), read(MISTRAL, sliding_window=None)
    assert (window.windows, whole.windows) == ({4096}, set())
    assert build(window, seq_len=4096) == build(whole, seq_len=4096)

    def attention(phase: str, tokens: int, model: ModelSpec = window) -> Kernel:
        kernels = build(model, phase, seq_len=tokens).ranks[0].phases[0].segments[0].kernels
        return next(kernel for kernel in kernels if kernel.name == "attention")

    assert attention("decode", 8192) == attention("decode", 4096)
    # 4,096 rising rows and 4,096 full ones of 8,192: 3,072.25 keys each, rounded up
    work = attention("prefill", 8192).work
    assert isinstance(work, AttentionWork) and (work.kv_len, work.causal) == (3073, False)
    assert attention("prefill", 8192).flops == 4 * 32 * 128 * 8192 * 3073
    assert attention("prefill", 8192, whole).flops == 4 * 32 * 128 * (8192 * 8193 / 2)
    assert read({k: v for k, v in MISTRAL.items() if k != "sliding_window"}).windows == {4096}  # transformers' default


def test_layers_of_qwen_slide_from_the_first_that_the_file_names() -> None:
    some = read(QWEN2, use_sliding_window=True, max_window_layers=21, sliding_window=4096)
    whole, near = (some.layer_groups(range(28))[i] for i in (0, 1))
    assert (whole[2], near[2]) == (range(21), range(21, 28))
    assert sum(tokens for _, tokens in some.caching(range(28), 8192)) == 21 * 8192 + 7 * 4096
    found = {
        segment.first: next(one.work.kv_len for one in segment.kernels if isinstance(one.work, AttentionWork))
        for segment in build(some, "decode", seq_len=8192).ranks[0].phases[0].segments[:2]
    }
    assert found == {0: 8192, 21: 4096}


def test_windows_of_qwen_need_their_switch_and_layers_to_slide() -> None:
    assert read(QWEN2).windows == set()
    assert read(QWEN2, use_sliding_window=True).windows == set()  # max_window_layers = all of them
    assert read(QWEN2, use_sliding_window=True, max_window_layers=21).windows == {131072}
    assert read(QWEN2, use_sliding_window=True, max_window_layers=0, sliding_window=4096).windows == {4096}
    assert read(QWEN3, layer_types=["sliding_attention", "full_attention"] * 14, sliding_window=1024).windows == {1024}
    assert read(PHI3).windows == {2047}


def test_some_layers_of_qwen_have_no_experts() -> None:
    sparse = params(read(QWEN3_MOE))
    layer = (128 * (4096 + 3 * 4096 * 1536), 3 * 4096 * 12288)  # experts with their router, dense
    assert params(read(QWEN3_MOE, mlp_only_layers=[0, 7])) == sparse - 2 * (layer[0] - layer[1])
    assert params(read(QWEN3_MOE, decoder_sparse_step=2)) == sparse - 47 * (layer[0] - layer[1])


def test_learned_positions_end() -> None:
    assert build(read(GPT2), seq_len=1024)
    assert build(read(GPT2), "decode", seq_len=1023)
    for phase, tokens, needed in (("prefill", 8192, 8192), ("decode", 1024, 1025)):
        with pytest.raises(WorkloadError) as error:
            build(read(GPT2), phase, seq_len=tokens)
        assert str(error.value) == (
            f"seq_len: {needed} tokens are more than the 1024 learned positions of c.json: give at most 1024"
        )
    with pytest.raises(WorkloadError, match=r"2048 tokens are more than the 512 learned positions of bert-large"):
        build("bert-large", seq_len=2048)
    with pytest.raises(WorkloadError, match=r"198 tokens are more than the 197 learned positions of vit-large"):
        build("vit-large", seq_len=198)


def test_positions_are_stretched_as_the_file_says() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read(QWEN2).max_positions == 32768
    assert read(QWEN2, rope_scaling=yarn).max_positions == 131072
    assert read(LLAMA).max_positions == 131072  # llama3 scaling is in max_position_embeddings already
    for kind in ("default", "linear", "dynamic", "longrope", "su", "llama3", "mrope"):
        assert read(LLAMA, rope_scaling={"type": kind}).max_positions == 131072
    known = "linear, dynamic, yarn, default, longrope, su, llama3, mrope, ntk, deepseek_yarn, proportional"
    odd = {"rope_type": "spiral", "factor": 4.0}
    assert refusal(LLAMA, rope_scaling=odd) == f"c.json: rope_scaling: rope_type = 'spiral': known are {known}"
    for factor in ("4", 0, -1.0, True, 1e9):
        assert refusal(LLAMA, rope_scaling=yarn | {"factor": factor}) == (
            f"c.json: rope_scaling: factor = {factor!r}: give a number from 1 to 10000"
        )
    assert refusal(LLAMA, rope_scaling="yarn") == "c.json: rope_scaling = 'yarn': give a table, or null"
