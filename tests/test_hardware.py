"""Laws, profile, catalog: hand figures, monotonicity, strictness, and what the fit refuses."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from hardware.calibrate.fit import read_fit_records
from hardware.catalog import list_gpus, load_gpu, parse_gpu
from hardware.errors import HardwareError
from hardware.laws.collective_time import bus_bytes
from hardware.laws.correction import Correction
from hardware.laws.nccl_paces import ring_steps
from hardware.laws.price import (
    collective_terms,
    decode_terms,
    elementwise_terms,
    gemm_terms,
    grouped_gemm_terms,
    prefill_terms,
)
from hardware.laws.sizes import CollectiveSizes, DecodeSizes, GemmSizes, GroupedSizes, PrefillSizes
from hardware.laws.terms import KernelTerms, dynamic_power_w, time_s, waves
from hardware.power import steady_point
from hardware.profile import dump_profile, load_profile, profile_for, read_profile

H100 = load_gpu("h100-sxm-80gb")
PROFILE = profile_for(H100)
SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[1].parent / "shared"))


def some_terms() -> dict[str, KernelTerms]:
    return {
        "gemm": gemm_terms(PROFILE, H100, GemmSizes(m=4096, n=4096, k=4096, dtype="bf16")),
        "thin gemm": gemm_terms(PROFILE, H100, GemmSizes(m=1, n=8192, k=8192, dtype="bf16")),
        "fp8 gemm": gemm_terms(PROFILE, H100, GemmSizes(m=1024, n=4096, k=4096, dtype="fp8_e4m3")),
        "prefill": prefill_terms(
            PROFILE,
            H100,
            PrefillSizes(batch=1, q_len=2048, kv_len=2048, q_heads=32, kv_heads=8, head_dim=128, causal=True),
        ),
        "decode": decode_terms(
            PROFILE, H100, DecodeSizes(batch=32, kv_len=2048, q_heads=32, kv_heads=8, head_dim=128, kv_bytes=2)
        ),
        "norm": elementwise_terms(
            PROFILE, H100, op="add_rmsnorm", rows=8192, bytes_moved=268435456, launched_blocks=8192
        ),
        "grouped": grouped_gemm_terms(
            PROFILE,
            H100,
            GroupedSizes(
                experts=128, rows=4096, distinct=128, tiles128=128, tiles256=128, rows_beyond128=0.0, n=1536, k=2048
            ),
        ),
        "all_reduce": collective_terms(
            PROFILE, H100, CollectiveSizes(op="all_reduce", world=4, buffer_bytes=2**25, ctas=None, in_graph=True)
        ),
    }


def test_the_one_time_formula_by_hand() -> None:
    terms = KernelTerms(
        floor_s=1e-6, blocks=264, cycles_per_block=2000.0, hbm_bytes=1e6, hbm_bytes_per_s=1e12, sharpness=2.0, scale=2.0
    )
    # two waves of 1 us at 2 GHz, 1 us of memory: 2 (1 + sqrt(2^2 + 1^2)) us
    assert waves(terms, 132) == 2
    assert time_s(terms, sms=132, sm_clock_hz=2e9) == pytest.approx(2 * (1 + math.sqrt(5)) * 1e-6)
    assert time_s(terms, sms=131, sm_clock_hz=2e9) == pytest.approx(2 * (1 + math.sqrt(10)) * 1e-6)


def test_the_one_power_formula_by_hand() -> None:
    terms = KernelTerms(
        floor_s=0.0, blocks=1, cycles_per_block=1.0, core_energy_j=2.0, hbm_energy_j=1.0, sm_power_w=40.0
    )
    power = dynamic_power_w(terms, sms=66, gpu_sms=132, progress_per_s=10.0, voltage_scale=0.5, clock_fraction=0.8)
    assert power == pytest.approx(10 * (2 * 0.5 + 1) + 40 * 0.5 * 0.5 * 0.8)


@pytest.mark.parametrize("name", list(some_terms()))
def test_more_sms_or_clock_is_never_slower_and_nothing_is_negative(name: str) -> None:
    terms = some_terms()[name]
    times = [time_s(terms, sms=sms, sm_clock_hz=1.5e9) for sms in (24, 48, 96, 120, 132)]
    assert times == sorted(times, reverse=True)
    clocks = [time_s(terms, sms=132, sm_clock_hz=f) for f in (0.4e9, 1.0e9, 1.5e9, 1.98e9)]
    assert clocks == sorted(clocks, reverse=True)
    assert min(times) > 0.0
    assert min(terms.core_energy_j, terms.hbm_energy_j, terms.link_energy_j, terms.sm_power_w) >= 0.0


def test_a_large_gemm_settles_where_the_card_does() -> None:
    # gemm.jsonl 8192^3: 1632 us at 697 W; duty.jsonl: 1364 MHz by the on-chip clock
    terms = gemm_terms(PROFILE, H100, GemmSizes(m=8192, n=8192, k=8192, dtype="bf16"))
    limits = PROFILE.clock_limits(H100, power_cap_w=None)
    point = steady_point(
        terms, PROFILE.power_curve(H100), gpu_sms=132, limit_w=limits.slow_limit_w,
        min_clock_hz=H100.min_clock_hz, max_clock_hz=H100.max_clock_hz,
    )  # fmt: skip
    assert point.latency_s == pytest.approx(1.63e-3, rel=0.03)
    assert point.sm_clock_hz == pytest.approx(1.364e9, rel=0.03)
    assert point.power_w == pytest.approx(697, rel=0.02)


def test_voltage_never_falls_with_the_clock_and_is_one_at_the_top() -> None:
    curve = PROFILE.power_curve(H100)
    scales = [curve.voltage_scale(f * 1e6) for f in range(345, 1981, 15)]
    assert scales == sorted(scales)
    assert scales[-1] == pytest.approx(1.0)
    # idle.jsonl: 115 to 135 W at 1980 MHz between 32 and 44 C
    assert 115.0 < curve.at(38.0).idle_w(H100.max_clock_hz) < 135.0
    assert curve.at(34.0).idle_w(345e6) == pytest.approx(72.4, abs=3.0)  # measured at 34 C


def test_bus_bytes_and_steps_of_collectives() -> None:
    assert bus_bytes("all_reduce", 8, 800) == 1400.0
    assert bus_bytes("all_gather", 8, 800) == bus_bytes("all_to_all", 8, 800) == 700.0
    assert bus_bytes("sendrecv_ring", 8, 800) == 800.0
    assert (ring_steps("all_reduce", 8), ring_steps("reduce_scatter", 8), ring_steps("sendrecv_ring", 8)) == (14, 7, 1)


def test_a_collective_in_a_step_is_cheaper_than_in_a_loop_and_more_blocks_are_faster() -> None:
    def seconds(**changes: object) -> float:
        fields_ = {"op": "all_reduce", "world": 4, "buffer_bytes": 2**20, "ctas": None, "in_graph": True} | changes
        terms = collective_terms(PROFILE, H100, CollectiveSizes(**fields_))  # type: ignore[arg-type]
        return time_s(terms, sms=132, sm_clock_hz=1.98e9)

    assert seconds() < seconds(in_graph=False)
    by_ctas = [seconds(ctas=c, buffer_bytes=2**28) for c in (2, 4, 8, 16, 32)]
    assert by_ctas == sorted(by_ctas, reverse=True)
    by_size = [seconds(buffer_bytes=2**i) for i in range(14, 31)]
    assert by_size == sorted(by_size)
    assert seconds(world=8) > seconds(world=4)


def test_a_correction_is_bounded_and_fades() -> None:
    import numpy as np

    learnt = Correction.learn(
        np.array([[10.0], [12.0]]), np.array([0.1, -0.1]), lengths=(1.0,), amplitude=0.1, noise=0.01
    )
    assert learnt.factor((10.0,)) == pytest.approx(math.exp(0.1), abs=0.02)
    assert learnt.factor((40.0,)) == pytest.approx(1.0, abs=1e-6)
    assert learnt.covers((11.0,)) and not learnt.covers((40.0,))


def test_profile_round_trips_and_is_finite(tmp_path: Path) -> None:
    profile = load_profile("h100-sxm-80gb")
    assert profile is not None and profile.status == "calibrated"
    path = tmp_path / "p.json"
    path.write_text(dump_profile(profile))
    again = read_profile(path)
    assert all(getattr(again, field.name) == getattr(profile, field.name) for field in fields(profile))

    def numbers(value: object) -> list[float]:
        if isinstance(value, bool | str | None.__class__):
            return []
        if isinstance(value, int | float):
            return [float(value)]
        if is_dataclass(value):
            return [n for f in fields(value) for n in numbers(getattr(value, f.name))]
        if isinstance(value, dict):
            return [n for v in value.values() for n in numbers(v)]
        return [n for v in value for n in numbers(v)]  # type: ignore[attr-defined]

    assert all(math.isfinite(n) for n in numbers(profile))
    assert (
        profile.provenance.files
        and profile.provenance.row_digests
        and "wattline calibrate" in profile.provenance.command
    )


def test_a_broken_profile_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("{}")
    with pytest.raises(HardwareError, match="Field required"):
        read_profile(path)


@pytest.mark.parametrize("name", list_gpus())
def test_every_gpu_of_the_catalog_gives_finite_predictions(name: str) -> None:
    gpu = load_gpu(name)
    profile = profile_for(gpu)
    assert profile.status == ("calibrated" if name == "h100-sxm-80gb" else profile.status)
    terms = gemm_terms(profile, gpu, GemmSizes(m=4096, n=4096, k=4096, dtype="bf16"))
    point = steady_point(
        terms, profile.power_curve(gpu), gpu_sms=gpu.sms,
        limit_w=profile.clock_limits(gpu, power_cap_w=None).slow_limit_w,
        min_clock_hz=gpu.min_clock_hz, max_clock_hz=gpu.max_clock_hz,
    )  # fmt: skip
    peak = gpu.tensor_flops_per_s.get("bf16", gpu.tensor_flops_per_s.get("fp16", 0.0))
    assert 0.3 * peak < 2 * 4096**3 / point.latency_s < 1.1 * peak
    assert 0.2 * gpu.tdp_w < point.power_w <= 1.01 * gpu.tdp_w
    assert profile.expected_error()


def test_same_silicon_with_faster_memory_decodes_faster() -> None:
    h200 = load_gpu("h200")
    work = {"batch": 32, "kv_len": 8192, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv_bytes": 2}
    slow = time_s(decode_terms(PROFILE, H100, DecodeSizes(**work)), sms=132, sm_clock_hz=1.98e9)
    fast = time_s(decode_terms(profile_for(h200), h200, DecodeSizes(**work)), sms=132, sm_clock_hz=1.98e9)
    assert slow / fast == pytest.approx(4.8 / 3.35, rel=0.05)


GPU = (Path(__file__).parents[1] / "hardware/data/gpus/h100-sxm-80gb.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sms =", "smss =", "x.toml: unknown key 'smss': did you mean 'sms'?"),
        ("value = 132", "value = -132", "x.toml: sms = -132: must be positive"),
        ("value = 132", "value = 131.5", "x.toml: sms = 131.5: give a whole number"),
        ("value = 132", "value = nan", "x.toml: sms = nan: give a finite number"),
        ("tdp_w = { value = 700.0", "tdp_w = { value = 50.0", "x.toml: idle_w = 72.3 is not below tdp_w = 50"),
        ('confidence = "high"', 'confidence = "sure"', "confidence = 'sure': give one of high, medium, low"),
        ("[tensor_flops_per_s]", "[tensor_flops]", "x.toml: unknown key 'tensor_flops'"),
    ],
)
def test_the_catalog_is_strict(old: str, new: str, message: str) -> None:
    with pytest.raises(HardwareError) as error:
        parse_gpu(GPU.replace(old, new, 1), where="x.toml")
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["model_step", "ring_attention", "dit_step"])
def test_the_fit_refuses_whole_model_rows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"kind": "gemm"}) + "\n" + json.dumps({"kind": kind}) + "\n")
    with pytest.raises(
        HardwareError, match=f"line 2: kind '{kind}' is for checking predictions and never enters a fit"
    ):
        read_fit_records([path])


def test_no_fitted_row_is_a_whole_model_row() -> None:
    if not (SHARED / "measurements").is_dir():
        pytest.skip(f"needs the measurement records ({SHARED / 'measurements'}; set WATTLINE_SHARED)")
    from hardware.profile import fitted_row_digests
    from sim.validation.records import read_records

    for name in ("model_step", "overlap", "ring_attention"):
        assert not {r.digest for r in read_records(SHARED / f"measurements/{name}.jsonl")} & fitted_row_digests()
    gemms = {r.digest for r in read_records(SHARED / "measurements/gemm.jsonl")}
    assert gemms <= fitted_row_digests()
