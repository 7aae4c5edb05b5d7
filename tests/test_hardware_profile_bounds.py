"""The shipped H100 profile: limits under a cap, fitted coefficients and corrections within their bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from hardware.calibrate import fit_families, fit_gemm
from hardware.catalog import load_gpu
from hardware.power import highest_clock
from hardware.profile import Corrections, profile_for

H100 = load_gpu("h100-sxm-80gb")
PROFILE = profile_for(H100)


def test_a_limit_is_met_from_below_or_at_an_end() -> None:
    def power(clock_hz: float) -> float:
        return 100.0 + 300.0 * (clock_hz / 1e9) ** 2

    assert highest_clock(power, 400.0, 3e8, 2e9) == pytest.approx(1e9, abs=10)
    assert highest_clock(power, 5000.0, 3e8, 2e9) == 2e9
    assert highest_clock(power, 50.0, 3e8, 2e9) == 3e8


def test_a_cap_scales_every_limit_and_infinity_removes_them() -> None:
    limits = PROFILE.clock_limits(H100, power_cap_w=350.0)
    full = PROFILE.clock_limits(H100, power_cap_w=None)
    for name in ("fast_limit_w", "middle_limit_w", "slow_limit_w"):
        assert getattr(limits, name) == pytest.approx(getattr(full, name) / 2)
        assert math.isinf(getattr(PROFILE.clock_limits(H100, power_cap_w=math.inf), name))
    assert full.slow_limit_w <= full.middle_limit_w <= full.fast_limit_w


@pytest.mark.parametrize(
    ("fitted", "start", "free"),
    [
        (PROFILE.gemm["bf16"], fit_gemm.START, fit_gemm.FREE_BF16),
        (PROFILE.prefill, fit_families.PREFILL_START, fit_families.FREE_PREFILL),
        (PROFILE.decode, fit_families.DECODE_START, fit_families.FREE_DECODE),
        (PROFILE.grouped, fit_families.GROUPED_START, fit_families.FREE_GROUPED),
    ],
    ids=["gemm", "prefill", "decode", "grouped"],
)
def test_fitted_coefficients_lie_within_their_bounds(fitted: Any, start: Any, free: tuple[str, ...]) -> None:
    for name in free:
        assert 0.2 * 0.999 <= getattr(fitted, name) / getattr(start, name) <= 5.0 * 1.001, name


def test_every_learnt_correction_is_bounded_wherever_it_is_asked() -> None:
    families: list[Corrections] = [
        *PROFILE.gemm_corrections.values(), PROFILE.prefill_corrections, PROFILE.decode_corrections,
        PROFILE.grouped_corrections,
    ]  # fmt: skip
    for corrections in families:
        for one in (corrections.time, corrections.energy):
            far = tuple(1000.0 for _ in one.lengths)
            assert one.factor(far) == pytest.approx(1.0, abs=1e-9)
            factors = [one.factor(point) for point in one.points]
            assert factors and math.exp(-one.bound) <= min(factors) <= max(factors) <= math.exp(one.bound)


def test_every_coefficient_that_was_fitted_has_a_standard_error() -> None:
    errors: Mapping[str, float] = PROFILE.provenance.standard_errors
    for family in ("power", "gemm.bf16", "prefill", "decode", "grouped"):
        found = {name: value for name, value in errors.items() if name.startswith(family)}
        assert found and all(math.isfinite(value) and value >= 0 for value in found.values()), family
