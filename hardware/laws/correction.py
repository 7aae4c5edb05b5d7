"""A bounded, learnt correction: a Gaussian process on the log residual of a law.

Far from every measured point it returns to one, so a law extrapolates by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hardware.laws.terms import KernelTerms

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Matern-3/2 process: ``points`` (n x d), weights alpha = (K + noise^2 I)^-1 residual, length scales."""

    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    lengths: tuple[float, ...]
    amplitude: float
    bound: float = 0.25

    @classmethod
    def none(cls) -> Correction:
        """No correction: the factor is one everywhere."""
        return cls(points=(), weights=(), lengths=(), amplitude=0.0)

    @classmethod
    def learn(
        cls,
        points: Floats,
        residuals: Floats,
        *,
        lengths: tuple[float, ...],
        amplitude: float,
        noise: float,
    ) -> Correction:
        """Condition on log residuals (measured / law) at ``points``."""
        kernel = _matern(points, points, np.asarray(lengths), amplitude)
        weights = np.linalg.solve(kernel + noise**2 * np.eye(len(points)), residuals)
        return cls(
            points=tuple(tuple(round(float(v), 6) for v in p) for p in points),
            weights=tuple(round(float(w), 8) for w in weights),
            lengths=lengths,
            amplitude=amplitude,
        )

    def factor(self, x: tuple[float, ...]) -> float:
        """exp of the expected log residual at ``x``, within the bound."""
        if not self.points:
            return 1.0
        points, weights, lengths = _arrays(self)
        kernel = _matern(np.asarray([x]), points, lengths, self.amplitude)[0]
        return math.exp(min(max(float(kernel @ weights), -self.bound), self.bound))

    def covers(self, x: tuple[float, ...]) -> bool:
        """True within the box of measured points, a quarter of an octave of slack."""
        if not self.points:
            return False
        points, _, _ = _arrays(self)
        low, high = points.min(axis=0) - 0.25, points.max(axis=0) + 0.25
        return bool(np.all((low <= x) & (x <= high)))

    def above(self, x: tuple[float, ...]) -> bool:
        """True beyond the largest measured value of any coordinate, a quarter of an octave of slack."""
        if not self.points:
            return True
        points, _, _ = _arrays(self)
        return bool(np.any(points.max(axis=0) + 0.25 < x))


@lru_cache(maxsize=64)
def _arrays(correction: Correction) -> tuple[Floats, Floats, Floats]:
    return np.asarray(correction.points), np.asarray(correction.weights), np.asarray(correction.lengths)


def _matern(left: Floats, right: Floats, lengths: Floats, amplitude: float) -> Floats:
    scaled = (left[:, None, :] - right[None, :, :]) / lengths
    distance = np.sqrt(3.0) * np.sqrt(np.sum(scaled**2, axis=-1))
    return np.asarray(amplitude**2 * (1.0 + distance) * np.exp(-distance))


def corrected(terms: KernelTerms, time: Correction, energy: Correction, x: tuple[float, ...]) -> KernelTerms:
    """``terms`` with the learnt factors on time and on the energy above idle."""
    scale, joules = time.factor(x), energy.factor(x)
    return replace(
        terms,
        scale=terms.scale * scale,
        core_energy_j=terms.core_energy_j * joules,
        hbm_energy_j=terms.hbm_energy_j * joules,
        sm_power_w=terms.sm_power_w * joules / scale,
        extrapolated=not time.covers(x),
    )
