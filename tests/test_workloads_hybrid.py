"""Hybrids of Mamba-2, attention and feed-forward layers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sim import Scenario, simulate
from tests.transformer_kit import build, kernels
from workloads import Group, Layout, MemoryLoad, RaggedStep, WorkloadError, build_ragged, load_model, memory_need
from workloads.huggingface import parse_config
from workloads.program import Kernel

MODEL = load_model("nemotron-h-8b")
CONFIG: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 512, "num_hidden_layers": 4, "hybrid_override_pattern": "MM*-",
    "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024, "mamba_num_heads": 16,
    "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128, "vocab_size": 1000,
}  # fmt: skip


def small(**change: Any) -> Any:
    return parse_config(json.dumps(CONFIG | change), where="c.json")


def mixer(phase: str, **fields: Any) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels(build(MODEL, phase, **fields))}


def test_layers_come_in_the_order_of_the_pattern() -> None:
    segments = build(small(), seq_len=256).ranks[0].phases[0].segments
    assert [(s.name, s.first, s.repeat) for s in segments] == [
        ("mamba layer", 0, 2), ("attention layer", 2, 1), ("feed-forward layer", 3, 1), ("lm_head", 0, 1),
    ]  # fmt: skip
    whole = build(MODEL, seq_len=256).ranks[0].phases[0].segments
    assert sum(s.repeat for s in whole if s.name != "lm_head") == 52
    assert sum(s.repeat for s in whole if s.name == "attention layer") == 4


def test_a_mixer_by_hand() -> None:
    found = mixer("prefill", batch=2, seq_len=4096)
    # 2 x 8192 channels, 2 x 8 groups x 128, 128 steps
    assert found["in_gemm"].flops == 2 * 8192 * 4096 * (2 * 8192 + 2 * 1024 + 128)
    chunks = 2 * 4096 // 128
    assert found["chunk_scores"].flops == 2 * chunks * 8 * 128 * 128 * 128
    assert found["chunk_states"].flops == found["read_states"].flops == 2 * chunks * 128 * 128 * 64 * 128


def test_work_grows_with_the_tokens_not_their_square() -> None:
    def flops(tokens: int) -> float:
        return sum(kernel.flops for kernel in mixer("prefill", seq_len=tokens).values())

    assert flops(16384) == pytest.approx(4 * flops(4096), rel=1e-12)


def test_a_decode_step_reads_and_writes_the_state_whatever_the_context() -> None:
    short, long = (mixer("decode", batch=8, seq_len=n)["state_update"] for n in (512, 65536))
    assert short == long
    state = 8 * 128 * 64 * 128 * 4
    assert 2 * state < short.bytes_moved < 2.1 * state


def test_ranks_share_the_heads() -> None:
    one, four = (mixer("prefill", seq_len=2048, tp=tp) for tp in (1, 4))
    for name in ("in_gemm", "chunk_scores", "chunk_values", "out_gemm"):
        assert four[name].flops == pytest.approx(one[name].flops / 4)
    assert "all_reduce_out" in four


def test_only_attention_layers_cache_keys() -> None:
    def kv(context: int) -> float:
        need = memory_need(MODEL, Layout(), MemoryLoad(batch=1, context=context, new_tokens=1, layers=52, lm_head=True))
        return need.kv_bytes

    assert kv(2000) - kv(1000) == 1000 * 4 * 2 * 8 * 128 * 2
    assert kv(0) == 24 * 128 * 64 * 128 * 4


def test_energy_adds_up_and_a_long_context_costs_little() -> None:
    runs = [
        simulate(Scenario.of(model="nemotron-h-8b", phase="decode", batch=16, seq_len=context))
        for context in (1024, 32768)
    ]
    for run in runs:
        assert sum(joules for joules, _ in run.sums_by("kernel").values()) == pytest.approx(run.energy_j, rel=1e-9)
    assert runs[1].latency_s < 1.5 * runs[0].latency_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hybrid_override_pattern": "MM*"},
            "c.json: hybrid_override_pattern = 'MM*': give one for each of the 4 layers",
        ),
        ({"hybrid_override_pattern": "MMX-"}, "c.json: layer 2 is 'X' by "),
        ({"n_groups": 3}, "c.json: mamba_num_heads = 16 is not a multiple of n_groups = 3"),
        ({"mlp_hidden_act": "silu"}, "c.json: mlp_hidden_act = 'silu': for model_type 'nemotron_h' only relu2"),
    ],
)
def test_a_configuration_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        small(**change)
    assert str(error.value).startswith(message)


def test_what_a_hybrid_cannot_do_is_said() -> None:
    with pytest.raises(WorkloadError, match="tp = 3 does not divide"):
        build(small(num_attention_heads=12, num_key_value_heads=12, hidden_size=768), tp=3, seq_len=128)
    with pytest.raises(WorkloadError, match="serving is known for decoders whose every layer is alike"):
        one = Group(phase="decode", sequences=1, new_tokens=1, context=9)
        build_ragged(MODEL, Layout(), RaggedStep(groups=[one], scored=1))
