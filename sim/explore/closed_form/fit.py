"""Fit the closed form: bounded least squares on relative errors of latency and energy, with standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from sim.errors import SimError
from sim.explore.closed_form.formula import NAMES, PARAMETERS, Floats, columns, predict
from sim.explore.closed_form.sizes import PassSizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """Coefficients of one phase in order of PARAMETERS, and their standard errors.

    An error is NaN where a bound holds the coefficient, or where no sample depends on it.
    """

    values: Floats
    errors: Floats
    samples: int

    def predict(self, sizes: Sequence[PassSizes]) -> tuple[Floats, Floats]:
        """Latency (s) and energy (J, all GPUs)."""
        latency_s, energy_j = predict(self.values, columns(sizes))
        return latency_s, energy_j


def check_samples(count: int) -> None:
    """Refuse fewer samples than the form has coefficients."""
    if count < len(NAMES):
        raise SimError(f"samples = {count}: the closed form has {len(NAMES)} coefficients a phase: give more")


def fit(sizes: Sequence[PassSizes], latency_s: Floats, energy_j: Floats) -> Fitted:
    """The coefficients that predict samples best, as ratios. Needs at least as many samples as coefficients.

    Raises :class:`SimError` when there are too few samples.
    """
    check_samples(len(sizes))
    work = columns(sizes)
    scale = np.array([parameter.start for parameter in PARAMETERS])
    top = np.array([parameter.top for parameter in PARAMETERS]) / scale

    def residuals(x: Floats) -> Floats:
        latency, energy = predict(x * scale, work)
        return np.concatenate([np.log(latency / latency_s), np.log(energy / energy_j)])

    found = least_squares(residuals, np.ones(len(scale)), bounds=(1e-9, top), x_scale="jac", max_nfev=2000)
    values = np.where(found.x < 1e-6, 0.0, found.x)
    weight = np.sqrt((found.jac**2).sum(axis=0))
    free = (values > 0.0) & (values < top * (1 - 1e-6)) & (weight > 1e-9 * weight.max())
    degrees = max(1, 2 * len(sizes) - int(free.sum()))
    jacobian = found.jac[:, free] / weight[free]
    covariance = np.linalg.pinv(jacobian.T @ jacobian, hermitian=True) * (2.0 * found.cost / degrees)
    errors = np.full(len(scale), np.nan)
    errors[free] = np.sqrt(np.maximum(np.diag(covariance), 0.0)) / weight[free] * scale[free]
    return Fitted(values=values * scale, errors=errors, samples=len(sizes))
