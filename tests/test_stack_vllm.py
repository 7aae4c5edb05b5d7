"""Stack ``vllm``: its kernels in order, their laws on measured rows, its host and the way of a request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import workloads
from hardware.calibrate.fit_engine import rows_by_law
from hardware.calibrate.suite.plans_vllm import vllm as vllm_plan
from hardware.catalog import load_gpu
from hardware.engine_laws import shipped_engines
from hardware.laws.engine_price import moved_terms, scaled_gemm_terms, tile_of
from hardware.laws.scaled import scaled_rows
from hardware.laws.sizes import MovedSizes
from hardware.laws.terms import time_s, wanted_sms
from hardware.profile import fitted_row_digests, load_profile, profile_for
from sim import simulate
from sim.scenario.spec import Scenario
from sim.serving import serve
from sim.serving.trace import to_trace
from sim.validation.records import read_records
from sim.validation.validate import validate
from workloads.engine import load_engine
from workloads.families.transformer import build_program

RECORDS = Path("records")
H100, H200 = "h100-sxm-80gb", "h200-sxm-141gb"


def layer(model: str, layout: workloads.Layout, phase: str = "decode", **options: object) -> list[str]:
    """Kernels of the first rank's layer, and of its head."""
    program = build_program(
        workloads.load_model(model), layout, phase=phase, batch=8, seq_len=1024,  # type: ignore[arg-type]
        options=workloads.Options(stack="vllm", **options),  # type: ignore[arg-type]
    )  # fmt: skip
    return [kernel.name for segment in program.ranks[0].phases[0].segments for kernel in segment.kernels]


def test_a_dense_layer_is_what_the_profiler_saw_of_it() -> None:
    assert layer("llama3-8b", workloads.Layout()) == [
        "embedding", "add_rmsnorm_attn", "qkv_gemm", "rope", "cache_write", "attention", "o_gemm", "add_rmsnorm_ff",
        "gate_up_gemm", "silu_mul", "down_gemm", "lm_head", "sample", "next_step",
    ]  # fmt: skip


def test_in_fp8_only_the_output_product_needs_a_kernel_that_quantises() -> None:
    names = layer("llama3-8b", workloads.Layout(), dtype=workloads.DType.FP8)
    assert [name for name in names if name.startswith(("quantise", "cast"))] == ["quantise_o_gemm"]
    assert names[names.index("quantise_o_gemm") + 1] == "o_gemm"


def test_experts_are_two_products_over_sorted_rows_and_ranks_add_their_sums() -> None:
    names = layer("qwen3-30b-a3b", workloads.Layout(tp=2, ep=2, ep_mode="all_reduce"))
    first = names.index("router_gemm")
    assert names[first : names.index("lm_head")] == [
        "router_gemm", "gate", "sort_rows", "map_experts", "gate_up_experts", "silu_mul", "down_experts", "expert_sum",
        "copy_experts", "all_reduce_ff",
    ]  # fmt: skip
    assert names[-4:] == ["all_gather_logits", "copy_logits", "sample", "next_step"]


def test_experts_run_the_same_kernels_in_both_16_bit_types() -> None:
    runs = [simulate(model="mixtral-8x7b", stack="vllm", dtype=dtype, layers=1) for dtype in ("fp16", "bf16")]
    assert runs[0].latency_s == runs[1].latency_s
    assert [run.standing.status for run in runs] == ["unchecked", "extrapolated"]  # rows are in bf16


def test_ranks_add_the_rows_of_a_vocabulary_that_they_hold_in_slices() -> None:
    """A trace of two GPUs has 65 all-reduces a step of 32 layers (records/h200-sxm-141gb/vllm/traces)."""
    assert layer("llama3-8b", workloads.Layout(tp=2))[:3] == ["embedding", "all_reduce_embedding", "add_rmsnorm_attn"]
    program = build_program(
        workloads.load_model("llama3-8b"), workloads.Layout(tp=2, pp=2), phase="decode", batch=1, seq_len=64,
        options=workloads.Options(stack="vllm"),
    )  # fmt: skip
    ran = [[segment.name for segment in rank.phases[0].segments] for rank in program.ranks]
    assert ["micro-batch 0 embedding" in names for names in ran] == [True, True, False, False]


