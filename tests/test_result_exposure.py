"""Lengths of unions of intervals against a count of every unit of time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sim.result.exposure import covered

INTERVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)), max_size=12)


@given(INTERVALS, st.sampled_from([1, 3]))
def test_what_is_covered_is_every_unit_of_time_that_some_interval_holds(
    intervals: list[tuple[int, int, int]], gpus: int
) -> None:
    gpu = np.array([whose % gpus for whose, _, _ in intervals], dtype=np.int64)
    start = np.array([begin for _, begin, _ in intervals], dtype=np.int64)
    end = start + np.array([length for _, _, length in intervals], dtype=np.int64)
    held: list[set[int]] = [set() for _ in range(gpus)]
    for whose, begin, length in intervals:
        held[whose % gpus] |= set(range(begin, begin + length))
    assert covered(gpu, start, end, gpus).tolist() == [len(units) for units in held]
