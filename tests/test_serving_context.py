"""Context parallelism inside a served replica: who holds which tokens, what ranks exchange, and what is refused."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

import workloads
from sim import simulate
from sim.cli import main
from sim.errors import ScenarioError
from sim.scenario.layout import layout_of
from sim.serving import ServeSpec, serve
from sim.serving.cost import Batch, Chunk
from sim.serving.memory import kv_blocks, stage_needs
from sim.serving.price import StepPrices
from sim.serving.requests import Request, Traffic
from sim.serving.stages import handoffs, stage_machine, stage_prices
from sim.serving.trace import to_trace
from sim.serving.transfers import CacheTransfers, transfer_cost
from traces.write.check import check_trace
from workloads import (
    Layout,
    MemoryLoad,
    Options,
    WorkloadError,
    load_model,
)

LLAMA = load_model("llama3-8b")
LATENT: tuple[dict[str, Any], ...] = (
    {"model": "deepseek-v3", "tp": 8, "dcp": 8, "gpu": "h200", "layers": 8},
    {"model": "deepseek-v3", "tp": 4, "cp": 2, "gpu": "h200", "layers": 4},
)
GATHER: dict[str, Any] = {"cp": 2, "cp_mode": "all_gather"}
GATHERED: tuple[dict[str, Any], ...] = ({"cp": 2}, {"cp": 4, "tp": 2})
# A load whose host adds nothing.
PLAIN: dict[str, Any] = {"model": "llama3-8b", "stack": "paged-kv", "requests": 1, "output_tokens": 4}
KINDS: tuple[dict[str, Any], ...] = (
    *GATHERED,
    {"cp": 2, "cp_mode": "ulysses"},
    {"tp": 2, "cp": 2, "cp_mode": "ulysses"},
    {"tp": 16, "dcp": 2},
)


def prices_of(**fields: Any) -> StepPrices:
    spec = ServeSpec.of(**{"model": "llama3-8b"} | fields)
    (prices,) = stage_prices(spec, spec.group())
    return prices


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "split", "whole"),
    [
        ("llama3-8b", {"cp": 2, "cp_mode": "all_gather"}, {}),
        ("llama3-8b", {"cp": 3, "cp_mode": "all_gather"}, {}),
        ("llama3-8b", {"tp": 2, "cp": 4, "cp_mode": "all_gather"}, {"tp": 2}),
        ("llama3-8b", {"cp": 4, "cp_mode": "ulysses"}, {}),
        ("llama3-8b", {"tp": 16, "dcp": 2}, {"tp": 8}),
        ("llama3-70b", {"tp": 32, "dcp": 4}, {"tp": 8}),
        ("deepseek-v3", {"tp": 8, "dcp": 8}, {"tp": 1}),
        ("deepseek-v3", {"cp": 8, "cp_mode": "all_gather"}, {}),
    ],
)
def test_caches_of_all_ranks_are_the_whole(model: str, split: dict[str, Any], whole: dict[str, Any]) -> None:
    """And those that tensor parallelism alone holds several times are held once."""
    spec = load_model(model)
    held = MemoryLoad(batch=3, context=4800, layers=spec.layers, lm_head=True)
    layouts = [Layout(**one) for one in (split, whole)]
    ours, once = (one.stage_ranks * workloads.memory_need(spec, one, held).kv_bytes for one in layouts)
    assert ours == pytest.approx(once, rel=1e-12)
    weights = [
        workloads.memory_need(spec, Layout(**split | {"cp": 1, "dcp": 1}), held),
        workloads.memory_need(spec, layouts[0], held),
    ]
    assert weights[0].weight_bytes == weights[1].weight_bytes


@pytest.mark.parametrize("fields", [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"tp": 16, "dcp": 2}])
def test_as_many_tokens_more_fit_as_ranks_share_them_out(fields: dict[str, Any]) -> None:
    spec = ServeSpec.of(model="llama3-8b", **fields)
    alone = ServeSpec.of(model="llama3-8b", tp=spec.tp)
    ranks = spec.cp * spec.dcp
    (need,), (whole,) = (stage_needs(one, one.group(), context=16 * ranks) for one in (spec, alone))
    assert need.kv_bytes == pytest.approx(whole.kv_bytes / ranks)
    blocks, before = (
        kv_blocks(one, one.group(), prices_of(**one.model_dump(exclude_unset=True)).machine) for one in (spec, alone)
    )
    assert spec.own_block_tokens(spec.group()) == 16 * ranks
    room = 0.9 * 80e9 - need.weight_bytes - need.activation_bytes
    assert blocks == int(room / need.kv_bytes)
    assert 0.98 < blocks / before < 1.02  # blocks are longer; weights and activations hardly differ


# -- prices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [*KINDS, *LATENT])
def test_parts_of_a_step_are_the_engine_s_step(fields: dict[str, Any]) -> None:
    prices = prices_of(**fields)
    rng = random.Random(7)
    for _ in range(4):
        decoding = rng.choice((0, 1, 17, 120))
        chunks = tuple(
            Chunk(tokens=tokens, context=tokens + rng.choice((0, 0, 777, 9000)))
            for tokens in rng.sample(range(2, 2500), rng.choice((0, 1, 3)) if decoding else 2)
        )
        batch = Batch(decoding=decoding, cached=decoding * rng.randint(50, 9000), chunks=chunks, ending=len(chunks[1:]))
        exact, quick = prices.exact(batch), prices.step(batch).whole
        assert quick.time_s == pytest.approx(exact.time_s, rel=0.01)
        assert quick.energy_j == pytest.approx(exact.energy_j, rel=0.01)


def test_without_it_a_server_is_the_plain_one() -> None:
    load: dict[str, Any] = {
        "model": "llama3-8b",
        "requests": 30,
        "rate_per_s": 8.0,
        "input_tokens": 900,
        "output_tokens": 30,
    }
    plain, same = serve(**load), serve(**load, cp=1, dcp=1, cp_mode="all_gather")
    assert plain.summary == same.summary and plain.requests.equals(same.requests)
    assert ServeSpec.of(**load).group() == ServeSpec.of(**load, cp=1).group()
    assert layout_of(ServeSpec.of(**load).group()) == Layout()


@pytest.mark.parametrize("mode", ["all_gather", "ulysses"])
def test_a_long_prompt_gets_quicker_with_every_rank(mode: str) -> None:
    first = [
        float(
            serve(**PLAIN | {"input_tokens": 32_000, "cp": cp} | ({"cp_mode": mode} if cp > 1 else {}))
            .requests["ttft_s"]
            .iloc[0]
        )
        for cp in (1, 2, 4, 8)
    ]
    ratios = [one / other for one, other in pairwise(first)]
    assert all(1.3 < ratio < 2.0 for ratio in ratios)


def test_a_long_context_decodes_quicker_on_more_ranks_and_a_short_one_slower() -> None:
    long, short = (
        [prices_of(stack="paged-kv", cp=cp).whole(Batch(decoding=32, cached=32 * tokens)).time_s for cp in (1, 2, 4)]
        for tokens in (32_000, 100)
    )
    assert long == sorted(long, reverse=True) and long[0] > 2 * long[2]
    assert short == sorted(short) and short[2] < 1.5 * short[0]


@pytest.mark.parametrize("fields", KINDS)
def test_energy_of_requests_and_pauses_is_the_whole(fields: dict[str, Any]) -> None:
    load: dict[str, Any] = {
        "requests": 40,
        "rate_per_s": 20.0,
        "input_tokens": 700,
        "output_tokens": 40,
        "length_spread": 0.8,
    }
    run = serve(model="llama3-8b", **load, **fields)
    shares = run.requests["prefill_j"].sum() + run.requests["decode_j"].sum()
    assert shares + run.energy_j_by_part["idle"] == pytest.approx(run.energy_j, rel=1e-9)
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)
    table = run.stretches
    seconds = table["end_s"] - table["start_s"]
    assert (table["power_w_per_gpu"] * seconds).sum() * run.spec.gpus == pytest.approx(run.energy_j, rel=1e-9)
    assert run.summary["status"] == "unchecked"
    assert any("a cache of" in reason for reason in run.summary["status_reasons"])


@pytest.mark.parametrize("fields", KINDS)
def test_what_ranks_compute_is_what_one_would(fields: dict[str, Any]) -> None:
    """FLOPs of prompts; a rank of gathered keys has every sequence that decodes."""
    load: dict[str, Any] = {
        "model": "llama3-8b",
        "requests": 3,
        "input_tokens": 4000,
        "output_tokens": 2,
        "rate_per_s": 1.0,
    }
    alone = serve(**load, tp=fields.get("tp", 1)).utilisation["flops"]
    assert serve(**load, **fields).utilisation["flops"] == pytest.approx(alone, rel=0.01)
    swapped = serve(**load | {"output_tokens": 200}, cp=2, cp_mode="ulysses").utilisation["flops"]
    assert swapped == pytest.approx(serve(**load | {"output_tokens": 200}).utilisation["flops"], rel=0.08)


# -- beside other things -----------------------------------------------------------------------------------------


def test_memory_that_runs_out_loses_nothing() -> None:
    load: dict[str, Any] = {
        "requests": 40,
        "rate_per_s": 50.0,
        "input_tokens": 100,
        "output_tokens": 120,
        "length_spread": 0.5,
    }
    for preemption in ("recompute", "swap"):
        run = serve(model="llama3-8b", cp=2, **load, kv_blocks=40, preemption=preemption)
        assert run.summary["preemptions"] > 0 and bool(run.requests["done_s"].notna().all())
        assert run.summary["most_blocks"] <= 40


def test_beginnings_are_known_again_in_blocks_of_all_ranks() -> None:
    prefix = (1, 2, 3, 4)
    asked = [
        Request(number=n, arrival_s=float(n), input_tokens=2200, output_tokens=4, prefix=prefix, block_tokens=512)
        for n in range(2)
    ]
    spec = ServeSpec.of(model="llama3-8b", cp=4, requests=2)
    run = serve(spec, traffic=Traffic(requests=asked))
    assert run.requests["hit_tokens"].tolist() == [0, 2048]
    with pytest.raises(
        ScenarioError, match="block_tokens = 256 on each of 4 ranks: must divide the trace's blocks of 512"
    ):
        serve(ServeSpec.of(model="llama3-8b", cp=4, requests=2, block_tokens=256), traffic=Traffic(requests=asked))


def test_prompts_on_ranks_of_their_own_hand_over_the_whole_cache() -> None:
    fields: dict[str, Any] = {"model": "llama3-8b", "prefill_replicas": 1, "requests": 6, "input_tokens": 6000}
    for more in ({"prefill_cp": 4}, {"cp": 2}, {"prefill_cp": 2, "cp_mode": "ulysses"}):
        spec = ServeSpec.of(**fields, **more)
        moved = CacheTransfers(env=None, spec=spec)  # type: ignore[arg-type]
        assert spec.gpus == (more.get("prefill_cp") or spec.cp) + spec.cp
        _, one_way = moved.cost(6000, 0, 1)
        ways = min(spec.gpus_of(0), spec.gpus_of(1))
        assert one_way * ways == pytest.approx(32 * 2 * 8 * 128 * 2 * 6000)
        assert transfer_cost(spec, 6000).time_s > 0
    run, plain = (serve(**fields, **more) for more in ({"prefill_cp": 4}, {}))
    assert run.spec.roles == "1 x tp 1 cp 4 for prompts + 1 x tp 1 for decoding"
    assert run.requests["ttft_s"].mean() < 0.5 * plain.requests["ttft_s"].mean()
    assert run.requests["tpot_s"].median() == pytest.approx(plain.requests["tpot_s"].median(), rel=0.02)


@pytest.mark.parametrize("fields", [{"cp": 2}, {"tp": 2, "cp": 2}, {"cp": 2, "cp_mode": "ulysses"}])
def test_stages_hand_over_a_rank_s_own_tokens(fields: dict[str, Any]) -> None:
    spec = ServeSpec.of(**PLAIN, pp=2, input_tokens=1000, **fields)
    run, stages = serve(spec), stage_prices(spec, spec.group())
    hand = handoffs(spec, spec.group(), 0)
    batch = Batch(chunks=(Chunk(tokens=1000, context=1000),), ending=1)
    taken = sum(one.whole(batch).time_s for one in stages) + hand.cost(500, 0).time_s
    assert run.requests["ttft_s"].iloc[0] == pytest.approx(taken, rel=1e-3)
    assert stage_machine(spec.group()).world == spec.tp * 2
    assert run.energy_j == pytest.approx(float(run.stretches["energy_j"].sum()), rel=1e-9)


@pytest.mark.parametrize("speculation", ["eagle", "ngram"])
def test_drafts_are_checked_over_a_spread_cache(speculation: str) -> None:
    load: dict[str, Any] = {
        "model": "llama3-8b",
        "concurrency": 4,
        "requests": 12,
        "input_tokens": 4000,
        "output_tokens": 60,
    }
    drafts = {"speculation": speculation, "acceptance": 0.8}
    for fields in ({"cp": 2}, {"cp": 2, "cp_mode": "ulysses"}, {"tp": 16, "dcp": 2}):
        run, plain = serve(**load, **fields, **drafts), serve(**load, **fields)
        assert run.summary["tokens_per_step"] == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3, rel=0.1)
        assert run.requests["tpot_s"].mean() < plain.requests["tpot_s"].mean()


@pytest.mark.parametrize("fields", [*GATHERED, {"cp": 2, "cp_mode": "ulysses"}])
def test_adapters_see_a_rank_s_own_tokens(fields: dict[str, Any]) -> None:
    adapters: dict[str, Any] = {"lora_adapters": 4, "max_loras": 4}
    prices, plain = prices_of(**fields, **adapters), prices_of(**fields)
    batch = Batch(decoding=6, cached=6 * 900, chunks=(Chunk(640, 640),), ending=1, adapted=646, adapters=3)
    assert prices.programs.own_adapted(batch) == prices.programs.own_tokens(batch)
    exact, quick = prices.exact(batch), prices.step(batch).whole
    assert quick.time_s == pytest.approx(exact.time_s, rel=0.01)
    added = [quick.time_s - plain.step(batch._replace(adapters=0, adapted=0)).whole.time_s]
    alone, bare = prices_of(tp=fields.get("tp", 1), **adapters), prices_of(tp=fields.get("tp", 1))
    added.append(alone.step(batch).whole.time_s - bare.step(batch._replace(adapters=0, adapted=0)).whole.time_s)
    assert 0 < added[0] < added[1]  # fewer rows of the same adapters
    run = serve(
        model="llama3-8b", requests=12, rate_per_s=20.0, input_tokens=300, output_tokens=20, **fields, **adapters
    )
    assert run.summary["adapters"]["load_bytes"] == run.spec.gpus * run.summary["adapters"]["loads"] * (
        run.summary["adapters"]["bytes_per_gpu"] / 4
    )
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)


def test_the_trace_shows_what_ranks_exchange() -> None:
    run = serve(model="llama3-8b", cp=2, requests=3, input_tokens=500, output_tokens=10, window=(0.0, 30.0))
    trace = to_trace(run)
    names = {kind.name for kind in trace.kinds if kind.category == "kernel"}
    assert {"all_gather_lse", "all_reduce_out", "all_gather_kv", "all_gather_hidden"} <= {
        n.split(" ")[0] for n in names
    }
    check_trace(trace)


def test_experts_of_each_rank_see_its_own_tokens() -> None:
    run = serve(model="qwen3-30b-a3b", tp=2, cp=2, requests=8, input_tokens=3000, output_tokens=10, rate_per_s=4.0)
    assert run.summary["stack"] == "vllm" and run.summary["gpus"] == 4
    assert run.energy_j == pytest.approx(float(run.stretches["energy_j"].sum()), rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cp_mode": "ulysses"}, "cp_mode = ulysses: is of ranks that share tokens: give cp of at least 2"),
        ({"cp": 2, "cp_mode": "zigzag"}, "cp_mode = 'zigzag': input should be 'all_gather' or 'ulysses'"),
        ({"tp": 16, "cp": 2, "dcp": 2}, "cp = 2 with dcp = 2: both spread caches: use one of them"),
        ({"tp": 8, "dcp": 2}, "dcp = 2: with tp = 8, 1 rank holds each of the 8 key/value heads of llama3-8b: use 1"),
        ({"tp": 32, "dcp": 3}, "dcp = 3: with tp = 32, 4 ranks hold each of the 8 key/value heads of .*: use 1, 2, 4"),
        ({"cp": 3, "cp_mode": "ulysses"}, "cp = 3 does not divide the 32 query heads of a rank of llama3-8b"),
        (
            {"model": "deepseek-v3", "cp": 2, "gpu": "h200", "tp": 8, "cp_mode": "ulysses"},
            "cp_mode = 'ulysses': the latents of deepseek-v3 have no heads to exchange: use cp_mode = 'all_gather'",
        ),
        ({"model": "llava-1.5-7b", "cp": 2, "images": 1}, "images: not known beside cp: leave one of them out"),
        ({"prefill_cp": 2}, "prefill_cp = 2: is of replicas for prompts: give prefill_replicas"),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ScenarioError, WorkloadError), match=message):
        serve(**{"model": "llama3-8b", "requests": 1} | fields)


def test_names_of_engines_lead_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    named = (("--prefill-context-parallel-size", "--cp"), ("--decode-context-parallel-size", "--dcp"))
    for theirs, ours in named:
        with pytest.raises(SystemExit) as stop:
            main(["serve", "llama3-8b", theirs, "2"])
        assert stop.value.code == 2
        assert f"it is {ours} here" in capsys.readouterr().err


def test_a_server_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt of 16,000 tokens, and 20 to generate, on two ranks."""
    asked = ["--requests", "1", "--input-tokens", "16000", "--output-tokens", "20"]
    main(["serve", "llama3-8b", "--cp", "2", *asked])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "llama3-8b in bf16, served on 2 x h100-sxm-80gb (1 x tp 1 cp 2), least_loaded"
    assert "  KV cache of a replica    843,328 tokens" in lines
    (first,) = (line for line in lines if line.startswith("│ time to first token"))
    assert first == "│ time to first token   │ 256.7 │ 256.7 │ 256.7 │ 256.7 │"
    main(["serve", "llama3-8b", "--json", *asked])
    alone = json.loads(capsys.readouterr().out)
    assert round(1e3 * alone["ttft_s"]["mean"], 1) == 459.0


