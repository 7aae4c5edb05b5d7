"""Decoder transformers: splits that the sizes do not allow are refused, with what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transformer_kit import build
from workloads import DType, Generation, WorkloadError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model": "llama3-8b", "tp": 2, "sequence_parallel": True, "dtype": DType.FP8},
            "dtype = 'fp8_e4m3': sequence_parallel layers have 16-bit kernels only: use bf16",
        ),
        (
            {"model": "llama3-8b", "tp": 2, "sequence_parallel": True, "stack": "paged-kv"},
            "stack = 'paged-kv': sequence_parallel is known for stack 'reference-torch' only",
        ),
        (
            {"model": "llama3-8b", "tp": 12},
            "tp = 12 does not divide the 32 query heads of llama3-8b: use 1, 2, 4, 8, 16, 32",
        ),
        (
            {"model": "qwen3-14b", "tp": 5},
            "tp = 5 neither divides nor is a multiple of the 8 key/value heads of qwen3-14b",
        ),
        (
            {"model": "llama3-8b", "tp": 2, "sequence_parallel": True, "seq_len": 1023},
            "sequence_parallel: tp = 2 does not divide the 1023 tokens of the step",
        ),
        (
            {"model": "llama3-8b", "tp": 2, "sequence_parallel": True, "overlap_chunks": 3},
            "overlap_chunks = 3: does not divide the 1024 tokens over tp = 2 ranks",
        ),
        (
            {"model": "llama3-8b", "tp": 0},
            "tp = 0: give a positive whole number",
        ),
        (
            {"model": "llama3-8b", "batch": 0},
            "batch = 0: give a positive whole number",
        ),
        (
            {"model": "llama3-8b", "seq_len": 0},
            "seq_len = 0: give a positive whole number",
        ),
        (
            {"model": "llama3-8b", "layers": 0},
            "layers = 0: give a positive whole number",
        ),
        (
            {"model": "llama3-8b", "layers": 33},
            "layers = 33: llama3-8b has 32",
        ),
        (
            {"model": "llama3-8b", "phase": "prefil"},
            "phase = 'prefil': known are 'prefill', 'decode'",
        ),
        (
            {"model": "llama3-8b", "overlap_chunks": 4},
            "overlap_chunks = 4 needs tp of at least 2: only its collectives can be cut",
        ),
        (
            {"model": "llama3-8b", "sequence_parallel": True},
            "sequence_parallel: needs tp of at least 2",
        ),
        (
            {"model": "llama3-8b", "phase": "decode", "batch": 2, "tp": 2, "sequence_parallel": True},
            "sequence_parallel: is for phase 'prefill', not 'decode'",
        ),
        (
            {"model": "qwen3-30b-a3b", "ep": 2},
            "ep = 2 needs ep_mode: 'all_reduce' or 'all_to_all'",
        ),
        (
            {"model": "qwen3-30b-a3b", "ep": 2, "ep_mode": "ring"},
            "ep_mode = 'ring': known are 'all_reduce', 'all_to_all'",
        ),
        (
            {"model": "qwen3-30b-a3b", "ep_mode": "all_reduce"},
            "ep_mode = 'all_reduce' needs ep of at least 2",
        ),
        (
            {"model": "qwen3-30b-a3b", "tp": 2, "ep": 4, "ep_mode": "all_reduce"},
            "ep = 4 with tp = 2: tp must be 1 or equal to ep in ep_mode 'all_reduce'",
        ),
        (
            {"model": "qwen3-30b-a3b", "ep": 2, "ep_mode": "all_reduce", "tokens_per_ep_rank": (1,)},
            "tokens_per_ep_rank has 1 entries, ep is 2: one a rank",
        ),
        (
            {"model": "llama3-8b", "tokens_per_ep_rank": (5,)},
            "tokens_per_ep_rank = (5,): llama3-8b has no experts",
        ),
    ],
)  # fmt: skip
def test_splits_that_the_sizes_do_not_allow_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        build(**fields)
    assert str(error.value) == message


def test_generate_needs_an_output() -> None:
    with pytest.raises(WorkloadError) as error:
        Generation.of(8, 0)
    assert str(error.value) == "output_len = 0: give a positive whole number"
