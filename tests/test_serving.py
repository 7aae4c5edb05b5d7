"""Serving: theory where theory knows the answer, conservation where it does not."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from sim.errors import ScenarioError
from sim.pages.served import served_page
from sim.scenario.machine import machine_of
from sim.scenario.spec import Scenario
from sim.serving import ServeResult, ServeSpec, serve
from sim.serving.cost import Batch, Chunk
from sim.serving.price import StepPrices
from sim.serving.records import Log
from sim.serving.report import print_summary
from sim.serving.request_files import read_traffic
from sim.serving.requests import arrivals
from sim.serving.trace import to_trace
from traces.write.check import check_trace

SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[2] / "shared"))


def requests_folder() -> Path:
    folder = SHARED / "public" / "requests"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: set WATTLINE_SHARED to the folder that holds public/")
    return folder


def prices_of(**fields: object) -> StepPrices:
    scenario = Scenario.of(phase="decode", **fields)
    return StepPrices(scenario=scenario, machine=machine_of(scenario))


def random_batches(seed: int, count: int) -> list[tuple[Batch, float]]:
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        sequences = rng.choice([0, 1, rng.randint(1, 64), rng.randint(1, 256)])
        chunks = []
        for _ in range(rng.choice([0, 0, 1, 2, 3])):
            tokens = rng.choice([512, rng.randint(1, 2048), 2048])
            chunks.append(Chunk(tokens=tokens, context=tokens + rng.choice([0, 512, rng.randint(0, 8000)])))
        if not sequences and not chunks:
            continue
        batch = Batch(
            decoding=sequences,
            cached=sequences * rng.randint(1, 8000),
            chunks=tuple(chunks),
            ending=rng.randint(0, len(chunks)),
        )
        found.append((batch, rng.choice([float("inf"), rng.uniform(450.0, 1018.0)])))
    return found


@pytest.mark.parametrize(
    ("count", "fields"),
    [
        (120, {"model": "llama3-8b"}),
        (50, {"model": "llama3-70b", "tp": 4}),
        (30, {"model": "qwen3-30b-a3b", "tp": 2, "ep": 2, "ep_mode": "all_reduce"}),
    ],
)
def test_step_prices_are_within_one_percent_of_the_engine(count: int, fields: dict[str, object]) -> None:
    prices = prices_of(**fields)
    for batch, target_w in random_batches(7, count):
        exact, quick = prices.exact(batch, target_w), prices.step(batch, target_w).whole
        assert quick.time_s == pytest.approx(exact.time_s, rel=0.01), (batch, target_w)
        assert quick.energy_j == pytest.approx(exact.energy_j, rel=0.01), (batch, target_w)


def test_one_prompt_at_a_time_waits_as_a_queue_of_constant_service_does() -> None:
    """Poisson arrivals, one server, constant service: Pollaczek-Khinchine says rho D / (2 (1 - rho))."""
    clock = {"model": "llama3-8b", "sm_clock_mhz": 1200, "max_num_seqs": 1, "input_tokens": 512, "output_tokens": 1}
    clock |= {"host": "none"}
    service_s = float(serve(requests=1, **clock).requests["e2e_s"].iloc[0])
    rho = 0.5
    run = serve(requests=20_000, rate_per_s=rho / service_s, seed=3, **clock)
    waits = run.requests["queue_s"]
    assert waits.mean() == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.02)
    at, free_s = run.requests["arrival_s"].to_numpy(), 0.0
    for arrival_s, wait_s in zip(at[:2000], waits[:2000], strict=True):  # Lindley, request by request
        assert wait_s == pytest.approx(max(0.0, free_s - arrival_s), abs=1e-9)
        free_s = max(free_s, arrival_s) + service_s


def test_a_closed_loop_goes_round_in_the_time_of_its_steps() -> None:
    """Eight equal requests march in step: a round is one prompt step and the decode steps, one after the other."""
    load = {"concurrency": 8, "requests": 80, "input_tokens": 100, "output_tokens": 50, "sm_clock_mhz": 1200}
    run = serve(model="llama3-8b", stack="paged-kv", **load)
    prices = prices_of(model="llama3-8b", stack="paged-kv", sm_clock_mhz=1200)
    prompt = Batch(chunks=(Chunk(tokens=100, context=100),) * 8, ending=8)
    steps = [prompt] + [Batch(decoding=8, cached=8 * (100 + i)) for i in range(49)]
    round_s = sum(prices.exact(step).time_s for step in steps)
    assert run.summary["requests_per_s"] == pytest.approx(8 / round_s, rel=0.02)
    little = run.summary["requests_per_s"] * run.summary["e2e_s"]["mean"]
    assert little == pytest.approx(8, rel=0.02)


def test_times_between_tokens_are_laid_out_step_by_step() -> None:
    log = Log()
    assert [column.tolist() for column in log.each_gap()] == [[], []]
    log.gap(0.5, 3)
    log.gaps.append((0.25, 0.125, 3, 2))  # three steps, each an eighth of a second longer than the one before
    assert [column.tolist() for column in log.each_gap()] == [[0.5, 0.25, 0.375, 0.5], [3, 2, 2, 2]]


def conserved(run: ServeResult) -> None:
    """Every request is done once, every token has its time, every joule its place."""
    table, log = run.requests, run.log
    assert (table["done_s"] >= table["first_token_s"]).all()
    assert (table["first_token_s"] > table["arrival_s"]).all()
    assert int(log.each_gap()[1].sum()) + len(table) == table["output_tokens"].sum()
    assert table["prefill_j"].sum() == pytest.approx(log.prefill_j, rel=1e-9)
    steps_j = sum(stretch.energy_j for stretch in log.stretches)
    assert steps_j + log.transfer_j == pytest.approx(run.energy_j, rel=1e-9)
    assert sum(run.summary["energy_j_by_part"].values()) == pytest.approx(run.summary["energy_j"], rel=1e-9)
    assert table["transfer_j"].sum() == pytest.approx(log.transfer_j, rel=1e-9)
    assert table["decode_j"].sum() == pytest.approx(log.decode_j, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=25),
    blocks=st.integers(10, 30),
    replicas=st.integers(2, 3),
    prompts=st.integers(0, 2),
    kill_s=st.floats(0.0, 0.4),
    down=st.tuples(st.floats(0.0, 0.3), st.floats(0.0, 0.3)),
    autoscale=st.sampled_from([None, "requests", "kv", "busy"]),
    preemption=st.sampled_from(["recompute", "swap"]),
    router=st.sampled_from(["round_robin", "least_loaded", "prefix_aware"]),
    attention=st.sampled_from(["balanced", "per_sequence"]),
    seed=st.integers(0, 100),
)
@example(  # one ends on the replica to which it was handed before the other has told its first token
    lengths=[(1, 2), (1, 1)], blocks=10, replicas=2, prompts=1, kill_s=0.0, down=(0.0, 0.25), autoscale=None,
    preemption="recompute", router="round_robin", attention="balanced", seed=0,
)  # fmt: skip
def test_no_request_is_lost_or_served_twice(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[tuple[int, int]],
    blocks: int,
    replicas: int,
    prompts: int,
    kill_s: float,
    down: tuple[float, float],
    autoscale: str | None,
    preemption: str,
    router: str,
    attention: str,
    seed: int,
) -> None:
    at = arrivals("poisson", rate_per_s=100.0, count=len(lengths), seed=seed)
    file = tmp_path_factory.mktemp("traffic") / "requests.csv"
    rows = [(at_s, inputs, outputs) for at_s, (inputs, outputs) in zip(at, lengths, strict=True)]
    pd.DataFrame(rows, columns=["arrival_s", "input_tokens", "output_tokens"]).to_csv(file, index=False)
    finished: list[int] = []
    spec = ServeSpec.of(
        model="llama3-8b", trace=file, kv_blocks=blocks, replicas=replicas, prefill_replicas=prompts,
        preemption=preemption, router=router, attention=attention, max_num_seqs=8, max_num_batched_tokens=64,
        autoscale=None if prompts else autoscale, autoscale_look_s=0.05, autoscale_calm_s=0.1, start_up_s=0.1,
    )  # fmt: skip
    outages = [(down[0], down[0] + down[1])]
    run = serve(spec, kills=[(kill_s, prompts)], outages=outages, progress=lambda done, _: finished.append(done))
    assert finished == list(range(1, len(lengths) + 1))
    conserved(run)
    served = run.requests[(run.requests["arrival_s"] >= down[0]) & (run.requests["moves"] == 0)]
    assert (served["started_s"] >= served["arrival_s"].clip(upper=sum(down))).all()


def test_a_prompt_is_computed_on_one_replica_and_goes_on_at_another() -> None:
    spec = {"model": "llama3-8b", "requests": 1, "input_tokens": 2048, "output_tokens": 3, "arrivals": "constant"}
    apart, whole = serve(prefill_replicas=1, **spec), serve(**spec)
    story = [(s.replica, s.prompt_tokens, s.decoding, s.steps) for s in apart.log.stretches if s.steps]
    assert story == [(0, 2048, 0, 1), (1, 0, 1, 1), (1, 0, 1, 1)]
    late_s = apart.requests["e2e_s"].iloc[0] - whole.requests["e2e_s"].iloc[0]
    kv_bytes = 2048 * 32 * 2 * 8 * 128 * 2  # tokens, layers, K and V, heads, elements, 16 bit
    link = machine_of(Scenario.of(model="llama3-8b")).gpu.link_bytes_per_s
    assert kv_bytes / link < late_s < 3 * kv_bytes / link
    assert apart.log.transfer_j > 0
    conserved(apart)


def test_the_joules_of_moved_caches_are_a_part_in_words_report_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    run = serve(model="llama3-8b", requests=3, input_tokens=2048, output_tokens=3, prefill_replicas=1)
    moved_j = run.summary["energy_j_by_part"]["transfer"]
    assert 0 < moved_j == run.log.transfer_j
    print_summary(run, Console(width=140))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "KV transfers" in line)
    assert f"{moved_j:,.4g}" in line
    grids = [section.table for section in served_page(run).sections if section.table is not None]
    (row,) = (row for grid in grids for row in grid.rows if row[0] == "KV transfers")
    assert row[1] == f"{moved_j:.4g} J"
    trace = to_trace(run)
    check_trace(trace)
    of_kind = [(trace.kinds[kind], j) for kind, j in zip(trace.spans.kind, trace.spans.energy_j, strict=True)]
    moves = [joules for kind, joules in of_kind if kind.name == "KV transfer"]
    steps_j = sum(joules for kind, joules in of_kind if kind.category == "step")
    assert len(moves) == 3 and sum(moves) == pytest.approx(moved_j, rel=1e-9)
    assert steps_j + sum(moves) == pytest.approx(run.energy_j, rel=1e-9)
    said = {"energy_j": run.energy_j, "energy_j_by_part": run.energy_j_by_part}
    assert trace.metadata["served"] == said | {"events_kernels": 0, "derived_kernels": 0}


def test_the_power_cap_slows_a_loaded_server_and_not_an_idle_one() -> None:
    load = {"model": "llama3-8b", "requests": 60, "input_tokens": 4000, "output_tokens": 8, "seed": 1}
    busy, capped = serve(rate_per_s=20.0, **load), serve(rate_per_s=20.0, power_cap_w=450, **load)
    assert capped.summary["ttft_s"]["mean"] > 1.3 * busy.summary["ttft_s"]["mean"]
    settled = capped.stretches[capped.stretches["end_s"] > 2.0]
    mean_w = settled["energy_j"].sum() / (settled["end_s"] - settled["start_s"]).sum()
    assert mean_w == pytest.approx(450, rel=0.02)
    quiet = serve(rate_per_s=0.2, **load)
    assert quiet.log.idle_j > 0.8 * quiet.energy_j
    conserved(quiet)


def test_recorded_traffic_is_read_as_it_was_written() -> None:
    folder = requests_folder()
    conversation = read_traffic(folder / "AzureLLMInferenceTrace_conv.csv").requests
    assert len(conversation) == 19_366
    second = conversation[1]
    assert (second.arrival_s, second.input_tokens, second.output_tokens) == (pytest.approx(4.314579), 396, 109)
    mooncake = read_traffic(folder / "mooncake_conversation_trace.jsonl.gz", limit=2).requests
    assert (mooncake[0].input_tokens, mooncake[0].output_tokens, mooncake[1].prefix[:2]) == (6758, 500, (0, 14))


def test_a_prefix_aware_router_sends_a_conversation_where_its_beginning_lies(tmp_path: Path) -> None:
    """Three talkers take turns on two replicas: each turn's prompt is the last one and a block more."""
    trace = tmp_path / "talk.jsonl"
    turns = [
        {"timestamp": 1000 * (3 * turn + who), "input_length": 512 * (turn + 1) + 1, "output_length": 2,
         "hash_ids": [100 * who + block for block in range(turn + 1)]}
        for turn in range(4) for who in range(3)
    ]  # fmt: skip
    trace.write_text("\n".join(json.dumps(turn) for turn in turns))
    hits = {
        router: serve(model="llama3-8b", trace=trace, replicas=2, router=router).summary["hit_tokens"]
        for router in ("round_robin", "prefix_aware")
    }
    assert hits["prefix_aware"] == 3 * (1 + 2 + 3) * 512  # all that was said before
    assert hits["round_robin"] == 3 * (0 + 1 + 2) * 512  # what was said two turns ago


