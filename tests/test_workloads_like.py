"""Families built on one another, branches of a layer that read one node, and gates: a TOML each, and no Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_workloads_invented import ATTENTION, BASE, EMBEDDINGS, NORM, OUT, QKV, SIZES, feed, layer
from workloads import Layout, Options, WorkloadError, build_program, load_model
from workloads.params import facts

HEAD = 'source = "invented"\nchecked = "not at all"\n'
ATTEND = f'{{ node = "attention", name = "attention", {ATTENTION} }}'
Q = '{ node = "gemm", name = "q_gemm", ops = [{ label = "Q", pattern = "bsm,mHh->bsHh", parallel = "H" }] }'
KV = (
    '{ node = "gemm", name = "kv_gemm", source = "add_rmsnorm_attn", ops = [{ label = "K", pattern = "bsm,mKh->bsKh", '
    'parallel = "K" }, { label = "V", pattern = "bsm,mKh->bsKh", parallel = "K" }] }'
)
GATE = Q.replace("q_gemm", "gate_gemm").replace('"Q"', '"gate"').replace(", ops", ', source = "add_rmsnorm_attn", ops')
TIMES = '{ node = "pointwise", name = "gated", op = "silu_mul", axis = "Hh", beside = "gate_gemm" }'


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes a family and a configuration, and gives the folder."""

    def write(text: str, config: dict[str, Any]) -> str:
        (tmp_path / "family.toml").write_text('model_types = ["mine"]\n' + text)
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
        return str(tmp_path)

    return write


def names(folder: str, **layout: Any) -> list[str]:
    program = build_program(load_model(folder), Layout(**layout), phase="prefill", batch=1, seq_len=1024,
                            options=Options(lm_head=False))  # fmt: skip
    return [kernel.name for kernel in program.ranks[0].phases[0].segments[-1].kernels]


def test_attention_and_experts_side_by_side_sum_once(written: Any) -> None:
    text = HEAD + SIZES + 'experts = "routed"\ntop_k = "chosen"\nshared_d_ff = "shared"\n[layer]\n'
    text += layer("both", NORM % "in", QKV, ATTEND, OUT,
                  '{ node = "experts", name = "experts", shared = true, source = "add_rmsnorm_in" }')  # fmt: skip
    folder = written(text, BASE | {"routed": 16, "chosen": 2, "shared": 512})
    experts = 2048 * 16 + 3 * 2048 * (16 * 1024 + 512)
    assert facts(load_model(folder))["parameters"] == EMBEDDINGS + 12 * (2048 + 2048 * 128 * 40 + experts)
    assert [one for one in names(folder, tp=2) if one.startswith("all_")] == ["all_reduce_ff"]
    away = [one for one in names(folder, ep=2, ep_mode="all_to_all") if one.startswith("all_")]
    assert away == ["all_to_all_dispatch", "all_to_all_combine"]
    rows = [one for one in names(folder, tp=2, sequence_parallel=True) if "gather_" in one or "scatter" in one]
    assert rows == ["all_gather_in", "gather_back", "reduce_scatter_in"]  # the norm is gathered once for both


@pytest.mark.parametrize("late", [False, True])
def test_a_gate_of_attention_is_a_product_of_its_own(written: Any, late: bool) -> None:
    inner = (ATTEND, GATE, TIMES.replace("gate_gemm", "attention")) if late else (GATE, ATTEND, TIMES)
    folder = written(HEAD + SIZES + "[layer]\n" + layer("only", NORM % "attn", Q, KV, *inner, OUT, NORM % "ff",
                                                        *feed("f")), BASE)  # fmt: skip
    assert facts(load_model(folder))["parameters"] == (
        EMBEDDINGS + 12 * (2 * 2048 + 2048 * 128 * (3 * 16 + 2 * 4) + 3 * 2048 * 1024)
    )
    # Heads stay where they are: nothing is gathered for the gate.
    assert [one for one in names(folder, tp=2) if one.startswith("all_")] == ["all_reduce_attn", "all_reduce_down"]


