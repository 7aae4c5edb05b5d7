"""Rows as lines: whatever a row holds comes back as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.explore.lines import line_of, row_of

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.lists(st.integers(0, 100), max_size=3),
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=("Cs",)), max_size=5), VALUES, max_size=8))
def test_every_row_comes_back(fields: dict[str, Any]) -> None:
    for row in ({**fields, "error": None}, {**fields, "error": "why"}):
        line = line_of(row)
        assert line.endswith("\n") and "\n" not in line[:-1]
        assert row_of(line) == json.loads(line) == row


def test_a_float_of_numpy_is_written_as_any_other() -> None:
    assert row_of(line_of({"error": None, "energy_j": np.float64(0.1)})) == {"error": None, "energy_j": 0.1}


@pytest.mark.parametrize("error", [None, "nothing to divide by"])
def test_a_figure_that_is_no_number_comes_back(error: str | None) -> None:
    row = row_of(line_of({"error": error, "mfu": math.nan, "low_s": -math.inf}))
    assert math.isnan(row["mfu"]) and row["low_s"] == -math.inf
