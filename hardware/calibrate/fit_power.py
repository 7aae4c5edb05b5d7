"""Voltage curve, idle power, chip spread and the fast limit, from duty and idle records.

Bursts of one kernel at true on-chip clocks, with pauses: mean power over burst and pause separates what an
iteration costs at its clock from what the warm, idle GPU draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.gpu import GpuSpec
from hardware.power import PowerCurve

Row = Mapping[str, Any]
# Where the voltage curve changes slope: duty clocks fall in two groups, below and above (physics notes).
KNEE_HZ = 1.6e9
# Idle power of an H100 locked at 360 to 800 MHz is flat (EnergAIzer artifact's idle table: 72 W up to 800 MHz, 120 W
# at 1980 MHz): the voltage is at its floor there.
FLOOR_HZ = 0.8e9
# Two-byte elements that one iteration moves through HBM, by the work's own shape (copy: 512 MiB buffer).
_HBM_PRIOR_J_PER_BYTE = (80e-12, 25e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerFit:
    """What duty and idle records say; standard errors beside each fitted figure."""

    curve: PowerCurve
    hbm_byte_energy_j: float
    chip_factors: tuple[float, ...]
    warm_idle_w: float
    fast_limit_w: float
    errors: Mapping[str, float]
    power_mape: float


def work_hbm_bytes(work: str) -> float:
    """HBM bytes of one iteration of a duty row's work, from its name."""
    if work.startswith("gemm_"):
        m, n, k = (int(part) for part in work.removeprefix("gemm_").split("x"))
        return 2.0 * (m * k + n * k + m * n)
    if work.startswith("copy_"):
        return float(work.removeprefix("copy_").removesuffix("MiB")) * 2**20
    fields = {part[0]: part[1:] for part in work.split("_")[2:]}  # attention_causal_b2_s4096_h32_kv8
    batch, length, heads, kv = (int(fields[c].lstrip("v")) for c in "bshk")
    return 2.0 * batch * length * 128 * (2 * heads + 2 * kv)


def fit_power(rows: Sequence[Row], gpu: GpuSpec) -> PowerFit:
    """Least squares on the mean power of duty rows, idle rows anchoring the static part."""
    duty = [r for r in rows if r["kind"] == "duty"]
    idle = [r for r in rows if r["kind"] == "idle"]
    deep_w = float(np.mean([p for r in idle for p, f in zip(r["power_w"], r["sm_clock_mhz"], strict=True) if f < 1000]))
    high_w = float(np.mean([p for r in idle for p, f in zip(r["power_w"], r["sm_clock_mhz"], strict=True) if f > 1000]))
    works = sorted({r["work"] for r in duty})
    chips = sorted({r["gpu_index"] for r in duty})
    f0 = gpu.max_clock_hz
    time, clock = (
        np.array([_settled(r, key) for r in duty]) * scale for key, scale in (("iter_s", 1.0), ("clock_mhz", 1e6))
    )
    count = np.array([r["n_per_burst"] for r in duty])
    period = np.array([r["period_s"] for r in duty])
    power = np.array([r["power_w"][0] for r in duty])
    work = np.array([works.index(r["work"]) for r in duty])
    chip = np.array([chips.index(r["gpu_index"]) for r in duty])
    hbm = np.array([work_hbm_bytes(w) for w in works])

    def unpack(
        x: NDArray[np.float64],
    ) -> tuple[PowerCurve, NDArray[np.float64], float, NDArray[np.float64], float]:
        static_w, clocked_w = _static(deep_w, high_w, x[0], x[1], f0)
        curve = PowerCurve(
            reference_clock_hz=f0,
            knee_hz=KNEE_HZ,
            floor_hz=FLOOR_HZ,
            lower_exponent=float(x[0]),
            upper_exponent=float(x[1]),
            static_w=static_w,
            clocked_w=clocked_w,
        )
        factors = np.append(1.0, x[4 : 3 + len(chips)])
        return curve, x[3 + len(chips) :], float(x[2]) * 1e-12, factors, float(x[3])

    def predicted(x: NDArray[np.float64]) -> NDArray[np.float64]:
        curve, core, hbm_j, factors, warm_w = unpack(x)
        scale = np.array([curve.voltage_scale(f) for f in clock])
        idle_w = np.array([curve.idle_w(f) for f in clock]) + warm_w - high_w
        dynamic = factors[chip] * (scale * core[work] * 1e-3 + hbm_j * hbm[work])
        busy = np.minimum(count * time, period)
        return np.asarray((count * dynamic + idle_w * busy + factors[chip] * warm_w * (period - busy)) / period)

    def residual(x: NDArray[np.float64]) -> NDArray[np.float64]:
        prior = (x[2] * 1e-12 - _HBM_PRIOR_J_PER_BYTE[0]) / _HBM_PRIOR_J_PER_BYTE[1]
        return np.append((predicted(x) / power - 1.0) / 0.02, prior)

    start = np.concatenate([[1.6, 2.0, 80.0, 140.0], np.ones(len(chips) - 1), np.full(len(works), 300.0)])
    solution = least_squares(residual, start, x_scale=np.abs(start))
    curve, _, hbm_j, factors, warm_w = unpack(solution.x)
    spread = np.sqrt(
        np.diag(np.linalg.inv(solution.jac.T @ solution.jac)) * 2 * solution.cost / (len(duty) - len(start))
    )
    error = np.abs(predicted(solution.x) / power - 1.0)
    return PowerFit(
        curve=curve,
        hbm_byte_energy_j=hbm_j,
        chip_factors=tuple(float(f) for f in factors),
        warm_idle_w=warm_w,
        fast_limit_w=0.0,
        errors={
            "lower_exponent": float(spread[0]),
            "upper_exponent": float(spread[1]),
            "hbm_byte_energy_j": float(spread[2]) * 1e-12,
            "warm_idle_w": float(spread[3]),
        },
        power_mape=float(error.mean()),
    )


def _settled(row: Row, key: str) -> float:
    """The middle of a burst's second half: without pauses the first iterations still run faster."""
    values = row[key]
    return float(np.median(values if row["idle_s"] > 0 else values[len(values) // 2 :]))


def _static(deep_w: float, high_w: float, lower: float, upper: float, f0: float) -> tuple[float, float]:
    """static + clocked g(f) f/f0 through idle power at the deep state (345 MHz) and at f0."""
    unit = PowerCurve(
        reference_clock_hz=f0,
        knee_hz=KNEE_HZ,
        floor_hz=FLOOR_HZ,
        lower_exponent=lower,
        upper_exponent=upper,
        static_w=0.0,
        clocked_w=1.0,
    )
    deep = unit.idle_w(345e6)
    clocked = (high_w - deep_w) / (1.0 - deep)
    return high_w - clocked, clocked