def test_few_choices_are_not_sorted() -> None:
    model, options = workloads.load_model("qwen3-30b-a3b"), workloads.Options(stack="vllm")
    for batch, sorts in ((4, False), (5, True)):  # 32 and 40 choices among 128 experts
        program = build_program(model, workloads.Layout(), phase="decode", batch=batch, seq_len=64, options=options)
        names = [kernel.name for segment in program.ranks[0].phases[0].segments for kernel in segment.kernels]
        assert ("sort_rows" in names) is sorts


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        ("deepseek-v3", {}, "its kernels for latent attention"),
        ("qwen3-30b-a3b", {"ep": 2, "ep_mode": "all_to_all"}, "use ep_mode = 'all_reduce'"),
        ("llama3-8b", {"cp": 2}, "use cp = 1"),
        ("llama3-8b", {"tp": 2, "overlap_chunks": 2}, "its collectives are whole"),
    ],
)
def test_what_its_kernels_are_not_known_for_is_refused(model: str, fields: dict[str, object], says: str) -> None:
    with pytest.raises(workloads.WorkloadError, match=says):
        simulate(Scenario.of(model=model, stack="vllm", seq_len=256, ignore_memory=True, **fields))


@pytest.mark.parametrize(
    ("gpu", "experts", "tokens", "tile"),
    [(H100, 128, 32, (16, 64)), (H100, 128, 33, (32, 64)), (H100, 128, 1024, (128, 128)), (H200, 128, 300, (32, 256)),
     (H200, 64, 256, (64, 128))],
)  # fmt: skip
def test_tiles_follow_the_tokens_and_where_there_is_one_the_tuned_table(
    gpu: str, experts: int, tokens: int, tile: tuple[int, int]
) -> None:
    assert tile_of("vllm", gpu, "bf16", experts, 768, tokens) == tile


@pytest.mark.parametrize("gpu", [H100, H200])
def test_its_laws_meet_the_kernels_that_they_were_fitted_on(gpu: str) -> None:
    rows = validate([RECORDS / gpu / "vllm" / "kernels.jsonl"])
    assert all(row.fitted for row in rows)
    bounds = {"vllm_experts": (0.025, 0.035), "vllm_attention": (0.02, 0.03), "vllm_scaled_gemm": (0.035, 0.04)}
    for kind, (time, energy) in bounds.items():
        mine = [row for row in rows if row.record.kind == kind and row.predicted is not None]
        assert len(mine) >= 29
        assert np.mean([abs(row.error("latency_s") or 0.0) for row in mine]) < time
        assert np.mean([abs(row.error("energy_j") or 0.0) for row in mine]) < energy


def test_left_out_errors_are_told_with_the_laws() -> None:
    for gpu in (H100, H200):
        laws = shipped_engines(gpu)["vllm"]
        assert {"routed.bf16", "decode.bf16", "prefill", "scaled.fp8_e4m3"} <= laws.left_out.keys()
        assert 0.0 < laws.left_out["routed.bf16"].time < 0.06
        assert set(laws.row_digests) <= fitted_row_digests()


def test_a_gpu_with_attention_of_public_tables_runs_it_in_an_engine_too() -> None:
    profile = profile_for(load_gpu("a100-sxm-80gb"))
    laws = profile.engines["vllm"]
    assert laws.decode["bf16"].hbm_bytes_per_s == pytest.approx(profile.decode.hbm_bytes_per_s)
    assert laws.prefill.efficiency == pytest.approx(profile.prefill.efficiency)
    fields = {"model": "llama3-8b", "gpu": "a100-sxm-80gb", "phase": "decode", "batch": 16, "seq_len": 1024}
    own, paged = (simulate(stack=stack, **fields) for stack in ("vllm", "paged-kv"))
    assert own.latency_s == pytest.approx(paged.latency_s, rel=0.06)


