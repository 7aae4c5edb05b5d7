"""Replicas in pipeline stages: a lone request, saturation, memory, joules, and what batches share."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workloads
from sim.errors import ScenarioError
from sim.scenario.layout import layout_of
from sim.scenario.machine import machine_of
from sim.serving import ServeResult, ServeSpec, serve
from sim.serving.cost import Batch, Chunk, Cost
from sim.serving.memory import kv_blocks, stage_needs
from sim.serving.requests import Traffic, made
from sim.serving.stages import handoffs, stage_machine, stage_prices
from sim.serving.trace import to_trace
from traces.write.check import check_trace
from workloads.engine import load_engine
from workloads.memory import MemoryLoad

# A stack whose host adds nothing: what is left are stages and transfers.
PLAIN: dict[str, Any] = {"model": "llama3-8b", "stack": "paged-kv", "input_tokens": 1000, "output_tokens": 8}
BUSY = PLAIN | {"concurrency": 96, "requests": 240, "output_tokens": 64, "max_num_batched_tokens": 2048}


def stages_of(spec: ServeSpec) -> Any:
    return stage_prices(spec, spec.group())


def through(spec: ServeSpec, batch: Batch) -> float:
    """Seconds of a batch alone through all stages, as the sum of its parts."""
    hand = handoffs(spec, spec.group(), 0)
    tokens = batch.decoding + batch.prompt_tokens
    computed = sum(prices.whole(batch).time_s for prices in stages_of(spec))
    return float(computed + sum(hand.cost(tokens, stage).time_s for stage in range(spec.pp - 1)))


# -- one request -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_a_lone_request_takes_the_sum_of_its_stages_and_transfers(pp: int, tp: int) -> None:
    spec = ServeSpec.of(**PLAIN, pp=pp, tp=tp, requests=1)
    run = serve(spec)
    (request,) = run.requests.to_dict("records")
    prompt = through(spec, Batch(chunks=(Chunk(tokens=1000, context=1000),), ending=1))
    # Limiters of an idle GPU begin a little below the fast limit, at which the sum is taken.
    assert request["ttft_s"] == pytest.approx(prompt, rel=1e-3)
    tokens = [through(spec, Batch(decoding=1, cached=1000 + number, longest=1000 + number)) for number in range(7)]
    assert request["e2e_s"] == pytest.approx(prompt + sum(tokens), rel=1e-3)
    gaps_s, counts = run.log.each_gap()
    assert list(gaps_s) == pytest.approx(tokens, rel=1e-9) and set(counts) == {1}


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("tp", [2, 4])
def test_stages_together_do_what_one_group_does(model: str, tp: int) -> None:
    one, two, many = (ServeSpec.of(model=model, stack="paged-kv", tp=tp, pp=pp) for pp in (1, 2, 3))
    batch = Batch(decoding=40, cached=40 * 700, chunks=(Chunk(tokens=300, context=500),), ending=1)
    (whole,) = stages_of(one)
    for spec in (two, many):
        parts = [prices.whole(batch) for prices in stages_of(spec)]
        together = Cost(*(sum(column) for column in zip(*parts, strict=True)))
        assert together.time_s == pytest.approx(whole.whole(batch).time_s, rel=1e-9)
        assert together.energy_j == pytest.approx(whole.whole(batch).energy_j, rel=1e-9)
        for prices in stages_of(spec):
            assert prices.world == tp
            assert prices.exact(batch).time_s == pytest.approx(prices.whole(batch).time_s, rel=0.01)


def test_one_stage_is_what_a_server_without_a_pipeline_is() -> None:
    assert (
        serve(**PLAIN, pp=1, requests=30, rate_per_s=30.0).summary
        == serve(**PLAIN, requests=30, rate_per_s=30.0).summary
    )


# -- many requests -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 4])
def busy(request: pytest.FixtureRequest) -> ServeResult:
    return serve(**BUSY, pp=request.param)


def test_a_stage_does_one_thing_at_a_time_and_time_is_accounted_for(busy: ServeResult) -> None:
    table = busy.stretches
    for stage in range(busy.spec.pp):
        mine = table[table["stage"] == stage].sort_values("start_s", kind="stable")
        begins, ends = mine["start_s"].to_numpy(), mine["end_s"].to_numpy()
        assert begins[1:] == pytest.approx(ends[:-1]) and begins[0] == 0.0
        assert ends[-1] == pytest.approx(busy.end_s)
    assert busy.energy_j == pytest.approx(float(table["energy_j"].sum()), rel=1e-9)
    requests, known = busy.requests, busy.energy_j_by_part
    assert requests["prefill_j"].sum() == pytest.approx(known["prefill"])
    assert requests["decode_j"].sum() == pytest.approx(known["decode"])


def test_saturation_is_what_the_slowest_stage_takes_at_most(busy: ServeResult) -> None:
    table = busy.stretches
    moved = (table["steps"] == 0) & ((table["decoding"] > 0) | (table["prompt_tokens"] > 0))
    works = table[(table["steps"] > 0) | moved]
    per_stage = works.groupby("stage").apply(lambda rows: float((rows["end_s"] - rows["start_s"]).sum()))
    assert per_stage.max() <= busy.end_s * (1 + 1e-9)
    # Full batches keep the last stage, which has the head too, at work nearly all of the time.
    shares = [stage["busy_share"] for stage in busy.summary["pipeline"]["stages"]]
    assert max(shares) == shares[-1] > 0.85
    alone = serve(**BUSY).summary["output_tokens_per_s"]
    faster = busy.summary["output_tokens_per_s"] / alone
    assert 0.6 * busy.spec.pp < faster < 1.05 * busy.spec.pp


def test_no_more_batches_are_in_flight_than_there_are_stages(busy: ServeResult) -> None:
    """At any time each stage computes one batch at most, and all of them at once a good part of the time."""
    table = busy.stretches
    works = table[table["steps"] > 0]
    marks = sorted([*((begin, 1) for begin in works["start_s"]), *((end, -1) for end in works["end_s"])])
    running = most = 0
    for _, change in marks:
        running += change
        most = max(most, running)
    assert most == busy.spec.pp


def test_a_request_that_comes_while_another_decodes_takes_the_other_batch() -> None:
    """Turns are scheduled ahead: the next one that sees it is that of the batch without any."""
    requests = made([0.0, 0.05, 5.0], [100, 100, 100], [40, 40, 40])
    spec = ServeSpec.of(**PLAIN | {"stack": "vllm"}, pp=2, requests=3)
    run = serve(spec, traffic=Traffic(requests=requests))
    assert run.stretches["decoding"].max() == 1
    both = run.requests["e2e_s"].to_numpy()
    # Two batches on two stages, where one alone leaves a stage idle: the host alone holds them up.
    assert both[:2].max() < 1.5 * both[2]


def test_a_stage_takes_its_next_batch_no_sooner_than_its_host() -> None:
    """Two batches of a small model wait for the host; one alone has its stages one after the other, and does not."""
    load = {"model": "llama3-8b", "gpu": "h200", "pp": 2, "input_tokens": 64, "output_tokens": 40, "requests": 1}
    stage_s = load_engine("vllm").host.stage_s
    alone = serve(**load)
    requests = made([0.0, 0.03], [64, 64], [40, 40])
    together = serve(ServeSpec.of(**load), traffic=Traffic(requests=requests))
    for run, least in ((alone, 0.0), (together, 0.999 * stage_s)):
        steps = run.stretches[(run.stretches["steps"] > 0) & (run.stretches["decoding"] > 0)]
        second = np.diff(steps[steps["stage"] == 1]["start_s"].to_numpy())
        assert second.min() > least
    assert alone.requests["tpot_s"].median() < 1.5 * stage_s < 1.85 * stage_s < together.requests["tpot_s"].median()


def test_the_host_s_pace_is_what_two_batches_took() -> None:
    """`stages.jsonl`: steps of 32 sequences in two batches on two machines, and kernels of a stage in traces of one."""
    folder = Path(__file__).parents[1] / "records" / "h200-sxm-141gb" / "vllm"
    found = [row for line in (folder / "stages.jsonl").open() if (row := json.loads(line))["kind"] == "vllm_stage"]
    each_s = [row["latency_s"] / row["pp"] for row in found]
    assert load_engine("vllm").host.stage_s == pytest.approx(sum(each_s) / len(each_s), rel=2e-3)
    row = found[0]
    for rank, kernels_s in enumerate(row["kernels_s"]):
        with gzip.open(folder / "traces" / f"llama3-8b-decode-32x1055-pp2.rank{rank}.json.gz") as stream:
            events = json.load(stream)["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel" and event["args"]["stream"] == 17]
        steps = sum(event.get("cat") == "gpu_user_annotation" and "execute" in event["name"] for event in events)
        assert sum(event["dur"] for event in kernels) / steps == pytest.approx(1e6 * kernels_s, rel=0.1)


def test_even_batches_hold_their_part_at_most() -> None:
    """Requests that come at once fill one batch of a vLLM; each gets its part where batches are even."""
    short = PLAIN | {"input_tokens": 16, "output_tokens": 40, "concurrency": 40, "requests": 120, "max_num_seqs": 40}
    natural, even = (serve(**short, pp=2, pp_batches=batches) for batches in ("natural", "even"))
    assert natural.stretches["decoding"].max() == 40 and even.stretches["decoding"].max() == 20
    assert even.summary["pipeline"]["bubble_share"] < 0.2 < 0.4 < natural.summary["pipeline"]["bubble_share"]
    # It makes hardly more tokens: each of the small batches reads all weights.
    assert even.summary["output_tokens_per_s"] > 0.95 * natural.summary["output_tokens_per_s"]


def test_bubbles_burn_what_idle_and_waiting_gpus_burn() -> None:
    spec = ServeSpec.of(**PLAIN, pp=2, requests=1, concurrency=1)
    run, hand = serve(spec), handoffs(spec, spec.group(), 0)
    table = run.stretches
    pauses = table[(table["steps"] == 0) & (table["decoding"] == 0) & (table["prompt_tokens"] == 0)]
    idle_w = stage_machine(spec.group()).model.idle_w(stage_machine(spec.group()).model.max_clock_hz)
    watts = pauses["power_w_per_gpu"].to_numpy()
    assert hand.waiting_w > 0 and watts.min() >= idle_w - 1e-6 and watts.max() <= idle_w + hand.waiting_w + 1e-6
    # The second stage waits in a receive while the first one computes; the first one waits for nobody.
    assert pauses[pauses["stage"] == 0]["power_w_per_gpu"].max() == pytest.approx(idle_w)
    assert pauses[pauses["stage"] == 1]["power_w_per_gpu"].max() == pytest.approx(idle_w + hand.waiting_w)
    said = run.summary["pipeline"]
    assert said["bubble_share"] == pytest.approx(0.5, abs=0.05)
    shares = [stage["busy_share"] for stage in said["stages"]]
    assert sum(shares) / 2 + said["transfer_share"] + said["bubble_share"] == pytest.approx(1.0)


# -- memory, transfers ---------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_fullest_stage() -> None:
    spec = ServeSpec.of(model="llama3-70b", tp=2, pp=3, stack="paged-kv")
    group = spec.group()
    first, middle, last = stage_needs(spec, group, context=16)
    layers = [len(layout_of(group).stage_layers(80, stage)) for stage in range(3)]
    assert layers == [26, 27, 27]
    assert middle.kv_bytes == pytest.approx(first.kv_bytes * 27 / 26)
    assert last.weight_bytes - middle.weight_bytes == pytest.approx(128256 * 8192 / 2 * 2)  # the head's half
    room = machine_of(group).gpu.memory_bytes * 0.9
    by_stage = [int((room - n.weight_bytes - n.activation_bytes) / n.kv_bytes) for n in (first, middle, last)]
    assert kv_blocks(spec, group, machine_of(group)) == min(by_stage) == by_stage[2]
    with pytest.raises(ScenarioError, match=r"does not fit .* with tp = 1.*the smallest replica that fits is tp 2"):
        serve(model="llama3-70b", requests=1)
    assert serve(model="llama3-70b", pp=4, requests=2, output_tokens=2).spec.gpus == 4


def test_stages_of_another_node_hand_over_through_nics() -> None:
    near, far = (ServeSpec.of(model="llama3-70b", tp=tp, pp=2) for tp in (4, 8))
    inside, outside = (handoffs(spec, spec.group(), 0).cost(8192, 0) for spec in (near, far))
    assert inside.time_s < 0.3 * outside.time_s
    assert outside.time_s == pytest.approx(8192 * 8192 * 2 / 50e9, rel=0.05)  # the residual stream at 400 Gb/s
    # The second replica of three stages of two GPUs begins at GPU 6 of 8: its second stage is on the next node.
    spec = ServeSpec.of(model="llama3-8b", tp=2, pp=3, replicas=2)
    crossing = handoffs(spec, spec.group(), 1)
    assert crossing.cost(4096, 0).time_s > 2 * crossing.cost(4096, 1).time_s


def test_pieces_of_a_long_prompt_follow_one_another_through_the_stages() -> None:
    long = PLAIN | {"input_tokens": 16384, "requests": 1, "output_tokens": 2}
    one, two = (serve(**long, pp=pp, max_num_batched_tokens=2048).summary for pp in (1, 2))
    # Eight pieces on two stages: nine half steps in place of sixteen, and transfers.
    assert 9 / 16 < two["ttft_s"]["mean"] / one["ttft_s"]["mean"] < 0.66


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("stack", ["paged-kv", "vllm"])
def test_short_memory_loses_no_request(preemption: str, stack: str) -> None:
    tight = PLAIN | {"stack": stack, "input_tokens": 400, "output_tokens": 200, "requests": 60, "rate_per_s": 200.0}
    run = serve(**tight, pp=2, kv_blocks=120, preemption=preemption, length_spread=0.5)
    table = run.requests
    assert (table["done_s"] >= table["first_token_s"]).all() and run.summary["preemptions"] > 0
    assert run.summary["most_blocks"] <= 120
    assert run.energy_j == pytest.approx(float(run.stretches["energy_j"].sum()), rel=1e-9)


def test_a_replica_in_stages_can_die_and_rest() -> None:
    fields = PLAIN | {"pp": 2, "replicas": 2, "requests": 120, "rate_per_s": 120.0, "output_tokens": 64}
    run = serve(**fields, kills=[(0.4, 0)])
    assert (run.requests["done_s"] > 0).all() and run.requests["moves"].sum() > 0
    assert run.energy_j == pytest.approx(float(run.stretches["energy_j"].sum()), rel=1e-9)
    scaled = serve(**fields | {"rate_per_s": 5.0}, autoscale="requests", autoscale_look_s=1.0, autoscale_calm_s=1.0)
    assert (scaled.requests["done_s"] > 0).all()
    assert scaled.energy_j == pytest.approx(float(scaled.stretches["energy_j"].sum()), rel=1e-9)


def test_prompts_in_stages_hand_their_caches_over() -> None:
    run = serve(**PLAIN, pp=2, prefill_replicas=1, requests=40, rate_per_s=20.0)
    assert run.spec.gpus == 4 and (run.requests["transfer_j"] > 0).all()
    assert run.spec.roles == "1 for prompts + 1 for decoding, tp 1 pp 2 each"


# -- what is written, and what is refused ----------------------------------------------------------------------------


def test_the_trace_has_a_process_a_stage() -> None:
    run = serve(**BUSY | {"requests": 20, "pp": 2}, window=(0.1, 0.15))
    trace = to_trace(run)
    check_trace(trace)
    names = set(trace.processes.values())
    assert {"replica 0, stage 0 (1 x h100-sxm-80gb)", "replica 0, stage 1 (1 x h100-sxm-80gb)"} <= names
    kinds = {kind.name for kind in trace.kinds}
    assert {"prefill", "decode", "to the next stage"} <= kinds
    kernels = {kind.name for kind in trace.kinds if kind.category == "kernel"}
    assert "lm_head_gemm" in kernels or any("head" in name for name in kernels)
    assert trace.metadata["wattline"]["worlds"] == [1, 1]


EAGLE: dict[str, Any] = {"speculation": "eagle", "acceptance": (0.8, 0.8, 0.7)}


def test_stages_that_check_drafts_are_one_gpu_s_step_together() -> None:
    """EAGLE's layer is the last stage's, in time and in memory (vLLM pull request 50514)."""
    one, two = (ServeSpec.of(model="llama3-8b", pp=pp, **EAGLE) for pp in (1, 2))
    (whole,), stages = (stage_prices(spec, spec.group()) for spec in (one, two))
    for batch in (
        Batch(decoding=8, cached=8 * 900),
        Batch(decoding=3, cached=3000, chunks=(Chunk(300, 300),), ending=1),
    ):
        found = [own.whole(batch) for own in stages]
        assert sum(cost.time_s for cost in found) == pytest.approx(whole.whole(batch).time_s, rel=0.01)
        awake_j = sum(cost.energy_j for cost in found) - whole.whole(batch).energy_j  # links: 29 W a GPU
        assert 0.0 < awake_j < 30.0 * sum(cost.time_s for cost in found)
        assert found[1].time_s > found[0].time_s
    held = serve(model="llama3-8b", pp=2, requests=2, output_tokens=4, **EAGLE).summary["pipeline"]["stages"]
    layer = 2 * (4096 * (6144 + 4096) + 3 * 4096 * 14336)
    assert held[1]["weight_bytes_per_gpu"] - held[0]["weight_bytes_per_gpu"] == pytest.approx(layer, rel=1e-3)
    assert held[1]["kv_bytes_per_token_per_gpu"] == held[0]["kv_bytes_per_token_per_gpu"] * 17 / 16


def test_stages_that_check_drafts_yield_what_passes() -> None:
    load = {"model": "llama3-8b", "pp": 2, "concurrency": 4, "requests": 24, "input_tokens": 200, "output_tokens": 200}
    run, plain = serve(**load, **EAGLE), serve(**load)
    assert run.summary["tokens_per_step"] == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**2 * 0.7, rel=0.05)
    assert run.requests["tpot_s"].mean() < plain.requests["tpot_s"].mean()
    assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)
    shares = run.requests["prefill_j"].sum() + run.requests["decode_j"].sum()
    assert shares + run.energy_j_by_part["idle"] == pytest.approx(run.energy_j, rel=1e-9)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_stages_that_check_drafts_lose_nothing_where_memory_runs_out(preemption: str) -> None:
    load = {"requests": 40, "rate_per_s": 50.0, "input_tokens": 100, "output_tokens": 120, "length_spread": 0.5}
    run = serve(
        model="llama3-8b", pp=2, **load, kv_blocks=60, preemption=preemption, kills=[(1.0, 0)], replicas=2, **EAGLE
    )
    assert run.summary["preemptions"] > 0 and run.requests["moves"].sum() > 0
    assert bool(run.requests["done_s"].notna().all())
    assert run.summary["most_blocks"] <= 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clock_policy": "slo", "slo_tpot_s": 0.1}, "pp = 2 is not known beside clock_policy = slo"),
        ({"sm_partition": "prefill=64,decode=68"}, "pp = 2 is not known beside sm_partition"),
        ({"speculation": "ngram", "acceptance": 0.5}, "speculation = 'ngram' is not known beside pp = 2"),
        ({"pp": 1, "pp_batches": "even"}, "pp_batches = even: is of batches in a pipeline: give pp of at least 2"),
        ({"pp": 40}, "pp = 40: 32 layers fill at most 32 stages"),
    ],
)
def test_what_stages_do_not_do_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises((ScenarioError, workloads.WorkloadError), match=message):
        serve(**PLAIN | {"pp": 2, "requests": 1} | change)


def test_needs_of_stages_are_the_whole() -> None:
    model = workloads.load_model("llama3-8b")
    held = MemoryLoad(batch=4, context=100, layers=model.layers, lm_head=True)
    whole = workloads.memory_need(model, workloads.Layout(), held)
    parts = workloads.stage_needs(model, workloads.Layout(pp=4), held)
    assert sum(part.weight_bytes for part in parts) == pytest.approx(whole.weight_bytes)
    assert sum(part.kv_bytes for part in parts) == pytest.approx(whole.kv_bytes)
