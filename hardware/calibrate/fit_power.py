"""Voltage curve, idle power and how much each chip draws, from duty and idle records.

Bursts of one kernel at true on-chip clocks, with pauses: mean power over burst and pause separates what an
iteration costs at its clock from what the warm, idle GPU draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.calibrate.fit_kit import FitSetting, settled_half, standard_errors
from hardware.gpu import GpuSpec
from hardware.power import PowerCurve
from hardware.profile import Matrix

Row = Mapping[str, Any]
Chip = tuple[str, int]
Floats = NDArray[np.float64]
# Temperature at which leakage counts as none: that of the idle rows (degrees C).
LEAKAGE_FREE_C = 40.0
# A kernel that draws less than this runs at the maximum clock under a 700 W cap (W).
BELOW_CAP_W = 660.0
# Where the voltage curve changes slope: duty clocks fall in two groups, below and above (physics notes).
KNEE_HZ = 1.6e9
# Idle power of an H100 locked at 360 to 800 MHz is flat (EnergAIzer artifact's idle table: 72 W up to 800 MHz, 120 W
# at 1980 MHz): the voltage is at its floor there.
FLOOR_HZ = 0.8e9
# J per HBM byte before the data speak: mean, standard deviation (published HBM3 figures of 4 to 7 pJ/bit and the
# controller; duty rows separate it weakly from core energy).
_HBM_PRIOR_J_PER_BYTE = (80e-12, 25e-12)
# Chips differ in idle power by about this (idle.jsonl: residual about a line in temperature).
IDLE_SIGMA_W = 4.0
# Noise of a duty row's mean power (5 to 6 ticks of the energy counter), relative.
_DUTY_SIGMA = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerFit:
    """What duty and idle records say; standard errors beside each fitted figure, and their correlation.

    ``core_j`` is the energy above idle of one iteration of each work at the reference voltage, HBM apart.
    """

    curve: PowerCurve
    hbm_byte_energy_j: float
    chip_factors: Mapping[Chip, float]
    core_j: Mapping[str, float]
    errors: Mapping[str, float]
    correlation: Matrix = ()

    def mean_power_w(self, row: Row) -> float:
        """Mean power of a duty row over bursts and pauses, from its iteration time, clock and temperature."""
        clock_mhz, time_s = (float(np.median(settled_half(row, column))) for column in ("clock_mhz", "iter_s"))
        clock_hz = clock_mhz * 1e6
        count, period_s, curve = row["n_per_burst"], row["period_s"], self.curve.at(row["temperature_c"][0])
        iteration_j = curve.voltage_scale(clock_hz) * self.core_j[row["work"]]
        iteration_j += self.hbm_byte_energy_j * work_hbm_bytes(row)
        busy_s = min(count * time_s, period_s)
        idle_j = curve.idle_w(clock_hz) * busy_s + curve.idle_w(curve.reference_clock_hz) * (period_s - busy_s)
        return float(self.chip_factors[chip_of(row)] * (count * iteration_j + idle_j) / period_s)


def chip_of(row: Row) -> Chip:
    """The chip that a duty row was run on."""
    return row["session"], row["gpu_index"]


def work_hbm_bytes(row: Row) -> float:
    """HBM bytes of one iteration of a duty row's work, from its name, or its kernel where the name does not say."""
    work = str(row["work"])
    if "kernel" in row:  # grouped GEMM: weights of the experts hit, activations in and out
        n, k = row["kernel"]["n"], row["kernel"]["k"]
        return float(2.0 * (row["distinct"] * n * k + row["rows"] * (n + k)))
    if work.startswith("gemm_"):
        m, n, k = (int(part) for part in work.removeprefix("gemm_").split("x"))
        return 2.0 * (m * k + n * k + m * n)
    if work.startswith("copy_"):
        return float(work.removeprefix("copy_").removesuffix("MiB")) * 2**20
    fields = {part[0]: part[1:] for part in work.split("_")[2:]}  # attention_causal_b2_s4096_h32_kv8
    batch, length, heads, kv = (int(fields[c].lstrip("v")) for c in "bshk")
    return 2.0 * batch * length * 128 * (2 * heads + 2 * kv)


