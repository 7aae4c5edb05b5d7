"""What Perfetto would drop from a trace: partial overlaps of spans on one lane."""

from __future__ import annotations

import numpy as np

from traces.records import Spans


def overlaps(spans: Spans) -> tuple[int, int]:
    """Number of spans that partly overlap an earlier one on their lane, and the index of the first (-1: none).

    A span inside another is fine (it nests); one that begins inside and ends outside is dropped by Perfetto
    v51 to v56 (``slice_drop_overlapping_complete_event``). Times count in nanoseconds, as they are written.
    """
    count, first = 0, -1
    start, end = to_ns(spans.start_ps), to_ns(spans.end_ps)
    order = np.lexsort((-end, start, spans.lane))
    lane_now, open_ends = -1, [0]
    for index in order.tolist():
        if spans.lane[index] != lane_now:
            lane_now, open_ends = int(spans.lane[index]), []
        while open_ends and open_ends[-1] <= start[index]:
            open_ends.pop()
        if open_ends and end[index] > open_ends[-1]:
            count += 1
            first = index if first < 0 else first
            continue
        open_ends.append(int(end[index]))
    return count, first


def to_ns(time_ps: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.int64]:
    """Picoseconds to whole nanoseconds, rounding to nearest: ends round, durations follow."""
    return (time_ps + 500) // 1000
