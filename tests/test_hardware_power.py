"""Idle power, voltage and the steady clock of one kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware.catalog import load_gpu
from hardware.laws.price import elementwise_terms, gemm_terms
from hardware.laws.sizes import GemmSizes
from hardware.laws.terms import KernelTerms
from hardware.power import OperatingPoint, PowerCurve, highest_clock, point_at, steady_point
from hardware.profile import profile_for

GPU = load_gpu("h100-sxm-80gb")
PROFILE = profile_for(GPU)
CLOCKS = st.floats(min_value=GPU.min_clock_hz, max_value=GPU.max_clock_hz)
CURVE = PowerCurve(
    reference_clock_hz=2e9,
    knee_hz=1.6e9,
    floor_hz=0.8e9,
    lower_exponent=1.0,
    upper_exponent=2.0,
    static_w=70.0,
    clocked_w=50.0,
    leakage_w_per_c=1.0,
    leakage_free_c=40.0,
    temperature_c=60.0,
)
# 1 GHz-cycles of pure compute on every SM, 100 J of it at the reference voltage.
BUSY = KernelTerms(floor_s=0.0, blocks=132, cycles_per_block=1e9, core_energy_j=100.0)


def settle(terms: KernelTerms, limit_w: float, curve: PowerCurve = CURVE) -> OperatingPoint:
    return steady_point(terms, curve, gpu_sms=132, limit_w=limit_w, min_clock_hz=1e9, max_clock_hz=2e9)


def test_voltage_by_hand() -> None:
    # Above the knee (f/f0)^2; at it 0.64; below it falls with f to the floor, and no further.
    assert CURVE.voltage_scale(2e9) == 1.0
    assert CURVE.voltage_scale(1.8e9) == pytest.approx(0.81)
    assert CURVE.voltage_scale(1.6e9) == pytest.approx(0.64)
    assert CURVE.voltage_scale(1.2e9) == pytest.approx(0.48)
    assert CURVE.voltage_scale(0.4e9) == CURVE.voltage_scale(0.8e9) == pytest.approx(0.32)


def test_idle_power_by_hand() -> None:
    assert CURVE.idle_w(2e9) == pytest.approx(70 + 50 + 20)
    assert CURVE.at(40.0).idle_w(2e9) == pytest.approx(120)
    assert CURVE.idle_w(1.6e9) == pytest.approx(70 + 0.64 * (40 + 20))


@given(CLOCKS, CLOCKS)
def test_the_shipped_curve_never_falls_with_the_clock(one: float, other: float) -> None:
    slow, fast = sorted((one, other))
    assert PROFILE.curve.voltage_scale(slow) <= PROFILE.curve.voltage_scale(fast) <= 1.0
    assert PROFILE.curve.idle_w(slow) <= PROFILE.curve.idle_w(fast)


def test_the_shipped_idle_power_is_what_idle_gpus_drew() -> None:
    # idle.jsonl: 72 W at 345 MHz and 34 C; 115 to 135 W at 1980 MHz between 32 and 44 C.
    assert PROFILE.curve.at(34.0).idle_w(345e6) == pytest.approx(72.4, abs=5.0)
    assert 115.0 < PROFILE.curve.at(32.0).idle_w(1.98e9) < PROFILE.curve.at(44.0).idle_w(1.98e9) < 136.0


def test_a_kernel_below_the_limit_runs_at_the_maximum_clock() -> None:
    point = settle(BUSY, limit_w=1000.0)
    # 0.5 s at 2 GHz: 100 J / 0.5 s above 140 W idle.
    assert point.sm_clock_hz == 2e9
    assert point.latency_s == pytest.approx(0.5)
    assert point.power_w == pytest.approx(340.0)


def test_a_kernel_above_the_limit_settles_on_it() -> None:
    point = settle(BUSY, limit_w=250.0)
    assert point.power_w == pytest.approx(250.0, rel=1e-6)
    assert 1e9 < point.sm_clock_hz < 2e9
    assert point.latency_s == pytest.approx(1e9 / point.sm_clock_hz)


@given(st.floats(min_value=200.0, max_value=330.0), st.floats(min_value=1.0, max_value=50.0))
def test_more_power_allowed_is_never_slower(limit_w: float, more_w: float) -> None:
    assert settle(BUSY, limit_w + more_w).latency_s <= settle(BUSY, limit_w).latency_s


def test_a_warmer_chip_is_slower_at_the_limit_and_hungrier_below_it() -> None:
    warm = CURVE.at(80.0)
    assert settle(BUSY, 250.0, warm).sm_clock_hz < settle(BUSY, 250.0).sm_clock_hz
    assert settle(BUSY, 1000.0, warm).power_w == pytest.approx(settle(BUSY, 1000.0).power_w + 20.0)


def test_the_clock_stops_at_its_ends() -> None:
    assert highest_clock(lambda f: f, 3.0, 1.0, 2.0) == 2.0
    assert highest_clock(lambda f: f, 0.5, 1.0, 2.0) == 1.0
    assert highest_clock(lambda f: f, 1.25, 1.0, 2.0) == pytest.approx(1.25, abs=1e-8)


def test_a_gap_lowers_power_and_adds_its_time() -> None:
    without, with_gap = (
        point_at(BUSY, CURVE, sms=132, gpu_sms=132, sm_clock_hz=2e9, gap_s=gap_s) for gap_s in (0.0, 0.5)
    )
    assert with_gap.latency_s == without.latency_s + 0.5
    assert with_gap.power_w == pytest.approx(240.0)


def test_copies_keep_the_maximum_clock_where_gemms_are_capped() -> None:
    gemm = gemm_terms(PROFILE, GPU, GemmSizes(m=8192, n=8192, k=8192, dtype="bf16"))
    copy = elementwise_terms(PROFILE, GPU, op="copy", rows=1, bytes_moved=2**28, launched_blocks=32768)
    clocks = [
        steady_point(
            terms, PROFILE.curve, gpu_sms=GPU.sms, limit_w=PROFILE.limits.slow_limit_w, min_clock_hz=GPU.min_clock_hz,
            max_clock_hz=GPU.max_clock_hz,
        ).sm_clock_hz
        for terms in (gemm, copy)
    ]  # fmt: skip
    assert 1.2e9 < clocks[0] < 1.5e9
    assert clocks[1] == GPU.max_clock_hz


def test_energy_above_idle_splits_into_core_and_memory() -> None:
    terms = replace(BUSY, hbm_energy_j=30.0)
    slow = point_at(terms, CURVE, sms=132, gpu_sms=132, sm_clock_hz=1.6e9)
    above_j = (slow.power_w - CURVE.idle_w(1.6e9)) * slow.latency_s
    assert above_j == pytest.approx(0.64 * 100.0 + 30.0)
