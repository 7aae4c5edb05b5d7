"""Power curves from published tables of core voltage and idle power by clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.power import PowerCurve

Floats = NDArray[np.float64]
# Cards idle at about this temperature (degrees C) while a table of idle power is taken.
IDLE_C = 35.0


def fit_curve(points: Sequence[tuple[float, float, float]], *, leakage_w_per_c: float) -> PowerCurve:
    """Voltage and idle power over the clock from a table of (Hz, V, W), taken idle.

    >>> flat = [(f, 0.7 if f <= 1e9 else 0.7 * f / 1e9, 40.0 + f / 1e8) for f in (5e8, 1e9, 1.2e9, 1.4e9)]
    >>> curve = fit_curve(flat, leakage_w_per_c=0.4)
    >>> round(curve.floor_hz / 1e6), round(curve.voltage_scale(5e8), 2), round(curve.idle_w(5e8))
    (1000, 0.51, 45)
    """
    clock, volt, idle = np.array(sorted(points)).T
    top, scale = float(clock[-1]), (volt / volt[-1]) ** 2
    floor = float(clock[volt <= volt[0]][-1])

    def curve(x: Floats, static: float = 0.0, clocked: float = 0.0, leaked: float = 0.0) -> PowerCurve:
        lower, knee = float(x[0]), floor + float(x[1]) * (top - floor)
        # The curve meets the table at its flat end and at the top.
        upper = float((np.log(scale[0]) - lower * np.log(floor / knee)) / np.log(knee / top))
        return PowerCurve(
            reference_clock_hz=top, knee_hz=knee, floor_hz=floor, lower_exponent=lower, upper_exponent=upper,
            static_w=static, clocked_w=clocked, leakage_w_per_c=leakage_w_per_c,
            leakage_free_c=IDLE_C - leaked / leakage_w_per_c, temperature_c=IDLE_C,
        )  # fmt: skip

    def errors(x: Floats) -> Floats:
        at = curve(x)
        return np.asarray(np.array([at.voltage_scale(f) for f in clock]) / scale - 1.0)

    shape = least_squares(errors, [1.3, 0.5], bounds=([0.1, 0.05], [4.0, 0.95])).x
    scales = np.array([curve(shape).voltage_scale(f) for f in clock])
    columns = np.stack([np.ones_like(clock), scales * clock / top, scales], axis=1)
    parts = np.linalg.lstsq(columns, idle, rcond=None)[0]
    return curve(shape, *(float(part) for part in parts))


def read_curve(path: Path, card: str, *, leakage_w_per_c: float) -> PowerCurve:
    """The curve of ``card`` in a CSV of columns gpu, sm_mhz, core_mv, idle_w_at_locked_clock."""
    table = pd.read_csv(path)
    rows = table[table.gpu == card]
    points = list(zip(rows.sm_mhz * 1e6, rows.core_mv * 1e-3, rows.idle_w_at_locked_clock, strict=True))
    return fit_curve(points, leakage_w_per_c=leakage_w_per_c)
