"""What every family's fit shares: settled points, least squares on logs, and learning the correction."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.gpu import GpuSpec
from hardware.laws.correction import Correction, LawCurve, corrected
from hardware.laws.terms import KernelTerms
from hardware.power import OperatingPoint, PowerCurve, point_at, steady_point
from hardware.profile import Corrections, Matrix

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = Mapping[str, Any]
Floats = NDArray[np.float64]
Coefficients = TypeVar("Coefficients", bound="DataclassInstance")
# A row whose median clock lies below this share of the maximum ran at the power cap.
CAPPED_CLOCK = 0.97
# How well a sampled median tells the clock of a kernel whose clock moves in steps (log).
CLOCK_SIGMA = 0.025
# Watts above idle below which a measured difference says nothing.
LEAST_ABOVE_IDLE_W = 5.0
# How well the ratio of a kernel's times at two true clocks is known (log; four GPUs agree to 0.4 %).
RATIO_SIGMA = 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class Law(Generic[Coefficients]):
    """A family's law as it is fitted: where the search begins, which coefficients are free, a row's terms and place.

    ``features_of`` gives the coordinates of a row's correction.
    """

    start: Coefficients
    free: Sequence[str]
    terms_of: Callable[[Coefficients, Row], KernelTerms]
    features_of: Callable[[Row], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFamily(Generic[Coefficients]):
    """One kernel family, fitted: its law's coefficients, learnt corrections, standard errors of the logs.

    ``correlation`` of the errors, in the order of their names.
    """

    law: Law[Coefficients]
    coefficients: Coefficients
    corrections: Corrections
    errors: Mapping[str, float]
    correlation: Matrix = ()

    def terms(self, row: Row, course: LawCurve | None = None) -> KernelTerms:
        """The corrected terms of a row; ``course``: see :func:`hardware.laws.correction.corrected`."""
        terms, features = self.law.terms_of(self.coefficients, row), self.law.features_of(row)
        return corrected(terms, self.corrections.time, self.corrections.energy, features, course)


def standard_errors(names: Sequence[str], covariance: Floats) -> tuple[dict[str, float], Matrix]:
    """Standard errors by name, sorted as a stored profile has them, and their correlation in that order (rounded).

    >>> standard_errors(("b", "a"), np.array([[4.0, 1.0], [1.0, 1.0]]))
    ({'a': 1.0, 'b': 2.0}, ((1.0, 0.5), (0.5, 1.0)))
    """
    order = sorted(range(len(names)), key=lambda i: names[i])
    covariance = covariance[np.ix_(order, order)]
    errors = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(errors, errors)
    return (
        dict(zip((names[i] for i in order), errors.tolist(), strict=True)),
        tuple(tuple(round(float(v), 4) for v in row) for row in correlation),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSetting:
    """What a fit holds fixed: machine, curve, and the limit that capped rows settle at."""

    gpu: GpuSpec
    curve: PowerCurve
    limit_w: float

    def point(self, terms: KernelTerms, row: Row) -> OperatingPoint:
        """Where ``terms`` repeated back to back settles on a chip as warm as in ``row``.

        That is the maximum clock where the row was seen there: what a fit says of a row that never met the cap
        must not hide behind the cap.
        """
        curve = self.curve_at(row)
        if not self.capped(row):
            sms = min(terms.blocks * terms.sms_per_block, float(self.gpu.sms))
            top = self.gpu.max_clock_hz
            return point_at(terms, curve, sms=sms, gpu_sms=self.gpu.sms, sm_clock_hz=top)
        return steady_point(
            terms,
            curve,
            gpu_sms=self.gpu.sms,
            limit_w=self.limit_w,
            min_clock_hz=self.gpu.min_clock_hz,
            max_clock_hz=self.gpu.max_clock_hz,
        )

    def seen(self, terms: KernelTerms, row: Row) -> OperatingPoint:
        """``terms`` at the median clock of ``row``; where it settles if the row does not say."""
        clocks = row.get("sm_clock_mhz")
        if not clocks or not self.capped(row):
            return self.point(terms, row)
        sms = min(terms.blocks * terms.sms_per_block, float(self.gpu.sms))
        clock_hz = clocks[0] * 1e6
        return point_at(terms, self.curve_at(row), sms=sms, gpu_sms=self.gpu.sms, sm_clock_hz=clock_hz)

    def curve_at(self, row: Row) -> PowerCurve:
        """The power curve at the row's own temperature."""
        celsius = row.get("temperature_c")
        return self.curve.at(float(np.mean(celsius))) if celsius else self.curve

    def idle_w(self, row: Row) -> float:
        """Idle watts of a chip as warm as in ``row``, at the maximum clock."""
        return self.curve_at(row).idle_w(self.gpu.max_clock_hz)

    def capped(self, row: Row) -> bool:
        """True for a row whose median clock lay below the maximum, and for one that does not say."""
        clocks = row.get("sm_clock_mhz")
        return not clocks or clocks[0] * 1e6 < CAPPED_CLOCK * self.gpu.max_clock_hz


