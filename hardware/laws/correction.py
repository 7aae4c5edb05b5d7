"""A bounded correction: a Gaussian process on the log residual of a law.

Far from every measured point it returns to one, so that the law alone extrapolates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.laws.terms import KernelTerms
from inputs.changed import changed
from inputs.same import Same

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Matern-3/2 process: ``points`` (n x d), weights alpha = (K + noise^2 I)^-1 residual, length scales.

    ``steepest_fall`` (None: any) is the most that the log may fall for one row more, where the first coordinate is the
    log2 of a number of rows. Where measured rows fall faster, between two kernels of a library, the fall is spread
    evenly over neighbouring sizes.
    """

    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    lengths: tuple[float, ...]
    amplitude: float
    bound: float = 0.25
    steepest_fall: float | None = None

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
        steepest_fall: float | None = None,
    ) -> Correction:
        """Condition on log residuals (measured / law) at ``points``."""
        kernel = _matern(points, points, np.asarray(lengths), amplitude)
        weights = np.linalg.solve(kernel + noise**2 * np.eye(len(points)), residuals)
        return cls(
            points=tuple(tuple(round(float(v), 6) for v in p) for p in points),
            weights=tuple(round(float(w), 8) for w in weights),
            lengths=lengths,
            amplitude=amplitude,
            steepest_fall=steepest_fall,
        )

    def factor(self, x: tuple[float, ...], law: Floats | None = None) -> float:
        """exp of the expected log residual at ``x``, within the bound.

        With ``law``, the log of what is corrected at all ``SIZES`` of the first coordinate, the product of both never
        falls along it where the law does not.
        """
        if not self.points:
            return 1.0
        if law is not None:
            return math.exp(float(np.interp(x[0], SIZES, _held_up(Same(self), x[1:], law.tobytes()))))
        if self.steepest_fall is not None:
            return math.exp(float(np.interp(2.0 ** x[0], _ROWS, _by_rows(Same(self), x[1:]))))
        return math.exp(float(_logs(self, np.asarray([x]))[0]))

    def held(self, x: tuple[float, ...]) -> tuple[float, ...]:
        """``x`` with no coordinate below the least measured one."""
        if not self.points:
            return x
        return tuple([max(value, low) for value, low in zip(x, _least(Same(self)), strict=True)])

    def covers(self, x: tuple[float, ...]) -> bool:
        """True within the box of measured points, a quarter of an octave of slack."""
        if not self.points:
            return False
        low, high = _box(Same(self))
        return all(low <= value <= high for low, value, high in zip(low, x, high, strict=True))

    def above(self, x: tuple[float, ...]) -> bool:
        """True beyond the largest measured value of any coordinate, a quarter of an octave of slack."""
        if not self.points:
            return True
        return any(value > high for value, high in zip(x, _box(Same(self))[1], strict=True))


_ROOT_3 = math.sqrt(3.0)
# Log2 of sizes at which a law is known to a correction that must not make it fall.
SIZES = np.arange(6.0, 37.0, 0.125)


@dataclass(frozen=True, slots=True, kw_only=True)
class LawCurve:
    """Logs of a law's seconds and of its joules above idle at ``SIZES`` of the first coordinate, at one clock."""

    seconds: Floats
    joules: Floats


@lru_cache(maxsize=4096)
def _held_up(held: Same[Correction], others: tuple[float, ...], law: bytes) -> Floats:
    """Logs at ``SIZES`` with which the corrected curve never falls: the mean of the least such curve above and the
    largest below."""
    course = np.frombuffer(law)
    corrected_logs = course + _logs(held.held, np.array([(x, *others) for x in SIZES]))
    above = np.maximum.accumulate(corrected_logs)
    below = np.minimum.accumulate(corrected_logs[::-1])[::-1]
    return np.asarray(0.5 * (above + below) - course)


# Rows between which a correction with a steepest fall goes straight: halves of octaves, as the measured rows lie.
_ROWS = np.array([1.0, *(size for power in range(1, 14) for size in (2.0**power, 1.5 * 2.0**power))])


@lru_cache(maxsize=4096)
def _by_rows(held: Same[Correction], others: tuple[float, ...]) -> Floats:
    """Logs at ``_ROWS`` where the ``others`` of the coordinates stay."""
    correction = held.held
    logs = _logs(correction, np.array([(x, *others) for x in np.log2(_ROWS)]))
    fall = (correction.steepest_fall or 0.0) * _ROWS
    # The least curve above and the largest one below that fall no faster: halfway between them errors are smallest.
    above = np.maximum.accumulate(logs + fall) - fall
    below = np.minimum.accumulate((logs + fall)[::-1])[::-1] - fall
    return np.asarray(0.5 * (above + below))


def _logs(correction: Correction, at: Floats) -> Floats:
    points, weights, lengths = _arrays(Same(correction))
    kernel = _matern(at, points, lengths, correction.amplitude)
    return np.minimum(np.maximum(kernel @ weights, -correction.bound), correction.bound)


@lru_cache(maxsize=64)
def _arrays(held: Same[Correction]) -> tuple[Floats, Floats, Floats]:
    correction = held.held
    return np.asarray(correction.points), np.asarray(correction.weights), np.asarray(correction.lengths)


@lru_cache(maxsize=64)
def _least(held: Same[Correction]) -> list[float]:
    """The least measured value of each coordinate."""
    points, _, _ = _arrays(held)
    least: list[float] = points.min(axis=0).tolist()
    return least


@lru_cache(maxsize=64)
def _box(held: Same[Correction]) -> tuple[list[float], list[float]]:
    """The least and the largest measured value of each coordinate, with a quarter of an octave of slack."""
    points, _, _ = _arrays(held)
    return (points.min(axis=0) - 0.25).tolist(), (points.max(axis=0) + 0.25).tolist()


def _matern(left: Floats, right: Floats, lengths: Floats, amplitude: float) -> Floats:
    scaled = (left[:, None, :] - right[None, :, :]) / lengths
    distance = _ROOT_3 * np.sqrt((scaled * scaled).sum(axis=-1))
    return np.asarray(amplitude**2 * (1.0 + distance) * np.exp(-distance))


def corrected(
    terms: KernelTerms,
    time: Correction,
    energy: Correction,
    x: tuple[float, ...],
    course: LawCurve | None = None,
    **more: Any,
) -> KernelTerms:
    """``terms`` with the learnt factors on time and on the energy above idle; ``course`` holds them up (``factor``).

    ``more`` are other fields that change with them.
    """
    scale = time.factor(x, None if course is None else course.seconds)
    joules = energy.factor(x, None if course is None else course.joules)
    learnt: dict[str, Any] = {
        "scale": terms.scale * scale,
        "core_energy_j": terms.core_energy_j * joules,
        "hbm_energy_j": terms.hbm_energy_j * joules,
        "sm_power_w": terms.sm_power_w * joules / scale,
        "extrapolated": not time.covers(x),
    }
    return changed(terms, **learnt | more)
