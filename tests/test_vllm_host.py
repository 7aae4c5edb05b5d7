"""The host of stack ``vllm``: its data are means of recorded lone prompts, and a long prompt is launched at them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardware.calibrate.suite import host_vllm
from sim.scenario.machine import machine_of
from sim.scenario.spec import Scenario
from sim.serving.cost import Batch, Chunk
from sim.serving.price import StepPrices
from workloads.engine import load_engine

FOLDER = Path(__file__).parents[1] / "records" / "h200-sxm-141gb" / "vllm"
RECORDS = FOLDER / "host.jsonl"
FEW, MANY = host_vllm.LAYERS


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def layer_s(models: set[str], captured: bool) -> Iterator[float]:
    """Seconds that a layer more costs, by machine and length of the prompt."""
    found = {(r["machine"], r["model"], r["tokens"], r["layers"]): r for r in rows() if r["model"] in models}
    limit = load_engine("vllm").host.captured_tokens
    for (machine, model, tokens, layers), row in found.items():
        if layers == MANY and (tokens <= limit) is captured:
            few = found[machine, model, tokens, FEW]
            yield (statistics.mean(row["ttft_s"]) - statistics.mean(few["ttft_s"])) / (MANY - FEW)


def steps(model: str) -> Iterator[dict[str, Any]]:
    """Lone prompts of the third machine."""
    for line in (FOLDER / "host_steps.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "vllm_host_step" and row["model"] == model:
            yield row


def launched_s(model: str, layers: int, captured: bool) -> Iterator[float]:
    """Seconds that the third machine's host launches a layer in."""
    for row in steps(model):
        if (row["tokens"] <= load_engine("vllm").host.captured_tokens) is captured:
            yield statistics.mean(row["launch_s"]) / layers


def test_the_paces_are_the_means_of_the_recorded_prompts() -> None:
    """Of machines, each counted once."""
    pace = load_engine("vllm").host
    dense = statistics.mean(layer_s({"dense"}, captured=False)), statistics.mean(launched_s("llama3-8b", 32, False))
    assert pace.kernel_s == pytest.approx(statistics.mean(dense) / 10, rel=0.01)
    captured = [*layer_s({"dense", "experts"}, True)]  # two machines
    third = statistics.mean([*launched_s("llama3-8b", 32, True), *launched_s("qwen3-30b-a3b", 48, True)])
    assert pace.captured_layer_s == pytest.approx((2 * statistics.mean(captured) + third) / 3, rel=0.01)
    wide = statistics.mean(layer_s({"wide_experts"}, captured=False))
    experts_s = statistics.mean([wide, statistics.mean(launched_s("qwen3-30b-a3b", 48, False))])
    assert pace.experts_layer_s == pytest.approx(experts_s - 16 * pace.kernel_s, rel=0.01)


def test_the_way_of_a_request_is_what_lone_prompts_took_beyond_their_layers() -> None:
    engine = load_engine("vllm")
    around_s = engine.host.prepare_s + engine.host.sample_s
    beyond = sorted(
        seconds - FEW * engine.host.captured_layer_s - around_s
        for row in rows()
        if row["layers"] == FEW and row["tokens"] <= 448 and row["model"] != "wide_experts"
        for seconds in row["ttft_s"]
    )
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert engine.request_path.draw(share) == pytest.approx(beyond[int(share * len(beyond))], rel=0.02)


def test_what_a_step_takes_the_host_beside_its_layers_are_means_of_recorded_steps() -> None:
    """Of another machine, whose requests took as long outside their steps as `request_path` has it of these."""
    lone = [*steps("llama3-8b"), *steps("qwen3-30b-a3b")]
    pace, path = load_engine("vllm").host, load_engine("vllm").request_path
    assert len(lone) == 6 and all(len(row["ttft_s"]) == 12 for row in lone)
    for name in ("prepare_s", "sample_s"):
        mean_s = statistics.mean(seconds for row in lone for seconds in row[name])
        assert getattr(pace, name) == pytest.approx(mean_s, rel=0.005)
    outside = [a - b for row in lone for a, b in zip(row["ttft_s"], row["step_s"], strict=True)]
    assert statistics.median(outside) == pytest.approx(path.draw(0.5), rel=0.05)


@pytest.mark.parametrize(("model", "kernels"), [("llama3-8b", 10), ("qwen3-30b-a3b", 16)])
def test_a_long_prompt_is_launched_kernel_by_kernel(model: str, kernels: int) -> None:
    scenario = Scenario.of(model=model, gpu="h200-sxm-141gb", stack="vllm", phase="prefill", batch=1, seq_len=1024)
    prices, pace = StepPrices(scenario=scenario, machine=machine_of(scenario)), load_engine("vllm").host
    layers, experts = (48, True) if kernels == 16 else (32, False)
    batch = Batch(chunks=(Chunk(tokens=1024, context=1024),), ending=1)
    assert prices.launching_s(pace, batch) == pytest.approx(
        layers * (kernels * pace.kernel_s + experts * pace.experts_layer_s)
    )
