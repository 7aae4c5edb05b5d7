"""Speculative decoding: how many tokens pass, what a step of drafts and a check costs, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sim import simulate
from sim.errors import ScenarioError
from sim.result.report import summary
from sim.result.timeline import Timeline
from workloads import tokens_a_step
from workloads.errors import WorkloadError

BASE = {"model": "llama3-70b", "gpu": "h100", "tp": 4, "phase": "decode", "batch": 4, "seq_len": 2048}
FREE = {"regime": "cold", "uncapped": True}


def run(**fields: Any) -> Timeline:
    return simulate(**(BASE | FREE | {"layers": 8, "shortcuts": True} | fields))


def drafted(**fields: Any) -> Timeline:
    given = {"speculation": "draft_model", "draft_model": "llama3-8b", "acceptance": 0.8}
    return run(**(given | fields))


def seconds(run: Timeline) -> dict[str, float]:
    """Seconds of a phase, one GPU's."""
    return {name: time_s for name, (_, time_s) in run.outcome.by_phase().items()}


@pytest.mark.parametrize(("rate", "count"), [(0.0, 3), (0.6, 1), (0.8, 4), (1.0, 5)])
def test_equal_chances_give_the_geometric_sum(rate: float, count: int) -> None:
    """Leviathan et al. 2023, equation 1: (1 - a^(n+1)) / (1 - a)."""
    closed = count + 1 if rate == 1.0 else (1.0 - rate ** (count + 1)) / (1.0 - rate)
    assert tokens_a_step([rate] * count) == pytest.approx(closed)


def test_each_position_counts_only_where_all_before_it_pass() -> None:
    assert tokens_a_step([0.9, 0.5, 0.4]) == pytest.approx(1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.4)
    assert tokens_a_step([0.0, 1.0, 1.0]) == 1.0


@pytest.mark.parametrize("count", [1, 3])
def test_the_speed_up_is_its_closed_form(count: int) -> None:
    """Tokens a step x plain step / (drafts + check): a draft is its model's own step, a check the same for all."""
    plain = run().latency_s
    steps = {name: run(model=name, layers=None).latency_s for name in ("llama3-8b", "llama3-70b")}
    found = {name: drafted(draft_model=name, draft_tokens=count) for name in steps}
    check_s = found["llama3-70b"].latency_s - count * steps["llama3-70b"]
    closed = tokens_a_step([0.8] * count) * plain / (count * steps["llama3-8b"] + check_s)
    one = found["llama3-8b"]
    assert one.tokens_per_s / run().tokens_per_s == pytest.approx(closed, rel=1e-9)
    assert one.tpot_s == pytest.approx(one.latency_s / tokens_a_step([0.8] * count))


def test_time_does_not_depend_on_what_passes_and_tokens_do() -> None:
    runs = [drafted(acceptance=rate) for rate in (0.0, 0.3, 0.7, 1.0)]
    assert len({run.latency_s for run in runs}) == 1
    assert all(b.tokens > a.tokens for a, b in pairwise(runs))
    assert runs[0].tokens == 4 and runs[-1].tokens == 16
    assert runs[0].tokens_per_s < run().tokens_per_s  # nothing passes: drafts are in vain


def test_more_drafts_take_longer_and_a_check_less_than_as_many_steps() -> None:
    times = [drafted(draft_tokens=count).latency_s for count in (1, 2, 4, 8)]
    assert times == sorted(times)
    one, draft = run().latency_s, run(model="llama3-8b", layers=None).latency_s
    checks = [drafted(draft_tokens=count).latency_s - count * draft for count in (1, 4)]
    assert one < checks[0] < checks[1] < 2 * one


def test_a_check_reads_each_cache_once() -> None:
    """Attention of 4 tokens a sequence: 4 times the arithmetic, the same cache; products have 4 times the rows."""
    plain, found = run(), drafted(draft_tokens=3)

    def of(run: Timeline, name: str) -> Any:
        return max((c for c in run.graph.classes if c.name == name), key=lambda c: float(c.describe["flops"]))

    ours, theirs = of(found, "attention"), of(plain, "attention")
    assert ours.describe["flops"] == 4 * theirs.describe["flops"]
    assert (ours.describe["batch"], ours.describe["q_heads"]) == (4, 4 * theirs.describe["q_heads"])
    assert ours.terms.hbm_bytes < 1.2 * theirs.terms.hbm_bytes
    assert of(found, "o_gemm").describe["m"] == 4 * of(plain, "o_gemm").describe["m"]


def test_a_layer_of_its_own_drafts_for_less_than_a_model() -> None:
    """EAGLE and MTP: one more layer, a product that joins and the head."""
    own = drafted(speculation="mtp", draft_model=None)
    assert {"join_gemm", "lm_head"} <= {c.name for c in own.graph.classes}
    assert seconds(own)["draft"] < 0.5 * seconds(drafted())["draft"]
    assert own.latency_s == drafted(speculation="eagle", draft_model=None).latency_s


def test_mixtures_draft_with_their_last_layer() -> None:
    found = simulate(
        model="deepseek-v3", gpu="h200", tp=8, phase="decode", batch=8, seq_len=2048, dtype="fp8", speculation="mtp",
        draft_tokens=1, acceptance="0.85", shortcuts=True, layers=5, lm_head=False,
    )  # fmt: skip
    drafts = [c for c in found.graph.classes if c.name == "gate_up_grouped"]
    assert len(drafts) == 2 and found.tokens == pytest.approx(8 * 1.85)