def test_the_profile_that_calibrate_wrote_says_nothing_of_engines() -> None:
    text = (Path("hardware") / "data" / "profiles" / f"{H100}.json").read_text(encoding="utf-8")
    profile = load_profile(H100)
    assert "engines" not in json.loads(text) and profile is not None and list(profile.engines) == ["vllm", "diffusers"]


def test_cutlass_products_cost_what_their_padded_rows_cost() -> None:
    """192 rows take 37.9 us on an H200, 256 take 39.3 (n 4096, k 14336); 128 take 25.8."""
    assert [scaled_rows(m, 4096, "token") for m in (1, 17, 100, 192, 256, 300)] == [16, 64, 128, 256, 256, 512]
    assert [scaled_rows(m, 4096, "block") for m in (1, 100, 192, 256, 300)] == [64, 128, 256, 256, 512]
    fields = {"model": "llama3-8b", "gpu": H200, "stack": "vllm", "phase": "decode", "seq_len": 64}
    one, two, three = (
        simulate(dtype="fp8_e4m3", batch=batch, lm_head=False, **fields).latency_s for batch in (128, 192, 256)
    )
    assert two - one > 1.5 * (three - two)


@pytest.mark.parametrize(
    ("m", "n", "k", "traced_us", "off"),
    # Median start to start on both ranks of the trace of tp 2 (no fit has seen it). gate_up and down of 32 rows take
    # longer there than rows of 16 and of 64 let expect (docs/engines.md).
    [(32, 3072, 4096, 7.7, 0.05), (32, 4096, 2048, 5.5, 0.16), (32, 14336, 4096, 22.8, 0.17),
     (32, 4096, 7168, 12.8, 0.2)],
)  # fmt: skip
def test_halves_of_products_follow_from_whole_ones(m: int, n: int, k: int, traced_us: float, off: float) -> None:
    gpu = load_gpu(H200)
    terms = scaled_gemm_terms(profile_for(gpu).engines["vllm"], gpu, m=m, n=n, k=k, scales="token")
    assert terms.blocks == n / 64  # as the trace's grids
    assert 1e6 * time_s(terms, sms=wanted_sms(terms, gpu.sms), sm_clock_hz=1980e6) == pytest.approx(traced_us, rel=off)


def test_a_product_of_half_the_depth_saves_what_it_does_not_read() -> None:
    """Few blocks reach the memory's rate: what is left of half a product is its launch."""
    gpu = load_gpu(H200)
    laws = profile_for(gpu).engines["vllm"]
    products = [scaled_gemm_terms(laws, gpu, m=1, n=4096, k=k, scales="token") for k in (4096, 2048)]
    whole, half = (time_s(terms, sms=wanted_sms(terms, gpu.sms), sm_clock_hz=1980e6) for terms in products)
    assert 0.7 < half / whole < 0.8


def test_queries_and_keys_are_rotated_by_one_kernel() -> None:
    """Rows hold two (3.07 us at 32 x 5,120); the server's one takes 2.0 us from start to start in a trace of its."""
    gpu = load_gpu(H200)
    terms = moved_terms(
        profile_for(gpu).engines["vllm"], gpu, MovedSizes(op="compiled_rope", rows=32, bytes_moved=4.0 * 32 * 5120)
    )
    assert terms is not None
    alone_us = 1e6 * time_s(terms, sms=wanted_sms(terms, gpu.sms), sm_clock_hz=1980e6)
    assert alone_us == pytest.approx(3.07 - 1.18, rel=0.02)
    rows = [
        row for row in validate([RECORDS / H200 / "vllm" / "kernels.jsonl"]) if row.record.inputs.get("how") == "rope"
    ]
    assert len(rows) == 31
    assert np.mean([abs(row.error("latency_s") or 0.0) for row in rows]) < 0.02


