"""The shipped H100 profile is what its committed records say."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hardware.calibrate.cards import of_one_kind, to_one_card
from hardware.calibrate.fit import ELEMENTWISE, fit_records, read_fit_records, record_files
from hardware.calibrate.fit_clocks import clock_pairs
from hardware.calibrate.fit_families import fit_decode, fit_elementwise
from hardware.calibrate.fit_limits import fit_limits
from hardware.calibrate.fit_power import fit_power, setting_of
from hardware.catalog import load_gpu
from hardware.profile import load_profile

RECORDS = Path(__file__).parents[1] / "records/h100-sxm-80gb/calibration"


def test_provenance_names_every_committed_record() -> None:
    profile = load_profile("h100-sxm-80gb")
    assert profile is not None
    assert set(profile.provenance.files) == {f"{f.parent.name}/{f.name}" for f in record_files([RECORDS])}


def test_committed_records_give_the_shipped_coefficients() -> None:
    """All but the tensor-core families, whose fit takes a quarter of a minute (README has the command for all)."""
    shipped, gpu = load_profile("h100-sxm-80gb"), load_gpu("h100")
    assert shipped is not None
    rows = read_fit_records(record_files([RECORDS]))
    power = fit_power(rows, gpu)
    rows, _ = to_one_card(of_one_kind(rows), gpu, power.curve)
    setting = setting_of(rows, gpu, power)
    single = [row for row in rows if row["world"] == 1 and "gpu_index" not in row]
    decode = fit_decode(
        [r for r in single if r["kind"] == "attention" and r["phase"] == "decode"], setting, power.hbm_byte_energy_j
    )
    moved = fit_elementwise(
        [r for r in single if r["kind"] in ELEMENTWISE],
        setting,
        power.hbm_byte_energy_j,
        clock_pairs(single, l2_bytes=gpu.l2_bytes),
    )
    found = {"curve": power.curve, "limits": fit_limits(rows, gpu, power.curve, setting.limit_w).limits}
    found |= {"decode": decode.coefficients} | {kind: family.coefficients for kind, family in moved.items()}
    expected = {"curve": shipped.curve, "limits": shipped.limits, "decode": shipped.decode} | dict(shipped.elementwise)
    assert found.keys() == expected.keys()
    for name, coefficients in found.items():
        wanted = {field: value for field, value in asdict(expected[name]).items() if value is not None}
        assert {field: asdict(coefficients)[field] for field in wanted} == pytest.approx(wanted, rel=1e-4), name


def test_eight_bit_rows_come_from_one_session() -> None:
    rows = [row for row in read_fit_records(record_files([RECORDS])) if row["world"] == 1]
    kept = of_one_kind(rows)
    assert {r["session"] for r in rows if r["kind"] == "cast_fp8"} == {"first", "suite"}
    assert {r["session"] for r in kept if r["kind"] == "cast_fp8"} == {"first"}
    assert [r for r in kept if r["kind"] == "attention"] == [r for r in rows if r["kind"] == "attention"]
    alone = [row for row in rows if row["session"] == "suite"]
    assert of_one_kind(alone) == alone


def test_a_user_with_one_gpu_gets_a_profile_from_the_calibration_plan() -> None:
    """The records of one run of the plan, four minutes on one card; what they lack is the shipped profile's."""
    shipped = load_profile("h100-sxm-80gb")
    assert shipped is not None
    own = fit_records([RECORDS / "suite"], load_gpu("h100"))
    assert own.status == "calibrated" and own.collective == shipped.collective
    assert own.spread == replace(shipped.spread, mean_power_factor=1.0)  # of that card
    assert own.elementwise["gelu"] == shipped.elementwise["gelu"]  # not in the plan
    assert own.elementwise["rope"].follows_below == shipped.elementwise["rope"].follows_below  # at one clock alone
    assert own.gemm["bf16"].efficiency == pytest.approx(shipped.gemm["bf16"].efficiency, rel=0.03)
    assert own.decode.hbm_bytes_per_s == pytest.approx(shipped.decode.hbm_bytes_per_s, rel=0.03)
    assert own.curve.idle_w(1.98e9) == pytest.approx(shipped.curve.idle_w(1.98e9), rel=0.1)