def test_memory_holds_the_draft_too() -> None:
    def held(**fields: Any) -> dict[str, float]:
        found: dict[str, float] = summary(simulate(**(BASE | {"shortcuts": True} | fields)))["memory_bytes_per_gpu"]
        return found

    plain = held()
    model = held(speculation="draft_model", draft_model="llama3-8b", acceptance=0.8)
    layer = held(speculation="mtp", acceptance=0.8)
    assert model["weights"] - plain["weights"] == pytest.approx(16.06e9 / 4, rel=0.01)
    assert layer["kv_cache"] / plain["kv_cache"] == pytest.approx(81 / 80)
    assert layer["largest_batch"] < plain["largest_batch"]


def test_figures_say_what_passes_and_that_nobody_measured_it() -> None:
    found = summary(drafted(acceptance="0.9,0.6,0.3"))
    assert found["tokens_per_step"] == pytest.approx(1 + 0.9 + 0.54 + 0.162)
    assert found["status"] == "unchecked"
    assert "tokens a step" in repr(drafted())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"acceptance": None}, "acceptance is missing: give the chance that a drafted token passes, such as 0.8"),
        ({"acceptance": (0.9, 0.8)}, "acceptance has 2 entries, draft_tokens is 3: one for all, or one for each"),
        ({"acceptance": 1.5}, "input should be less than or equal to 1"),
        (
            {"draft_model": "llama-7b"},
            "draft_model = llama-7b: drafts of 32,000 kinds of tokens, the model has 128,256",
        ),
        ({"draft_model": None}, "speculation = 'draft_model' needs a draft_model"),
        ({"speculation": "mtp"}, "speculation = 'mtp' contradicts draft_model = llama3-8b"),
        ({"phase": "prefill"}, "speculation = 'draft_model' is for decode and generate, not 'prefill'"),
        ({"speculation": None, "draft_model": None}, r"acceptance = \(0.8,\) needs speculation"),
        ({"pp": 2}, "speculation runs on tensor or expert groups: leave pp and cp at 1"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ScenarioError, WorkloadError), match=message):
        drafted(**fields)


def test_a_draft_of_a_serving_engine_begins_with_its_embedding() -> None:
    """One layer of the model again, after the row of the token that was drafted last, for each token drafted."""
    found = drafted(
        speculation="mtp", draft_model=None, draft_tokens=2, stack="vllm", tp=1, layers=4, ignore_memory=True
    )
    names = [cls.name for cls in found.graph.classes]
    assert names.index("embedding") < names.index("join_gemm") < names.index("lm_head")


def generated(**fields: Any) -> Timeline:
    return run(phase="generate", output_len=13, **({"speculation": "ngram", "acceptance": 1.0} | fields))


def test_a_generation_is_its_prompt_and_steps_that_yield_what_passes() -> None:
    """Four tokens a step: 12 after the first one are three steps, each over what the ones before yielded."""
    steps_s = [drafted(seq_len=2048 + 4 * number, acceptance=1.0).latency_s for number in range(3)]
    text, model = generated(), generated(speculation="draft_model", draft_model="llama3-8b")
    for found, steps in (
        (model, sum(steps_s)),
        (text, sum(steps_s) - 9 * run(model="llama3-8b", layers=None).latency_s),
    ):
        spent = summary(found)
        assert spent["tpot_s"] * 12 == pytest.approx(steps, rel=2e-3)
        assert found.tokens == 4 * 13
    prompt_s = run(phase="prefill").latency_s
    draft_s = run(phase="prefill", model="llama3-8b", layers=None, lm_head=False).latency_s
    assert summary(text)["ttft_s"] == pytest.approx(prompt_s, rel=1e-9)
    assert summary(model)["ttft_s"] == pytest.approx(prompt_s + draft_s, rel=1e-9)


def test_a_generation_s_speed_up_is_its_closed_form() -> None:
    """Mean tokens a step x plain decode step / step that checks; contexts hardly matter over so few tokens."""
    plain = run(phase="generate", output_len=65)
    found = run(phase="generate", output_len=65, speculation="eagle", acceptance=0.6, draft_tokens=2)
    step_s = drafted(speculation="eagle", draft_model=None, acceptance=0.6, draft_tokens=2).latency_s
    closed = tokens_a_step([0.6] * 2) * run().latency_s / step_s
    ratio = summary(plain)["tpot_s"] / summary(found)["tpot_s"]
    assert ratio == pytest.approx(closed, rel=0.02)  # 64 / 1.96 is no whole number of steps
    assert summary(found)["tokens_per_step"] == pytest.approx(1.96)


def test_long_generations_by_buckets_of_contexts_agree_with_their_steps() -> None:
    """Past 128 tokens contexts share steps; tokens a step divide what is left into as many steps."""
    found = run(phase="generate", output_len=401, speculation="ngram", acceptance=1.0, layers=4)
    ends = [
        drafted(speculation="ngram", draft_model=None, acceptance=1.0, layers=4, seq_len=context).latency_s
        for context in (2048, 2048 + 396)
    ]
    assert summary(found)["tpot_s"] * 400 / 100 == pytest.approx(sum(ends) / 2, rel=2e-3)