def test_latent_attention_with_a_gate_over_dense_layers_first(written: Any) -> None:
    gate = GATE.replace(', source = "add_rmsnorm_attn"', "")
    latent = '{ node = "latent_attention", name = "attention", q_latent = true, source = "add_rmsnorm_attn" }'
    dense = [one.replace("{ ", "{ when = \"feed == 'd'\", ", 1) for one in feed("d")]
    experts = '{ node = "experts", name = "experts", shared = "shared", when = "feed == \'experts\'" }'
    text = 'like = "deepseek"\n' + HEAD + "[layer]\n"
    text += layer("layer", NORM % "attn", gate, latent, TIMES, OUT, NORM % "ff", experts, *dense)
    config = {
        "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 8192,
        "moe_intermediate_size": 1024, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "first_k_dense_replace": 2, "vocab_size": 64000, "q_lora_rank": 768, "kv_lora_rank": 256,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    folder = written(text, config)
    attention = 2048 * (768 + 256 + 32) + 768 * 16 * 96 + 256 * 16 * (64 + 64) + 2 * 16 * 64 * 2048 + 768 + 256
    found = facts(load_model(folder))
    assert found["parameters"] == (
        EMBEDDINGS + 12 * (attention + 2 * 2048) + 2 * 3 * 2048 * 8192 + 10 * (2048 * 32 + 33 * 3 * 2048 * 1024)
    )
    assert found["kv_bytes_per_token"] == 12 * (256 + 32) * 2
    assert [one for one in names(folder, tp=2) if one.startswith("all_")] == ["all_reduce_attn", "all_reduce_ff"]


def test_a_family_over_another_says_what_differs(written: Any) -> None:
    text = (
        'like = "llama"\n' + HEAD + 'ignored = ["cap"]\nextra_parameters = "num_hidden_layers * num_attention_heads"\n'
    )
    text += "kind = \"'near' if window else 'far'\"\n[terms]\nwindow = \"near if i % apart else 0\"\nqk_norm = true\n"
    config = {
        "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 64000, "near": 512, "apart": 4, "cap": 50.0,
    }  # fmt: skip
    model = load_model(written(text, config))
    assert facts(model)["parameters"] == (
        EMBEDDINGS + 12 * (2048 * 128 * 40 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128 + 16)
    )
    assert sum(tokens for _, tokens in model.caching(range(12), 4096)) == 3 * 4096 + 9 * 512
    assert [name for name, _, _ in model.layer_groups(range(5))] == ["far layer", "near layer", "far layer"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "lama"\n' + HEAD, "like = 'lama': known are "),
        ('like = "llama"\n' + HEAD + '[terms]\nwindow = "far"\nfar = "window"\n', "it leads back to itself"),
        ('like = "llama"\n' + HEAD + '[[check]]\nthat = "vocab_size > 70000"\nwhy = "too few words"\n',
         "vocab_size = 64000: too few words"),
        (HEAD + SIZES + "[layer]\n" + layer("only", NORM % "attn", QKV, *feed("f")),
         "gate_up_gemm: reads 'bsm', and qkv_gemm yields 'bsHh' and 'bsKh' and 'bsKh': mend one of them, or name what"),
        (HEAD + SIZES + "[layer]\n" + layer("only", NORM % "attn", QKV, ATTEND.replace("Kzh", "KzL"), OUT),
         "axis 'L': attention is over heads H, or K with r, of size h"),
        (HEAD + SIZES + "[layer]\n" + layer("only", NORM % "attn", QKV, ATTEND, TIMES, OUT),
         "gated: beside = 'gate_gemm': no node before it has that name"),
        (HEAD + SIZES + "[layer]\n" + layer("only", NORM % "attn", GATE.replace(', parallel = "H"', ""), Q.replace(
            ", ops", ', source = "add_rmsnorm_attn", ops'), KV, ATTEND, TIMES, OUT),
         "gated: attention is split along 'H' and gate_gemm along nothing: give both the same parallel"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(written: Any, text: str, message: str) -> None:
    keys = {
        "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 6144,
        "vocab_size": 64000,
    }  # fmt: skip
    with pytest.raises(WorkloadError) as error:
        load_model(written(text, keys if "like" in text else BASE))
    assert message in str(error.value) and "\n" not in str(error.value)
