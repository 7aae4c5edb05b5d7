"""Durations that lie: a kernel that ends after the next one of its stream has begun."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traces.capture import NONE, Capture, Finding

# Programmatic dependent launch starts a kernel in the tail of the one before; nothing else overlaps on one stream.
TAIL_NS = 5_000
RULE = "overrun"


def clipped(capture: Capture) -> Capture:
    """``capture`` without durations that reach into the next piece of work of their stream by more than a tail.

    Late time stamps of an end are known of ROCm. Branches of one graph may share a stream, and are left.
    """
    work = capture.work
    order = np.lexsort((work.start_ns, work.stream, work.rank))
    same = (np.diff(work.rank[order]) == 0) & (np.diff(work.stream[order]) == 0)
    first, second = order[:-1][same], order[1:][same]
    over = (work.end_ns[first] - work.start_ns[second] > TAIL_NS) & (work.start_ns[second] > work.start_ns[first])
    over &= (work.graph[first] == NONE) | (work.graph[first] != work.graph[second])
    rows = first[over]
    if not len(rows):
        return capture
    dur_ns = work.dur_ns.copy()
    dur_ns[rows] = work.start_ns[second[over]] - work.start_ns[rows]
    at = int(rows.min())
    finding = Finding(
        rule=RULE,
        count=len(rows),
        first=f"'{capture.names[work.name[at]][:80]}' on stream {work.stream[at]} of rank {work.rank[at]}",
        remedy="it ends after the next work of its stream began: read as ending there; its time stamp came late",
    )
    return replace(capture, work=replace(work, dur_ns=dur_ns), findings=[*capture.findings, finding])
