"""Stack ``vllm`` with decode context parallelism: its kernels, and steps of a real server on two H200s."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from sim.serving import serve
from sim.validation.records import read_records
from sim.validation.validate import validate
from workloads import Group, Layout, Options, RaggedStep, build_ragged, load_model
from workloads.engine import load_engine
from workloads.kernels import host_seconds
from workloads.program import Kernel
from workloads.work import AttentionWork, CollectiveWork

FOLDER = Path(__file__).parents[1] / "records" / "h200-sxm-141gb" / "vllm"
ROWS, CONFIG = FOLDER / "context.jsonl", FOLDER / "llama3-8b-mqa.json"
# What the profiler did to launches of the same host (docs/stacks.md): seconds a kernel with it, between.
PROFILED_S = (61e-6, 110e-6)
STEP: dict[str, Any] = {
    "model": str(CONFIG), "gpu": "h200-sxm-141gb", "tp": 2, "dcp": 2, "stack": "vllm", "phase": "decode",
}  # fmt: skip


def kernels_of(stack: str, groups: list[Group]) -> list[Kernel]:
    """Kernels of a step of one layer on the second rank."""
    options = Options(stack=stack, layers=1)
    program = build_ragged(
        load_model(str(CONFIG)), Layout(tp=2, dcp=2), RaggedStep(groups=groups, scored=1), options=options
    )
    return [kernel for segment in program.ranks[1].phases[0].segments for kernel in segment.kernels]


def test_a_layer_has_the_kernels_of_the_trace_in_its_order() -> None:
    kernels = kernels_of("vllm", [Group(phase="decode", sequences=32, new_tokens=1, context=4117)])
    names = [kernel.name for kernel in kernels]
    at = names.index("cache_write")
    assert names[at : names.index("o_gemm")] == [
        "cache_write", "all_gather_q", "reorder_q", "attention", "copy_lse", "all_gather_lse", "correct_out",
        "order_out", "reduce_scatter_out", "reorder_out", "copy_own_lse", "plan_new", "attention_new", "merge_out",
    ]  # fmt: skip
    moved = {kernel.name: kernel.bytes_moved for kernel in kernels if not isinstance(kernel.work, AttentionWork)}
    queries = 32 * 32 * 128 * 2  # 32 tokens, heads of both ranks
    assert moved["all_gather_q"] == queries and moved["reorder_q"] == moved["order_out"] == 2 * queries
    assert moved["reorder_out"] == queries  # the rank's own half, read and written
    assert (moved["copy_lse"], moved["copy_own_lse"]) == (2 * 32 * 32 * 4, 2 * 32 * 16 * 4)
    assert moved["all_gather_lse"] == 2 * 32 * 32 * 4
    assert all(kernel.work.engine is None for kernel in kernels[at:] if "gather" in kernel.name
               and isinstance(kernel.work, CollectiveWork))  # fmt: skip
    reads = [(k.work.q_heads, k.work.kv_len, k.work.causal) for k in kernels if isinstance(k.work, AttentionWork)]
    assert reads == [(32, 2059, False), (16, 1, False)]


def test_prompts_copy_what_they_gather_and_scatter_too() -> None:
    names = [k.name for k in kernels_of("vllm", [Group(phase="prefill", sequences=1, new_tokens=500, context=900)])]
    at = names.index("cache_write")
    assert names[at + 1 : names.index("o_gemm")] == [
        "all_gather_q", "reorder_q", "attention_cached", "attention", "copy_lse", "all_gather_lse", "correct_out",
        "order_out", "reduce_scatter_out", "reorder_out", "copy_own_lse", "merge_out",
    ]  # fmt: skip


def test_gathered_caches_of_a_context_group_need_no_order_of_heads() -> None:
    layout = Layout(cp=2, cp_mode="all_gather")
    groups = [Group(phase="prefill", sequences=1, new_tokens=500, context=900)]
    step, options = RaggedStep(groups=groups, scored=1), Options(stack="paged-kv")
    program = build_ragged(load_model("llama3-8b"), layout, step, options=options)
    names = {kernel.name for segment in program.ranks[0].phases[0].segments for kernel in segment.kernels}
    assert "reduce_scatter_out" in names and not names & {"reorder_q", "order_out", "reorder_out", "copy_lse"}


def test_the_gpu_waits_for_a_host_that_waited_for_it() -> None:
    """Once a step, of this engine alone; as long as in the traces less what the profiler does to launches."""
    pace = load_engine("vllm").host
    spans = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    seen_s = statistics.mean(row["span_s"] for row in spans if row["kind"] == "vllm_wait")
    assert pace.cache_shards_s == pytest.approx(seen_s * pace.kernel_s / statistics.mean(PROFILED_S), rel=0.01)
    group = Group(phase="decode", sequences=4, new_tokens=1, context=900)
    waits = [host_seconds(kernel) for kernel in kernels_of("vllm", [group])]
    assert sum(waits) == waits[-1] == pytest.approx(pace.cache_shards_s, abs=1e-6)
    assert not sum(map(host_seconds, kernels_of("paged-kv", [group])))


def test_steps_of_the_server_are_predicted() -> None:
    """Two steps that no fit has seen, with the model's own config beside them."""
    rows = [row for row in validate((ROWS,)) if row.record.kind == "model_step"]
    errors = [(row.error("latency_s"), row.error("energy_j")) for row in rows]
    assert [row.record.inputs["batch"] for row in rows] == [4, 32]
    for latency, energy in errors:
        assert latency is not None and abs(latency) < 0.03
        assert energy is not None and abs(energy) < 0.08


def test_a_row_s_own_model_lies_beside_its_file(tmp_path: Path) -> None:
    config = json.loads(CONFIG.read_text(encoding="utf-8"))
    (tmp_path / "narrow.json").write_text(json.dumps(config | {"hidden_size": 2048}), encoding="utf-8")
    row = next(json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines() if "model_step" in line)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"model": "narrow.json"}) + "\n" + json.dumps(row | {"model": "none.json"}) + "\n")
    assert [record.inputs["model"] for record in read_records(path)] == [
        str(tmp_path / "narrow.json"), str(tmp_path / "none.json"),
    ]  # fmt: skip
    narrow, missing = validate((path,))
    assert narrow.predicted is not None and narrow.predicted.latency_s < 0.9 * row["latency_s"]
    assert missing.predicted is None and "none.json" in (missing.skipped or "")


def test_status_names_the_measured_steps() -> None:
    run = simulate(**STEP, batch=8, seq_len=5000, chip_temperature_c=43)
    assert "2 unseen runs of this kind" in run.standing.words() and "dcp 2 was measured" not in run.standing.words()
    other = simulate(**STEP | {"tp": 4, "dcp": 4, "batch": 8, "seq_len": 5000})
    assert "no whole run with layout = tp 4, dcp 4 was measured" in other.standing.words()
    load: dict[str, Any] = {"requests": 3, "rate_per_s": 2.0, "input_tokens": 4500, "output_tokens": 4}
    served = {name: value for name, value in STEP.items() if name != "phase"}
    reasons, wider = (
        " ".join(serve(**served | degrees, **load).summary["status_reasons"]) for degrees in ({}, {"tp": 4, "dcp": 4})
    )
    assert "no server was measured" in reasons and "a cache of" not in reasons
    assert "no step with a cache of 4 ranks (dcp) was measured" in wider
