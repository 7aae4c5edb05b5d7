"""One kernel at any clock: the clock of least energy, utilisation, every family, measured and forecast GPUs."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from sim.explore.kernel import KernelReport, kernel_report
from sim.scenario.machine import Policy, machine
from tests.test_cli import run
from workloads.work import AttentionWork, DType, GemmWork, GroupedGemmWork, Work

GEMM = GemmWork(m=4096, n=4096, k=4096)


def report(work: Work, gpu: str = "h100-sxm-80gb", cap_w: float | None = None) -> KernelReport:
    return kernel_report(machine(gpu, policy=Policy(power_cap_w=cap_w)), work)


def test_the_clock_of_least_energy_is_one_that_the_limit_allows() -> None:
    free, capped = report(GEMM, "a100-pcie-40gb"), report(GEMM, "a100-pcie-40gb", cap_w=150.0)
    for found, limit_w in ((free, 250.0), (capped, 150.0)):
        assert found.best.power_w <= limit_w * 1.001
        assert found.best.energy_j <= found.settled.energy_j
        assert all(found.best.energy_j <= p.energy_j for p in found.sweep if p.power_w <= limit_w)
    assert capped.best.energy_j >= free.best.energy_j


def test_the_sweep_covers_the_clocks_of_the_gpu() -> None:
    clocks = [round(point.sm_clock_hz / 1e6) for point in report(GEMM, "a100-pcie-40gb").sweep]
    assert (clocks[0], clocks[-1]) == (240, 1410)
    assert {b - a for a, b in itertools.pairwise(clocks)} == {90}


def test_energy_is_power_times_time_at_every_clock() -> None:
    for point in report(GEMM).sweep:
        assert point.energy_j == pytest.approx(point.power_w * point.latency_s, rel=1e-12)


@pytest.mark.parametrize(
    ("work", "low", "high"),
    [
        (GEMM, 0.6, 1.0),
        (AttentionWork(batch=2, q_len=8192, kv_len=8192, q_heads=32, kv_heads=8, head_dim=128, causal=True), 0.4, 0.8),
        (AttentionWork(batch=2, q_len=1, kv_len=8192, q_heads=32, kv_heads=8, head_dim=128, causal=False), 0.0, 0.05),
        (
            GroupedGemmWork(
                experts=128,
                rows=32768,
                distinct=128,
                tiles128=320,
                tiles256=192,
                rows_beyond128=16384.0,
                n=1536,
                k=2048,
            ),
            0.3,
            0.9,
        ),
        (GemmWork(m=1, n=4096, k=4096), 0.0, 0.02),
    ],
)
def test_tensor_utilisation_of_families(work: Work, low: float, high: float) -> None:
    assert low < report(work).settled.tensor_utilisation < high


def test_half_the_pairs_of_a_causal_mask_are_useful() -> None:
    def useful(causal: bool) -> float:
        work = AttentionWork(batch=4, q_len=4096, kv_len=4096, q_heads=32, kv_heads=8, head_dim=128, causal=causal)
        point = report(work).settled
        return point.tensor_utilisation * point.latency_s * point.sm_clock_hz

    assert useful(True) / useful(False) == pytest.approx(4097 / 8192, rel=1e-9)


def test_fp32_runs_on_other_units() -> None:
    single, half = (
        report(GemmWork(m=2048, n=2048, k=2048, dtype=dtype, out_dtype=dtype), "a100-pcie-40gb")
        for dtype in (DType.FP32, DType.BF16)
    )
    assert single.settled.latency_s > 10 * half.settled.latency_s
    assert 0.5 < single.settled.tensor_utilisation < 1.0


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "h200", "a100-pcie-40gb", "b200", "l40s"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["gemm", "--m", "512", "--n", "4096", "--k", "4096"],
        ["attention", "--seq-len", "2048"],
        ["attention", "--seq-len", "8192", "--decode", "--batch", "16"],
        ["elementwise", "--op", "softmax", "--rows", "4096", "--width", "4096"],
        ["grouped", "--tokens", "512", "--experts", "128", "--top-k", "8", "--n", "1536", "--k", "2048"],
        ["collective", "--op", "all_reduce", "--bytes", "1048576", "--world", "4"],
    ],
)
def test_every_family_on_measured_and_forecast_gpus(
    gpu: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["kernel", *arguments, "--gpu", gpu, "--json"], capsys)
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    assert found["settled"]["energy_j"] > 0
    assert found["best"]["energy_j"] <= found["settled"]["energy_j"]


def test_more_choices_than_experts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kernel", "grouped", "--tokens", "8", "--experts", "4", "--top-k", "5", "--n", "8", "--k", "8"]
    code, _, err = run(arguments, capsys)
    assert code == 2
    assert "top-k = 5 is more than experts = 4" in err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("gemm --m 8192 --n 8192 --k 8192", "calibrated", ""),
        ("gemm --m 65536 --n 8192 --k 8192", "extrapolated", "outside the measured range"),
        ("attention --seq-len 2048", "calibrated", ""),
        ("attention --seq-len 2048 --head-dim 256", "unchecked", "heads of 256 elements was measured, only of 128"),
        ("attention --seq-len 2048 --head-dim 80 --decode", "unchecked", "heads of 80 elements was measured"),
        ("elementwise --op silu_mul --rows 8192 --width 4096", "calibrated", ""),
        ("elementwise --op layernorm --rows 8192 --width 4096", "unchecked", "no layernorm was measured: it is priced"),
        ("elementwise --op softmax --rows 8192 --width 4096", "unchecked", "priced as add_rmsnorm is"),
    ],
)
def test_a_kernel_says_what_no_row_held(
    arguments: str, status: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Heads of 7 or 100,000 elements, 1e8 rows and a layer norm were calibrated."""
    code, out, _ = run(["kernel", *arguments.split(), "--json"], capsys)
    found: dict[str, Any] = json.loads(out)
    assert (code, found["status"]) == (0, status)
    assert words in " ".join(found["status_reasons"])


@pytest.mark.parametrize(
    "arguments",
    [
        "gemm --m 99999999 --n 8192 --k 8192",
        "attention --seq-len 2048 --head-dim 100000000",
        "attention --batch 100000 --seq-len 100000 --decode",
        "elementwise --op add --rows 100000000 --width 100000000",
        "grouped --tokens 8 --experts 128 --top-k 8 --n 100000 --k 100000",
        "collective --op all_reduce --bytes 10000000000000 --world 4",
        "dispatch --world 16 --tokens 10000000 --hidden 7168 --top-k 8",
    ],
)
def test_a_kernel_that_no_card_holds_is_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["kernel", *arguments.split()], capsys)
    assert code == 2
    assert re.fullmatch(r"wattline: the kernel's operands take \S+ GB, \S+ has 80: give smaller sizes\n", err), err
