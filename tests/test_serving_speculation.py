"""Servers that check drafted tokens: what a step costs, how many tokens it yields, and what becomes of memory."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from sim.errors import ScenarioError
from sim.result.notes import GRAPHED_DRAFTS
from sim.serving import serve
from sim.serving.cost import Batch, Chunk
from sim.serving.drafted import Acceptance, DraftedScheduler
from sim.serving.inflight import Limits, Sequence
from sim.serving.kv import BlockPool
from sim.serving.price import StepPrices
from sim.serving.requests import Request
from sim.serving.scheduler import Scheduler
from sim.serving.spec import ServeSpec
from sim.serving.stages import stage_prices
from workloads import tokens_a_step
from workloads.engine import load_engine

BASE = {"model": "llama3-70b", "tp": 4}
DRAFTS: dict[str, dict[str, Any]] = {
    "draft_model": {"speculation": "draft_model", "draft_model": "llama3-8b", "acceptance": 0.8},
    "eagle": {"speculation": "eagle", "acceptance": (0.8, 0.7, 0.6)},
    "ngram": {"speculation": "ngram", "acceptance": 0.4},
}


def prices(**fields: Any) -> StepPrices:
    spec = ServeSpec.of(**(BASE | fields))
    return stage_prices(spec, spec.group())[0]


@pytest.mark.parametrize("kind", DRAFTS)
def test_parts_of_a_step_are_the_step_in_one_run(kind: str) -> None:
    found = prices(**DRAFTS[kind])
    for batch in (
        Batch(decoding=12, cached=12 * 900),
        Batch(decoding=5, cached=5 * 2000, chunks=(Chunk(tokens=300, context=300),), ending=1),
        Batch(chunks=(Chunk(tokens=512, context=1024), Chunk(tokens=64, context=64)), ending=1),
    ):
        parts, whole, exact = found.step(batch).whole, found.whole(batch), found.exact(batch)
        assert parts.time_s == pytest.approx(whole.time_s, rel=1e-12)
        assert parts.energy_j == pytest.approx(whole.energy_j, rel=1e-12)
        assert whole.time_s == pytest.approx(exact.time_s, rel=0.01)
        assert whole.energy_j == pytest.approx(exact.energy_j, rel=0.01)


def test_a_step_is_its_drafts_and_a_check_that_costs_the_same_whatever_drafts() -> None:
    batch = Batch(decoding=8, cached=8 * 1500)
    text, model = prices(**DRAFTS["ngram"]), prices(**DRAFTS["draft_model"])
    draft = prices(model="llama3-8b", sampling="greedy")
    drafts_s = 3 * draft.whole(batch).time_s
    assert model.whole(batch).time_s == pytest.approx(text.whole(batch).time_s + drafts_s, rel=1e-9)
    layer = prices(**DRAFTS["eagle"]).whole(batch).time_s - text.whole(batch).time_s
    assert 0.0 < layer < drafts_s
    plain = prices().whole(batch).time_s
    assert plain < text.whole(batch).time_s < 1.5 * plain  # a cache is read once for all that is checked


@pytest.mark.parametrize("kind", DRAFTS)
def test_the_speed_up_is_its_closed_form_where_all_pass(kind: str) -> None:
    """One request at a time, each step of which yields draft_tokens + 1."""
    load = {"concurrency": 1, "requests": 3, "input_tokens": 1024, "output_tokens": 61, "host": "none"}
    drafts = DRAFTS[kind] | {"acceptance": 1.0}
    run, plain = serve(**BASE, **load, **drafts), serve(**BASE, **load)
    steps = [Batch(decoding=1, cached=1024 + 4 * number) for number in range(15)]
    drafted = prices(**drafts)
    closed = sum(drafted.whole(step).time_s for step in steps) / 60
    assert run.requests["tpot_s"].tolist() == pytest.approx([closed] * 3, rel=1e-3)
    tokens = [Batch(decoding=1, cached=1024 + number) for number in range(60)]
    plainly = prices()
    speed_up = sum(plainly.whole(one).time_s for one in tokens) / sum(drafted.whole(step).time_s for step in steps)
    assert plain.requests["tpot_s"].mean() / run.requests["tpot_s"].mean() == pytest.approx(speed_up, rel=1e-3)
    assert run.summary["tokens_per_step"] == 4.0


def test_a_draft_model_of_vllm_is_launched_kernel_by_kernel_and_eagle_is_not() -> None:
    """No graph holds its passes (a trace of vLLM 0.24): a step takes as long as the host, served or simulated."""
    drafts = {"speculation": "draft_model", "draft_model": "llama3.2-1b", "acceptance": 0.0}
    load = {"model": "llama3-8b", "input_tokens": 1000, "output_tokens": 20, "requests": 1}
    host_s = 3 * 16 * 10 * load_engine("vllm").host.draft_kernel_s  # passes, layers, kernels of a layer
    tpot_s = serve(**load, **drafts).requests["tpot_s"][0]
    assert tpot_s == pytest.approx(host_s, rel=0.02)
    step = simulate(model="llama3-8b", phase="decode", batch=1, seq_len=1010, stack="vllm", **drafts)
    assert step.latency_s == pytest.approx(tpot_s, rel=0.05)
    text = simulate(model="llama3-8b", phase="generate", batch=1, seq_len=1010, output_len=4, stack="vllm", **drafts)
    assert text.standing.notes == (GRAPHED_DRAFTS,) and not step.standing.notes
    assert (
        serve(**load, **(drafts | {"draft_model": None, "speculation": "eagle"})).requests["tpot_s"][0] < 0.4 * host_s
    )


def test_traces_show_what_is_a_graph() -> None:
    """Three drafts and a check: with EAGLE four graphs a step, with a draft model one, the check's."""
    folder = Path(__file__).parents[1] / "records" / "h200-sxm-141gb" / "vllm" / "traces"
    found = {}
    for name in ("1055-eagle", "1030-draft-llama3.2-1b"):
        with gzip.open(folder / f"llama3-8b-decode-32x{name}.rank0.json.gz") as stream:
            events = json.load(stream)["traceEvents"]
        calls = Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
        steps = sum(e.get("cat") == "user_annotation" and e["name"].startswith("execute") for e in events)
        launched = sum(
            count for call, count in calls.items() if call.startswith(("cuLaunchKernel", "cudaLaunchKernel"))
        )
        found[name] = round(calls["cudaGraphLaunch"] / steps), launched / steps
    assert found["1055-eagle"][0] == 4 and found["1055-eagle"][1] < 50
    assert found["1030-draft-llama3.2-1b"][0] <= 2 and 600 < found["1030-draft-llama3.2-1b"][1] < 800
    pace, counted = load_engine("vllm").host, 3 * 16 * 10
    launched_s = found["1030-draft-llama3.2-1b"][1] * pace.kernel_s
    assert counted * pace.draft_kernel_s == pytest.approx(launched_s, rel=0.005)


