"""One thing more of a whole run: a token, a sequence, a layer, an answer or a microbatch never makes it cheaper, a watt
of cap or 15 MHz of locked clock never slower; the mean power holds its cap, or the report says that it cannot.

Where one token more costs far more than its share, an edge stands there that measured rows show; each is named below
with what they show of it.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim import simulate
from sim.result.report import status_text
from sim.result.timeline import Timeline

CHEAPER = 0.005
# The level that windows of the slow limiter settle at: 0.2 % about the cap (tests/test_steady.py).
OVER = 1.002
DENSE, MIXTURES = ("llama3-8b", "qwen2-1.5b", "llama3-70b"), ("mixtral-8x7b", "qwen3-30b-a3b")
GPUS = ("h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "a100-sxm-80gb")
QUICK = settings(max_examples=20, deadline=None, derandomize=True, database=None)
Fields = dict[str, Any]


@st.composite
def scenarios(draw: st.DrawFn, phase: str | None = None) -> Fields:
    """Dense and mixture, prefill and decode, one GPU, tensor or expert parallel, at free, locked and capped clocks."""
    model = draw(st.sampled_from(DENSE + MIXTURES))
    phase = phase or draw(st.sampled_from(("prefill", "decode")))
    seq_len = draw(st.sampled_from((1, 63, 128, 300, 511, 512, 1000, 2048)))
    fields: Fields = {
        "model": model,
        "gpu": draw(st.sampled_from(GPUS)),
        "layers": draw(st.integers(1, 3)),
        "phase": phase,
        "seq_len": seq_len,
        "batch": draw(st.sampled_from((1, 2, 4, 15, 16, 32) if seq_len <= 512 or phase == "decode" else (1, 2, 4))),
        "lm_head": draw(st.booleans()),
        "launch": draw(st.sampled_from(("graph", "graph", "eager"))),
        "regime": draw(st.sampled_from(("steady", "steady", "cold"))),
    }
    ranks = draw(st.sampled_from((1, 1, 2, 4)))
    if ranks > 1 and model in MIXTURES and draw(st.booleans()):
        fields |= {"ep": ranks, "ep_mode": draw(st.sampled_from(("all_reduce", "all_to_all")))}
    elif ranks > 1:
        fields |= {"tp": ranks}
    match draw(st.sampled_from(("free", "locked", "capped"))):
        case "locked":
            fields["sm_clock_mhz"] = draw(st.sampled_from((900, 1200, 1395)))
        case "capped":
            fields["power_cap_w"] = draw(st.sampled_from((300, 330, 400)))
    return fields


def never_cheaper(fields: Fields, more: Fields) -> tuple[Timeline, Timeline]:
    """Both runs, once it is sure that the one of more work costs no less."""
    less, run = simulate(**fields), simulate(**fields | more)
    assert run.latency_s > less.latency_s * (1.0 - CHEAPER), (fields, more)
    assert run.energy_j > less.energy_j * (1.0 - CHEAPER), (fields, more)
    return less, run


@QUICK
@given(scenarios())
def test_a_token_more_is_never_cheaper(fields: Fields) -> None:
    never_cheaper(fields, {"seq_len": fields["seq_len"] + 1})


@QUICK
@given(scenarios())
def test_a_sequence_more_is_never_cheaper(fields: Fields) -> None:
    never_cheaper(fields, {"batch": fields["batch"] + 1})


@QUICK
@given(scenarios())
def test_a_layer_more_is_never_cheaper(fields: Fields) -> None:
    never_cheaper(fields, {"layers": fields["layers"] + 1})


@QUICK
@given(scenarios("generate"), st.integers(1, 8))
def test_an_answer_one_token_longer_is_never_cheaper(fields: Fields, output_len: int) -> None:
    never_cheaper(fields | {"output_len": output_len}, {"output_len": output_len + 1})


@QUICK
@given(scenarios("prefill"), st.integers(1, 6))
def test_a_microbatch_more_is_never_cheaper(fields: Fields, count: int) -> None:
    for name in ("tp", "ep", "ep_mode"):
        fields.pop(name, None)
    fields |= {"pp": 2, "layers": 2, "batch": count, "micro_batches": count}
    never_cheaper(fields, {"batch": count + 1, "micro_batches": count + 1})


@QUICK
@given(scenarios(), st.sampled_from((250, 299, 330, 399)), st.sampled_from((1, 5, 20)))
def test_a_watt_more_is_never_slower_and_the_cap_holds(fields: Fields, cap_w: int, more_w: int) -> None:
    fields.pop("sm_clock_mhz", None)
    fields |= {"power_cap_w": cap_w, "regime": "steady"}
    runs = [simulate(**fields | {"power_cap_w": watts}) for watts in (cap_w, cap_w + more_w)]
    assert runs[1].latency_s < runs[0].latency_s * (1.0 + CHEAPER), fields
    for run, watts in zip(runs, (cap_w, cap_w + more_w), strict=True):
        if max(run.power_w_per_gpu) > watts * OVER:
            assert f"power_cap_w = {watts} cannot be held" in status_text(run), fields


@QUICK
@given(scenarios(), st.sampled_from((900, 1200, 1380)))
def test_a_higher_locked_clock_is_never_slower(fields: Fields, mhz: int) -> None:
    fields.pop("power_cap_w", None)
    slow, fast = (simulate(**fields | {"sm_clock_mhz": clock}) for clock in (mhz, mhz + 15))
    assert fast.latency_s < slow.latency_s * (1.0 + CHEAPER), fields


PREFILL: Fields = {"gpu": "h100-sxm-80gb", "layers": 2, "lm_head": False, "sm_clock_mhz": 1410}
# What one token more costs at an edge: where, and the most that measured rows show. Kinds: ``tile``: rows of products
# after a whole number of 128 (gemm.jsonl, n 28672, k 4096: 110 us at 256 rows, 154 at 384, +40 %, and attention's
# blocks of 128 queries; no row of ours lies between, so that the most is a whole row of tiles: an eighth of 1,024);
# ``kernel``: grouped products change kernel beyond 128 rows an expert (experts.jsonl: falls of
# 1 to 2 % from 2,000 to 2,080 tokens, spread over 4 rows either way here); ``experts``: a second token of a mixture
# reads the weights of other experts (grouped_gemm.jsonl: 8 to 16 of 128 experts hit, twice the bytes).
EDGES = [
    ("tile", "llama3-8b", 1, 256, 0.40),
    ("tile", "llama3-8b", 1, 1024, 0.125),
    ("tile", "llama3-70b", 2, 128, 0.40),
    ("kernel", "mixtral-8x7b", 1, 516, 0.03),
    ("experts", "qwen3-30b-a3b", 1, 1, 1.0),
]


@pytest.mark.parametrize(("kind", "model", "batch", "seq_len", "most"), EDGES)
def test_edges_are_where_measured_rows_have_them(kind: str, model: str, batch: int, seq_len: int, most: float) -> None:
    fields = PREFILL | {"model": model, "phase": "prefill", "batch": batch, "seq_len": seq_len}
    less, run = never_cheaper(fields, {"seq_len": seq_len + 1})
    assert run.latency_s < less.latency_s * (1.0 + most), kind


@pytest.mark.parametrize(
    ("model", "batch", "seq_len"), [("llama3-8b", 1, 300), ("llama3-70b", 3, 200), ("qwen3-8b", 4, 330)]
)
def test_between_edges_a_token_more_costs_little(model: str, batch: int, seq_len: int) -> None:
    fields = PREFILL | {"model": model, "phase": "prefill", "batch": batch, "seq_len": seq_len}
    less, run = never_cheaper(fields, {"seq_len": seq_len + 1})
    assert run.latency_s < less.latency_s * 1.02


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_a_sequence_more_of_a_model_of_four_bits(tmp_path: Path, batch: int) -> None:
    """Few tiles turned all weights alone, so that a ninth sequence, with twice the tiles, was 3 to 6 % cheaper."""
    config = {
        "model_type": "qwen3", "hidden_size": 7168, "num_hidden_layers": 40, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "vocab_size": 32000,
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields: Fields = {
        "model": str(tmp_path / "config.json"), "gpu": "mi300x", "tp": 4, "power_cap_w": 703, "seq_len": 278,
        "phase": "decode", "layers": 4, "ignore_memory": True, "weight_dtype": "int4_g128",
    }  # fmt: skip
    fewer, more = (simulate(batch=number, **fields) for number in (batch, batch + 1))
    assert more.latency_s > (1.0 - CHEAPER) * fewer.latency_s
    assert more.energy_j > (1.0 - CHEAPER) * fewer.energy_j


def test_a_longer_prompt_is_no_quicker_where_the_gpu_overtakes_the_host() -> None:
    """vLLM's host sets the pace of Qwen3-30B-A3B up to 4,440 tokens on an H200, the kernels beyond; from some 9,700
    tokens on the GPU is so far behind that its waits are left out."""
    seconds = [
        simulate(
            model="qwen3-30b-a3b", gpu="h200-sxm-141gb", stack="vllm", seq_len=tokens, regime="cold", detail="folded"
        ).latency_s
        for tokens in (*range(4400, 4490, 10), *range(9400, 10100, 100))
    ]
    assert all(later >= 0.999 * sooner for sooner, later in pairwise(seconds))
