"""Where the time of a captured run went: classes, streams, communication, idle gaps and their causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traces.capture import NONE, Capture, Category
from traces.classify import COMMUNICATION, Classes
from traces.collectives import match_collectives, waiting_ns
from traces.intervals import gaps, length
from traces.records import Ints

LAUNCH_BOUND_GAPS = 8  # so many gaps in a row, each waiting for the host, make a launch-bound region


@dataclass(frozen=True, slots=True, kw_only=True)
class ByClass:
    """One class of kernels: rows, sum of durations, energy (NaN where the trace has none)."""

    cls: str
    count: int
    time_us: float
    energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ByStream:
    """One stream: rows, and the time it was busy (a union)."""

    rank: int
    stream: int
    count: int
    busy_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ByKernel:
    """One kernel name: rows, sum and mean of durations, share of the sum over all kernels."""

    name: str
    cls: str
    count: int
    time_us: float
    mean_us: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A launch-bound region: from one time to another the GPU mostly waited for the host."""

    rank: int
    start_us: float
    end_us: float
    kernels: int
    idle_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """One rank's GPU: lengths of unions of intervals in microseconds, between first kernel and last."""

    rank: int
    span_us: float
    busy_us: float
    communication_us: float
    computation_us: float
    overlap_us: float
    exposed_us: float
    idle_us: float
    idle_by_cause_us: Mapping[str, float]
    straggler_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything ``wattline inspect`` shows of a capture, critical path aside."""

    kernels: int
    streams: int
    collectives: int
    ranks: Sequence[RankTimes]
    by_class: Sequence[ByClass]
    by_stream: Sequence[ByStream]
    top: Sequence[ByKernel]
    launch_bound: Sequence[Region]
    energy_j: float


def summarise(capture: Capture, classes: Classes, *, top: int = 10) -> Summary:
    """Sum up ``capture``: times in microseconds, energy in joules."""
    work = capture.work
    kernels = capture.kernels
    waited = waiting_ns(capture, match_collectives(capture, classes))
    ranks, regions = [], []
    for rank in capture.ranks:
        times, mine = _rank(capture, classes, rank, waited)
        ranks.append(times)
        regions += mine
    lanes = np.unique(_lane(capture)[kernels])
    energy = work.energy_j[kernels]
    return Summary(
        kernels=len(kernels),
        streams=len(lanes),
        collectives=int(classes.is_class(COMMUNICATION).sum()),
        ranks=ranks,
        by_class=_by_class(capture, classes),
        by_stream=_by_stream(capture),
        top=_top(capture, classes, top),
        launch_bound=regions,
        energy_j=float(np.nansum(energy)) if np.isfinite(energy).any() else float("nan"),
    )


def _rank(capture: Capture, classes: Classes, rank: int, waited: Ints) -> tuple[RankTimes, list[Region]]:
    work = capture.work
    mine = work.rank == rank
    kernel = mine & (work.category == Category.KERNEL)
    if not kernel.any():
        kernel = mine  # only copies: their span, no computation
    start, end = work.start_ns, work.end_ns
    first, last = int(start[kernel].min()), int(end[kernel].max())
    is_communication = kernel & classes.is_class(COMMUNICATION)
    computes = kernel & ~is_communication & (work.category == Category.KERNEL)
    communication = length(start[is_communication], end[is_communication])
    computation = length(start[computes], end[computes])
    overlap = communication + computation - length(start[is_communication | computes], end[is_communication | computes])
    busy = length(np.clip(start[mine], first, last), np.clip(end[mine], first, last))
    causes, regions = _idle(capture, np.flatnonzero(mine), first, last, rank)
    times = RankTimes(
        rank=rank,
        span_us=(last - first) / 1e3,
        busy_us=busy / 1e3,
        communication_us=communication / 1e3,
        computation_us=computation / 1e3,
        overlap_us=overlap / 1e3,
        exposed_us=(communication - overlap) / 1e3,
        idle_us=(last - first - busy) / 1e3,
        idle_by_cause_us={cause: ns / 1e3 for cause, ns in causes.items()},
        straggler_us=float(waited[mine].sum()) / 1e3,
    )
    return times, regions


def _idle(capture: Capture, rows: Ints, first: int, last: int, rank: int) -> tuple[dict[str, int], list[Region]]:
    """Idle nanoseconds of one rank by cause, and where launches set the pace.

    A gap ends as some work begins. If that work's launch call ended only after the gap had begun, the GPU
    waited for the host; if it had been launched before, it waited for other work; without a launch call
    nobody can tell.
    """
    work, calls = capture.work, capture.calls
    begins, ends = gaps(np.clip(work.start_ns[rows], first, last), np.clip(work.end_ns[rows], first, last))
    # Rows are ordered by start: the first row at a gap's end is what ended it.
    ender = rows[np.searchsorted(work.start_ns[rows], ends)]
    launch = work.launch[ender]
    launched_ns = np.where(launch != NONE, (calls.start_ns + calls.dur_ns)[launch], 0) if len(calls) else launch
    known = launch != NONE
    host = known & (launched_ns > begins)
    size = ends - begins
    causes = {
        "host": int(size[host].sum()),
        "dependency": int(size[known & ~host].sum()),
        "unknown": int(size[~known].sum()),
    }
    regions = []
    edges = np.flatnonzero(np.diff(np.concatenate([[0], host.astype(np.int8), [0]])))
    for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if b - a >= LAUNCH_BOUND_GAPS:
            inside = (work.start_ns[rows] >= begins[a]) & (work.start_ns[rows] <= ends[b - 1])
            idle_us = float(size[a:b].sum()) / 1e3
            regions.append(
                Region(
                    rank=rank, start_us=begins[a] / 1e3, end_us=ends[b - 1] / 1e3, kernels=int(inside.sum()),
                    idle_us=idle_us,
                )
            )  # fmt: skip
    return causes, regions


def _by_class(capture: Capture, classes: Classes) -> list[ByClass]:
    work, many = capture.work, len(classes.labels)
    time = np.bincount(classes.index, weights=work.dur_ns, minlength=many) / 1e3
    count = np.bincount(classes.index, minlength=many)
    energy = np.bincount(classes.index, weights=np.nan_to_num(work.energy_j), minlength=many)
    known = np.bincount(classes.index, weights=np.isfinite(work.energy_j), minlength=many) > 0
    return [
        ByClass(
            cls=classes.labels[i], count=int(count[i]), time_us=float(time[i]),
            energy_j=float(energy[i]) if known[i] else float("nan"),
        )
        for i in np.argsort(-time, kind="stable").tolist() if count[i]
    ]  # fmt: skip


def _lane(capture: Capture) -> Ints:
    """One number for a rank's stream."""
    streams, stream = np.unique(capture.work.stream, return_inverse=True)
    return np.asarray(capture.work.rank * len(streams) + stream)


