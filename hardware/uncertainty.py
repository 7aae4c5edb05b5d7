"""Profiles that the records allow as well as the fitted one: what a prediction's interval is drawn from.

Four things are drawn, each from a normal distribution on its logarithm unless the text says otherwise:

* *Coefficients*, within their standard errors and correlations, which the profile stores. Those that the rows leave
  open stay as they are, and the others are drawn as if they were known (:data:`WEAK_LOG_ERROR`): together they make
  up for one another, apart they would not. A profile without correlations has no such draw.
* *Families*: a law is wrong by more than its coefficients are. How far 68 of 100 rows lay off when they were left out
  of the fit (``left_out.toml``) moves time and power of a whole family, by one factor each.
* *Chips and sessions*: power of a chip (the profile's own spread, unless it was measured), and the mean power that the
  slow limiter holds.
* *What was never measured*: forecast and uncalibrated profiles are widened to what they say of themselves.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import qmc

from hardware.laws.collective import Sharing
from hardware.power import PowerCurve
from hardware.profile import BASE_GPU, Matrix, Profile
from inputs.same import Same

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Floats = NDArray[np.float64]
Law = TypeVar("Law", bound="DataclassInstance")
Next = Callable[[], float]
# A coefficient whose logarithm is known no better than this is weakly identified (35 % either way): the rows leave it
# open, others carry its share.
WEAK_LOG_ERROR = 0.3
# Medians of capped GEMM power in the three sessions of our H100 records: 679, 699 and 710 W.
SLOW_LIMIT_LOG_ERROR = 0.022
# Launches of one layer on the host differed by 1.7 times between runs; the profile has the quickest.
HOST_SLOWEST = 1.7
# Half-widths of 90 % that profiles say of themselves (Profile.expected_error), as standard deviations of logs.
STATUS_LOG_ERROR = {"calibrated": 0.0, "forecast": math.log(1.15) / 1.645, "uncalibrated": math.log(1.40) / 1.645}
POWER = ("lower_exponent", "upper_exponent", "static_w", "clocked_w", "leakage_w_per_c")
# More than any profile draws.
DIMENSIONS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyError:
    """What 68 of 100 of ``n`` left-out rows lie within, as logs: of time, and of mean power."""

    n: int
    time: float
    power: float


@lru_cache(maxsize=8)
def left_out(gpu: str) -> Mapping[str, FamilyError]:
    """Errors of each family on rows left out of its fit; those of the measured base where ``gpu`` has none.

    Source: ``python -m hardware.calibrate.crossval records/h100-sxm-80gb/calibration --spread FILE``.
    """
    text = (files("hardware") / "data" / "left_out.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {name: FamilyError(**row) for name, row in table.get(gpu, table[BASE_GPU]).items()}


def drawn_profiles(
    profile: Profile, *, gpus: int, count: int, seed: int, known_chips: bool = False
) -> tuple[Profile, ...]:
    """``count`` profiles that the records of ``profile`` allow, for runs on ``gpus`` GPUs; the same every time.

    ``known_chips`` leaves out how chips differ in power: theirs was measured.
    A Latin hypercube: each drawn figure covers its distribution evenly. Equal requests share their profiles.
    """
    return _drawn(Same(profile), gpus, count, seed, known_chips)


@lru_cache(maxsize=32)
def _drawn(profile: Same[Profile], gpus: int, count: int, seed: int, known_chips: bool) -> tuple[Profile, ...]:
    normal = ndtri(qmc.LatinHypercube(d=DIMENSIONS, rng=np.random.default_rng(seed)).random(count))
    return tuple(_draw(profile.held, gpus, row, known_chips) for row in normal)


def _draw(profile: Profile, gpus: int, normal: Floats, known_chips: bool) -> Profile:
    """One profile; ``normal`` holds standard normal numbers, taken in order."""
    take: Next = iter(normal.tolist()).__next__
    errors = left_out(profile.gpu)
    unmeasured = STATUS_LOG_ERROR[profile.status]
    whole_time, whole_power = (math.exp(unmeasured * take()) for _ in range(2))
    chips = profile.spread.power / math.sqrt(gpus) * take()
    whole_power *= 1.0 if known_chips else math.exp(chips)
    curve = _curve(profile, take)
    # Energies were fitted at the clocks of the cap: a steeper voltage curve turns about the knee, not about the top.
    knee = profile.curve.knee_hz
    turned = profile.curve.voltage_scale(knee) / curve.voltage_scale(knee)

    def law(name: str, c: Law, *, at_cap: bool = False) -> Law:
        c = _coefficients(profile, name, c, take)
        error = errors.get(name, FamilyError(n=0, time=0.0, power=0.0))
        time = whole_time * math.exp(error.time * take())
        power = whole_power * math.exp(error.power * take())
        return scaled(c, time=time, power=power * (turned if at_cap else 1.0))

    fast, slow = profile.provenance.standard_errors.get("limits.fast_limit_w", 0.0), SLOW_LIMIT_LOG_ERROR
    limits = profile.limits
    limits = replace(
        limits,
        fast_limit_w=limits.fast_limit_w + fast * take(),
        slow_limit_w=limits.slow_limit_w * math.exp(slow / math.sqrt(gpus) * take()),
    )
    uniform = float(ndtr(take()))
    return replace(
        profile,
        curve=curve,
        limits=limits,
        launch=replace(
            profile.launch, host_issue_s=profile.launch.host_issue_s * (1.0 + (HOST_SLOWEST - 1.0) * uniform)
        ),
        gemm={dtype: law(f"gemm.{dtype}", c, at_cap=True) for dtype, c in profile.gemm.items()},
        prefill=law("prefill", profile.prefill, at_cap=True),
        grouped=law("grouped", profile.grouped, at_cap=True),
        decode=law("decode", profile.decode),
        elementwise={kind: law(kind, c) for kind, c in profile.elementwise.items()},
        collective=law("collective", profile.collective),
        sharing=_sharing(profile.sharing, take),
    )


def scaled(c: Law, *, time: float, power: float) -> Law:
    """A law's coefficients with every time longer by ``time``, and every power above idle higher by ``power``.

    >>> from hardware.laws.attention import PrefillCoefficients
    >>> c = PrefillCoefficients(
    ...     efficiency=0.8, tile_overhead=1.0, imbalance=1.0, floor_s=1e-6, flop_energy_j=1e-12
    ... )
    >>> twice = scaled(c, time=2.0, power=1.5)
    >>> twice.efficiency, twice.floor_s, twice.flop_energy_j
    (0.4, 2e-06, 3e-12)
    """
    changes: dict[str, Any] = {}
    for field in fields(c):
        value, name = getattr(c, field.name), field.name
        if name == "tables":
            changes[name] = tuple(
                replace(t, rows=tuple((b, size, s * time, w * power) for b, size, s, w in t.rows)) for t in value
            )
        elif value is not None and (factor := _factor(name, time, power)) != 1.0:
            changes[name] = value * factor
    return replace(c, **changes)


def _factor(name: str, time: float, power: float) -> float:
    """What a coefficient is multiplied by, from the unit in its name."""
    if name == "efficiency" or "_per_s" in name:
        return 1.0 / time
    if name.endswith("_s") or "cycles" in name:
        return time
    if name.endswith("_energy_j"):
        return time * power
    return power if name.endswith("_power_w") else 1.0


def _coefficients(profile: Profile, name: str, c: Law, take: Next) -> Law:
    """``c`` with the coefficients that the rows determine drawn within their errors."""
    shifts = _correlated(profile, name, f"{name}.log.", take)
    return replace(c, **{key: getattr(c, key) * math.exp(x) for key, x in shifts.items()})


def _curve(profile: Profile, take: Next) -> PowerCurve:
    """The power curve within its errors (in its own units); energies per HBM byte stay with the families."""
    curve = profile.curve
    shifts = _correlated(profile, "power", "power.", take)
    return replace(curve, **{key: max(0.0, getattr(curve, key) + shifts.get(key, 0.0)) for key in POWER})


def _correlated(profile: Profile, name: str, prefix: str, take: Next) -> dict[str, float]:
    """Shifts of a family's determined coefficients, correlated as the fit says; none where it does not say."""
    correlation = profile.provenance.correlations.get(name, ())
    stored = profile.provenance.standard_errors
    errors = {key.removeprefix(prefix): e for key, e in sorted(stored.items()) if key.startswith(prefix)}
    if len(correlation) != len(errors) or not errors:
        return {}
    names, root = _root(correlation, tuple(errors.items()), logs=".log." in prefix)
    shifts = root @ np.array([take() for _ in names])
    return dict(zip(names, shifts.tolist(), strict=True))