def fit_power(rows: Sequence[Row], gpu: GpuSpec) -> PowerFit:
    """Least squares on the mean power of duty rows and of idle rows, each at its own temperature."""
    duty = [r for r in rows if r["kind"] == "duty"]
    idle = [
        (power_w, clock_mhz * 1e6, celsius)
        for r in rows
        if r["kind"] == "idle"
        for power_w, clock_mhz, celsius in zip(r["power_w"], r["sm_clock_mhz"], r["temperature_c"], strict=True)
    ]
    works = sorted({r["work"] for r in duty})
    chips = sorted({chip_of(r) for r in duty})
    power = np.array([r["power_w"][0] for r in duty])
    running_c = operating_temperature_c(rows)
    names = ("lower_exponent", "upper_exponent", "hbm_byte_energy_j", "static_w", "clocked_w", "leakage_w_per_c")
    units = (1.0, 1.0, 1e-12, 1.0, 1.0, 1.0)
    first_chip = len(names)
    first_work = first_chip + len(chips) - 1

    def built(x: Floats, errors: Mapping[str, float]) -> PowerFit:
        values = {name: float(v) * unit for name, v, unit in zip(names, x, units, strict=False)}
        hbm_j = values.pop("hbm_byte_energy_j")
        return PowerFit(
            curve=PowerCurve(
                reference_clock_hz=gpu.max_clock_hz,
                knee_hz=KNEE_HZ,
                floor_hz=FLOOR_HZ,
                leakage_free_c=LEAKAGE_FREE_C,
                temperature_c=running_c,
                **values,
            ),
            hbm_byte_energy_j=hbm_j,
            chip_factors=dict(zip(chips, (1.0, *x[first_chip:first_work].tolist()), strict=True)),
            core_j=dict(zip(works, (x[first_work:] * 1e-3).tolist(), strict=True)),
            errors=errors,
        )

    def residual(x: Floats) -> Floats:
        fit = built(x, {})
        at_duty = (np.array([fit.mean_power_w(row) for row in duty]) / power - 1.0) / _DUTY_SIGMA
        at_idle = [(fit.curve.at(c).idle_w(f) - watts) / IDLE_SIGMA_W for watts, f, c in idle]
        prior = (fit.hbm_byte_energy_j - _HBM_PRIOR_J_PER_BYTE[0]) / _HBM_PRIOR_J_PER_BYTE[1]
        return np.concatenate([at_duty, at_idle, [prior]])

    start = np.concatenate([[1.6, 2.0, 80.0, 70.0, 50.0, 1.0], np.ones(len(chips) - 1), np.full(len(works), 300.0)])
    solution = least_squares(residual, start, x_scale=np.abs(start))
    degrees = len(duty) + len(idle) + 1 - len(start)
    covariance = np.linalg.inv(solution.jac.T @ solution.jac) * 2 * solution.cost / degrees
    spread, correlation = standard_errors(names, covariance[:first_chip, :first_chip])
    errors = {name: spread[name] * unit for name, unit in zip(names, units, strict=True)}
    return replace(built(solution.x, errors), correlation=correlation)


def setting_of(rows: Sequence[Row], gpu: GpuSpec, power: PowerFit) -> FitSetting:
    """What the families' fits hold fixed: the curve, and the mean power that large GEMMs settled at."""
    capped = [
        row["power_w"][0]
        for row in rows
        if row["kind"] == "gemm"
        and row["world"] == 1
        and "gpu_index" not in row
        and row["dtype"] == "bf16"
        and row["m"] >= 512
        and row["power_w"][0]
    ]
    return FitSetting(gpu=gpu, curve=power.curve, limit_w=float(np.median(capped)))


def operating_temperature_c(rows: Sequence[Row]) -> float:
    """Median temperature of metered one-GPU kernels that stayed below the power cap (degrees C).

    At the cap the limiter sets the power whatever the chip leaks; below it this is how warm busy chips are.
    """
    warm = [
        r["temperature_c"][0]
        for r in rows
        if r["kind"] not in ("idle", "duty", "transient", "host", "collective", "alone", "together", "in_context")
        and r["world"] == 1
        and r.get("temperature_c")
        and r["power_w"][0] is not None
        and r["power_w"][0] < BELOW_CAP_W
    ]
    return float(np.median(warm))