# A vLLM 0.24 server on an H100 and an H200 (shared measurements, whole steps: nothing is fitted on them).
STEPS = [
    (H100, "llama3-8b", {"phase": "prefill", "batch": 4, "seq_len": 2048}, 0.190995, 133.99, 72.0),
    (H100, "llama3-8b", {"phase": "decode", "batch": 1, "seq_len": 743}, 0.006585, 3.011, 63.0),
    (H100, "llama3-8b", {"phase": "decode", "batch": 256, "seq_len": 656}, 0.016633, 11.495, 74.0),
    (H100, "qwen3-30b-a3b", {"phase": "prefill", "batch": 2, "seq_len": 4096}, 0.141205, 98.03, 66.0),
    (H100, "qwen3-30b-a3b", {"phase": "decode", "batch": 8, "seq_len": 2221}, 0.012720, 6.006, 61.0),
    (H100, "qwen3-30b-a3b", {"phase": "decode", "batch": 128, "seq_len": 372}, 0.026424, 15.755, 66.0),
    (H200, "llama3-8b", {"phase": "decode", "batch": 8, "seq_len": 2278}, 0.005616, 3.008, 45.0),
    (H200, "llama3-8b", {"phase": "decode", "batch": 128, "seq_len": 1197}, 0.010914, 7.511, 52.0),
]


@pytest.mark.parametrize(("gpu", "model", "fields", "seconds", "joules", "celsius"), STEPS)
def test_whole_steps_of_a_real_server(
    gpu: str, model: str, fields: dict[str, object], seconds: float, joules: float, celsius: float
) -> None:
    run = simulate(model=model, gpu=gpu, stack="vllm", chip_temperature_c=celsius, **fields)
    assert run.latency_s == pytest.approx(seconds, rel=0.04)
    assert run.energy_j == pytest.approx(joules, rel=0.05)


@pytest.mark.parametrize(
    ("tp", "ep", "dtype", "count", "latency", "energy"),
    [
        (1, 1, "fp8_e4m3", 9, 0.05, 0.08),
        (1, 1, "bf16", 9, 0.08, 0.10),
        (2, 1, "bf16", 16, 0.04, 0.08),
        (2, 1, "fp8_e4m3", 8, 0.05, 0.08),
        (2, 2, "bf16", 16, 0.08, 0.10),
    ],
)
def test_steps_that_came_after_the_fit(tp: int, ep: int, dtype: str, count: int, latency: float, energy: float) -> None:
    """H200s of another day, FP8, experts, two GPUs: mean absolute errors within the bars of vLLM's stack."""
    rows = validate((RECORDS / H200 / "vllm" / "steps.jsonl",))
    asked = [row for row in rows if [row.record.inputs[key] for key in ("tp", "ep", "dtype")] == [tp, ep, dtype]]
    assert len(asked) == count
    for output, bar in (("latency_s", latency), ("energy_j", energy)):
        errors = [row.error(output) for row in asked]
        assert sum(abs(error) for error in errors if error is not None) / len(errors) < bar


def test_rows_of_the_measuring_script_become_steps_of_the_stack(tmp_path: Path) -> None:
    start = {"kind": "start", "name": "llama3-70b-40l-tp2", "gpu": H200, "tp": 2, "over": {"tensor_parallel_size": 2}}
    decode = {"kind": "decode", "name": "llama3-70b-40l-tp2", "gpu": H200, "tp": 2, "batch": 64, "seq": 1024,
              "mean_context": 1255.4, "itl_s": 0.013, "power_w": [600.0, 610.0],
              "clock": [[1980, 50], [1975, 52]]}  # fmt: skip
    experts = {**decode, "name": "qwen3-30b-a3b-ep2"}
    eight = {**decode, "name": "llama3-8b-fp8", "tp": 1, "power_w": [600.0], "clock": [[1980, 50]]}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (start, decode, experts, eight)))
    _, dense, mixture, _ = read_records(path)
    assert dense.kind == "model_step" and dense.measured["energy_j"] == pytest.approx(0.013 * 1210)
    told = {name: dense.inputs[name] for name in ("model", "layers", "tp", "stack", "phase", "batch", "seq_len")}
    assert told == {"model": "llama3-70b", "layers": 40, "tp": 2, "stack": "vllm", "phase": "decode", "batch": 64,
                    "seq_len": 1255}  # fmt: skip
    assert (mixture.inputs["ep"], mixture.inputs["ep_mode"]) == (2, "all_reduce")
    path.write_text(json.dumps(eight) + "\n")
    (record,) = read_records(path)
    assert (record.inputs["model"], record.inputs["dtype"], record.inputs["tp"]) == ("llama3-8b", "fp8_e4m3", 1)


