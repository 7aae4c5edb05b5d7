"""Sizes of the models that the suite can run with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hardware.errors import HardwareError
from inputs.suggest import nearest

HEAD_DIM = 128
WAN_TEXT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model's sizes; ``experts`` 0 means a dense feed-forward of width ``ff``; source: its public config."""

    width: int
    q_heads: int
    kv_heads: int
    ff: int
    layers: int
    vocabulary: int = 0
    experts: int = 0
    top_k: int = 0


SHAPES = {
    # config.json of meta-llama/Llama-3.1-8B and -70B
    "llama3-8b": ModelShape(width=4096, q_heads=32, kv_heads=8, ff=14336, layers=32, vocabulary=128256),
    "llama3-70b": ModelShape(width=8192, q_heads=64, kv_heads=8, ff=28672, layers=80, vocabulary=128256),
    # config.json of Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": ModelShape(
        width=2048, q_heads=32, kv_heads=4, ff=768, layers=48, vocabulary=151936, experts=128, top_k=8
    ),
    # config.json of Wan-AI/Wan2.1-T2V-1.3B and -14B
    "wan2.1-1.3b": ModelShape(width=1536, q_heads=12, kv_heads=12, ff=8960, layers=30),
    "wan2.1-14b": ModelShape(width=5120, q_heads=40, kv_heads=40, ff=13824, layers=40),
}


def shape_of(model: str, shapes: Mapping[str, ModelShape] = SHAPES) -> ModelShape:
    """The sizes of ``model`` among ``shapes``.

    >>> shape_of("llama3-8b").width
    4096
    """
    try:
        return shapes[model]
    except KeyError:
        raise HardwareError(f"model = '{model}' is not one the suite can run: {nearest(model, shapes)}") from None
