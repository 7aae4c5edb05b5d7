"""What low-rank adapters (LoRA) add to a step: kernels, their laws, prices of steps, single runs."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest

from hardware.catalog import load_gpu
from hardware.laws.adapters import AdapterSizes, adapter_base_terms
from hardware.laws.terms import time_s, wanted_sms
from hardware.profile import profile_for
from sim import Scenario, simulate
from sim.errors import MemoryShortError
from sim.scenario.memory import memory_need
from sim.scenario.resolved import resolve_scenario
from sim.serving.cost import Batch, Chunk, Cost
from sim.serving.price import StepPrices
from sim.serving.spec import ServeSpec
from sim.serving.stages import stage_prices
from workloads import Layout, Options, build_program, load_model
from workloads.families.adapters import Adapters, adapter_size
from workloads.program import Kernel
from workloads.work import AdapterGemmWork, CollectiveWork

MODEL = "llama3-8b"
COPIES = 32 * 7 * 4  # of one adapter on all seven products of its 32 layers, both halves cleared and written


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
def test_more_adapters_rank_rows_or_slots_are_never_quicker_or_cheaper(gpu: str) -> None:
    """Rows: of as many splits of the depth (fewer from 128 on). Rank: not from 16 to 32 on the way up, where loads are
    no longer masked (test_lora_law.py)."""
    spec, rng = load_gpu(gpu), random.Random(7)
    laws = profile_for(spec).engines["vllm"].adapters

    def cost(rows: int, distinct: int, rank: int, slots: int = 64, **more: Any) -> tuple[float, float]:
        between = 4.0 * more["slices"] * rank + 2.0 * more["width"] * (2 if more["up"] else 1)
        sizes = AdapterSizes(
            rows=rows, distinct=min(distinct, rows), rank=rank, row_bytes=between, slots=slots, **more
        )  # fmt: skip
        terms = adapter_base_terms(laws[sizes.law], sizes, spec)
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
            rng.choice([8, 16, 32, 64]),
        )
        least = cost(rows, distinct, rank, **more)
        others = [
            cost(rows, distinct + rng.randint(1, 9), rank, **more),
            cost(rows + rng.randint(0, 7), distinct, rank, **more),
            cost(rows, distinct, rank, slots=64 + rng.randint(1, 64), **more),
        ]
        if rank != 16 or not more["up"]:
            others.append(cost(rows, distinct, 2 * rank, **more))
        for other in others:
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


@pytest.mark.parametrize(
    ("rows", "others", "adapters"), [(4, 60, 2), (1, 126, 1), (100, 28, 8), (20, 780, 3), (300, 300, 5)]
)
def test_adapters_beside_tokens_that_ask_for_none_are_launched_for_all_of_them(
    rows: int, others: int, adapters: int
) -> None:
    """Parts of a step are the step in one run; and it takes no less than with the adapters of a step of its own rows,
    where the way down is cut as often."""
    found, tokens = prices(), rows + others
    batch = Batch(decoding=32, cached=32 * 900, chunks=(Chunk(tokens - 32, tokens - 32),), ending=1)
    asked = batch._replace(adapted=rows, adapters=adapters)
    whole, exact = found.whole(asked), found.exact(asked)
    assert whole.time_s == pytest.approx(exact.time_s, rel=0.01)
    assert whole.energy_j == pytest.approx(exact.energy_j, rel=0.01)
    beside_s = whole.time_s - found.whole(batch).time_s
    if (rows < 128) == (tokens < 128):
        alone = Batch(decoding=rows, cached=900 * rows)
        with_them = found.whole(alone._replace(adapted=rows, adapters=adapters))
        assert beside_s > with_them.time_s - found.whole(alone).time_s


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


def test_steps_with_more_adapters_of_more_rank_cost_no_less() -> None:
    batch = Batch(decoding=40, cached=40 * 700, chunks=(Chunk(500, 500),), ending=1)

    def cost(adapters: int, rank: int = 16) -> Cost:
        return prices(max_lora_rank=rank).whole(batch._replace(adapted=540, adapters=adapters))

    none = prices().whole(batch)
    assert none == prices(lora_adapters=0, max_loras=1).whole(batch)  # not a bit of it is left
    more = [none, *(cost(adapters) for adapters in (1, 2, 8, 32))]
    for course in (more, [cost(32, rank) for rank in (32, 64, 256)]):
        for less, same in pairwise(course):
            assert less.time_s < same.time_s and less.energy_j < same.energy_j
    # Loads of rank 16 are masked on the way up: where many tokens ask for adapters, 32 takes a step less time, also
    # for blocks without rows (4,096 tokens of eight adapters up to gate and up: 791 us at rank 16, 615 at 64).
    assert 0.84 < cost(32, 32).time_s / more[-1].time_s < 0.88


def test_a_single_step_has_its_adapters_and_their_slots() -> None:
    step = {"model": MODEL, "phase": "decode", "batch": 32, "seq_len": 500, "stack": "vllm"}
    runs = [simulate(**step, **more) for more in ({}, {"lora_adapters": 1}, {"lora_adapters": 32})]
    assert [run.latency_s for run in runs] == sorted(run.latency_s for run in runs)
    one = prices(max_loras=32).whole(Batch(decoding=32, cached=32 * 500, adapted=32, adapters=32))
    assert runs[2].latency_s == pytest.approx(one.time_s, rel=0.01)
    assert any("with layout = adapters was measured" in reason for reason in runs[1].standing.reasons)
    with pytest.raises(MemoryShortError):
        simulate(**(step | {"batch": 128}), lora_adapters=128, max_lora_rank=256)
    room = [
        memory_need(resolve_scenario(Scenario.of(**step, lora_adapters=asked, max_loras=slots))).weight_bytes
        for asked, slots in ((1, None), (1, 8), (8, None))
    ]
    assert room[0] < room[1] == room[2]
    drafted = simulate(**step, lora_adapters=4, speculation="eagle", acceptance=0.5)
    assert drafted.latency_s > simulate(**step, speculation="eagle", acceptance=0.5).latency_s


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_adapters": 4}, "lora_adapters = 4: a sequence asks for one, batch = 2: give at most 2"),
        ({"max_lora_rank": 32}, "max_lora_rank = 32: is of adapters"),
        ({"max_loras": 8}, "max_loras = 8: is of adapters: give lora_adapters"),
        ({"lora_adapters": 2, "max_loras": 1}, "max_loras = 1: a step asks for lora_adapters = 2: give no fewer"),
        ({"lora_adapters": 1, "phase": "train"}, "is for phases that serve, not 'train'"),
        ({"lora_adapters": 1, "tp": 2, "sequence_parallel": True, "phase": "prefill"}, "leave cp and seq"),
        ({"lora_adapters": 1, "tp": 2, "overlap_chunks": 2, "phase": "prefill"}, "known beside whole products"),
        ({"lora_adapters": 1, "model": "bert-large", "phase": "prefill"}, "known for decoders"),
    ],
)  # fmt: skip
def test_steps_refuse_what_nobody_runs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        simulate(**({"model": MODEL, "batch": 2, "seq_len": 64, "phase": "decode"} | fields))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=4, ep=4, ep_mode="all_reduce")])
def test_experts_have_a_matrix_for_each_pair_of_an_adapter_and_an_expert(layout: Layout) -> None:
    """Qwen3-30B-A3B: 128 experts of 768, 8 for each of 32 tokens: 256 rows, of which 233 pairs with 8 adapters."""
    adapters = Adapters(rank=16, modules=("experts",), distinct=8)
    found = kernels(layout, adapters, model="qwen3-30b-a3b")
    works = {k.name: k.work for k in found if isinstance(k.work, AdapterGemmWork)}
    inner, ep = 768 // (1 if layout.ep > 1 else layout.tp), layout.ep
    assert set(works) == {
        "lora_shrink_gate_up_grouped", "lora_expand_gate_up_grouped", "lora_shrink_down_grouped",
        "lora_expand_down_grouped",
    }  # fmt: skip
    down, up = works["lora_shrink_gate_up_grouped"], works["lora_expand_gate_up_grouped"]
    assert (down.width, down.slices, up.width) == (2048, 2, 2 * inner)
    down, up = works["lora_shrink_down_grouped"], works["lora_expand_down_grouped"]
    assert (down.width, down.slices, up.width) == (inner, 1, 2048)
    assert {(one.rows, one.distinct) for one in works.values()} == {(256 // ep, 233 // ep)}
    assert sum(k.name == "lora_sort_rows" for k in found) == 1
    plain = kernels(layout, None, model="qwen3-30b-a3b")
    assert [k for k in found if "lora" not in k.name] == plain
    one = adapter_size(load_model("qwen3-30b-a3b"), layout, range(48), adapters)
    assert one.rank_bytes == 2 * 48 * 128 // ep * 16 * (2 * 2048 + 2 * inner + inner + 2048)
    assert one.copies == 48 * 3 * 4


def test_parts_of_a_step_with_adapters_on_experts_are_the_step_in_one_run() -> None:
    for fields in ({}, {"stack": "paged-kv", "tp": 2}):
        found = prices(model="qwen3-30b-a3b", lora_targets="o_proj,experts", gpu="h200", max_loras=4, **fields)
        for batch in (
            Batch(decoding=12, cached=12 * 900, adapted=12, adapters=4),
            Batch(decoding=5, cached=5 * 2000, chunks=(Chunk(700, 700),), ending=1, adapted=705, adapters=3),
        ):
            whole, exact = found.whole(batch), found.exact(batch)
            assert whole.time_s == pytest.approx(exact.time_s, rel=0.01)
            assert whole.energy_j == pytest.approx(exact.energy_j, rel=0.01)
            assert whole.time_s > 1.02 * found.whole(batch._replace(adapters=0, adapted=0)).time_s


def test_experts_are_refused_where_there_are_none() -> None:
    with pytest.raises(Exception, match="lora_targets: llama3-8b has no product 'experts'"):
        kernels(Layout(), Adapters(rank=16, modules=("experts",)))
    with pytest.raises(
        Exception, match=r"qwen3-30b-a3b has no product 'up_proj' \(those of its routed experts are 'ex"
    ):
        kernels(Layout(), Adapters(rank=16, modules=("up_proj",)), model="qwen3-30b-a3b")


def test_latent_attention_has_them_before_it_and_behind_it() -> None:
    """DeepSeek-V3 on 8: latents of 1,536 and 512 and 64 on every rank, 16 heads of 128 and 64, outputs of 16 x 128."""
    adapters, layout = Adapters(rank=16, distinct=4), Layout(tp=8)
    for phase in ("prefill", "decode"):
        programs = [
            build_program(
                load_model("deepseek-v3"), layout, phase=phase, batch=4, seq_len=256,
                options=Options(stack="paged-kv", layers=1, lm_head=False, adapters=one),
            )
            for one in (adapters, None)
        ]  # fmt: skip
        found, plain = ([k for segment in one.ranks[0].phases[0].segments for k in segment.kernels] for one in programs)
        works = {k.name.split("_", 2)[2]: k.work for k in found if isinstance(k.work, AdapterGemmWork) and k.work.up}
        downs = {
            k.name.split("_", 2)[2]: k.work for k in found if isinstance(k.work, AdapterGemmWork) and not k.work.up
        }
        assert {name: (downs[name].slices, downs[name].width, up.width) for name, up in works.items()} == {
            "latent_down_gemm": (2, 7168, 1536 + 512 + 64), "q_up_gemm": (1, 1536, 16 * 192),
            "o_gemm": (1, 16 * 128, 7168), "gate_up_gemm": (2, 7168, 2 * 18432 // 8),
            "down_gemm": (1, 18432 // 8, 7168),
        }  # fmt: skip
        assert [k for k in found if "lora" not in k.name] == plain
    one = adapter_size(load_model("deepseek-v3"), layout, range(1), adapters)
    assert one.copies == 4 * 7
    assert one.rank_bytes == 2 * 16 * sum(downs[name].slices * downs[name].width + works[name].width for name in works)


def test_parts_of_a_step_with_adapters_on_latents_are_the_step_in_one_run() -> None:
    found = prices(model="deepseek-v3", gpu="h200", tp=8, layers=6, max_loras=4, lora_targets="q_b_proj,o_proj,experts")
    for batch in (
        Batch(decoding=12, cached=12 * 900, adapted=12, adapters=4),
        Batch(decoding=5, cached=5 * 2000, chunks=(Chunk(700, 700),), ending=1, adapted=705, adapters=3),
    ):
        whole, exact = found.whole(batch), found.exact(batch)
        assert whole.time_s == pytest.approx(exact.time_s, rel=0.01)
        assert whole.energy_j == pytest.approx(exact.energy_j, rel=0.01)
    with pytest.raises(Exception, match="lora_targets: llama3-8b has no product 'q_b_proj': it has q_proj"):
        kernels(Layout(), Adapters(rank=16, modules=("q_b_proj",)))
