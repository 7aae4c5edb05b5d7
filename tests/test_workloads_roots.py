"""Roots of functions of one number: those of SciPy's solver, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import brentq

from workloads.roots import root_between

FUNCTIONS: tuple[Callable[[float], float], ...] = (
    lambda x: x**3 - 2.0 * x - 5.0,
    lambda x: math.exp(x) - 3.0,
    lambda x: math.cos(x) - x,
    lambda x: 50.0 * math.atan(x - 1.3),
    lambda x: x - 1.0,
)


@given(
    function=st.sampled_from(FUNCTIONS),
    low=st.floats(-3.0, 1.0),
    high=st.floats(1.0, 6.0),
    xtol=st.sampled_from([2e-12, 1e-6]),
    turned=st.booleans(),
)
def test_roots_are_scipys(
    function: Callable[[float], float], low: float, high: float, xtol: float, turned: bool
) -> None:
    low, high = (high, low) if turned else (low, high)
    assume(function(low) * function(high) <= 0.0)
    assert root_between(function, low, high, xtol=xtol) == brentq(function, low, high, xtol=xtol)


def test_a_root_has_to_lie_between() -> None:
    with pytest.raises(ValueError, match=r"a root between 2 and 3: values 3 and 8 have one sign"):
        root_between(lambda x: x * x - 1.0, 2.0, 3.0)
    with pytest.raises(ValueError, match=r"not found in 100 steps, try a larger xtol"):
        root_between(lambda x: (x - 0.1) ** 5, -1.0, 1.5)
