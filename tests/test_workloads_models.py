"""Models of one's own (TOML, Hugging Face), read strictly; parameters, memory, routing of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.transformer_kit import build, layer, names
from workloads import Layout, WorkloadError, load_model, params
from workloads.catalog import list_models
from workloads.huggingface import parse_config
from workloads.memory import MemoryLoad, memory_need
from workloads.model_file import parse_model
from workloads.work import GemmWork

MINE = """
id = "mine"
source = "made up for a test"
d_model = 5120
layers = 3
q_heads = 40
kv_heads = 8
head_dim = 128
d_ff = 17408
vocab = 151936
"""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "published"),
    [
        # Parameters as the model cards state them, in billions.
        ("llama-1b", 1.2441),  # by hand from its sizes; the paper states none
        ("llama-3b", 3.4265),  # OpenLLaMA 3B, of the same sizes
        ("llama-7b", 6.738),  # arXiv 2302.13971
        ("llama3.2-1b", 1.236),  # its model card: 1.23B
        ("llama3.2-3b", 3.213),  # its model card: 3.21B
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("mixtral-8x7b", 46.7),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.0),
        ("deepseek-v3", 671.0),  # arXiv 2412.19437
        ("deepseek-r1", 671.0),
        ("gpt2", 0.1244),  # positions (0.8 M) included
        ("opt-1.3b", 1.3158),
        ("bert-large", 0.3351),
        ("vit-large", 0.3033),  # 304.4 M with a classifier of 1 M
        ("qwen2-1.5b", 1.5437),
        ("llava-1.5-7b", 7.06),  # 7,063 M in its weights
        ("nemotron-h-8b", 8.1),  # arXiv 2504.03624
    ],
)
def test_parameters_are_within_half_a_percent_of_the_published(model: str, published: float) -> None:
    assert params(load_model(model)) / 1e9 == pytest.approx(published, rel=0.005)


def test_every_model_of_the_catalog_is_in_the_parameter_test() -> None:
    assert list_models() == (
        "bert-large", "deepseek-r1", "deepseek-v3", "gpt2", "llama-1b", "llama-3b", "llama-7b", "llama3-405b",
        "llama3-70b", "llama3-8b", "llama3.2-1b", "llama3.2-3b", "llava-1.5-7b", "mixtral-8x7b",
        "nemotron-h-8b", "opt-1.3b", "qwen2-1.5b", "qwen3-14b", "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-32b",
        "qwen3-8b", "vit-large",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "active"),
    [
        # Active parameters a token, in billions: model cards; DeepSeek-V3: arXiv 2412.19437 (says 37).
        ("mixtral-8x7b", 12.9),
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.0),
        ("deepseek-v3", 37.0),
        ("llama3-8b", 8.03),
    ],
)
def test_active_parameters_are_within_two_percent_of_the_published(model: str, active: float) -> None:
    assert params(load_model(model), active=True) / 1e9 == pytest.approx(active, rel=0.02)


def test_memory_of_llama3_8b_by_hand() -> None:
    need = memory_need(
        load_model("llama3-8b"), Layout(), MemoryLoad(batch=2, context=1024, new_tokens=1024, layers=32, lm_head=True)
    )
    # 8.03e9 weights less the norms, two bytes each; K and V of 8 heads x 128 in 32 layers
    assert need.weight_bytes == 2 * (params(load_model("llama3-8b")) - 65 * 4096)
    assert need.kv_bytes == 2 * 2 * 1024 * 8 * 128 * 32 * 2


def test_memory_counts_copied_key_value_heads_and_prints_its_sum() -> None:
    model = load_model("llama3-8b")  # 8 key/value heads on 16 ranks: one whole head each
    need = memory_need(model, Layout(tp=16), MemoryLoad(batch=1, context=1000, new_tokens=1, layers=32, lm_head=False))
    assert need.weight_bytes == 32 * 2 * (4096 * 128 * (2 * 2 + 2 * 1) + 3 * 4096 * 14336 / 16)
    assert need.kv_bytes == 2 * 1000 * 128 * 32 * 2
    assert str(need) == "weights 0.9 + KV cache 0.0 + activations 0.0 = 0.9 GB a GPU"


def test_memory_of_mixtral_over_tensor_parallel_ranks() -> None:
    need = memory_need(
        load_model("mixtral-8x7b"), Layout(tp=4), MemoryLoad(batch=1, context=1, new_tokens=1, layers=32, lm_head=False)
    )
    attention, router, experts = 2 * 4096 * 4096 + 2 * 4096 * 1024, 4096 * 8, 8 * 3 * 4096 * 14336
    assert need.weight_bytes == 2 * 32 * (attention / 4 + router + experts / 4)


# -- models of one's own ----------------------------------------------------------------------------------------


def test_a_made_up_model_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE, encoding="utf-8")
    found = layer(build(str(path), tp=4, seq_len=512))
    shapes = {k: (v.work.m, v.work.n, v.work.k) for k, v in found.items() if isinstance(v.work, GemmWork)}
    assert shapes == {
        "qkv_gemm": (512, (10 + 2 * 2) * 128, 5120),
        "o_gemm": (512, 5120, 10 * 128),
        "gate_up_gemm": (512, 2 * 17408 // 4, 5120),
        "down_gemm": (512, 5120, 17408 // 4),
    }
    assert names(build(str(path))) == names(build("llama3-8b"))


def test_a_model_may_list_its_own_block() -> None:
    # A plain two-matrix feed-forward (GELU) around multi-head attention, heads written as H.
    text = (
        MINE
        + """
