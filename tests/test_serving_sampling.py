"""Drawing tokens: the shipped table, and what it was not made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardware.catalog import load_gpu
from hardware.sampling import sampling_cost
from sim.serving import serve
from sim.serving.cost import Batch
from sim.serving.price import StepPrices

RECORDS = Path(__file__).parents[1] / "records" / "h100-sxm-80gb" / "serving" / "sampling.jsonl"
H100 = load_gpu("h100-sxm-80gb")


def measured(width: int) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    return [row for row in rows if row["kind"] == "sample" and row["width"] == width]


def test_the_table_is_what_was_measured_on_llama_vocabularies() -> None:
    rows = measured(128_256)
    assert len(rows) == 30
    for row in rows:
        cost = sampling_cost(row["how"], row["rows"], row["width"], H100)
        assert cost == (pytest.approx(row["latency_s"], rel=1e-3), pytest.approx(row["energy_j"], rel=1e-3))


def test_another_vocabulary_is_predicted_from_it() -> None:
    """Qwen3's logits, in no table: the PyTorch kernels of up to 32 rows are others, so that those miss."""
    rows = [row for row in measured(151_936) if row["rows"] >= 128]
    assert len(rows) == 6
    for row in rows:
        seconds, joules = sampling_cost(row["how"], row["rows"], row["width"], H100)
        assert seconds == pytest.approx(row["latency_s"], rel=0.11), row
        assert joules == pytest.approx(row["energy_j"], rel=0.11), row


def test_more_rows_never_cost_less() -> None:
    for how in ("greedy", "random", "top_p"):
        costs = [sampling_cost(how, rows, 128_256, H100) for rows in range(1, 1200, 7)]
        assert costs == sorted(costs)


def test_sorting_the_vocabulary_is_paid_in_every_step() -> None:
    load = {"model": "llama3-8b", "concurrency": 128, "requests": 256, "input_tokens": 64, "output_tokens": 64}
    greedy, sorting = (serve(sampling=how, **load) for how in ("greedy", "top_p"))
    later_s = sorting.summary["itl_s"]["p50"] - greedy.summary["itl_s"]["p50"]
    assert later_s == pytest.approx(2.909e-3 - 0.098e-3, rel=0.05)


def test_an_eager_server_is_as_slow_as_its_host_issues_kernels() -> None:
    load = {"model": "llama3-8b", "concurrency": 4, "requests": 4, "input_tokens": 64, "output_tokens": 33}
    graph, eager = serve(**load), serve(launch="eager", **load)
    prices = StepPrices(scenario=eager.spec.group(), machine=eager.machine)
    batch = Batch(decoding=4, cached=4 * 80)
    kernels = prices.whole_step(batch).work.kernels
    issue_s = eager.machine.profile.launch.host_issue_s
    assert eager.summary["itl_s"]["p50"] > graph.summary["itl_s"]["p50"]
    assert eager.summary["itl_s"]["p50"] >= kernels * issue_s
    assert prices.step(batch).whole.time_s == pytest.approx(prices.exact(batch).time_s, rel=0.01)


def test_the_host_idles_the_gpus_before_each_step() -> None:
    load = {"model": "llama3-8b", "concurrency": 64, "requests": 64, "input_tokens": 64, "output_tokens": 33}
    load |= {"stack": "paged-kv"}
    none, sync = serve(**load), serve(host="vllm-sync", host_ms=1.0, **load)
    gap_s = 4.0e-3 + 64 / 256 * 1.5e-3 + 1e-3
    assert sync.summary["itl_s"]["p50"] - none.summary["itl_s"]["p50"] == pytest.approx(gap_s, rel=0.02)
    idle_j = 33 * gap_s * none.machine.model.idle_w(none.machine.model.max_clock_hz)
    assert sync.log.idle_j - none.log.idle_j == pytest.approx(idle_j, rel=1e-6)