def test_serve_takes_the_stack_where_the_model_can_run_on_it_and_says_why_not() -> None:
    load = {"requests": 3, "rate_per_s": 5.0, "input_tokens": 64, "output_tokens": 4}
    assert serve(model="llama3-8b", **load).summary["stack"] == "vllm"
    other = serve(model="deepseek-v3", tp=8, kv_blocks=20_000, **load)
    assert other.summary["stack"] == "paged-kv"
    assert "latent attention" in other.spec.stack_reason


def test_a_request_waits_for_the_step_that_was_planned_ahead_and_for_its_way() -> None:
    """A prompt that comes beside a decoding sequence waits for the step at hand and for the one planned already."""
    load = {
        "model": "llama3-8b",
        "requests": 40,
        "rate_per_s": 4.0,
        "input_tokens": 256,
        "output_tokens": 100,
        "seed": 2,
    }
    ahead, plain = serve(**load), serve(host="none", **load)
    table = ahead.requests
    way_s = table["received_s"] - table["arrival_s"]
    path = load_engine("vllm").request_path
    assert (way_s >= 0).all() and way_s.max() <= max(path.seconds)
    pace = load_engine("vllm").host
    beyond_s = way_s.median() + pace.prepare_s + pace.sample_s
    assert beyond_s == pytest.approx(0.005, abs=0.0005)  # of lone prompts, tests/test_vllm_host.py
    assert table["ttft_s"].median() > plain.requests["ttft_s"].median() + 0.5 * plain.summary["itl_s"]["p50"]
    assert (plain.requests["received_s"] == plain.requests["arrival_s"]).all()
    trace = to_trace(ahead)
    shown = [trace.kinds[kind].name for kind in trace.spans.kind]
    assert shown.count("request path") == int((way_s > 0).sum())


def test_a_host_that_launches_prompts_piece_by_piece_leaves_the_gpus_idle() -> None:
    """48 layers of 16 kernels take the host longer than a prompt of 600 tokens takes the GPU."""
    load = {"model": "qwen3-30b-a3b", "requests": 1, "input_tokens": 600, "output_tokens": 2, "seed": 1}
    run, plain = serve(**load), serve(host="none", **load)
    pace = load_engine("vllm").host
    host_s = pace.seconds(tokens=600, layers=48, kernels=16, experts=True)
    assert host_s > 2 * float(plain.requests["ttft_s"].iloc[0])
    waited_s = float(run.requests["first_token_s"].iloc[0] - run.requests["started_s"].iloc[0])
    around_s = pace.prepare_s + pace.sample_s  # of this step, and of the next, which is launched before it is told
    assert waited_s == pytest.approx(host_s + 2 * around_s, rel=0.002)
    assert run.log.idle_j > plain.log.idle_j


def test_whole_rows_of_the_stack_give_runs_a_status_and_an_error() -> None:
    fields = {"phase": "decode", "batch": 32, "seq_len": 2048, "stack": "vllm", "chip_temperature_c": 66}
    run = simulate(model="llama3-8b", **fields)
    assert run.standing.status == "calibrated"
    assert "6 unseen runs" in run.standing.expected_error


def test_compiled_kernels_are_planned_and_fitted_as_the_server_compiles_them() -> None:
    """For any number of tokens: where such rows exist, a kernel compiled for its own number is no measure of it."""
    planned = [row for row in vllm_plan(1) if row["kind"] == "vllm_compiled"]
    assert planned and all(row["sizes"] == "any" for row in planned)
    own = [{name: value for name, value in row.items() if name != "sizes"} for row in planned]
    assert rows_by_law([*own, *planned]) == rows_by_law(planned)
    assert all(len(rows) for rows in rows_by_law(own).values())  # better than none
