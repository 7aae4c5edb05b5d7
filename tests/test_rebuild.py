"""The shipped H100 profile is what its committed records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware.calibrate.fit import fit_records, record_files
from hardware.catalog import load_gpu
from hardware.profile import load_profile

RECORDS = Path(__file__).parents[1] / "records/h100-sxm-80gb/calibration"


def test_provenance_names_every_committed_record() -> None:
    profile = load_profile("h100-sxm-80gb")
    assert profile is not None
    assert set(profile.provenance.files) == {f"{f.parent.name}/{f.name}" for f in record_files([RECORDS])}


def test_a_user_with_one_gpu_gets_a_profile_from_the_calibration_plan() -> None:
    """The records of one run of the plan, four minutes on one card; what they lack is the shipped profile's."""
    shipped = load_profile("h100-sxm-80gb")
    assert shipped is not None
    own = fit_records([RECORDS / "suite"], load_gpu("h100"))
    assert own.status == "calibrated" and own.collective == shipped.collective and own.spread == shipped.spread
    assert own.elementwise["gelu"] == shipped.elementwise["gelu"]  # not in the plan
    assert own.gemm["bf16"].efficiency == pytest.approx(shipped.gemm["bf16"].efficiency, rel=0.03)
    assert own.decode.hbm_bytes_per_s == pytest.approx(shipped.decode.hbm_bytes_per_s, rel=0.03)
    assert own.curve.idle_w(1.98e9) == pytest.approx(shipped.curve.idle_w(1.98e9), rel=0.1)
