"""Contexts of unequal length in one batch: the law against what was measured, and what a server makes of it."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.laws.uneven import UnevenContexts, longest_tail_s
from sim.errors import ScenarioError
from sim.scenario.machine import machine_of
from sim.scenario.spec import Scenario
from sim.serving import ServeResult, serve
from sim.serving.cost import Batch
from sim.serving.inflight import Limits, Sequence
from sim.serving.kv import BlockPool
from sim.serving.price import StepPrices
from sim.serving.requests import Request
from sim.serving.scheduler import Scheduler
from sim.serving.trace import to_trace
from tests.test_serving import conserved

RECORDS = Path(__file__).parents[1] / "records" / "h100-sxm-80gb" / "serving" / "uneven_attention.jsonl"
SMS = 132


def errors(part: str) -> list[float]:
    """Relative errors of the law on the uneven batches of a part, given the even one of the same size beside each."""
    rows = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    rows = [row for row in rows if row.get("part") == part and row["batch"] >= 32]
    found = []
    for _, group in groupby(rows, key=lambda row: (row["q_heads"], row["kv_heads"], row["batch"], row["mean_tokens"])):
        even, *uneven = group
        assert even["spread"] == 0.0
        for row in uneven:
            tail_s = longest_tail_s(
                UnevenContexts(
                    batch=row["batch"],
                    mean=row["sum_tokens"] / row["batch"],
                    longest=row["longest_tokens"],
                    kv_heads=row["kv_heads"],
                    token_bytes=512,
                ),
                even_s=even["latency_s"],
                sms=SMS,
            )
            found.append((even["latency_s"] + tail_s) / row["latency_s"] - 1.0)
    return found


@pytest.mark.parametrize(("part", "count", "mean", "most"), [("fit", 90, 0.075, 0.26), ("held_back", 42, 0.09, 0.24)])
def test_the_law_meets_what_was_measured(part: str, count: int, mean: float, most: float) -> None:
    found = [abs(error) for error in errors(part)]
    assert len(found) == count
    assert statistics.fmean(found) < mean
    assert max(found) < most


@pytest.mark.parametrize("batch", [1, 8, 32, 128, 512])
def test_equal_contexts_wait_for_nobody_and_longer_ones_ever_longer(batch: int) -> None:
    equal = UnevenContexts(batch=batch, mean=1024, longest=1024, kv_heads=8, token_bytes=512)
    uneven = [replace(equal, longest=1024 * more) for more in (1, 2, 4, 8) if more <= batch]
    tails_s = [longest_tail_s(contexts, even_s=batch * 1e-6, sms=SMS) for contexts in uneven]
    assert tails_s[0] == 0.0
    assert tails_s == sorted(tails_s)
    assert len(tails_s) == 1 or tails_s[-1] > 0


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=15),
    blocks=st.integers(12, 30),
)
def test_the_longest_is_the_longest_of_those_that_run(lengths: list[tuple[int, int]], blocks: int) -> None:
    scheduler = Scheduler(
        limits=Limits(max_num_seqs=6, max_num_batched_tokens=64), pool=BlockPool(blocks=blocks, block_tokens=16)
    )
    for number, (tokens, wanted) in enumerate(lengths):
        request = Request(number=number, arrival_s=0.0, input_tokens=tokens, output_tokens=wanted)
        scheduler.add(Sequence(request=request, target=tokens))
    while scheduler.busy:
        step = scheduler.plan()
        cached = [s.computed + scheduler.step - s.joined for s in scheduler.running.values()]
        assert (step.batch.longest, step.batch.cached) == (max(cached, default=0), sum(cached))
        scheduler.advance(step, scheduler.steady_steps() if not step.pieces else 1)


def talk(tmp_path: Path, longest: int, **fields: object) -> ServeResult:
    """63 prompts of 500 tokens and one of ``longest``, all at once."""
    file = tmp_path / f"{longest}.csv"
    lines = [f"0,{longest if number == 40 else 500},40" for number in range(64)]
    file.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *lines]))
    return serve(model="llama3-8b", trace=file, max_num_batched_tokens=65_536, **fields)


def test_one_long_context_holds_up_every_step_of_kernels_that_cut_nothing_up(tmp_path: Path) -> None:
    for longest, later in ((500, False), (16_000, True)):
        balanced, waiting = (talk(tmp_path, longest, attention=how) for how in ("balanced", "per_sequence"))
        conserved(waiting)
        took_s = [run.summary["itl_s"]["p50"] for run in (balanced, waiting)]
        prices = StepPrices(scenario=waiting.spec.group(), machine=waiting.machine, attention="per_sequence")
        batch = Batch(decoding=64, cached=63 * 520 + longest + 20, longest=longest + 20)
        tail_s = prices.tail(batch).time_s
        assert took_s[1] - took_s[0] == pytest.approx(tail_s, rel=0.03, abs=1e-6)
        assert (tail_s > 10e-3) == later
        idle_w = waiting.machine.model.idle_w(waiting.machine.model.max_clock_hz)
        assert prices.tail(batch).energy_j == pytest.approx(tail_s * idle_w)
        assert prices.exact(batch).time_s == pytest.approx(prices.step(batch).whole.time_s, rel=0.01)


def test_the_trace_shows_the_wait_for_the_longest(tmp_path: Path) -> None:
    run = talk(tmp_path, 16_000, attention="per_sequence", window=(1.3, 1.4))
    trace = to_trace(run)
    names = [trace.kinds[kind].name for kind in trace.spans.kind]
    assert names.count("attention_longest") == len(run.log.run_steps) >= 3
    for step in run.log.run_steps:
        tail_s = step.prices.tail(step.batch, step.target_w).time_s
        begin, end = round(step.start_s * 1e12), round((step.start_s + step.time_s) * 1e12)
        lasting = [
            stop - start
            for name, start, stop in zip(names, trace.spans.start_ps, trace.spans.end_ps, strict=True)
            if name == "attention_longest" and begin - 1 <= start <= stop <= end + 1
        ]
        assert lasting == [pytest.approx(tail_s * 1e12, rel=1e-6)]


def test_latent_attention_is_not_guessed() -> None:
    scenario = Scenario.of(model="deepseek-v3", tp=8, phase="decode")
    prices = StepPrices(scenario=scenario, machine=machine_of(scenario), attention="per_sequence")
    with pytest.raises(ScenarioError, match="attention = per_sequence: measured for fused attention over keys"):
        prices.step(Batch(decoding=4, cached=4096, longest=2048))