def test_tokens_a_step_are_the_closed_form_s_mean() -> None:
    chances = (0.8, 0.6, 0.4)
    draws = [next(Acceptance(chances=chances, seed=1).passing(number)) for number in range(4000)]
    spread = math.sqrt(3.0 / len(draws))
    assert 1 + sum(draws) / len(draws) == pytest.approx(tokens_a_step(chances), abs=3 * spread)
    for place, chance in enumerate(chances):  # each position where all before it passed
        reached = [drawn for drawn in draws if drawn >= place]
        assert sum(drawn > place for drawn in reached) / len(reached) == pytest.approx(chance, abs=0.05)
    load = {"concurrency": 8, "requests": 60, "input_tokens": 200, "output_tokens": 200}
    run = serve(**BASE, **load, speculation="ngram", acceptance=chances)
    assert run.summary["tokens_per_step"] == pytest.approx(tokens_a_step(chances), rel=0.03)


def test_what_passes_is_a_request_s_own_and_seeded() -> None:
    first, again, other = (
        [drawn for drawn, _ in zip(Acceptance(chances=(0.7,) * 4, seed=seed).passing(3), range(50), strict=False)]
        for seed in (0, 0, 1)
    )
    assert first == again != other
    load = {"requests": 30, "input_tokens": 100, "output_tokens": 40, "rate_per_s": 5.0}
    runs = [serve(**BASE, **load, **DRAFTS["eagle"]).requests for _ in range(2)]
    assert runs[0].equals(runs[1])
    assert len(set(runs[0]["tpot_s"])) > 20  # no two alike


def test_energy_of_requests_and_pauses_is_the_whole() -> None:
    run = serve(**BASE, requests=40, rate_per_s=4.0, output_tokens=50, **DRAFTS["draft_model"])
    shares = run.requests["prefill_j"].sum() + run.requests["decode_j"].sum()
    assert shares + run.energy_j_by_part["idle"] == pytest.approx(run.energy_j, rel=1e-9)
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)


