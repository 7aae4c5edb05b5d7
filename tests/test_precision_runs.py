"""Runs in any precision: laws over bits, what is said of them, and the runs that quantised checkpoints are for."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from sim import Scenario, simulate
from sim.errors import MemoryShortError
from sim.explore.kernel import kernel_report
from sim.result.report import headline, summary, summary_text
from sim.scenario.machine import machine
from sim.scenario.memory import check_memory, memory_use
from sim.scenario.precision import precision_of
from sim.scenario.resolved import resolve_scenario
from sim.serving import ServeSpec, serve
from sim.serving.memory import kv_blocks
from sim.serving.transfers import transfer_cost
from tests.config_kit import LLAMA
from tests.test_cli import run
from workloads.storage import storage
from workloads.work import AttentionWork, DType, GemmWork

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8_STATIC = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"},
                                  "input_activations": {"num_bits": 8, "type": "float", "dynamic": False}}},
}  # fmt: skip
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip


def config(folder: Path, table: Any, model: dict[str, Any] = LLAMA) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(model | {"quantization_config": table}), encoding="utf-8")
    return str(path)


# -- laws over bits ---------------------------------------------------------------------------------------------

NARROWING = ("bf16", "fp8_e4m3", "int6_g128", "int5_g128", "nf4_g64", "int4_g128", "int3_g128", "int2_g128")


@pytest.mark.parametrize(("model", "batch"), [("llama3-8b", 1), ("llama3-8b", 8), ("qwen3-30b-a3b", 4)])
def test_fewer_bits_of_weights_take_less_time_and_energy_where_memory_bounds(model: str, batch: int) -> None:
    runs = [
        simulate(model=model, phase="decode", batch=batch, layers=2, weight_dtype=name, ignore_memory=True)
        for name in NARROWING
    ]
    for wider, narrower in pairwise(runs):
        assert narrower.latency_s < wider.latency_s
        assert narrower.energy_j < wider.energy_j
    assert runs[1].latency_s > 0.5 * runs[0].latency_s


def test_many_rows_pay_for_turning_weights_and_are_never_quicker_than_in_sixteen_bits() -> None:
    target = machine("h100-sxm-80gb")
    wide = GemmWork(m=8192, n=28672, k=4096)
    times = {}
    for name in ("int4_g128", "fp8_e4m3"):
        work = GemmWork(m=8192, n=28672, k=4096, weights=storage(name))
        report = kernel_report(target, work)
        assert report.extrapolated
        times[name] = report.settled.latency_s / kernel_report(target, wide).settled.latency_s
    assert 1.0 < times["int4_g128"] == pytest.approx(times["fp8_e4m3"], rel=0.05)
    assert times["int4_g128"] < 1.5
    # 8-bit activations run at the 8-bit rate, whatever the weights are stored in.
    eight = kernel_report(target, GemmWork(m=8192, n=28672, k=4096, dtype=DType.FP8)).settled.latency_s
    blocks = GemmWork(m=8192, n=28672, k=4096, dtype=DType.FP8, weights=storage("fp8_block128"))
    assert kernel_report(target, blocks).settled.latency_s == pytest.approx(eight, rel=0.01)


def test_a_cache_of_half_the_bytes_takes_more_than_half_the_time() -> None:
    """FlashAttention 3 over 64 x 4,096 keys: 220.9 us in FP8, 360.5 in bf16, H100 (records/*/vllm/kernels.jsonl)."""
    target = machine("h100-sxm-80gb")
    long = {"batch": 64, "q_len": 1, "kv_len": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "causal": False}
    wide, narrow = (kernel_report(target, AttentionWork(**long, kv_dtype=kv)) for kv in (DType.BF16, DType.FP8))
    assert narrow.hbm_bytes == wide.hbm_bytes / 2
    assert narrow.settled.latency_s == pytest.approx(wide.settled.latency_s * 220.9 / 360.5, rel=0.05)
    assert narrow.extrapolated


def test_a_step_of_quantised_kernels_says_that_none_was_measured(tmp_path: Path) -> None:
    run_ = simulate(model=config(tmp_path, AWQ), phase="decode", batch=4, layers=2)
    data = summary(run_)
    assert data["status"] == "unchecked"
    assert data["status_reasons"][0].startswith(
        "no whole run with dtype = int4_g128_zero weights, bf16 activations was measured"
    )
    assert data["extrapolated_kernels"] == ["down_gemm", "gate_up_gemm", "o_gemm", "qkv_gemm"]
    assert data["precision"] == {
        "weights": "int4_g128_zero", "activations": "bf16", "kv_cache": "bf16", "accumulators": "fp32", "head": "bf16",
        "other": "bf16", "method": "awq",
    }  # fmt: skip
    assert headline(run_) == (
        "decode, batch 4, 2048 tokens, int4_g128_zero weights, bf16 activations, 1 x h100-sxm-80gb"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ignore": ["lm_head", "re:.*self_attn.*"]}, "fp8_e4m3, bf16 in some products"),
        ({"ignore": []}, "fp8_e4m3, fp8_e4m3 head"),
    ],
)
def test_a_checkpoint_of_fp8_in_part_is_none_of_those_measured_in_fp8(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    fields = {"phase": "decode", "batch": 16, "layers": 2, "gpu": "h100"}
    whole = simulate(model=config(tmp_path, FP8_STATIC), **fields)
    assert (whole.standing.status, precision_of(whole.scenario).words()) == ("calibrated", "fp8_e4m3")
    part = simulate(model=config(tmp_path, FP8_STATIC | change), **fields)
    assert part.standing.status == "unchecked"
    assert part.standing.reasons[0].startswith(f"no whole run with dtype = {words} was measured")
    assert headline(part) == f"decode, batch 16, 2048 tokens, {words}, 1 x h100-sxm-80gb"
    assert summary(part)["mfu_type"] == "fp8_e4m3"
    assert "% of fp8_e4m3 FLOP/s" in summary_text(part)


def test_weights_of_32_bits_that_run_in_16_are_named(tmp_path: Path) -> None:
    run_ = simulate(model=config(tmp_path, None, LLAMA | {"torch_dtype": "float32"}), layers=2)
    assert run_.standing.status == "calibrated"
    assert run_.standing.notes == ("the file's weights are fp32, run in bf16: --dtype fp32 runs them as they are",)
    assert simulate(model="llama3-8b", layers=2).standing.notes == ()


def test_names_that_people_use_are_one_run() -> None:
    told = {"model": "llama3-8b", "phase": "decode", "batch": 4, "layers": 1}
    plain_, alias = (simulate(**told, dtype=name) for name in ("fp8_e4m3", "FP8"))
    assert (alias.latency_s, alias.scenario) == (plain_.latency_s, plain_.scenario)
    assert Scenario.of(model="llama3-8b", dtype="bfloat16", kv_dtype="float8", weight_dtype="AWQ").model_dump()[
        "weight_dtype"
    ] == "int4_g128_zero"  # fmt: skip
    same = simulate(**told, weight_dtype="bf16", kv_dtype="bf16")
    assert same.latency_s == simulate(**told).latency_s
    assert same.standing.status == simulate(**told).standing.status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weight-dtype", "int9"], "weight_dtype = 'int9': 'int9' is no known format: give one like bf16, fp8_e4m3,"),
        (["--kv-dtype", "fp4"], "'--kv-dtype': 'fp4' is not one of 'bf16', 'fp16', 'fp8_e4m3', 'int8'"),
        (["--weight-dtype", "bf16", "--dtype", "fp8"], "weight_dtype = 'bf16' with activations in fp8_e4m3: no kernel"),
        (["--weight-dtype", "int4", "--phase", "train"], "phase = 'train': llama3-8b is quantised: gradients of bf16"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["simulate", "--model", "llama3-8b", "--layers", "1", "--seq-len", "128", *arguments], capsys)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


# -- the runs that quantised checkpoints are for -----------------------------------------------------------------


def test_deepseek_r1_as_shipped_runs_and_serves_on_eight_h200() -> None:
    need = memory_use(
        resolve_scenario(Scenario.of(model="deepseek-r1", gpu="h200-sxm-141gb", tp=8, phase="decode", batch=64))
    ).need
    assert need.weight_bytes == pytest.approx(85.1e9, rel=0.01)
    shipped, wide = (
        simulate(
            model=name, gpu="h200-sxm-141gb", tp=8, phase="decode", batch=64, layers=5, ignore_memory=name[-1] == "3"
        )
        for name in ("deepseek-r1", "deepseek-v3")
    )
    assert 0.5 * wide.latency_s < shipped.latency_s < 0.85 * wide.latency_s
    assert shipped.energy_j < 0.8 * wide.energy_j
    served = serve(ServeSpec.of(model="deepseek-r1", gpu="h200-sxm-141gb", tp=8, requests=4, output_tokens=4)).summary
    assert served["requests"] == 4
    assert served["precision"]["weights"] == "fp8_e4m3_block128"
    assert "no step with fp8_e4m3_block128 weights, fp8_e4m3_g128 activations was measured" in served["status_reasons"]
    # One sequence's eight choices leave some ranks without a row.
    apart = {"model": "deepseek-r1", "gpu": "h200-sxm-141gb", "tp": 8, "ep": 8, "ep_mode": "all_reduce"}
    lone = simulate(phase="decode", batch=1, layers=5, **apart)
    assert lone.latency_s < simulate(phase="decode", batch=64, layers=5, **apart).latency_s
    assert serve(ServeSpec.of(requests=2, output_tokens=4, **apart)).summary["requests"] == 2
    sixteen = Scenario.of(model="deepseek-v3", gpu="h200-sxm-141gb", tp=8, phase="decode")
    with pytest.raises(MemoryShortError):
        check_memory(resolve_scenario(sixteen), load_gpu("h200-sxm-141gb"))


def test_70b_in_four_bits_fits_one_h100(tmp_path: Path) -> None:
    gpu = load_gpu("h100-sxm-80gb")
    for table, weights in ((AWQ, 39.77e9), (NVFP4, 42.71e9), (None, 141.1e9)):
        path = config(tmp_path, table, LLAMA_70B)
        asked = Scenario.of(model=path, phase="decode", batch=8, seq_len=2048)
        assert memory_use(resolve_scenario(asked)).need.weight_bytes == pytest.approx(weights, rel=1e-3)
        if table is None:
            with pytest.raises(MemoryShortError):
                check_memory(resolve_scenario(asked), gpu)
        else:
            check_memory(resolve_scenario(asked), gpu)
            assert simulate(asked.model_copy(update={"layers": 2})).latency_s > 0.0


def test_a_cache_in_fp8_doubles_what_a_server_holds() -> None:
    blocks, moves = [], []
    for kv in (None, "fp8"):
        spec = ServeSpec.of(model="llama3-8b", kv_dtype=kv, requests=4, output_tokens=4)
        group = spec.group()
        blocks.append(kv_blocks(spec, group, machine(group.gpu)))
        moves.append(transfer_cost(spec, 100_000).time_s)
        found = serve(spec).summary
        assert found["kv_blocks"] == blocks[-1]
        assert found["kv_bytes_per_token_per_gpu"] == (131072 if kv is None else 65536)
    assert 0 <= blocks[1] - 2 * blocks[0] <= 1
    assert moves[1] == pytest.approx(moves[0] / 2, rel=0.01)


def test_what_a_gpu_cannot_multiply_runs_in_sixteen_bits(tmp_path: Path) -> None:
    told = {"model": config(tmp_path, NVFP4), "phase": "decode"}
    types = {gpu: precision_of(Scenario.of(gpu=gpu, **told)).product for gpu in ("h100", "b200", "a100-sxm-80gb")}
    assert {str(one.weights) for one in types.values()} == {"nvfp4"}
    assert [one.multiplies.value for one in types.values()] == ["bf16", "fp4_e2m1", "bf16"]
    eight = config(tmp_path, {"quant_method": "fp8"})
    assert precision_of(Scenario.of(model=eight, gpu="a100-sxm-80gb")).product.multiplies is DType.BF16
    old = simulate(model=eight, gpu="a100-sxm-80gb", phase="decode", layers=1)
    assert [c.name for c in old.outcome.classes() if c.name.startswith("cast_")] == []
    with pytest.raises(HardwareError, match=r"^dtype = 'fp8_e4m3': a100-sxm-80gb has no GEMM figures for it"):
        simulate(model="llama3-8b", gpu="a100-sxm-80gb", dtype="fp8", layers=1)  # asked for by name
