"""What Perfetto would drop from a trace: partial overlaps of spans on one lane."""

from __future__ import annotations

import numpy as np

from traces.records import Ints, Spans


def overlaps(spans: Spans) -> tuple[int, int]:
    """Number of spans that partly overlap an earlier one on their lane, and the index of the first (-1: none).

    A span inside another is fine (it nests); one that begins inside and ends outside is dropped by Perfetto
    v51 to v56 (``slice_drop_overlapping_complete_event``). Times count in nanoseconds, as they are written.

    >>> lane, kind = np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64)
    >>> start, end = np.array([0, 2_000, 5_000]), np.array([4_000, 3_000, 9_000])
    >>> overlaps(Spans(lane=lane, kind=kind, start_ps=start, end_ps=end, energy_j=np.zeros(3)))
    (0, -1)
    >>> overlaps(Spans(lane=lane, kind=kind, start_ps=start, end_ps=end + [0, 2_000, 0], energy_j=np.zeros(3)))
    (1, 1)
    """
    return overlaps_ns(spans.lane, to_ns(spans.start_ps), to_ns(spans.end_ps))


def overlaps_ns(lanes: Ints, start: Ints, end: Ints) -> tuple[int, int]:
    """:func:`overlaps` of times that are nanoseconds already."""
    suspects = np.isin(lanes, _lanes_that_are_not_plain_sequences(lanes, start, end)).nonzero()[0]
    order = suspects[np.lexsort((-end[suspects], start[suspects], lanes[suspects]))]
    count, first = 0, -1
    lane_now: int | None = None
    open_ends: list[int] = []
    rows = zip(order.tolist(), lanes[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True)
    for index, lane, begin, finish in rows:
        if lane != lane_now:
            lane_now, open_ends = lane, []
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        if open_ends and finish > open_ends[-1]:
            count += 1
            first = index if first < 0 else first
            continue
        open_ends.append(finish)
    return count, first


def to_ns(time_ps: Ints) -> Ints:
    """Picoseconds to whole nanoseconds, rounding to nearest: ends round, durations follow.

    >>> to_ns(np.array([0, 499, 500, 1_499])).tolist()
    [0, 0, 1, 1]
    """
    return (time_ps + 500) // 1000


def _lanes_that_are_not_plain_sequences(lane: Ints, start: Ints, end: Ints) -> Ints:
    """Lanes where some span begins before its predecessor ends: nesting, overlap, or merely unsorted."""
    # Most lanes are plain sequences: one linear pass clears them and the slow walk sees only the rest.
    by_lane = np.argsort(lane, kind="stable")
    lane, start, end = lane[by_lane], start[by_lane], end[by_lane]
    return np.unique(lane[1:][(lane[1:] == lane[:-1]) & (start[1:] < end[:-1])])
