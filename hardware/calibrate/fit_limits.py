"""The power limiters from duty and transient records: three limits, and how the slower two act in time.

Fast limit: power of bursts that the clock yields to. Middle limit: the plateau of the first second of load.
Slow limiter: when the plateau ends says how long it looks back, the energy counter how deep it cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardware.clock import ClockLimits
from hardware.gpu import GpuSpec
from hardware.power import PowerCurve

Row = Mapping[str, Any]
# Where the records do not show a limiter: an H100's, as shares of the slow limit (700 W cap).
FAST_RATIO, MIDDLE_RATIO = 1.45, 1.04
SLOW_TIME_S, DIP_RATIO, RECOVERY_RATIO, RECOVERY_S = 0.91, 0.815, 0.955, 0.2
# Set by hand, not fitted: with these the engine gives the first steps of transient.jsonl (90 ms after idle, 93 ms
# after decode, 98 ms from then on). Shorter bursts than this mean's time are never slowed (duty.jsonl: 17 ms).
MIDDLE_TIME_S, MIDDLE_GAIN_PER_S = 0.032, 28.0
TICK_S = 0.005
# A burst row is slowed by the fast limit when its clock stays below this share of the maximum. HBM-bound GEMMs of 64
# and 128 rows and grouped ones run at 92 to 94 % of it whatever they draw (750 to 900 W): another limiter, which costs
# them no time and is not modelled.
SLOWED_SHARE = 0.9
# Bursts are metered well enough when they fill this share of a period (the pause's idle power is subtracted).
LEAST_BUSY_SHARE = 0.25
# A step this much longer than the plateau's marks the dip.
DIP_STEP = 1.02
# The energy counter moves every 100 ms; a bin belongs to the dip below the first share of the middle limit, to the
# recovery below the second.
DIP_BELOW, RECOVERED_ABOVE = 0.90, 0.975


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsFit:
    """Limits and the standard errors of those that records show (units of the fields)."""

    limits: ClockLimits
    errors: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One long prefill of a transient record: when it began and what the counter says around it."""

    start_s: float
    steps_s: tuple[float, ...]
    before_w: float
    bins: tuple[tuple[float, float, float], ...]  # begin, end, mean watts between two moves of the counter


def fit_limits(rows: Sequence[Row], gpu: GpuSpec, curve: PowerCurve, slow_limit_w: float) -> LimitsFit:
    """The limits of ``gpu``; what the records do not show takes an H100's share of the slow limit."""
    errors: dict[str, float] = {}

    def mean(name: str, values: Sequence[float], default: float) -> float:
        """Mean and its standard error; ``default`` without values, no error from a single one."""
        if len(values) > 1:
            errors[name] = float(np.std(values, ddof=1) / np.sqrt(len(values)))
        return float(np.mean(values)) if len(values) else default

    loads = [load for row in rows if row["kind"] == "transient" for load in _loads(row)]
    fast_w = mean("fast_limit_w", _burst_powers(rows, gpu, curve), FAST_RATIO * slow_limit_w)
    plateaus = [w for load in loads for a, b, w in load.bins if load.start_s + 0.2 <= a and b <= load.start_s + 0.7]
    middle_w = mean("middle_limit_w", plateaus, MIDDLE_RATIO * slow_limit_w)
    looks_back, dips, recoveries, recovery_times = [], [], [], []
    for load in loads:
        onset_s = _dip_onset_s(load.steps_s)
        if onset_s is None or slow_limit_w <= load.before_w:
            continue
        looks_back.append(onset_s * (middle_w - load.before_w) / (slow_limit_w - load.before_w))
        bins = [b for b in load.bins if b[0] > load.start_s + onset_s - 0.05]
        deepest = min(range(min(3, len(bins))), key=lambda i: bins[i][2])
        dips.append(bins[deepest][2] / middle_w)
        recovering = []
        for begin, end, watts in bins[deepest + 1 :]:
            if watts > RECOVERED_ABOVE * middle_w:
                break
            if watts > DIP_BELOW * middle_w:
                recovering.append(watts / middle_w)
                recovery_times.append(end - begin)
        recoveries += recovering
    count = len(dips)
    return LimitsFit(
        limits=ClockLimits(
            cap_w=gpu.tdp_w,
            fast_limit_w=fast_w,
            middle_limit_w=max(middle_w, slow_limit_w),
            slow_limit_w=slow_limit_w,
            middle_time_s=MIDDLE_TIME_S,
            slow_time_s=mean("slow_time_s", looks_back, SLOW_TIME_S),
            middle_gain_per_s=MIDDLE_GAIN_PER_S,
            dip_ratio=mean("dip_ratio", dips, DIP_RATIO),
            recovery_ratio=mean("recovery_ratio", recoveries, RECOVERY_RATIO),
            recovery_s=sum(recovery_times) / count if recovery_times else RECOVERY_S,
            tick_s=TICK_S,
        ),
        errors=errors,
    )