@lru_cache(maxsize=64)
def _root(correlation: Matrix, errors: tuple[tuple[str, float], ...], *, logs: bool) -> tuple[tuple[str, ...], Floats]:
    """Names of the determined coefficients and a square root of their covariance, given the others."""
    spread = np.array([e for _, e in errors])
    held = spread > WEAK_LOG_ERROR if logs else np.zeros(len(spread), dtype=bool)
    covariance = np.asarray(correlation) * np.outer(spread, spread)
    free = covariance[np.ix_(~held, ~held)]
    if held.any():
        across = covariance[np.ix_(~held, held)]
        free = free - across @ np.linalg.pinv(covariance[np.ix_(held, held)]) @ across.T
    values, vectors = np.linalg.eigh(free)
    names = tuple(name for (name, _), is_held in zip(errors, held, strict=True) if not is_held)
    return names, vectors * np.sqrt(np.maximum(values, 0.0))


def _sharing(sharing: Sharing, take: Next) -> Sharing:
    """What kernels take from one another, within the errors of its fit (in its own units).

    A collective beside a product was predicted less well than that: its slow-down is drawn within the middle one of
    the errors by number of blocks.
    """
    moved = {name: max(1e-3, getattr(sharing, name) + e * take()) for name, e in sharing.standard_errors.items()}
    by_blocks = sorted(collective for _, _, collective in sharing.left_out.values())
    if by_blocks:
        factor = math.exp(math.log1p(by_blocks[len(by_blocks) // 2]) * take())
        moved["beside_slowdown"] = max(1.0, moved.get("beside_slowdown", sharing.beside_slowdown) * factor)
    if "mixed_hbm_share" in moved:
        moved["mixed_hbm_share"] = min(1.0, moved["mixed_hbm_share"])
    return replace(sharing, **moved)
