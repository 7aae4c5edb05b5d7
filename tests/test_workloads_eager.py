"""LayerNorm families from their configurations, and models as unfused kernel lists."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.transformer_kit import build, kernels, names
from workloads import DType, WorkloadError, load_model
from workloads.huggingface import parse_config
from workloads.work import AttentionWork, ElementwiseWork, GemmWork

MODELS = ("bert-large", "gpt2", "opt-1.3b", "qwen2-1.5b", "vit-large")
GPT2: dict[str, Any] = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


@pytest.mark.parametrize("name", MODELS)
def test_unfused_products_do_the_work_of_the_fused_kernels(name: str) -> None:
    """Products of scores know no mask: they are as much as fused attention without one."""

    def flops(stack: str) -> float:
        return sum(
            replace(kernel.work, causal=False).flops if isinstance(kernel.work, AttentionWork) else kernel.flops
            for kernel in kernels(build(name, batch=2, seq_len=197 if name == "vit-large" else 512, stack=stack))
            if not isinstance(kernel.work, ElementwiseWork)
        )

    assert flops("eager-torch") == pytest.approx(flops("reference-torch"), rel=1e-12)


def test_a_layer_of_gpt2_in_eager_mode() -> None:
    program = build("gpt2", batch=4, seq_len=128, stack="eager-torch")
    assert names(program) == [
        "layernorm_attn", "qkv_gemm", "copy_q", "copy_k", "copy_v", "scores", "scale", "mask", "softmax", "values",
        "copy_out", "o_gemm", "add_attn", "layernorm_ff", "up_gemm", *(f"activation.{i}" for i in range(8)),
        "down_gemm", "add_ff",
    ]  # fmt: skip
    scores = next(kernel.work for kernel in kernels(program) if kernel.name == "scores")
    assert scores == GemmWork(m=128, n=128, k=64, count=48)


def test_scores_pass_through_memory_unless_they_are_fused() -> None:
    def moved(stack: str) -> float:
        return sum(kernel.bytes_moved for kernel in kernels(build("opt-1.3b", seq_len=2048, stack=stack)))

    scores = 32 * 2048**2 * 2  # bytes of a layer: heads x tokens^2 x 16 bit
    # written and read by the mask, the softmax in fp32, the way back to 16 bit and the products around
    assert moved("eager-torch") - moved("reference-torch") > 9 * scores


def test_kernels_in_fp32_move_twice_the_bytes() -> None:
    def moved(dtype: DType) -> float:
        program = build("gpt2", batch=2, seq_len=256, stack="eager-torch", dtype=dtype)
        return sum(kernel.bytes_moved for kernel in kernels(program))

    assert moved(DType.FP32) == 2 * moved(DType.BF16)


def test_an_encoder_has_no_head_and_no_mask() -> None:
    assert len(build("bert-large", seq_len=128).ranks[0].phases[0].segments) == 1
    attention = next(one.work for one in kernels(build("vit-large", seq_len=197)) if one.name == "attention")
    assert isinstance(attention, AttentionWork)
    assert not attention.causal
    assert load_model("vit-large").max_positions == 14 * 14 + 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert-large", {"phase": "decode"}, "phase = 'decode': bert-large is an encoder: use phase = 'prefill'"),
        ("gpt2", {"dtype": DType.FP32}, "dtype = 'fp32': stack 'reference-torch' has 16-bit kernels: use stack"),
        ("gpt2", {"dtype": DType.FP8, "stack": "eager-torch"}, "dtype = 'fp8_e4m3': stack 'eager-torch' is known"),
    ],
)
def test_what_a_family_cannot_do_is_said(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message.replace("(", r"\(")):
        build(name, batch=1, seq_len=128, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 7}, "c: n_embd = 768, n_head = 7: 768 is not a multiple of 7"),
        (
            {"activation_function": "swiglu"},
            "c: activation_function = 'swiglu': for model_type 'gpt2' only gelu_new",
        ),
        ({"n_layer": None}, "c: n_layer is missing: give a positive whole number"),
    ],
)
def test_a_configuration_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_config(json.dumps(GPT2 | change), where="c")
    assert str(error.value).startswith(message)


def test_sequence_parallelism_follows_from_the_nodes_of_any_layer() -> None:
    layer = kernels(build("opt-1.3b", tp=2, sequence_parallel=True, batch=1, seq_len=512))[:14]
    assert [kernel.name for kernel in layer] == [
        "layernorm_attn", "all_gather_attn", "qkv_gemm", "attention", "o_gemm", "reduce_scatter_attn", "add_attn",
        "layernorm_ff", "all_gather_ff", "up_gemm", "activation", "down_gemm", "reduce_scatter_ff", "add_ff",
    ]  # fmt: skip
    rows = {kernel.name: kernel.work.rows for kernel in layer if isinstance(kernel.work, ElementwiseWork)}
    assert rows == {"layernorm_attn": 256, "add_attn": 256, "layernorm_ff": 256, "activation": 512, "add_ff": 256}
