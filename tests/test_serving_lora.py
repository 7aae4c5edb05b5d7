"""Servers with low-rank adapters (LoRA): where they lie, who waits for whom, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sim.errors import ScenarioError
from sim.serving import ServeSpec, serve
from sim.serving.adapters import own_sizes
from sim.serving.cost import Batch, Chunk
from sim.serving.inflight import Limits, Sequence
from sim.serving.kv import BlockPool
from sim.serving.requests import Request, apart, made, with_adapters
from sim.serving.scheduler import Scheduler
from sim.serving.stages import stage_prices
from tests.test_lora_steps import COPIES, MODEL

ONE_GB = 0.083886080  # rank 16 on all products of Llama 3 8B
LINK, ISSUE_S = 63e9, 12.55e-6
STEPS = Path("records/h200-sxm-141gb/vllm/adapter_steps.jsonl")
LOAD: dict[str, Any] = {"model": MODEL, "requests": 60, "rate_per_s": 20.0, "input_tokens": 300, "output_tokens": 40}


def test_a_lone_request_s_tokens_all_come_with_its_adapter() -> None:
    """Each of its steps costs more than one without, wherever in a range of contexts it stands."""
    one: dict[str, Any] = {"model": MODEL, "requests": 1, "output_tokens": 9, "host": "none"}
    paces = [
        float(serve(**one, input_tokens=tokens, lora_adapters=1).requests["tpot_s"].iloc[0])
        for tokens in (120, 127, 128, 129, 130)
    ]
    plain_s = float(serve(**one, input_tokens=128).requests["tpot_s"].iloc[0])
    assert paces == sorted(paces) and paces[-1] < 1.001 * paces[0]
    assert paces[0] / plain_s == pytest.approx(1.248, abs=0.002)  # by the law of vLLM's own kernels


def test_a_server_whose_requests_ask_for_none_is_the_plain_one() -> None:
    plain, with_slots = serve(**LOAD), serve(**LOAD, lora_adapters=8, lora_share=0.0)
    assert with_slots.requests.drop(columns="adapter").equals(plain.requests)
    assert with_slots.energy_j == plain.energy_j
    assert with_slots.summary["adapters"]["loads"] == 0
    held = [run.summary["memory_bytes_per_gpu"] for run in (plain, with_slots)]
    assert held[1]["weights"] - held[0]["weights"] == pytest.approx(ONE_GB * 1e9)
    assert held[1]["kv_cache"] < held[0]["kv_cache"]


def test_energy_of_requests_and_pauses_is_the_whole() -> None:
    run = serve(**LOAD, lora_adapters=20, max_loras=4, lora_popularity="zipf:1")
    shares = run.requests["prefill_j"].sum() + run.requests["decode_j"].sum()
    assert shares + run.energy_j_by_part["idle"] == pytest.approx(run.energy_j, rel=1e-9)
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)


def test_an_adapter_comes_over_the_host_s_link_once_while_it_keeps_its_slot() -> None:
    one = {"model": MODEL, "input_tokens": 100, "output_tokens": 4, "concurrency": 1, "host": "none"}
    run = serve(**one, requests=30, lora_adapters=6, max_loras=6, seed=3)
    asked = run.requests["adapter"].tolist()
    found = run.summary["adapters"]
    assert found["loads"] == found["asked_for"] == len(set(asked)) == 6
    each_s = max(ONE_GB * 1e9 / LINK, COPIES * ISSUE_S)  # the host issues the copies that move it
    assert found["load_s"] == pytest.approx(6 * each_s, rel=1e-9)
    assert found["load_bytes"] == pytest.approx(6 * ONE_GB * 1e9)
    first = [asked.index(adapter) for adapter in set(asked)]
    waited, others = (
        [ttft for number, ttft in enumerate(run.requests["ttft_s"]) if (number in first) == loaded]
        for loaded in (True, False)
    )
    assert min(waited) - max(others) == pytest.approx(each_s, rel=1e-3)


def test_those_who_decode_see_the_loads_of_others() -> None:
    """All times between tokens together are what passed between first and last tokens."""
    run = serve(**LOAD, lora_adapters=12, max_loras=3)
    gaps_s, counts = run.log.each_gap()
    passed_s = (run.requests["done_s"] - run.requests["first_token_s"]).sum()
    assert (gaps_s * counts).sum() == pytest.approx(passed_s, rel=1e-9)
    assert run.summary["adapters"]["loads"] > 12 and run.summary["preemptions"] == 0


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_slots_forget_the_longest_unused(slots: int) -> None:
    """One request at a time, so that loads are those of a list kept by hand."""
    one = {"model": MODEL, "input_tokens": 50, "output_tokens": 2, "concurrency": 1}
    run = serve(**one, requests=80, lora_adapters=9, max_loras=slots, lora_popularity="zipf:1.1")
    held: list[int] = []
    loads = 0
    for adapter in run.requests["adapter"]:
        loads += adapter not in held
        held = [other for other in held if other != adapter][-(slots - 1) :] if slots > 1 else []
        held.append(adapter)
    assert run.summary["adapters"]["loads"] == loads


@pytest.mark.parametrize("seed", range(4))
def test_no_step_asks_for_more_than_there_are_slots(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        limits=Limits(max_num_seqs=10, max_num_batched_tokens=64, max_loras=2),
        pool=BlockPool(blocks=60, block_tokens=4),
    )
    coming = [
        Request(number=n, arrival_s=float(n), input_tokens=rng.randint(1, 30), output_tokens=rng.randint(1, 20),
                adapter=rng.randint(-1, 4))
        for n in range(60)
    ][::-1]  # fmt: skip
    done: list[int] = []
    passed = False
    while scheduler.busy or coming:
        if coming:
            request = coming.pop()
            scheduler.add(Sequence(request=request, target=request.input_tokens))
        step = scheduler.plan()
        running = [*scheduler.running.values(), *(s for s, _ in step.pieces)]
        assert step.adapters == {s.request.adapter for s in running} - {-1}
        assert step.batch.adapters == len(step.adapters) <= 2
        asked = sum(s.request.adapter >= 0 for s in scheduler.running.values())
        assert step.batch.adapted == asked + sum(n for s, n in step.pieces if s.request.adapter >= 0)
        finished = [s.request.number for s in scheduler.advance(step)[1]]
        passed |= bool(done) and any(number < max(done) for number in finished)
        done += finished
    assert sorted(done) == list(range(60)) and passed


def test_more_slots_keep_nobody_waiting() -> None:
    runs = [serve(**LOAD, lora_adapters=8, max_loras=slots) for slots in (1, 2, 8)]
    queue = [run.requests["queue_s"].mean() for run in runs]
    assert queue == sorted(queue, reverse=True) and queue[0] > 4 * queue[-1]


def test_requests_choose_adapters_by_law() -> None:
    plain = made([0.0] * 20_000, [9] * 20_000, [9] * 20_000)
    drawn = [one.adapter for one in with_adapters(plain, count=4, law="zipf:1", share=0.75, seed=0)]
    assert drawn.count(-1) / 20_000 == pytest.approx(0.25, abs=0.01)
    whole = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for place in range(4):
        assert drawn.count(place) / 20_000 == pytest.approx(0.75 / (place + 1) / whole, abs=0.01)
    even = [one.adapter for one in with_adapters(plain, count=4, law="uniform", share=1.0, seed=0)]
    assert all(even.count(place) / 20_000 == pytest.approx(0.25, abs=0.01) for place in range(4))


def test_a_beginning_is_known_again_under_its_own_adapter_only(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    rows = [
        {"timestamp": 2000 * n, "input_length": 1600, "output_length": 2, "hash_ids": [1, 2, 3], "adapter": adapter}
        for n, adapter in enumerate(["sql", "", "sql", None, "chat", 7])
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    run = serve(model=MODEL, trace=path, lora_adapters=3, max_loras=3)
    assert run.requests["adapter"].tolist() == [0, -1, 0, -1, 1, 2]
    assert run.requests["hit_tokens"].tolist() == [0, 0, 1536, 1536, 0, 0]
    same = apart([Request(number=0, arrival_s=0.0, input_tokens=9, output_tokens=1, prefix=(5, -5))])
    assert same[0].prefix == (5, -5)  # nobody asks for one


def test_a_file_says_who_asks_for_what(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,adapter\n0,10,2,sql\n1,10,2,\n2,10,2,chat\n")
    with pytest.raises(ScenarioError, match=r"lora_adapters = 0: .* ask for 2 \(sql, chat\): give lora_adapters = 2"):
        serve(model=MODEL, trace=path)
    with pytest.raises(ScenarioError, match=r"lora_share = 0\.5 contradicts the column adapter"):
        serve(model=MODEL, trace=path, lora_adapters=2, lora_share=0.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_replicas": 1},
        {"tp": 2, "speculation": "eagle", "acceptance": 0.7},
        {"clock_policy": "slo", "slo_tpot_s": 0.05},
        {"attention": "per_sequence"},
        {"kv_blocks": 200, "preemption": "swap"},
        {"stack": "paged-kv", "model": "qwen3-30b-a3b", "tp": 2},
    ],
)
def test_whatever_else_a_server_does_every_request_is_served(fields: dict[str, Any]) -> None:
    run = serve(**(LOAD | fields), lora_adapters=5, max_loras=2)
    assert bool(run.requests["done_s"].notna().all())
    assert run.summary["adapters"]["loads"] >= 5


def test_replicas_that_die_lose_no_request() -> None:
    run = serve(kills=[(0.5, 0)], **LOAD, replicas=2, lora_adapters=5, max_loras=3)
    assert bool(run.requests["done_s"].notna().all()) and run.requests["moves"].sum() > 0


def test_figures_say_that_nobody_measured_it() -> None:
    data = serve(**(LOAD | {"requests": 4}), lora_adapters=2).summary
    assert data["status"] == "unchecked"
    assert any("lora_adapters" in reason for reason in data["status_reasons"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loras": 4}, "max_loras = 4: is of adapters: give lora_adapters"),
        ({"lora_adapters": 2, "max_lora_rank": 20}, "max_lora_rank = 20: vLLM has slots of 1, 8, 16.*: give 32"),
        ({"lora_adapters": 2, "lora_targets": "q_proj,mlp"}, "lora_targets.1 = 'mlp'"),
        ({"lora_adapters": 2, "lora_popularity": "zipf"}, "lora_popularity = 'zipf': give uniform, or zipf:S"),
        ({"lora_adapters": 2, "sm_partition": "prefill=64,decode=68"}, "lora_adapters = 2 is not known beside sm_part"),
        ({"lora_adapters": 2, "model": "nemotron-h-8b"}, "lora_adapters: known for decoders of queries"),
        ({"lora_adapters": 2, "model": "qwen3-30b-a3b", "lora_targets": "gate_proj"}, "no product 'gate_proj'"),
        ({"lora_adapters": 100_000, "max_lora_rank": 256}, "a node's host has"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        serve(**({"model": MODEL, "requests": 1} | fields))


def test_a_file_whose_column_names_nobody_asks_for_no_adapter(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("arrival_s,input_tokens,output_tokens,adapter\n0,10,2,\n1,10,2,\n")
    run = serve(model=MODEL, trace=str(path), lora_adapters=4)
    assert set(run.requests["adapter"]) == {-1} and run.summary["adapters"]["loads"] == 0
    with pytest.raises(ScenarioError, match=r"lora_share = 0\.5 contradicts the column adapter"):
        serve(model=MODEL, trace=str(path), lora_adapters=4, lora_share=0.5)


def test_kernels_of_adapters_do_not_lend_a_step_its_status() -> None:
    run = serve(model=MODEL, requests=2, input_tokens=10, output_tokens=2, lora_adapters=1)
    assert "no step with adapters was measured" in run.summary["status_reasons"]
    assert not any("kernels of a step: calibrated" in reason for reason in run.summary["status_reasons"])


def test_slots_that_fit_nowhere_name_what_to_lower() -> None:
    with pytest.raises(ScenarioError, match="or lower max_loras, max_lora_rank or max_num_batched_tokens"):
        serve(model=MODEL, requests=1, lora_adapters=3, max_loras=4096, max_lora_rank=512)


# -- stages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
def test_stages_together_hold_and_compute_what_one_group_does(tp: int) -> None:
    specs = [ServeSpec.of(model=MODEL, tp=tp, pp=pp, lora_adapters=4, max_loras=4) for pp in (1, 3)]
    one, many = (own_sizes(spec.group()) for spec in specs)
    assert sum(size.rank_bytes for size in many) == pytest.approx(one[0].rank_bytes)
    assert sum(size.copies for size in many) == one[0].copies
    batch = Batch(decoding=40, cached=40 * 700, chunks=(Chunk(tokens=300, context=500),), adapted=310, adapters=3)
    (whole,), parts = ([prices.whole(batch) for prices in stage_prices(spec, spec.group())] for spec in specs)
    assert sum(part.time_s for part in parts) == pytest.approx(whole.time_s, rel=1e-9)
    assert sum(part.energy_j for part in parts) == pytest.approx(whole.energy_j, rel=1e-9)
    bare = [prices.whole(batch._replace(adapters=0)) for prices in stage_prices(specs[1], specs[1].group())]
    assert all(part.time_s > without.time_s for part, without in zip(parts, bare, strict=True))


def test_each_stage_brings_its_layers_part_before_its_step() -> None:
    one = {"model": MODEL, "input_tokens": 100, "output_tokens": 4, "concurrency": 1, "host": "none", "pp": 2}
    run = serve(**one, requests=30, lora_adapters=6, max_loras=6, seed=3)
    found, asked = run.summary["adapters"], run.requests["adapter"].tolist()
    assert found["loads"] == found["asked_for"] == len(set(asked)) == 6
    assert found["load_bytes"] == pytest.approx(6 * ONE_GB * 1e9)
    each_s = max(ONE_GB * 1e9 / LINK, COPIES * ISSUE_S)
    assert found["load_s"] == pytest.approx(6 * each_s, rel=1e-9)  # half of it on either stage
    first = [asked.index(adapter) for adapter in set(asked)]
    waited, others = (
        [ttft for number, ttft in enumerate(run.requests["ttft_s"]) if (number in first) == loaded]
        for loaded in (True, False)
    )
    assert min(waited) - max(others) == pytest.approx(each_s, rel=1e-3)


@pytest.mark.parametrize(("slots", "pp"), [(1, 2), (2, 2), (3, 4)])
def test_batches_in_flight_ask_for_no_more_than_there_are_slots(slots: int, pp: int) -> None:
    """One that did would find no slot to give up; everything is served, and its joules are accounted for."""
    load = LOAD | {"rate_per_s": 60.0, "length_spread": 0.8, "max_num_batched_tokens": 512}
    run = serve(**load, pp=pp, lora_adapters=9, max_loras=slots, window=(0.0, 100.0))
    assert max(step.batch.adapters for step in run.log.run_steps) <= slots
    assert bool(run.requests["done_s"].notna().all())
    shares = run.requests["prefill_j"].sum() + run.requests["decode_j"].sum()
    assert shares + run.energy_j_by_part["idle"] == pytest.approx(run.energy_j, rel=1e-9)
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)
    fuller = serve(**load, pp=pp, lora_adapters=9, max_loras=9)
    assert fuller.requests["queue_s"].mean() < run.requests["queue_s"].mean()


def test_a_slot_takes_the_host_what_it_took_a_real_one() -> None:
    """The pace is of rank 16; rank 64, four times the bytes, took an eighth longer and is in no coefficient."""
    rows = [json.loads(line) for line in STEPS.read_text(encoding="utf-8").splitlines()]
    took = {row["max_lora_rank"]: row["span_s"] for row in rows if row["kind"] == "vllm_slot"}
    assert took[16] == pytest.approx(COPIES * ISSUE_S, rel=1e-3)
    assert took[64] == pytest.approx(COPIES * ISSUE_S, rel=0.13)
    read = [row["span_s"] for row in rows if row["kind"] == "vllm_adapter_file"]
    assert min(read) > 18 * took[16]  # reading it from a file, which nobody simulates