# -- single steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [*GATHERED, {"tp": 16, "dcp": 2}])
def test_a_single_step_is_a_server_s(fields: dict[str, Any]) -> None:
    """In kernels; and in time, where no limiter minds it, less the choice of tokens."""
    prices = prices_of(stack="paged-kv", **fields)
    alone: dict[str, Any] = fields if "dcp" in fields else {"cp_mode": "all_gather"} | fields
    decode, prompt = Batch(decoding=24, cached=24 * 3000), Batch(chunks=(Chunk(1800, 1800),), ending=1)
    for work, single in (
        (decode, {"phase": "decode", "batch": 24, "seq_len": 3000}),
        (prompt, {"phase": "prefill", "batch": 1, "seq_len": 1800}),
    ):
        step, ours = (
            [(s.repeat, s.kernels) for s in program.ranks[1].phases[0].segments]
            for program in (
                prices.programs.step(work),
                workloads.build_spread(LLAMA, Layout(**alone), options=Options(stack="paged-kv"), **single),
            )
        )
        assert step == ours
    run = simulate(model="llama3-8b", stack="paged-kv", phase="decode", batch=24, seq_len=3000, **alone)
    assert run.latency_s == pytest.approx(prices.exact(decode).time_s - prices.drawing(decode).time_s, rel=1e-3)


