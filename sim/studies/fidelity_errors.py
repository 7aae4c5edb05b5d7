"""Figures of the accuracy page: errors by group with intervals, and what the records do not fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

from hardware.profile import Profile
from hardware.uncertainty import WEAK_LOG_ERROR
from sim.validation.validate import Row

# What splits a file into groups; a field that a row does not have leaves no trace in the group's name.
GROUP_FIELDS = ("model", "phase", "op", "dtype", "ep_mode", "launch", "world")
SEED = 20260101
RESAMPLES = 9999
# Fewer rows than this have no interval worth printing.
MIN_ROWS = 5
# The fits pull every logarithm to its start with this standard deviation (hardware/calibrate/fit_kit.py).
PRIOR_LOG_ERROR = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupError:
    """Absolute relative errors of one output over one group, as fractions; ``interval`` is that of the mean."""

    file: str
    group: str
    n: int
    mean: float
    median: float
    worst: float
    bias: float
    interval: tuple[float, float] | None


def mean_interval(values: Sequence[float], *, seed: int = SEED) -> tuple[float, float] | None:
    """Bootstrap 95 % interval of the mean (percentile method), None below five values.

    >>> mean_interval([0.01, 0.02, 0.03])
    >>> low, high = mean_interval([0.01, 0.02, 0.03, 0.04, 0.05])
    >>> 0.01 < low < 0.03 < high < 0.05
    True
    """
    if len(values) < MIN_ROWS:
        return None
    found = bootstrap(
        (np.asarray(values),), np.mean, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(seed)
    ).confidence_interval
    return float(found.low), float(found.high)


def group_errors(rows: Sequence[Row], output: str) -> list[GroupError]:
    """Errors of ``output`` ("latency_s", "energy_j") by file and group, in file order; others are passed over."""
    members: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        error = row.error(output)
        if error is not None:
            members.setdefault((row.record.path.name, group_name(row)), []).append(error)
    return [summarise(file, group, signed) for (file, group), signed in members.items()]


def group_name(row: Row) -> str:
    """What a row is counted under: its kind (where model and phase do not say it), and its group fields."""
    inputs = row.record.inputs
    words = [] if "model" in inputs and "phase" in inputs else [row.record.kind]
    for field in GROUP_FIELDS:
        match field, inputs.get(field):
            case (_, None) | ("launch", "graph"):  # a row that does not say was a graph too
                continue
            case "world", value:
                words.append(gpus(value))
            case _, value:
                words.append(str(value))
    return " ".join(words)


def gpus(count: int) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{count} GPU{'s' if count > 1 else ''}"


def summarise(file: str, group: str, signed: Sequence[float]) -> GroupError:
    """The figures of one group from its signed errors (fractions)."""
    absolute = np.abs(signed)
    return GroupError(
        file=file,
        group=group,
        n=len(absolute),
        mean=float(absolute.mean()),
        median=float(np.median(absolute)),
        worst=float(absolute.max()),
        bias=float(np.mean(signed)),
        interval=mean_interval(absolute.tolist()),
    )


def weakly_identified(profile: Profile) -> list[tuple[str, float]]:
    """Coefficients whose standard error of the logarithm is above 0.3, worst first.

    Names that carry ``log`` already hold that error; the power curve's are in the coefficient's own unit and are
    divided by its value.
    """
    found = []
    for name, error in profile.provenance.standard_errors.items():
        if ".log." in name:
            relative = error
        else:
            value = getattr(profile.curve, name.removeprefix("power."), None)
            if not value:
                continue
            relative = error / abs(value)
        if relative > WEAK_LOG_ERROR:
            found.append((name.replace(".log.", "."), relative))
    return sorted(found, key=lambda item: (-item[1], item[0]))