def digest(row: Row) -> str:
    """A row's name, by which a profile says what it was fitted on; ``session`` is no part of what was measured."""
    measured = {name: value for name, value in row.items() if name != "session"}
    return hashlib.sha256(json.dumps(measured, sort_keys=True).encode()).hexdigest()[:16]


def settled_half(row: Row, column: str) -> Floats:
    """Samples of a duty row: all, or where it never pauses the second half (the first iterations still run faster)."""
    values = np.asarray(row[column])
    return values if row["idle_s"] > 0 else values[len(values) // 2 :]


def settled_limit(setting: FitSetting, rows: Sequence[Row]) -> FitSetting:
    """``setting`` with the limit that the capped ones of ``rows`` settled at (their median power).

    Sessions differ by some 3 % in the mean power that the limiter holds, and a capped row's energy is that power
    times its time: a session's own figure keeps the difference out of the coefficients.
    """
    watts = [row["power_w"][0] for row in rows if row["power_w"][0] and setting.capped(row)]
    return replace(setting, limit_w=float(np.median(watts))) if len(watts) >= 3 else setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What is known of coefficients beside the rows.

    ``anchors`` are pairs of rows of one shape at two true clocks (``clock_hz``): the ratio of their times (its log
    known to ``ratio_sigma``) says what follows the clock, whatever the shape's own correction will be. ``priors`` are
    standard deviations of logs about the start (1 where not given), ``most`` the largest values that make sense.
    """

    anchors: Sequence[tuple[Row, Row]] = ()
    ratio_sigma: float = RATIO_SIGMA
    priors: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How corrections are learnt: length scales of the coordinates, amplitude and noise of time and of energy (logs),
    and the most that time may fall for one row more (None: any)."""

    lengths: tuple[float, ...]
    time: tuple[float, float] = (0.06, 0.02)
    energy: tuple[float, float] = (0.08, 0.03)
    steepest_fall: float | None = None


UNCONSTRAINED = Constraints()


def fit_family(
    rows: Sequence[Row],
    setting: FitSetting,
    law: Law[Coefficients],
    learning: Learning,
    constraints: Constraints = UNCONSTRAINED,
) -> FittedFamily[Coefficients]:
    """Coefficients by least squares, then corrections of what is left."""
    coefficients, errors, correlation = fit_coefficients(rows, setting, law, constraints)
    terms, features = [law.terms_of(coefficients, row) for row in rows], [law.features_of(row) for row in rows]
    corrections = learn_corrections(rows, terms, features, setting, learning)
    return FittedFamily(
        law=law, coefficients=coefficients, corrections=corrections, errors=errors, correlation=correlation
    )


def fit_coefficients(
    rows: Sequence[Row], setting: FitSetting, law: Law[Coefficients], constraints: Constraints = UNCONSTRAINED
) -> tuple[Coefficients, dict[str, float], Matrix]:
    """Least squares on log time and log energy of ``rows`` at their steady points.

    Returns the coefficients, and the standard errors of the logs of the free ones with their correlation.
    """
    start, free, terms_of, priors = law.start, law.free, law.terms_of, constraints.priors
    widths = np.array([priors.get(name, 1.0) for name in free])
    gpu, curve = setting.gpu, setting.curve

    def build(x: Floats) -> Coefficients:
        return replace(start, **dict(zip(free, np.exp(x).tolist(), strict=True)))

    def residual(x: Floats) -> Floats:
        c = build(x)
        out: list[float] = []
        for row in rows:
            point = setting.point(terms_of(c, row), row)
            out.append(math.log(point.latency_s / row["latency_s"]) / 0.03)
            if row.get("sm_clock_mhz") and setting.capped(row):
                out.append(math.log(point.sm_clock_hz / (row["sm_clock_mhz"][0] * 1e6)) / CLOCK_SIGMA)
            if row["energy_j"]:
                out.append(math.log(point.latency_s * point.power_w / row["energy_j"]) / 0.04)
        for pair in constraints.anchors:
            slow, fast = (
                math.log(
                    point_at(
                        terms_of(c, row), curve, sms=gpu.sms, gpu_sms=gpu.sms, sm_clock_hz=row["clock_hz"]
                    ).latency_s
                    / row["latency_s"]
                )
                for row in pair
            )
            out.extend([(slow - fast) / constraints.ratio_sigma, 0.5 * (slow + fast) / 0.03])
        # A pull to the start keeps what the rows do not identify where the datasheet put it.
        out.extend((x - x0) / widths)
        return np.asarray(out)

    x0 = np.log([getattr(start, name) for name in free])
    upper = np.minimum(x0 + math.log(5), [math.log(constraints.most.get(name, math.inf)) for name in free])
    solution = least_squares(
        residual, x0, loss="soft_l1", bounds=(x0 - math.log(5), upper), diff_step=1e-3, max_nfev=40
    )
    covariance = np.linalg.pinv(solution.jac.T @ solution.jac)
    return build(solution.x), *standard_errors(free, covariance)


def learn_corrections(
    rows: Sequence[Row],
    terms: Sequence[KernelTerms],
    features: Sequence[tuple[float, ...]],
    setting: FitSetting,
    learning: Learning,
) -> Corrections:
    """Corrections of time and of energy above idle.

    Each row is compared with the law at the clock the row was seen at, so that time and energy are distinguished
    where the power cap ties them together: a slow kernel and a hungry one settle at the same latency.
    """
    log_time, log_energy, metered = [], [], []
    for row, law in zip(rows, terms, strict=True):
        at = setting.seen(law, row)
        log_time.append(math.log(row["latency_s"] / at.latency_s))
        if row["energy_j"]:
            idle_w = setting.curve_at(row).idle_w(at.sm_clock_hz)
            measured = max(row["energy_j"] - idle_w * row["latency_s"], LEAST_ABOVE_IDLE_W * row["latency_s"])
            modelled = max(at.power_w - idle_w, LEAST_ABOVE_IDLE_W) * at.latency_s
            log_energy.append(math.log(measured / modelled))
            metered.append(len(log_time) - 1)
    points = np.asarray(features)
    return Corrections(
        time=Correction.learn(
            points,
            np.array(log_time),
            lengths=learning.lengths,
            amplitude=learning.time[0],
            noise=learning.time[1],
            steepest_fall=learning.steepest_fall,
        ),
        energy=Correction.learn(
            points[metered],
            np.array(log_energy),
            lengths=learning.lengths,
            amplitude=learning.energy[0],
            noise=learning.energy[1],
            steepest_fall=learning.steepest_fall,
        )
        if metered
        else Correction.none(),
    )
