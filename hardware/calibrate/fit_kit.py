"""What every family's fit shares: settled points, least squares on logs, and learning the correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.gpu import GpuSpec
from hardware.laws.correction import Correction, corrected
from hardware.laws.terms import KernelTerms
from hardware.power import OperatingPoint, PowerCurve, point_at, steady_point

Row = Mapping[str, Any]
Floats = NDArray[np.float64]
Coefficients = TypeVar("Coefficients")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a fit holds fixed: machine, curve, and the limit that capped rows settle at."""

    gpu: GpuSpec
    curve: PowerCurve
    limit_w: float

    def point(self, terms: KernelTerms) -> OperatingPoint:
        """Where ``terms`` repeated back to back settles."""
        return steady_point(
            terms,
            self.curve,
            gpu_sms=self.gpu.sms,
            limit_w=self.limit_w,
            min_clock_hz=self.gpu.min_clock_hz,
            max_clock_hz=self.gpu.max_clock_hz,
        )


def fit_coefficients(
    rows: Sequence[Row],
    setting: Setting,
    start: Coefficients,
    free: Sequence[str],
    terms_of: Callable[[Coefficients, Row], KernelTerms],
    *,
    anchors: Sequence[Row] = (),
) -> tuple[Coefficients, dict[str, float]]:
    """Least squares on log time and log energy of ``rows`` at their settled points.

    ``anchors`` are rows whose true clock is known (``clock_hz``): time at that clock, with three times the
    weight. Returns the coefficients and the standard errors of the logs of the ``free`` ones.
    """
    gpu, curve = setting.gpu, setting.curve

    def build(x: Floats) -> Coefficients:
        return replace(start, **dict(zip(free, np.exp(x).tolist(), strict=True)))  # type: ignore[type-var]

    def residual(x: Floats) -> Floats:
        c = build(x)
        out: list[float] = []
        for row in rows:
            point = setting.point(terms_of(c, row))
            out.append(math.log(point.latency_s / row["latency_s"]) / 0.03)
            if row["energy_j"]:
                out.append(math.log(point.latency_s * point.power_w / row["energy_j"]) / 0.04)
        for row in anchors:
            point = point_at(terms_of(c, row), curve, sms=gpu.sms, gpu_sms=gpu.sms, sm_clock_hz=row["clock_hz"])
            out.append(math.log(point.latency_s / row["latency_s"]) / 0.01)
        # A weak pull to the start keeps what the rows do not identify where the datasheet put it.
        out.extend((x - x0) / 1.0)
        return np.asarray(out)

    x0 = np.log([getattr(start, name) for name in free])
    solution = least_squares(
        residual, x0, loss="soft_l1", bounds=(x0 - math.log(5), x0 + math.log(5)), diff_step=1e-3, max_nfev=25
    )
    covariance = np.linalg.pinv(solution.jac.T @ solution.jac)
    errors = {name: float(math.sqrt(v)) for name, v in zip(free, np.diag(covariance), strict=True)}
    return build(solution.x), errors


def learn_correction(
    rows: Sequence[Row],
    terms: Sequence[KernelTerms],
    features: Sequence[tuple[float, ...]],
    setting: Setting,
    *,
    lengths: tuple[float, ...],
    time: tuple[float, float] = (0.06, 0.02),
    energy: tuple[float, float] = (0.08, 0.03),
) -> tuple[Correction, Correction]:
    """Corrections of time and of energy above idle (amplitude, noise of each).

    A capped row's clock depends on its energy and its time on the clock, so the two are learnt in turns.
    """
    points = np.asarray(features)
    time_correction, energy_correction = Correction.none(), Correction.none()
    log_time, log_energy = np.zeros(len(rows)), np.zeros(len(rows))
    for _ in range(4):
        for i, row in enumerate(rows):
            now = corrected(terms[i], time_correction, energy_correction, tuple(points[i]))
            at = setting.point(now)
            log_time[i] += math.log(row["latency_s"] / at.latency_s) - (
                0.0 if not time_correction.points else log_time[i] - math.log(time_correction.factor(tuple(points[i])))
            )
            if row["energy_j"]:
                idle_w = setting.curve.idle_w(at.sm_clock_hz)
                measured = max(row["energy_j"] / row["latency_s"] - idle_w, 5.0) * row["latency_s"]
                modelled = max(at.power_w - idle_w, 5.0) * at.latency_s
                log_energy[i] += math.log(measured / modelled) - (
                    0.0
                    if not energy_correction.points
                    else log_energy[i] - math.log(energy_correction.factor(tuple(points[i])))
                )
        time_correction = Correction.learn(points, log_time, lengths=lengths, amplitude=time[0], noise=time[1])
        energy_correction = Correction.learn(points, log_energy, lengths=lengths, amplitude=energy[0], noise=energy[1])
    return time_correction, energy_correction
