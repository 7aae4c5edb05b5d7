"""Exposure against a count of every unit of time, and lengths of unions of intervals."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.graph import KernelClass
from sim.engine.record import Recorder
from sim.result.exposure import S_PER_PS, SpanKinds, _one_by_one, _overlapping, covered, exposure
from tests.engine_kit import COMPUTE, COPY, REDUCE, graph

INTERVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 9)), max_size=12)
PAUSE_PS = 2
PAUSED = replace(COMPUTE, gap_s=PAUSE_PS * S_PER_PS)
GATHER, SCATTER = (replace(REDUCE, name=op, describe={"op": op}) for op in ("all_gather", "reduce_scatter"))
# A span on each of two GPUs, of which one stands for three: its begin (one by one: after the last) and its length.
TIMES = st.tuples(st.integers(0, 12), st.integers(1, 9))
KERNELS = st.lists(
    st.tuples(st.sampled_from([PAUSED, COPY, GATHER, SCATTER]), st.tuples(TIMES, TIMES)), min_size=1, max_size=8
)
MULTIPLICITY = (3, 1)


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


@pytest.mark.parametrize("one_by_one", [False, True])
@given(kernels=KERNELS)
def test_exposure_is_every_unit_of_time_in_which_communication_is_alone(
    kernels: list[tuple[KernelClass, tuple[tuple[int, int], ...]]], one_by_one: bool
) -> None:
    queue: list[KernelClass | tuple[KernelClass, int]] = [
        (kernel, i) if kernel.collective else kernel for i, (kernel, _) in enumerate(kernels)
    ]
    kinds = SpanKinds(graph((0, queue), (1, queue)), MULTIPLICITY)
    starts, ends = np.zeros((2, 2, len(kernels)), dtype=np.int64)
    for gpu in (0, 1):
        now = 0
        for i, (kernel, times) in enumerate(kernels):
            begin, length = times[gpu]
            starts[gpu, i] = begin + (kernel is PAUSED) * PAUSE_PS + now
            ends[gpu, i] = starts[gpu, i] + length
            now = ends[gpu, i] if one_by_one else 0
    alone = {name: [0, 0] for name in kinds.kinds}
    working = []
    for gpu, ranks in enumerate(MULTIPLICITY):
        computing, paused = set[int](), set[int]()
        moving: dict[str, set[int]] = {name: set() for name in kinds.kinds}
        waiting: dict[str, set[int]] = {name: set() for name in kinds.kinds}
        for i, (kernel, _) in enumerate(kernels):
            start, end = starts[gpu, i], ends[gpu, i]
            if kernel.collective:
                comes = min(starts[:, i].max(), end)
                waiting[kernel.name] |= set(range(start, comes))
                moving[kernel.name] |= set(range(comes, end))
            else:
                computing |= set(range(start, end))
                paused |= set(range(start - (kernel is PAUSED) * PAUSE_PS, start))
        working.append(len(computing.union(paused, *moving.values())))
        taken = computing
        for part, sets in enumerate((moving, waiting)):
            for name in kinds.kinds:
                alone[name][part] += ranks * len(sets[name] - taken)
                taken = taken | sets[name]
    order = np.argsort(ends.ravel(), kind="stable")
    records = Recorder(
        span_op=array("q", order.tolist()),
        span_start_ps=array("q", starts.ravel()[order].tolist()),
        span_end_ps=array("q", ends.ravel()[order].tolist()),
    )
    found = exposure(kinds, records)
    assert found.by_kind == {name: tuple(ps * S_PER_PS for ps in parts) for name, parts in alone.items()}
    assert found.working_s == [ps * S_PER_PS for ps in working]
    if one_by_one:
        assert _one_by_one(kinds, records) == _overlapping(kinds, records)
