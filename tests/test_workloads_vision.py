"""Vision-language models: images through an encoder and a projector before the language model's prefill."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.transformer_kit import build
from workloads import Layout, MemoryLoad, Options, WorkloadError, build_program, load_model, memory_need
from workloads.huggingface import parse_config
from workloads.program import Program, Segment
from workloads.work import AttentionWork, GemmWork

MODEL = load_model("llava-1.5-7b")
CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "text_config": {"model_type": "llama"},
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16,
        "intermediate_size": 4304, "image_size": 384, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh",
    },
}  # fmt: skip


def segments(program: Program, rank: int = 0) -> dict[str, Segment]:
    return {segment.name: segment for segment in program.ranks[rank].phases[0].segments}


def flops(program: Program) -> float:
    return sum(s.repeat * k.flops for s in program.ranks[0].phases[0].segments for k in s.kernels)


def test_images_run_before_the_prefill() -> None:
    found = segments(build(MODEL, batch=2, seq_len=1400, images=2))
    assert list(found) == ["patches", "vision layer", "projector", "layer", "lm_head"]
    assert found["vision layer"].repeat == 24
    (attention,) = (k.work for k in found["vision layer"].kernels if k.name == "attention")
    assert attention == AttentionWork(
        batch=4, q_len=577, kv_len=577, q_heads=16, kv_heads=16, head_dim=64, causal=False
    )
    shapes = [k.work for k in found["projector"].kernels if isinstance(k.work, GemmWork)]
    assert [(w.m, w.n, w.k) for w in shapes] == [(4 * 576, 4096, 1024), (4 * 576, 4096, 4096)]


def test_without_images_it_is_its_language_model() -> None:
    assert list(segments(build(MODEL, seq_len=1024))) == ["layer", "lm_head"]


def test_images_add_their_encoder_and_nothing_else() -> None:
    with_images, without = (build(MODEL, batch=2, seq_len=1400, images=n) for n in (2, 0))
    encoder = sum(
        s.repeat * k.flops for n, s in segments(with_images).items() if n in ("patches", "vision layer", "projector")
        for k in s.kernels
    )  # fmt: skip
    assert flops(with_images) == pytest.approx(flops(without) + encoder, rel=1e-12)


def test_decode_steps_see_no_images() -> None:
    program = build(MODEL, "decode", seq_len=1400, images=2)
    assert "vision layer" not in segments(program)


def test_the_first_stage_alone_encodes_once_a_micro_batch() -> None:
    layout = Layout(pp=2, micro_batches=2)
    program = build_program(MODEL, layout, phase="prefill", batch=2, seq_len=1400, options=Options(images=1))
    first, last = (sum("vision layer" in name for name in segments(program, rank)) for rank in (0, 1))
    assert (first, last) == (2, 0)


def test_the_encoder_takes_memory() -> None:
    def weights(name: Any) -> float:
        return memory_need(
            name, Layout(), MemoryLoad(batch=1, context=1024, new_tokens=1024, layers=32, lm_head=True)
        ).weight_bytes

    assert weights(MODEL) - weights(replace(MODEL, vision=None)) == pytest.approx(2 * 304e6, rel=0.02)


def test_an_encoder_without_a_class_token() -> None:
    vision = parse_config(json.dumps(CONFIG), where="c").vision
    assert vision is not None
    assert (vision.patches, vision.tokens) == (576, 576)
    assert vision.model.head_dim == 72
    cut = parse_config(json.dumps(CONFIG | {"vision_config": CONFIG["vision_config"] | {"patch_size": 14}}), where="c")
    assert cut.vision is not None and cut.vision.tokens == 27 * 27  # 6 pixels at the edge are left


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vision_config": {"model_type": "swin"}},
            "c: vision_config.model_type = 'swin': is no image encoder that is known",
        ),
        ({"text_config": 7}, "c: text_config = 7: give the language model's configuration"),
        ({"text_config": {"model_type": "t6"}}, "c: text_config: model_type = 't6' is not supported"),
    ],
)
def test_a_configuration_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_config(json.dumps(CONFIG | change), where="c")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama3-8b", {"images": 1}, "images = 1: llama3-8b has no image encoder"),
        (MODEL, {"images": 3}, "seq_len = 1024 has no room for images = 3 of 576 tokens each: give at least 1728"),
        (MODEL, {"images": 1, "tp": 2, "sequence_parallel": True}, "images = 1: an encoder runs whole on every tensor"),
    ],
)
def test_what_cannot_be_is_said(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        build(model, **options)
    assert str(error.value).startswith(message)