def _burst_powers(rows: Sequence[Row], gpu: GpuSpec, curve: PowerCurve) -> list[float]:
    """Mean power within slowed bursts (W), one a work: GPUs of a type are averaged first, as are pause lengths.

    Kernels differ by a few per cent: 980 W in attention to 1043 W in a 512-row GEMM on an H100. Letting an HBM watt
    count for 0.76 +- 0.12 of a core watt would halve that; four kernels do not establish it, so it is left out.
    """
    by_work: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] != "duty" or row["idle_s"] <= 0 or not row["power_w"] or row["power_w"][0] is None:
            continue
        busy_s = row["n_per_burst"] * float(np.mean(row["iter_s"]))
        slowed = float(np.mean(row["clock_mhz"])) * 1e6 < SLOWED_SHARE * gpu.max_clock_hz
        if slowed and busy_s >= LEAST_BUSY_SHARE * row["period_s"]:
            idle_w = curve.at(row["temperature_c"][0]).idle_w(gpu.max_clock_hz)
            pause_s = row["period_s"] - busy_s
            burst_j = row["power_w"][0] * row["period_s"] - idle_w * pause_s
            by_work.setdefault(row["work"], []).append(burst_j / busy_s)
    return [float(np.mean(powers)) for powers in by_work.values()]


def _loads(row: Row) -> list[_Load]:
    """The prefills of a transient record that last long enough for the slow limiter to act."""
    log = row["log"]
    moves = [(t, e) for i, (t, e, *_) in enumerate(log) if i and e != log[i - 1][1]]
    bins = [(a, b, (f - e) * 1e-3 / (b - a)) for (a, e), (b, f) in itertools.pairwise(moves)]
    loads = []
    for mark in row["marks"]:
        steps_s = tuple(ms * 1e-3 for ms in mark["step_ms"])
        start_s = float(mark["start_s"])
        before = [w for a, b, w in bins if start_s - 0.9 <= a and b <= start_s]
        inside = tuple(b for b in bins if start_s <= b[0] and b[1] <= start_s + sum(steps_s))
        if mark["work"] == "prefill" and sum(steps_s) > 1.0 and before:
            loads.append(_Load(start_s=start_s, steps_s=steps_s, before_w=float(np.mean(before)), bins=inside))
    return loads


def _dip_onset_s(steps_s: Sequence[float]) -> float | None:
    """Seconds from a load's start to its first dip, read off the steps that grow longer; None without one."""
    plateau_s = float(np.median(steps_s[2:6]))
    for i in range(3, len(steps_s) - 1):
        if steps_s[i] > DIP_STEP * plateau_s:
            longest_s = max(steps_s[i : i + 2])
            dipped = (steps_s[i] - plateau_s) / (longest_s - plateau_s)  # share of this step's work done in the dip
            return float(sum(steps_s[:i]) + (1.0 - dipped) * plateau_s)
    return None
