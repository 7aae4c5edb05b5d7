"""Laws of whole runs: an oracle from the laws alone, power caps in every phase, more of anything, every GPU."""

from __future__ import annotations

from typing import Any

import pytest

from hardware.catalog import list_gpus
from hardware.laws.terms import dynamic_power_w, time_s
from hardware.profile import load_profile
from sim import simulate
from sim.engine.graph import KernelClass
from sim.errors import ScenarioError
from sim.result.report import summary
from sim.scenario.machine import Machine

BASE: dict[str, Any] = {"model": "llama3-8b", "gpu": "h100", "layers": 3}
PHASES: list[dict[str, Any]] = [
    {"phase": "prefill", "seq_len": 2048},
    {"phase": "decode", "batch": 64, "seq_len": 4096},
    {"phase": "generate", "batch": 8, "seq_len": 512, "output_len": 6},
]
NAMES = ["prefill", "decode", "generate"]


def alone(kernel: KernelClass, target: Machine, clock_hz: float) -> tuple[float, float]:
    """Seconds (pause included) and joules of one kernel at a clock, from the two formulas and nothing else."""
    sms = min(kernel.terms.blocks * kernel.terms.sms_per_block, float(target.gpu.sms))
    work_s = time_s(kernel.terms, sms=sms, sm_clock_hz=clock_hz)
    watts = dynamic_power_w(
        kernel.terms, sms=sms, gpu_sms=target.gpu.sms, progress_per_s=1.0 / work_s,
        voltage_scale=target.curve.voltage_scale(clock_hz),
        clock_fraction=clock_hz / target.gpu.max_clock_hz,
    )  # fmt: skip
    seconds = work_s + kernel.gap_s
    return seconds, watts * work_s + target.curve.idle_w(clock_hz) * seconds


@pytest.mark.parametrize("phase", PHASES, ids=NAMES)
@pytest.mark.parametrize("mhz", [600, 1200, 1980])
def test_a_serial_run_is_the_sum_of_its_kernels(phase: dict[str, Any], mhz: float) -> None:
    run = simulate(**BASE, **phase, uncapped=True, sm_clock_mhz=mhz)
    parts = [alone(run.graph.classes[c], run.machine, mhz * 1e6) for c in run.graph.op_class]
    # Picoseconds are whole: an end is at most one late.
    assert run.latency_s == pytest.approx(sum(s for s, _ in parts), abs=1e-12 * len(parts), rel=1e-12)
    assert run.energy_j == pytest.approx(sum(j for _, j in parts), rel=1e-7)
    assert run.sm_clock_hz_per_gpu == pytest.approx((mhz * 1e6,))


@pytest.mark.parametrize("phase", PHASES, ids=NAMES)
def test_mean_power_keeps_within_every_cap_and_a_higher_cap_is_never_slower(phase: dict[str, Any]) -> None:
    runs = [simulate(**BASE, **phase, power_cap_w=cap) for cap in (400.0, 500.0, 600.0, 700.0)]
    free = simulate(**BASE, **phase, uncapped=True)
    for cap, run in zip((400.0, 500.0, 600.0, 700.0), runs, strict=True):
        assert run.power_w_per_gpu[0] <= 1.001 * cap
    latencies = [run.latency_s for run in (*runs, free)]
    assert latencies == sorted(latencies, reverse=True)
    if phase["phase"] != "decode":  # bound by memory, decode gives up clock and no time
        assert latencies[0] > 1.05 * latencies[3] > 1.05 * latencies[4]


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": "prefill", "seq_len": 4096},
        {"phase": "prefill", "seq_len": 4096, "tp": 2},
        {"phase": "prefill", "seq_len": 4096, "power_cap_w": 400.0},
        {"phase": "decode", "batch": 64, "seq_len": 2048, "power_cap_w": 350.0},
    ],
)
def test_all_kernels_of_a_settled_capped_step_run_at_one_clock(fields: dict[str, Any]) -> None:
    """Products at the cap, and norms, copies and collectives that by themselves would not meet it."""
    run = simulate(**BASE, **fields, regime="steady")
    clocks_hz = set(run.power["sm_clock_hz"])
    assert len(clocks_hz) == 1 and clocks_hz == set(run.clock_limit_hz)
    assert max(clocks_hz) < 0.9 * run.machine.gpu.max_clock_hz
    assert {"gemm", "attention", "elementwise"} <= set(run.kernels["family"])
    assert run.power["power_w"].max() > 1.3 * run.power["power_w"].min()


