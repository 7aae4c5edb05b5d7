"""Fitting: what it may read, that it finds what made the data, and what it predicts of rows left out."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardware.calibrate.crossval import collective_errors, errors_of, folds
from hardware.calibrate.fit import CHECK_KINDS, read_fit_records
from hardware.calibrate.fit_families import (
    DECODE_START,
    FREE_DECODE,
    decode_row_law,
    fit_decode,
    on_chip_clocks,
)
from hardware.calibrate.fit_gemm import FREE_BF16, LENGTHS, duty_anchors, gemm_row_law
from hardware.calibrate.fit_kit import (
    FitSetting,
    FittedFamily,
    Learning,
    digest,
    fit_coefficients,
    learn_corrections,
    settled_limit,
)
from hardware.calibrate.fit_power import fit_power, setting_of
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from hardware.laws.attention import decode_parts
from hardware.laws.correction import Correction
from hardware.laws.terms import KernelTerms, time_s
from hardware.profile import load_profile

GPU = load_gpu("h100-sxm-80gb")
PROFILE = load_profile("h100-sxm-80gb")
assert PROFILE is not None
SETTING = FitSetting(gpu=GPU, curve=PROFILE.curve, limit_w=700.0)
GEMM_LAW = gemm_row_law(GPU, PROFILE.gemm["bf16"], FREE_BF16)
SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[2] / "shared")) / "measurements"
measured = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no measurements at {SHARED}: set WATTLINE_SHARED")


def records(*names: str) -> list[Any]:
    return read_fit_records([SHARED / f"{name}.jsonl" for name in names])


# -- what a fit may read ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(CHECK_KINDS))
def test_whole_model_rows_never_enter_a_fit(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"kind": "copy", "gpu": "h100-sxm-80gb"}\n' + json.dumps({"kind": kind}) + "\n")
    with pytest.raises(HardwareError, match=f"line 2: kind '{kind}' is for checking predictions and never enters"):
        read_fit_records([path])


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text('{"kind": "gem"}\n')
    with pytest.raises(HardwareError, match="line 1: unknown kind 'gem'"):
        read_fit_records([path])


@measured
def test_the_shipped_profile_holds_no_whole_model_row() -> None:
    fitted = set(PROFILE.provenance.row_digests)
    for name in ("model_step", "overlap", "ring_attention"):
        rows = [json.loads(line) for line in (SHARED / f"{name}.jsonl").read_text().splitlines()]
        assert rows and not fitted & {digest(row) for row in rows}
        assert f"{name}.jsonl" not in PROFILE.provenance.files
    assert fitted >= {digest(row) for row in records("gemm", "attention")}


def test_every_standard_error_is_finite() -> None:
    errors = PROFILE.provenance.standard_errors
    assert {"gemm.bf16.log.efficiency", "decode.log.hbm_bytes_per_s", "power.leakage_w_per_c"} <= set(errors)
    assert all(np.isfinite(error) and error >= 0.0 for error in errors.values())


# -- two clocks ---------------------------------------------------------------------------------------------

ATTENTION = {"causal": True, "batch": 2, "seq_len": 4096, "q_heads": 32, "kv_heads": 8}
STAMPED = {"work": "attention_causal_b2_s4096_h32_kv8", "idle_s": 0}


def attention_at(mhz: float, **fields: Any) -> dict[str, Any]:
    return ATTENTION | {"sm_clock_mhz": [mhz]} | fields


def test_capped_rows_get_the_clock_that_stamps_saw_and_others_keep_the_drivers() -> None:
    rows = [attention_at(1700.0), attention_at(1500.0, seq_len=16384, causal=False), attention_at(1980.0, seq_len=512)]
    duty = [
        STAMPED | {"clock_mhz": [1500.0, 1530.0, 1700.0]},  # its median: 0.9 of the driver's
        STAMPED | {"clock_mhz": [1700.0], "idle_s": 0.02},  # with pauses: below the cap
        STAMPED | {"clock_mhz": [1980.0], "work": "gemm_4096x4096x4096"},
        STAMPED | {"clock_mhz": [1980.0], "work": "attention_causal_b1_s4096_h32_kv8"},  # no row of that shape
    ]
    assert [row["sm_clock_mhz"][0] for row in on_chip_clocks(rows, duty, SETTING)] == [1530.0, 1350.0, 1980.0]
    assert on_chip_clocks(rows, duty[1:], SETTING) == rows
    assert rows[0]["sm_clock_mhz"] == [1700.0]


def test_the_shipped_records_put_attentions_own_clock_at_91_per_cent_of_the_drivers() -> None:
    first = Path(__file__).parents[1] / "records" / GPU.id / "calibration" / "first"
    prefill = [row for row in read_fit_records([first / "attention.jsonl"]) if row["phase"] == "prefill"]
    moved = on_chip_clocks(prefill, read_fit_records([first / "duty.jsonl"]), SETTING)
    pairs = [(old["sm_clock_mhz"][0], new["sm_clock_mhz"][0]) for old, new in zip(prefill, moved, strict=True)]
    assert {round(new / old, 3) for old, new in pairs if old < 1920} == {0.913}
    assert {new / old for old, new in pairs if old >= 1965} == {1.0}
    assert (1725, 1574) in [(old, round(new)) for old, new in pairs]


# -- a fit finds what made the data -------------------------------------------------------------------------


def decode_row(batch: int, length: int, kv_heads: int, truth: Any, celsius: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "batch": batch, "seq_len": length, "q_heads": 8 * kv_heads, "kv_heads": kv_heads, "head_dim": 128,
        "temperature_c": [celsius], "sm_clock_mhz": [1980],
    }  # fmt: skip
    point = SETTING.point(decode_row_law(SETTING, truth).terms_of(truth, row), row)
    return row | {
        "latency_s": point.latency_s,
        "energy_j": point.latency_s * point.power_w,
        "power_w": [point.power_w],
    }


def test_coefficients_are_recovered_from_their_own_predictions() -> None:
    truth = replace(DECODE_START, floor_s=5e-6, merge_s=40e-9, hbm_bytes_per_s=2.8e12, core_byte_energy_j=30e-12)
    rows = [
        decode_row(batch, length, kv_heads, truth, celsius=40.0 + 2.0 * batch**0.5)
        for batch in (1, 8, 32, 128)
        for length in (512, 2048, 8192)
        for kv_heads in (1, 8)
    ]
    found, errors, correlation = fit_coefficients(
        rows,
        SETTING,
        decode_row_law(SETTING, DECODE_START),
    )
    assert found.hbm_bytes_per_s == pytest.approx(truth.hbm_bytes_per_s, rel=0.01)
    assert found.floor_s == pytest.approx(truth.floor_s, rel=0.03)
    assert found.core_byte_energy_j == pytest.approx(truth.core_byte_energy_j, rel=0.05)
    assert errors["hbm_bytes_per_s"] < 0.02 < errors["split_s"]
    told = np.array(correlation)
    assert told.shape == (len(FREE_DECODE),) * 2 and np.all(np.diag(told) == 1.0) and np.all(told == told.T)
    # Bytes cost energy in the core and watts in SMs that wait for them: what one takes the other loses.
    names = sorted(FREE_DECODE)
    assert list(errors) == names and told[names.index("core_byte_energy_j"), names.index("sm_power_w")] < -0.3


def test_rows_below_the_cap_are_judged_at_the_maximum_clock() -> None:
    terms = KernelTerms(floor_s=0.0, blocks=132, cycles_per_block=1e6, core_energy_j=1.0)
    free, capped = (SETTING.point(terms, {"sm_clock_mhz": [mhz]}) for mhz in (1980, 1400))
    assert free.sm_clock_hz == 1.98e9 and free.power_w > 700.0
    assert capped.sm_clock_hz < 1.98e9 and capped.power_w == pytest.approx(700.0, rel=1e-6)


def test_a_session_keeps_its_own_settled_power() -> None:
    rows = [{"power_w": [w], "sm_clock_mhz": [mhz]} for w, mhz in ((500, 1980), (668, 1500), (672, 1400), (671, 1600))]
    assert settled_limit(SETTING, rows).limit_w == 671.0
    assert settled_limit(SETTING, rows[:3]).limit_w == 700.0  # two rows are too few to tell


def test_a_correction_meets_its_points_and_fades_away_from_them() -> None:
    points = np.array([[float(x), float(y)] for x in range(4) for y in range(3)])
    wanted = 0.05 * np.sin(points[:, 0])
    learnt = Correction.learn(points, wanted, lengths=(1.0, 1.0), amplitude=0.06, noise=0.002)
    assert np.log([learnt.factor(tuple(p)) for p in points]) == pytest.approx(wanted, abs=0.003)
    assert learnt.factor((40.0, 1.0)) == pytest.approx(1.0, abs=1e-9)
    assert learnt.covers((1.5, 1.5)) and not learnt.covers((9.0, 1.5))


def test_a_correction_is_bounded() -> None:
    learnt = Correction.learn(np.array([[0.0]]), np.array([3.0]), lengths=(1.0,), amplitude=5.0, noise=0.01)
    assert learnt.factor((0.0,)) == pytest.approx(np.exp(0.25))


@pytest.mark.parametrize(
    ("streams", "kv_len", "parts"),
    [(1, 2048, 16.0), (1, 8192, 64.0), (8, 2048, 13.2), (32, 2048, 3.3), (106, 8192, 1.0), (1024, 512, 1.0)],
)
def test_split_keys_by_hand(streams: int, kv_len: int, parts: float) -> None:
    # 132 SMs: 0.8 x 132 = 105.6 streams are enough, fewer are cut into as many parts as make that number, none shorter
    # than a block of 128 keys.
    assert decode_parts(streams, kv_len, 132) == pytest.approx(parts)


# -- what is predicted of rows left out ---------------------------------------------------------------------


def means(errors: Sequence[tuple[float, float]]) -> tuple[float, float]:
    latency, energy = np.nanmean(np.abs(np.asarray(errors)), axis=0) * 100
    return float(latency), float(energy)


@measured
def test_decode_attention_left_out() -> None:
    rows = [row for row in records("attention") if row["phase"] == "decode"]
    errors = []
    for i, row in enumerate(rows):
        family = fit_decode(rows[:i] + rows[i + 1 :], SETTING, DECODE_START.hbm_byte_energy_j)
        errors.append(errors_of(row, family.terms(row), SETTING))
    latency, energy = means(errors)
    assert latency < 5.0 and energy < 6.0


@measured
def test_gemm_shapes_left_out() -> None:
    """Corrections learnt without each (n, k); python -m hardware.calibrate.crossval refits the law as well."""
    rows = [row for row in records("gemm") if row["dtype"] == "bf16"]
    law, errors = GEMM_LAW, []
    for rest, out in folds(rows, lambda row: (row["n"], row["k"])):
        if out[0]["k"] != 4096:
            continue
        learnt = learn_corrections(
            rest,
            [law.terms_of(law.start, r) for r in rest],
            [law.features_of(r) for r in rest],
            SETTING,
            Learning(lengths=LENGTHS),
        )
        family = FittedFamily(law=law, coefficients=law.start, corrections=learnt, errors={})
        errors += [errors_of(r, family.terms(r), SETTING) for r in out]
    latency, energy = means(errors)
    assert latency < 3.0 and energy < 4.0


@measured
def test_collectives_at_block_counts_left_out() -> None:
    held = collective_errors(records("collective", "in_context", "contention"), SETTING)
    latency, power = means(list(zip(held.latency, held.energy, strict=True)))
    assert latency < 8.0 and power < 6.0


@measured
def test_power_of_bursts() -> None:
    rows = records("duty", "idle", "gemm", "attention")
    power = fit_power(rows, GPU)
    duty = [row for row in rows if row["kind"] == "duty"]
    errors = [abs(power.mean_power_w(row) / row["power_w"][0] - 1.0) for row in duty]
    assert 100 * float(np.mean(errors)) < 3.0
    assert setting_of(rows, GPU, power).limit_w == pytest.approx(699.0, abs=3.0)


@measured
@pytest.mark.parametrize(
    "anchor",
    [
        # 256 rows against 470 MB of weights: streaming these (175 us) and multiplying (190 us) nearly meet.
        # How far two such bounds add up is one exponent for all products; here it leaves the clock 1.2 % too little.
        pytest.param(0, marks=pytest.mark.xfail(strict=True, reason="-1.2 %: HBM and tensor cores bound it alike")),
        1,
        2,
    ],
)
def test_clock_scaling_of_products(anchor: int) -> None:
    anchors = duty_anchors(records("duty", "idle", "gemm", "attention"))
    assert len(anchors) == 3
    slow, fast = anchors[anchor]
    times = [
        time_s(GEMM_LAW.terms_of(GEMM_LAW.start, row), sms=GPU.sms, sm_clock_hz=row["clock_hz"]) for row in (slow, fast)
    ]
    assert abs(times[0] / times[1] / (slow["latency_s"] / fast["latency_s"]) - 1.0) < 0.01
