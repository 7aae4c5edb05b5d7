"""Roots of functions of one number. SciPy's solver finds the same ones, but takes as long to import as a run."""

from __future__ import annotations

from collections.abc import Callable

ROUNDING = 2.0**-50  # relative: four units in the last place
MOST_STEPS = 100


def root_between(function: Callable[[float], float], low: float, high: float, *, xtol: float = 2e-12) -> float:
    """Where ``function``, which has another sign at ``low`` than at ``high``, is zero, to within ``xtol``.

    Brent's method (Algorithms for Minimization without Derivatives, 1973, chapter 4): inverse interpolation through the
    last points, halving where that gains too little. Raises :class:`ValueError` where the signs are equal, and
    where a hundred steps do not do.

    >>> root_between(lambda x: x * x - 2.0, 0.0, 2.0)
    1.4142135623731364
    """
    before, f_before = float(low), function(low)
    best, f_best = float(high), function(high)
    if f_before * f_best > 0.0:
        raise ValueError(f"a root between {low:g} and {high:g}: values {f_before:g} and {f_best:g} have one sign")
    if f_before == 0.0:
        return before
    across, f_across = before, f_before  # of the other sign than the best point
    step = last = 0.0
    for _ in range(MOST_STEPS):
        if f_before * f_best < 0.0:
            across, f_across = before, f_before
            step = last = best - before
        if abs(f_across) < abs(f_best):
            before, f_before = best, f_best
            best, f_best = across, f_across
            across, f_across = before, f_before
        near = (xtol + ROUNDING * abs(best)) / 2.0
        half = (across - best) / 2.0
        if f_best == 0.0 or abs(half) < near:
            return best
        tried = None
        if abs(last) > near and abs(f_best) < abs(f_before):
            if before == across:  # two points: a straight line
                tried = -f_best * (best - before) / (f_best - f_before)
            else:
                rise = (f_before - f_best) / (before - best)
                rise_across = (f_across - f_best) / (across - best)
                tried = (
                    -f_best * (f_across * rise_across - f_before * rise) / (rise_across * rise * (f_across - f_before))
                )
            if 2.0 * abs(tried) >= min(abs(last), 3.0 * abs(half) - near):
                tried = None
        last, step = (half, half) if tried is None else (step, tried)
        before, f_before = best, f_best
        best += step if abs(step) > near else near if half > 0.0 else -near
        f_best = function(best)
    raise ValueError(f"a root between {low:g} and {high:g}: not found in {MOST_STEPS} steps, try a larger xtol")
