"""MIG slices: SMs, memory and bandwidth of their own, the clock and the watts of their card."""

from __future__ import annotations

from typing import Any

import pytest

from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from hardware.mig import mig_profiles
from sim import simulate
from sim.errors import ScenarioError
from sim.scenario.machine import machine

PREFILL = {"model": "llama3-8b", "layers": 4, "seq_len": 1024}


@pytest.mark.parametrize(
    ("card", "profile"), [(card, name) for card, known in mig_profiles().items() for name in known]
)
def test_all_slices_of_a_card_fit_on_it(card: str, profile: str) -> None:
    whole, one = load_gpu(card), load_gpu(f"{card}:{profile}")
    assert one.slices * one.sms <= whole.sms
    assert one.slices * one.memory_bytes <= whole.memory_bytes
    assert one.slices * one.l2_bytes <= whole.l2_bytes
    assert one.tensor_flops_per_cycle_per_sm("bf16") == pytest.approx(whole.tensor_flops_per_cycle_per_sm("bf16"))
    assert float(profile.partition(".")[2].removesuffix("gb")) == pytest.approx(one.memory_bytes / 1e9, rel=0.03)


def test_the_slice_of_a_whole_card_runs_as_the_card() -> None:
    whole, one = simulate(**PREFILL), simulate(**PREFILL, gpu="h100:7g.80gb")
    assert (one.latency_s, one.energy_j) == (whole.latency_s, pytest.approx(whole.energy_j, rel=1e-12))
    assert one.standing.status == "unchecked"


def test_a_slice_has_its_own_sms_and_its_share_of_memory() -> None:
    whole, one = machine("h100").model, machine("h100:2g.20gb").model
    assert (one.sms, one.hbm_bytes_per_s, one.max_clock_hz) == (32, whole.hbm_bytes_per_s / 4, whole.max_clock_hz)
    decode = {"model": "llama-1b", "phase": "decode", "sm_clock_mhz": 1500}
    times = [simulate(**decode, gpu=gpu).latency_s for gpu in ("h100", "h100:4g.40gb", "h100:2g.20gb", "h100:1g.10gb")]
    # One token reads 2.5 GB of weights: at 1/8 of the bandwidth that takes 6 ms; the pauses between kernels stay.
    assert times == sorted(times) and 4.0 < times[-1] / times[0] < 8.0 and times[-1] > 8 * 2.5e9 / 3.35e12


def test_two_slices_side_by_side_take_only_watts_from_each_other() -> None:
    fixed = {**PREFILL, "gpu": "h100:3g.40gb", "sm_clock_mhz": 900}
    alone, both = simulate(**fixed), simulate(**fixed, dp=2, batch=2)
    assert both.latency_s == alone.latency_s
    idle_j = machine("h100").curve.idle_w(900e6) * alone.latency_s
    assert both.energy_j == pytest.approx(2 * alone.energy_j - idle_j, rel=1e-9)
    free = {**PREFILL, "seq_len": 8192, "gpu": "h100:3g.40gb"}
    one, two = simulate(**free), simulate(**free, dp=2, batch=2)
    assert two.latency_s > one.latency_s
    assert two.energy_j / two.latency_s == pytest.approx(machine("h100").limits.slow_limit_w, rel=2e-3)


def test_a_slice_without_a_cap_runs_at_its_clock() -> None:
    free = {**PREFILL, "gpu": "h100:3g.40gb", "uncapped": True}
    assert simulate(**free).latency_s == simulate(**free, sm_clock_mhz=1980).latency_s
    assert simulate(**free).latency_s <= simulate(**PREFILL, gpu="h100:3g.40gb").latency_s


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpu": "h100:1g.10gb"}, "it has 10 GB: h100-sxm-80gb:1g.20gb holds it; or --ignore-memory"),
        ({"gpu": "h100:3g.30gb"}, "no such MIG profile: did you mean '3g.40gb'?"),
        ({"gpu": "h100:3g.40gb+4g.40gb"}, "slices of different sizes share no work, .*: run each by itself"),
        ({"gpu": "h100:3g.40gb,h100:4g.40gb"}, "slices of different sizes share no work"),
        ({"gpu": "h100:"}, "no such MIG profile: known are 1g.10gb"),
        ({"gpu": "h100:1g.10gb:2"}, "no such MIG profile: did you mean '1g.10gb'?"),
        ({"gpu": "l4:1g.5gb"}, "no such MIG profile: known are slices of a100-sxm-40gb"),
        ({"gpu": "h100:3g.40gb", "tp": 2}, "MIG slices exchange nothing"),
        ({"gpu": "h100:3g.40gb", "dp": 3, "batch": 3}, "a card has 2 slices"),
        ({"gpu": "h100:3g.40gb", "power_cap_w": 800}, "takes at most 700 W"),
        ({"gpu": "h100:3g.40gb", "sm_partitions": "a=61"}, "61 SMs in all, the GPU has 60"),
    ],
)
def test_what_a_slice_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ScenarioError, HardwareError), match=message):
        simulate(model="llama3-8b", **fields)