def test_gamma_arrivals_have_the_rate_and_burstiness_asked_for() -> None:
    gaps = np.diff([0.0, *arrivals("gamma", rate_per_s=5.0, count=50_000, burstiness=4.0, seed=2)])
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": "llama3-70b"}, "does not fit on h100-sxm-80gb with tp = 1"),
        ({"model": "llama3-8b", "rat_per_s": 1}, "did you mean 'rate_per_s'?"),
        ({"model": "llama3-8b", "kv_blocks": 2}, "a replica holds 32: raise kv_blocks, or"),
        (
            {"model": "llama3-8b", "requests": 3, "rate_per_s": 1e-300, "arrivals": "constant"},
            "rate_per_s = 1e-300: the last of 3 requests comes after 3e+300 s: give at most 1e+10 s of traffic",
        ),
        ({"model": "llama3-8b", "max_num_seqs": 9000}, "must exceed max_num_seqs"),
    ],
)
def test_bad_servers_are_refused_in_one_line(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ScenarioError) as error:
        serve(**fields)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival_s,input_tokens,output_tokens\n0,5,x\n", "line 2: output_tokens = x: give a positive number"),
        ("arrival_s,input_tokens,output_tokens\n0,5,1\n1,5,1,8\n", "line 3: 4 cells, the header has 3"),
        ("a,b\n1,2\n", "columns a, b: need arrival_s, input_tokens, output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "holds no request"),
    ],
)
def test_bad_traffic_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "traffic.csv"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=says.replace(".", r"\.")):
        read_traffic(file)


