"""Waits of a rank for ranks that the trace lacks: collectives of one size that take many times as long as others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.capture import NONE, Capture
from traces.classify import COMMUNICATION, Classes
from traces.records import Ints

FEWEST = 4  # collectives of one name and size, so that a usual time shows
USUAL = 0.25  # quantile of their times that waits for nobody
WAITED = 3.0  # times the usual time: what takes longer waited


@dataclass(frozen=True, slots=True, kw_only=True)
class UntracedWait:
    """``rows`` of collectives of ``rank`` that waited ``lost_ns`` in all beyond their usual times."""

    rank: int
    rows: Ints
    lost_ns: int


def untraced_waits(capture: Capture, classes: Classes, collective: Ints) -> list[UntracedWait]:
    """Of each rank, among its collectives with recorded sizes that no other traced rank takes part in."""
    work = capture.work
    alone = classes.is_class(COMMUNICATION) & (work.collective != NONE) & (collective == NONE)
    found = []
    for rank in capture.ranks:
        rows = np.flatnonzero(alone & (work.rank == rank))
        if not len(rows):
            continue
        sizes = [(args.operation, args.dtype, args.elements_in, args.elements_out) for args in capture.collectives]
        number = {size: place for place, size in enumerate(dict.fromkeys(sizes))}
        kind = np.array([number[size] for size in sizes])[work.collective[rows]]
        lost_ns = np.zeros(len(rows), dtype=np.int64)
        for one in np.unique(kind).tolist():
            mine = np.flatnonzero(kind == one)
            if len(mine) >= FEWEST:
                dur_ns = work.dur_ns[rows[mine]]
                usual_ns = float(np.quantile(dur_ns, USUAL))
                lost_ns[mine] = np.where(dur_ns > WAITED * usual_ns, dur_ns - usual_ns, 0.0)
        if lost_ns.any():
            late = rows[lost_ns > 0]
            found.append(UntracedWait(rank=rank, rows=late[np.argsort(-work.dur_ns[late])], lost_ns=int(lost_ns.sum())))
    return found