def test_the_draft_s_cache_takes_room() -> None:
    held = {kind: serve(**BASE, requests=2, output_tokens=4, **DRAFTS[kind]).summary for kind in DRAFTS}
    token = {kind: data["kv_bytes_per_token_per_gpu"] for kind, data in held.items()}
    plain = 80 * 2 * 2 * 128 * 2  # layers, K and V, heads of a rank, elements, 16 bit
    assert token == {"ngram": plain, "eagle": plain * 81 / 80, "draft_model": plain + 32 * 2 * 2 * 128 * 2}
    blocks = [held[kind]["kv_blocks"] for kind in ("ngram", "eagle", "draft_model")]
    assert blocks == sorted(blocks, reverse=True)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_memory_that_runs_out_loses_no_token(preemption: str) -> None:
    load = {"requests": 40, "rate_per_s": 50.0, "input_tokens": 100, "output_tokens": 120, "length_spread": 0.5}
    run = serve(**BASE, **load, kv_blocks=60, preemption=preemption, **DRAFTS["ngram"])
    assert run.summary["preemptions"] > 0
    assert bool(run.requests["done_s"].notna().all())
    assert run.summary["most_blocks"] <= 60


def walked(scheduler: Scheduler, requests: list[Request]) -> list[tuple[Any, ...]]:
    """All that a scheduler does with ``requests``, one of which comes before each step."""
    seen: list[tuple[Any, ...]] = []
    coming = requests[::-1]
    while scheduler.busy or coming:
        if coming:
            request = coming.pop()
            scheduler.add(Sequence(request=request, target=request.input_tokens))
        step = scheduler.plan()
        first, done = scheduler.advance(step)
        numbers = [sorted(one.request.number for one in some) for some in (first, done)]
        seen.append((step.batch._replace(longest=0), *numbers, scheduler.pool.used, scheduler.preempted))
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_with_nothing_drafted_it_is_the_plain_scheduler(seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        Request(number=n, arrival_s=float(n), input_tokens=rng.randint(1, 40), output_tokens=rng.randint(1, 60))
        for n in range(40)
    ]
    limits = Limits(max_num_seqs=12, max_num_batched_tokens=64, preemption=rng.choice(["recompute", "swap"]))
    none = Acceptance(chances=(), seed=0)
    plain, drafted = (
        make(limits=limits, pool=BlockPool(blocks=40, block_tokens=4), **more)
        for make, more in ((Scheduler, {}), (DraftedScheduler, {"acceptance": none}))
    )
    assert walked(plain, requests) == walked(drafted, requests)
    assert plain.preempted > 0


def test_prompts_elsewhere_and_servers_that_die_go_on_drafting() -> None:
    load = {"requests": 30, "rate_per_s": 100.0, "input_tokens": 300, "output_tokens": 40, "model": "llama3-8b"}
    apart = serve(**load, prefill_replicas=1, replicas=1, **DRAFTS["eagle"])
    assert apart.summary["tokens_per_step"] > 1.5
    killed = serve(kills=[(0.2, 0)], replicas=2, **load, **DRAFTS["eagle"])
    assert bool(killed.requests["done_s"].notna().all()) and killed.requests["moves"].sum() > 0


def test_figures_say_that_nobody_measured_it() -> None:
    data = serve(model="llama3-8b", requests=2, output_tokens=4, **DRAFTS["eagle"]).summary
    assert data["status"] == "unchecked"
    assert any("speculation" in reason for reason in data["status_reasons"])
    assert serve(model="llama3-8b", requests=2, output_tokens=4).summary["tokens_per_step"] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"acceptance": 0.5}, "needs speculation: draft_model, eagle, mtp or ngram"),
        ({"speculation": "mtp"}, "acceptance is missing"),
        (DRAFTS["eagle"] | {"max_num_seqs": 2048}, "2048, 4 tokens for each and room for prompts"),
        (DRAFTS["eagle"] | {"clock_policy": "slo", "slo_tpot_s": 0.05}, "clock_policy = slo is not known beside"),
        (DRAFTS["eagle"] | {"sm_partition": "prefill=64,decode=68"}, "speculation = eagle is not known beside sm_part"),
        (DRAFTS["draft_model"] | {"draft_model": "qwen3-8b"}, "drafts of 151,936 kinds of tokens"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as error:
        serve(**BASE, requests=1, **fields)
    assert isinstance(error.value, ScenarioError) or "draft_model" in str(error.value)