def test_prompts_may_have_replicas_of_another_degree() -> None:
    """Each part is as where both replicas had its degree; a cache leaves through the ports of the narrower one."""
    spec: dict[str, Any] = {"model": "llama3-8b", "requests": 6, "rate_per_s": 2.0, "output_tokens": 8}
    spec |= {"replicas": 1, "prefill_replicas": 1}
    narrow, wide = serve(tp=2, **spec), serve(tp=4, **spec)
    mixed, other = serve(tp=2, prefill_tp=4, **spec), serve(tp=4, prefill_tp=2, **spec)
    assert [run.spec.gpus for run in (narrow, wide, mixed, other)] == [4, 8, 6, 6]
    for run, prompts, decoding in ((mixed, wide, narrow), (other, narrow, wide)):
        assert run.energy_j_by_part["prefill"] == pytest.approx(prompts.energy_j_by_part["prefill"], rel=1e-9)
        assert run.energy_j_by_part["decode"] == pytest.approx(decoding.energy_j_by_part["decode"], rel=0.01)
        took, at_two = (one.log.transfers[0].end_s - one.log.transfers[0].start_s for one in (run, narrow))
        assert took == pytest.approx(at_two, rel=1e-9)
        assert run.summary["gpu_hours"] == pytest.approx(6 * run.end_s / 3600)
    assert mixed.spec.roles == "1 x tp 4 for prompts + 1 x tp 2 for decoding"
    with pytest.raises(ScenarioError, match="prefill_tp = 2: is of replicas for prompts: give prefill_replicas"):
        serve(model="llama3-8b", prefill_tp=2)