def _by_stream(capture: Capture) -> list[ByStream]:
    work, lane = capture.work, _lane(capture)
    order = np.lexsort((work.start_ns, lane))
    lane, start, end = lane[order], work.start_ns[order], work.end_ns[order]
    first = np.flatnonzero(np.diff(lane, prepend=lane[0] - 1))
    busy = np.add.reduceat(end - start, first)
    # On most streams nothing overlaps, and the union is the sum.
    overlaps = np.flatnonzero((lane[1:] == lane[:-1]) & (start[1:] < end[:-1]))
    last = np.append(first[1:], len(order))
    for number in np.unique(np.searchsorted(first, overlaps, side="right") - 1).tolist():
        mine = slice(first[number], last[number])
        busy[number] = length(start[mine], end[mine])
    columns = (work.rank[order][first], work.stream[order][first], last - first, busy)
    return [
        ByStream(rank=rank, stream=stream, count=count, busy_us=busy_ns / 1e3)
        for rank, stream, count, busy_ns in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _top(capture: Capture, classes: Classes, top: int) -> list[ByKernel]:
    work, kernels = capture.work, capture.kernels
    name = work.name[kernels]
    time = np.bincount(name, weights=work.dur_ns[kernels], minlength=len(capture.names)) / 1e3
    count = np.bincount(name, minlength=len(capture.names))
    label = dict(zip(name.tolist(), classes.index[kernels].tolist(), strict=True))
    return [
        ByKernel(
            name=capture.names[i], cls=classes.labels[label[i]], count=int(count[i]), time_us=float(time[i]),
            mean_us=float(time[i] / count[i]), share=float(time[i] / max(time.sum(), 1e-9)),
        )
        for i in np.argsort(-time, kind="stable")[:top].tolist() if count[i]
    ]  # fmt: skip
