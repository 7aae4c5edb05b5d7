"""Public training steps beside ours: LLM-foundry's table, by kernels of today and by the framework that made it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from sim.errors import ScenarioError
from tests.test_training import kernels
from workloads import Layout, Options, Program, WorkloadError, build_training, load_model
from workloads.program import Kernel

# LLM-foundry's public table (scripts/train/benchmarking/README.md, H100 80GB BF16, rows without activation
# checkpointing): model, tokens, GPUs, sequences a GPU, tokens a second. MPT models have GPT-2's layers, 50,368 words.
MPT = {"760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40)}
# In no fit: how many times as many tokens a second we predict. Its framework is of 2023 (eager, amp with 32-bit sums,
# FlashAttention in Triton, which the rows of long sequences show), our kernels are those that we measured.
ROWS = [
    ("760m", 512, 8, 96, 669998, 1.44), ("760m", 2048, 8, 24, 505177, 1.75), ("760m", 8192, 8, 6, 334602, 2.0),
    ("760m", 16384, 8, 3, 222521, 2.26), ("1b", 512, 8, 56, 418201, 1.38), ("1b", 2048, 8, 14, 363645, 1.48),
    ("1b", 4096, 8, 7, 308282, 1.60), ("1b", 16384, 8, 2, 157194, 2.13), ("3b", 512, 8, 40, 223721, 1.31),
    ("3b", 1024, 8, 20, 216369, 1.32), ("3b", 2048, 16, 10, 386285, 1.43), ("3b", 4096, 8, 5, 167712, 1.53),
    ("3b", 8192, 8, 3, 132626, 1.70), ("3b", 16384, 8, 1, 89223, 2.01), ("7b", 2048, 8, 6, 85144, 1.35),
    ("13b", 2048, 8, 2, 38336, 1.42), ("13b", 2048, 16, 2, 76280, 1.44),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tokens", "gpus", "sequences", "per_s", "times"), ROWS)
def test_public_steps_of_2023_take_as_much_longer_as_the_status_says(
    name: str, tokens: int, gpus: int, sequences: int, per_s: int, times: float, tmp_path: Path
) -> None:
    width, depth, heads = MPT[name]
    config = {"model_type": "gpt2", "n_embd": width, "n_layer": depth, "n_head": heads, "vocab_size": 50368,
              "n_positions": 65536}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = simulate(model=str(tmp_path / "config.json"), phase="train", dp=gpus, batch=gpus * sequences, seq_len=tokens,
                   sharding="zero3", ignore_memory=True)  # fmt: skip
    assert gpus * sequences * tokens / run.latency_s / per_s == pytest.approx(times, rel=0.03)
    assert run.standing.status == "unchecked"
    assert "steps of 2023 took 1.3 to 2.3 times as long" in run.standing.notes[0]


# The same rows under stack llm-foundry (workloads/data/stacks/llm-foundry.toml: settings and rates of kernels that are
# public, nothing from these rows): how many times as many tokens a second we predict. The bar, 12 % for 3B and 7B, is
# missed by 3B at 512 to 2,048 tokens.
FOUNDRY = {("760m", 2048): 1.334, ("760m", 16384): 1.021, ("1b", 512): 1.239, ("1b", 16384): 1.021, ("3b", 512): 1.171,
           ("3b", 2048): 1.141, ("3b", 4096): 1.094, ("3b", 16384): 1.005, ("7b", 2048): 1.112}  # fmt: skip


@pytest.mark.parametrize("row", [row for row in ROWS if row[:2] in FOUNDRY], ids=str)
def test_public_steps_as_the_framework_that_made_them(row: Any, tmp_path: Path) -> None:
    name, tokens, gpus, sequences, per_s, times = row
    width, depth, heads = MPT[name]
    config = {"model_type": "gpt2", "n_embd": width, "n_layer": depth, "n_head": heads, "vocab_size": 50368,
              "n_positions": 65536}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = simulate(model=str(tmp_path / "config.json"), phase="train", dp=gpus, batch=gpus * sequences, seq_len=tokens,
                   sharding="zero3", ignore_memory=True, stack="llm-foundry")  # fmt: skip
    found = gpus * sequences * tokens / run.latency_s / per_s
    assert found == pytest.approx(FOUNDRY[name, tokens], rel=0.03)
    assert abs(found - 1) < 0.8 * abs(times - 1)  # nearer than kernels of today
    assert run.standing.status == "unchecked"
    assert "LLM-foundry's public steps took 1.0 to 1.34 times as long" in run.standing.notes[0]


def test_a_framework_attends_to_all_keys_and_sums_in_32_bit() -> None:
    model, layout = load_model("llama-1b"), Layout(dp=2)
    options = Options(layers=2, sharding="zero3")
    ours, theirs = (
        build_training(model, layout, batch=2, seq_len=1024, options=replace(options, stack=stack))
        for stack in ("reference-torch", "llm-foundry")
    )

    def of(program: Program, phase: str, name: str) -> Kernel:
        return next(kernel for kernel in kernels(program, phase, rank=0) if kernel.name == name)

    for phase, name in (("forward", "attention"), ("backward", "attention_grad")):
        assert of(theirs, phase, name).flops == pytest.approx(2 * of(ours, phase, name).flops, rel=1e-3)
    sums = [of(program, "backward", "reduce_scatter_weight_grad") for program in (ours, theirs)]
    assert sums[1].bytes_moved == 2 * sums[0].bytes_moved
    weights = sums[0].bytes_moved / 2
    assert of(theirs, "backward", "before_sum").bytes_moved == 14 * weights
    assert of(theirs, "backward", "after_sum").bytes_moved == 8 * weights / 2
    assert of(theirs, "backward", "attention_passes").bytes_moved == 26 * 1024 * model.d_model
    # the sum waits for its pass, and the layer's first product for its own gather, which the layer before does not hide
    layer = theirs.ranks[0].phases[1].segments[1].kernels
    assert (layer[0].name, layer[0].after) == (
        "all_gather_weights",
        (max(i for i, k in enumerate(layer) if not k.stream) - len(layer),),
    )
    assert layer[1].after == (0,)
    at = next(i for i, kernel in enumerate(layer) if kernel.name == "before_sum")
    assert [layer[at + i].after for i in (1, 2)] == [(at,), (at + 1,)]


def test_a_framework_s_stack_trains_only() -> None:
    with pytest.raises(ScenarioError, match="stack = 'llm-foundry' is for phase 'train', not 'prefill'"):
        simulate(model="llama-1b", stack="llm-foundry")
    with pytest.raises(WorkloadError, match="stack = 'llm-foundry' has no cp: use stack 'reference-torch'"):
        simulate(model="llama-1b", phase="train", stack="llm-foundry", cp=2, cp_mode="ring", ignore_memory=True)