[[block]]
node = "gemm"
name = "qkv_gemm"
ops = [
  { label = "Q", pattern = "bsm,mHh->bsHh", parallel = "H" },
  { label = "K", pattern = "bsm,mKh->bsKh", parallel = "K" },
  { label = "V", pattern = "bsm,mKh->bsKh", parallel = "K" },
]
[[block]]
node = "attention"
name = "attention"
scores = "bHsh,bHzh->bHsz"
values = "bHsz,bHzh->bHsh"
parallel = "H"
[[block]]
node = "gemm"
name = "o_gemm"
ops = [{ label = "O", pattern = "bsHh,mHh->bsm", parallel = "H" }]
[[block]]
node = "gemm"
name = "up_gemm"
ops = [{ label = "up", pattern = "bsm,mf->bsf", parallel = "f" }]
[[block]]
node = "pointwise"
name = "gelu"
op = "gelu"
[[block]]
node = "gemm"
name = "down_gemm"
ops = [{ label = "down", pattern = "bsf,mf->bsm", parallel = "f" }]
"""
    )
    model = parse_model(text, where="mine.toml")
    program = build(model, tp=2)
    assert names(program) == [
        "qkv_gemm", "attention", "o_gemm", "all_reduce_attn", "up_gemm", "gelu", "down_gemm",
        "all_reduce_down",
    ]  # fmt: skip
    assert 2 * layer(program)["attention"].flops == layer(build(model))["attention"].flops
    assert layer(build(model))["attention"].flops == 4 * 40 * (1024 * 1025 / 2) * 128
    assert layer(program)["gelu"].bytes_moved == 2 * 1024 * 8704 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("d_ff = 17408\n", ""), "m.toml: d_ff is missing: give a positive whole number"),
        (("17408", "-1"), "m.toml: d_ff = -1: give a positive whole number"),
        (("17408", "1.5"), "m.toml: d_ff = 1.5: give a positive whole number"),
        (("17408", "true"), "m.toml: d_ff = True: give a positive whole number"),
        (("d_ff", "dff"), "m.toml: unknown key 'dff': did you mean 'd_ff'?"),
        (("d_ff", "zzz"), "m.toml: unknown key 'zzz': known: id, source, d_model, layers, q_heads, kv_heads, head_dim, "
            "d_ff, vocab, experts, top_k, shared_d_ff, dense_layers, dense_d_ff, route_groups, top_groups, "
            "max_positions, window, tied_embeddings, qk_norm, latent, axes, block"),
        (("kv_heads = 8", "kv_heads = 7"), "mine: q_heads = 40 is not a multiple of kv_heads = 7"),
        (
            ("vocab = 151936", "vocab = 8\nexperts = 4"),
            "mine: experts = 4 with top_k = 0: give both, top_k at most experts",
        ),
        (('"mine"', "3"), "m.toml: id = 3: give a text"),
        (("vocab = 151936", "vocab = 8\ntied_embeddings = 1"), "m.toml: tied_embeddings = 1: give true or false"),
        (("vocab = 151936", "vocab = 8\nblock = 3"), "m.toml: block = 3: give [[block]] tables"),
        (("vocab = 151936", "vocab = 8\nblock = [3]"), "m.toml: block = [3]: give [[block]] tables"),
    ],
)  # fmt: skip
def test_a_model_file_is_read_strictly(change: tuple[str, str], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_model(MINE.replace(*change, 1), where="m.toml")
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            'node = "conv"\nname = "c"',
            "node = 'conv': known are gemm, attention, pointwise, experts, latent_attention, indexer, state_space",
        ),
        ('node = "gemm"', "name = None: give a text"),
        ('node = "gemm"\nname = "g"', "ops is missing: give a list of { label, pattern, parallel }"),
        ('node = "gemm"\nname = "g"\nops = [1]', "an op is { label, pattern, parallel }, found 1"),
        ('node = "gemm"\nname = "g"\nopps = []', "unknown key 'opps': did you mean 'ops'?"),
        (
            'node = "gemm"\nname = "g"\nops = [{ pattern = "bsm,mf->bsf", parallel = "H" }]',
            "'bsm,mf->bsf': parallel axis 'H' is not in the pattern (bsmf)",
        ),
        (
            'node = "gemm"\nname = "g"\nops = [{ pattern = "bsm,mf->bsf", parallel = 3 }]',
            "parallel = 3: give one axis of the pattern, for example 'H'",
        ),
        (
            'node = "attention"\nname = "a"',
            "an op is { label, pattern, parallel }, found {'label': 'scores', 'pattern': None, 'parallel': None}",
        ),
        (
            'node = "pointwise"\nname = "p"\nop = "tanh"',
            "op = 'tanh': known are copy, permute_copy, add_rmsnorm, rmsnorm, silu_mul, gelu, gelu_tanh, relu, add, "
            "scale, softmax, layernorm, rope, cast_fp8, gather, index_add, topk_sum",
        ),
    ],
)
def test_a_block_is_read_strictly(node: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_model(f"{MINE}[[block]]\n{node}\n", where="m.toml")
    assert str(error.value) == f"m.toml: block 1: {message}"


def test_a_hugging_face_config_is_the_catalogs_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    mine, theirs = load_model(str(path)), load_model("llama3-8b")
    assert (mine.sizes(), mine.layers, mine.block) == (theirs.sizes(), theirs.layers, theirs.block)
    assert load_model(f"{tmp_path}/") == mine  # the folder of a checkpoint


def test_a_hugging_face_config_of_experts() -> None:
    mine, theirs = parse_config(json.dumps(MOE), where="c"), load_model("qwen3-30b-a3b")
    assert (mine.sizes(), params(mine)) == (theirs.sizes(), params(theirs))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "c.json, line 1: not valid JSON: Expecting property name enclosed in double quotes"),
        ("[]", "c.json: a configuration is an object, found list"),
        (
            '{"model_type": "t6"}',
            "c.json: model_type = 't6' is not supported: "
            "'wattline models --all' lists those that are (a family.toml beside it "
            "adds one)",
        ),
        (
            '{"model_type": ["llama"]}',
            "c.json: model_type = ['llama'] is not supported: "
            "'wattline models --all' lists those that are (a family.toml beside it "
            "adds one)",
        ),
        (
            json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}),
            "c.json: hidden_size is missing: give a positive whole number",
        ),
        (json.dumps(CONFIG | {"vocab_size": "1"}), "c.json: vocab_size = '1': give a positive whole number"),
        (
            json.dumps(CONFIG | {"num_key_value_heads": 5}),
            "c.json: q_heads = 32 is not a multiple of kv_heads = 5",
        ),
        (
            json.dumps(CONFIG | {"hidden_act": "gelu"}),
            "c.json: hidden_act = 'gelu': for model_type 'llama' only silu or swish leaves the layers as they are "
            "priced",
        ),
    ],
)  # fmt: skip
def test_a_hugging_face_config_is_checked(text: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_config(text, where="c.json")
    assert str(error.value) == message


def test_a_window_that_is_switched_off_is_no_window() -> None:
    config = CONFIG | {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}
    assert parse_config(json.dumps(config), where="c").q_heads == 32


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("qwen2", "did you mean 'qwen2-1.5b'?"),
        ("bert", "did you mean 'bert-large'?"),
        ("mixtral", "did you mean 'mixtral-8x7b'?"),
        ("nemotron-h", "did you mean 'nemotron-h-8b'?"),
        ("llama3-7", "did you mean 'llama3-70b'?"),
        ("llama3", "fits several models: llama3-405b, llama3-70b, llama3-8b: name one"),
        ("qwen3-3", "fits several models: qwen3-30b-a3b, qwen3-32b: name one"),
    ],
)
def test_a_beginning_that_leaves_the_size_open_is_refused_with_the_candidates(name: str, candidates: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        load_model(name)
    assert candidates in str(refused.value) and "\n" not in str(refused.value)


def test_a_beginning_that_says_the_size_is_that_model() -> None:
    assert load_model("qwen3-30b").id == load_model("QWEN3-30B-A3B").id == "qwen3-30b-a3b"