def test_a_capped_run_in_time_has_many_clocks() -> None:
    run = simulate(**BASE, seq_len=4096, batch=64, regime="cold")
    assert run.power["sm_clock_hz"].nunique() > 10


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"seq_len": 512}, {"seq_len": 1024}),
        ({"batch": 1}, {"batch": 2}),
        ({"layers": 2}, {"layers": 3}),
        ({"lm_head": False}, {"lm_head": True}),
        ({"phase": "decode", "batch": 8, "seq_len": 1024}, {"phase": "decode", "batch": 8, "seq_len": 8192}),
        ({"launch": "graph"}, {"launch": "eager"}),
        ({"stack": "reference-torch"}, {"stack": "unfused-torch"}),
        ({"model": "llama3-8b"}, {"model": "llama3-70b"}),
        (
            {"phase": "generate", "seq_len": 128, "output_len": 2},
            {"phase": "generate", "seq_len": 128, "output_len": 3},
        ),
    ],
)
def test_more_work_takes_longer_and_costs_more(less: dict[str, Any], more: dict[str, Any]) -> None:
    small, large = (simulate(**BASE | {"seq_len": 1024} | fields) for fields in (less, more))
    assert small.latency_s < large.latency_s
    assert small.energy_j < large.energy_j


@pytest.mark.parametrize("gpu", list_gpus())
def test_every_gpu_runs_both_phases(gpu: str) -> None:
    for phase in ("prefill", "decode"):
        run = simulate(model="llama3-8b", gpu=gpu, layers=2, phase=phase, batch=4, seq_len=512)
        data = summary(run)
        assert data["status"] == ("calibrated" if gpu == "h100-sxm-80gb" else data["status"])
        assert 1e-5 < data["latency_s"] < 1.0
        assert 0.0 < data["energy_j"] == pytest.approx(sum(data["energy_j_by_class"].values()), rel=1e-9)
        assert data["expected_error"]


def test_ranks_that_do_the_same_work_cost_the_same() -> None:
    run = simulate(**BASE, tp=4, seq_len=1024)
    assert len(set(run.energy_j_per_gpu)) == len(set(run.power_w_per_gpu)) == 1


def test_the_busiest_expert_rank_sets_the_time_and_each_pays_for_its_own_rows() -> None:
    fields: dict[str, Any] = {
        "model": "qwen3-30b-a3b", "layers": 2, "ep": 2, "tp": 2, "ep_mode": "all_reduce", "seq_len": 2048,
    }  # fmt: skip
    even = simulate(**fields, tokens_per_ep_rank=(8192, 8192))
    uneven = simulate(**fields, tokens_per_ep_rank=(14336, 2048))
    assert uneven.latency_s > 1.05 * even.latency_s
    assert uneven.energy_j_per_gpu[0] > uneven.energy_j_per_gpu[1]


def test_keywords_over_a_scenario_replace_its_fields() -> None:
    from sim import Scenario

    base = Scenario.of(**BASE, seq_len=256)
    assert simulate(base, batch=2).scenario == Scenario.of(**BASE, seq_len=256, batch=2)
    with pytest.raises(ScenarioError) as error:
        simulate(base, bacth=2)
    assert str(error.value) == "unknown key 'bacth' in scenario: did you mean 'batch'?"


def test_warmer_chips_leak_more_and_the_cap_makes_them_slower() -> None:
    cool, warm = (simulate(**BASE, phase="decode", chip_temperature_c=celsius) for celsius in (50.0, 75.0))
    profile = load_profile("h100-sxm-80gb")
    assert profile is not None
    leaked_w = profile.curve.leakage_w_per_c * 25.0
    assert warm.latency_s == cool.latency_s
    assert warm.power_w_per_gpu[0] - cool.power_w_per_gpu[0] == pytest.approx(leaked_w, rel=1e-6)
    capped = [
        simulate(**BASE | {"seq_len": 4096}, phase="prefill", chip_temperature_c=celsius).latency_s
        for celsius in (50.0, 75.0)
    ]
    assert 1.005 < capped[1] / capped[0] < 1.03


def test_a_temperature_that_no_chip_survives_is_refused() -> None:
    with pytest.raises(ScenarioError, match="chip_temperature_c = 400"):
        simulate(**BASE, chip_temperature_c=400.0)
