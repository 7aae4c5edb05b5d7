"""Low-rank adapters (LoRA): what they add to a step, where they lie, and who waits for whom."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hardware.catalog import load_gpu
from hardware.laws.adapters import AdapterSizes, adapter_base_terms
from hardware.laws.terms import time_s, wanted_sms
from hardware.profile import profile_for
from sim import simulate
from sim.errors import MemoryShortError, ScenarioError
from sim.serving import serve
from sim.serving.cost import Batch, Chunk, Cost
from sim.serving.inflight import Limits, Sequence
from sim.serving.kv import BlockPool
from sim.serving.price import StepPrices
from sim.serving.requests import Request, apart, made, with_adapters
from sim.serving.scheduler import Scheduler
from sim.serving.spec import ServeSpec
from sim.serving.stages import stage_prices
from workloads import Layout, Options, build_program, load_model
from workloads.families.adapters import Adapters, adapter_size
from workloads.program import Kernel
from workloads.work import AdapterGemmWork, CollectiveWork

MODEL = "llama3-8b"
ONE_GB = 0.083886080  # rank 16 on all products of Llama 3 8B
LINK, ISSUE_S, COPIES = 63e9, 2.6875264822142025e-05, 32 * 7 * 4
LOAD: dict[str, Any] = {"model": MODEL, "requests": 60, "rate_per_s": 20.0, "input_tokens": 300, "output_tokens": 40}


def kernels(layout: Layout, adapters: Adapters | None, model: str = MODEL) -> list[Kernel]:
    options = Options(stack="vllm", layers=1, lm_head=False, adapters=adapters)
    program = build_program(load_model(model), layout, phase="decode", batch=32, seq_len=500, options=options)
    return [k for phase in program.ranks[0].phases for segment in phase.segments for k in segment.kernels]


def prices(**fields: Any) -> StepPrices:
    spec = ServeSpec.of(**({"model": MODEL, "lora_adapters": 64, "max_loras": 64} | fields))
    return stage_prices(spec, spec.group())[0]


@pytest.mark.parametrize("tp", [1, 4])
def test_a_product_s_adapters_are_two_kernels_split_as_it_is(tp: int) -> None:
    """The way down of what is split by columns is whole on every rank, and no collective comes in."""
    found = kernels(Layout(tp=tp), Adapters(rank=16, distinct=8))
    works = {k.name: k.work for k in found if isinstance(k.work, AdapterGemmWork)}
    sides = {
        "qkv": (4096, 6144 // tp), "o": (4096 // tp, 4096), "gate_up": (4096, 28672 // tp), "down": (14336 // tp, 4096),
    }  # fmt: skip
    for name, (depth, columns) in sides.items():
        down, up = works[f"lora_shrink_{name}_gemm"], works[f"lora_expand_{name}_gemm"]
        slices = {"qkv": 3, "gate_up": 2}.get(name, 1)
        assert (down.width, up.width, down.slices) == (depth, columns, slices)
        assert (down.weights, up.weights) == (8 * 16 * slices * depth, 8 * 16 * columns)
        assert (down.flops, up.flops) == (2 * 32 * 16 * slices * depth, 2 * 32 * 16 * columns)
    assert len(works) == 8
    plain = kernels(Layout(tp=tp), None)
    assert [k for k in found if "lora" not in k.name] == plain
    assert sum(isinstance(k.work, CollectiveWork) for k in found) == sum(
        isinstance(k.work, CollectiveWork) for k in plain
    )
    one = adapter_size(load_model(MODEL), Layout(tp=tp), range(32), Adapters(rank=16))
    assert one.rank_bytes == 2 * 32 * 16 * sum(
        {"qkv": 3, "gate_up": 2}.get(name, 1) * depth + columns for name, (depth, columns) in sides.items()
    )
    assert one.copies == COPIES


def test_products_that_were_not_asked_for_have_none() -> None:
    found = kernels(Layout(), Adapters(rank=16, modules=("q_proj", "o_proj")))
    assert {k.name for k in found if "lora_expand" in k.name} == {"lora_expand_qkv_gemm", "lora_expand_o_gemm"}
    routed = kernels(Layout(), Adapters(rank=16), model="qwen3-30b-a3b")
    assert {k.name for k in routed if "lora_expand" in k.name} == {"lora_expand_qkv_gemm", "lora_expand_o_gemm"}


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb"])
def test_more_adapters_rank_or_rows_are_never_quicker_or_cheaper(gpu: str) -> None:
    spec, rng = load_gpu(gpu), random.Random(7)
    law = profile_for(spec).engines["vllm"].routed["bf16"]

    def cost(rows: int, distinct: int, rank: int, **more: Any) -> tuple[float, float]:
        between = 4.0 * more["slices"] * rank + 2.0 * more["width"] * (2 if more["up"] else 1)
        sizes = AdapterSizes(rows=rows, distinct=min(distinct, rows), rank=rank, row_bytes=between, **more)
        terms = adapter_base_terms(law, sizes, spec)
        sms = wanted_sms(terms, float(spec.sms))
        seconds = time_s(terms, sms=sms, sm_clock_hz=spec.max_clock_hz)
        return seconds, terms.core_energy_j + terms.hbm_energy_j + terms.sm_power_w * sms / spec.sms * seconds

    for _ in range(300):
        more = {
            "slices": rng.choice([1, 2, 3]),
            "width": rng.choice([512, 4096, 14336, 28672]),
            "up": rng.random() < 0.5,
        }
        rows, distinct, rank = (
            rng.choice([1, 5, 31, 32, 33, 120, 700, 8192]),
            rng.randint(1, 64),
            rng.choice([8, 16, 64]),
        )
        least = cost(rows, distinct, rank, **more)
        for other in (cost(rows, distinct + rng.randint(1, 9), rank, **more), cost(rows, distinct, 2 * rank, **more)):
            assert all(a <= b * (1 + 1e-12) for a, b in zip(least, other, strict=True)), (
                rows,
                distinct,
                rank,
                more,
                least,
                other,
            )


def test_parts_of_a_step_are_the_step_in_one_run() -> None:
    for found in (prices(), prices(tp=2, max_lora_rank=64, lora_targets="qkv_proj,down_proj")):
        for batch in (
            Batch(decoding=12, cached=12 * 900, adapted=12, adapters=5),
            Batch(decoding=5, cached=5 * 2000, chunks=(Chunk(300, 300),), ending=1, adapted=303, adapters=3),
            Batch(chunks=(Chunk(512, 1024), Chunk(64, 64)), ending=1, adapted=64, adapters=1),
        ):
            parts, whole, exact = found.step(batch).whole, found.whole(batch), found.exact(batch)
            assert parts.time_s == pytest.approx(whole.time_s, rel=1e-12)
            assert parts.energy_j == pytest.approx(whole.energy_j, rel=1e-12)
            assert whole.time_s == pytest.approx(exact.time_s, rel=0.01)
            assert whole.energy_j == pytest.approx(exact.energy_j, rel=0.01)


@pytest.mark.parametrize("fields", [{}, {"speculation": "eagle", "acceptance": 0.5}, {"attention": "per_sequence"}])
def test_a_step_costs_the_same_whatever_was_priced_before(fields: dict[str, Any]) -> None:
    """Steps that only decode are remembered by what they are: adapters are part of it."""
    rng = random.Random(4)
    found, fresh = prices(**fields), prices(**fields)
    for _ in range(300):
        decoding, adapters = rng.choice((1, 2, 9)), rng.choice((0, 0, 1, 2))
        adapters = min(adapters, decoding)
        chunks = rng.choice(((), (), (), (Chunk(64, 64),)))
        cached = decoding * rng.randrange(500, 700)
        batch = Batch(decoding, cached, cached, chunks, 0, found.each * rng.randint(adapters, decoding), adapters)
        batch = batch if adapters else batch._replace(adapted=0)
        target_w = rng.choice((math.inf, 600.0, 590.0, 400.0))
        whole, parts = found.whole(batch, target_w), fresh.step(batch, target_w).whole
        assert whole.time_s == pytest.approx(parts.time_s, rel=1e-9), batch
        assert whole.energy_j == pytest.approx(parts.energy_j, rel=1e-9), batch


def test_a_lone_request_s_tokens_all_come_with_its_adapter() -> None:
    """Each of its steps costs more than one without, wherever in a range of contexts it stands."""
    one: dict[str, Any] = {"model": MODEL, "requests": 1, "output_tokens": 9}
    paces = [
        float(serve(**one, input_tokens=tokens, lora_adapters=1).requests["tpot_s"].iloc[0])
        for tokens in (120, 127, 128, 129, 130)
    ]
    plain_s = float(serve(**one, input_tokens=128).requests["tpot_s"].iloc[0])
    assert paces == sorted(paces) and paces[0] > 1.3 * plain_s and paces[-1] < 1.001 * paces[0]


def test_steps_with_more_adapters_of_more_rank_cost_no_less() -> None:
    batch = Batch(decoding=40, cached=40 * 700, chunks=(Chunk(500, 500),), ending=1)

    def cost(adapters: int, rank: int = 16) -> Cost:
        return prices(max_lora_rank=rank).whole(batch._replace(adapted=540, adapters=adapters))

    none = prices().whole(batch)
    assert none == prices(lora_adapters=0, max_loras=1).whole(batch)  # not a bit of it is left
    more = [none, *(cost(adapters) for adapters in (1, 2, 8, 32)), *(cost(32, rank) for rank in (32, 64, 256))]
    for less, same in pairwise(more):
        assert less.time_s < same.time_s and less.energy_j < same.energy_j


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


def test_a_single_step_has_its_adapters_and_their_slots() -> None:
    step = {"model": MODEL, "phase": "decode", "batch": 32, "seq_len": 500, "stack": "vllm"}
    runs = [simulate(**step, **more) for more in ({}, {"lora_adapters": 1}, {"lora_adapters": 32})]
    assert [run.latency_s for run in runs] == sorted(run.latency_s for run in runs)
    one = prices().whole(Batch(decoding=32, cached=32 * 500, adapted=32, adapters=32))
    assert runs[2].latency_s == pytest.approx(one.time_s, rel=0.01)
    assert any("lora_adapters" in reason for reason in runs[1].standing.reasons)
    with pytest.raises(MemoryShortError):
        simulate(**(step | {"batch": 128}), lora_adapters=128, max_lora_rank=256)
    drafted = simulate(**step, lora_adapters=4, speculation="eagle", acceptance=0.5)
    assert drafted.latency_s > simulate(**step, speculation="eagle", acceptance=0.5).latency_s


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
        ({"lora_adapters": 2, "pp": 2}, "pp = 2 is not known beside lora_adapters"),
        ({"lora_adapters": 2, "sm_partition": "prefill=64,decode=68"}, "lora_adapters = 2 is not known beside sm_part"),
        ({"lora_adapters": 2, "model": "nemotron-h-8b"}, "lora_adapters: known for decoders of queries"),
        ({"lora_adapters": 2, "model": "qwen3-30b-a3b", "lora_targets": "gate_proj"}, "no product 'gate_proj'"),
        ({"lora_adapters": 100_000, "max_lora_rank": 256}, "a node's host has"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        serve(**({"model": MODEL, "requests": 1} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_adapters": 4}, "lora_adapters = 4: a sequence asks for one, batch = 2: give at most 2"),
        ({"max_lora_rank": 32}, "max_lora_rank = 32: is of adapters"),
        ({"lora_adapters": 1, "phase": "train"}, "is for phases that serve, not 'train'"),
        ({"lora_adapters": 1, "tp": 2, "sequence_parallel": True, "phase": "prefill"}, "leave cp and seq"),
        ({"lora_adapters": 1, "tp": 2, "overlap_chunks": 2, "phase": "prefill"}, "known beside whole products"),
        ({"lora_adapters": 1, "model": "bert-large", "phase": "prefill"}, "known for decoders"),
    ],
)  # fmt: skip
def test_steps_refuse_what_nobody_runs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        simulate(**({"model": MODEL, "batch": 2, "seq_len": 64, "phase": "decode"} | fields))


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