@pytest.mark.parametrize("cp", [2, 4])
def test_gathered_keys_take_what_a_balanced_ring_takes(cp: int) -> None:
    """Of a long prompt most is attention, which both share out evenly; rings of ours were measured."""
    prompt: dict[str, Any] = {"model": "llama3-8b", "phase": "prefill", "seq_len": 32_000, "cp": cp}
    gathered, ring = (simulate(**prompt, cp_mode=mode).latency_s for mode in ("all_gather", "zigzag"))
    assert gathered == pytest.approx(ring, rel=0.03)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phase": "generate", "output_len": 3}, "cp_mode = 'all_gather' is for phase 'prefill' or 'decode'"),
        ({"phase": "train"}, "cp_mode = 'all_gather' is for phase 'prefill' or 'decode'"),
        ({"phase": "decode", "pp": 2}, "pp: not known beside cp_mode = 'all_gather': leave one of them out"),
        ({"phase": "decode", "batch": 4, "dp": 2}, "leave dp at 1"),
        ({"phase": "prefill", "tp": 2, "overlap_chunks": 2}, "overlap: not known beside cp_mode = 'all_gather'"),
    ],
)
def test_single_steps_refuse_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ScenarioError, WorkloadError), match=message):
        simulate(model="llama3-8b", **GATHER, **fields)
