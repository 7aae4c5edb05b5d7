"""A clock that falls, seen in a trace: in the clock that a simulated one states, else in products that take longer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from traces.capture import NONE, Capture, Category
from traces.classify import Classes
from traces.read.own import CLOCK
from traces.records import Floats, Ints

FALLEN = 0.03  # of the clock, or of the pace of products, that is worth a word
STEADY = 0.015  # what the memory's pace may change: where that falls too, it is no clock
FEWEST = 12  # runs of one kernel of one grid, so that thirds of them compare
FALLING_PARTS = 6  # of the runs of a kernel, whose medians show whether its pace falls all the way
COMPUTE_NS = 20_000  # a shorter product is bound by memory or launches
LARGEST = 0.6  # no clock falls further while work runs: what takes longer than that is other work
EXPERTS = re.compile("moe|group", re.IGNORECASE)  # how much they do is not in their grids


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowing:
    """From when on a rank's clock was lower (``row``: the kernel that lost most), how much time that took in all."""

    rank: int
    start_ns: int
    end_ns: int
    row: int
    seen: str
    lost_ns: float


def slowing(capture: Capture, classes: Classes) -> list[Slowing]:
    """The rank that lost most, if any lost what matters."""
    found = []
    for rank in capture.ranks:
        stated = [sample for sample in capture.samples if sample.rank == rank and sample.name == CLOCK]
        advice = (
            _stated(capture, classes, rank, stated[0].time_ns, stated[0].value)
            if stated
            else _paced(capture, classes, rank)
        )
        if advice is not None:
            found.append(advice)
    return sorted(found, key=lambda advice: -advice.lost_ns)[:1]


def _stated(capture: Capture, classes: Classes, rank: int, time_ns: Ints, clock: Floats) -> Slowing | None:
    """By the clock that the trace holds."""
    work = capture.work
    products = np.flatnonzero((work.rank == rank) & classes.is_class("gemm"))
    highest = float(clock.max(initial=0.0))
    low = np.flatnonzero(clock < (1 - FALLEN) * highest)
    if not len(products) or not len(low) or highest <= 0:
        return None
    at = np.clip(np.searchsorted(time_ns, work.start_ns[products], side="right") - 1, 0, None)
    share = 1 - clock[at] / highest
    lost = share * work.dur_ns[products]
    busy_ns = float(work.dur_ns[products].sum())
    if lost.sum() < FALLEN * busy_ns:
        return None
    ends = np.append(time_ns[1:], work.end_ns[work.rank == rank].max())
    return Slowing(
        rank=rank, start_ns=int(time_ns[low[0]]), end_ns=int(ends[low[-1]]), row=int(products[int(np.argmax(lost))]),
        seen=f"the SM clock falls from {highest:,.0f} to {float(clock[low].min()):,.0f} MHz, and products take "
        f"{lost.sum() / (busy_ns - lost.sum()):.0%} longer than at the highest",
        lost_ns=float(lost.sum()),
    )  # fmt: skip


def _paced(capture: Capture, classes: Classes, rank: int) -> Slowing | None:
    """By the pace of products that come again: of the same name and grid, later ones take longer, copies do not."""
    work = capture.work
    of_rank = (work.rank == rank) & (work.category == Category.KERNEL)
    plain = ~np.array([EXPERTS.search(name) is not None for name in capture.names])
    products = np.flatnonzero(of_rank & classes.is_class("gemm") & (work.dur_ns >= COMPUTE_NS) & plain[work.name])
    memory = np.flatnonzero(of_rank & (classes.is_class("elementwise") | classes.is_class("norm")))
    products, memory = (_unaccompanied(capture, rows) for rows in (products, memory))
    change, lost_ns, worst, since = _change(capture, products)
    if worst == NONE or not FALLEN <= change <= LARGEST:
        return None
    also, _, known, _ = _change(capture, memory)
    if known != NONE and also > max(STEADY, change / 3):
        return None
    return Slowing(
        rank=rank, start_ns=since, end_ns=int(work.end_ns[products].max()), row=worst,
        seen=f"products of one name and grid take {change:.0%} longer later than at first, and copies do not: "
        "the clock fell",
        lost_ns=lost_ns,
    )  # fmt: skip


def _unaccompanied(capture: Capture, rows: Ints) -> Ints:
    """Those of ``rows`` beside which nothing of their rank runs (one GPU's rows, by start)."""
    if not len(rows):
        return rows
    work = capture.work
    mine = np.flatnonzero(work.rank == work.rank[rows[0]])
    start, end = work.start_ns[mine], work.end_ns[mine]
    latest = np.maximum.accumulate(end)
    free = np.ones(len(mine), dtype=bool)
    free[1:] &= latest[:-1] <= start[1:]
    free[:-1] &= end[:-1] <= start[1:]
    return rows[free[np.searchsorted(mine, rows)]]


def _neighbours(capture: Capture, rows: Ints) -> tuple[Ints, Ints]:
    """Names of the work before and after each of ``rows`` on its stream."""
    work = capture.work
    order = np.lexsort((work.start_ns, work.stream, work.rank))
    names = np.concatenate([[NONE], work.name[order], [NONE]])
    place = np.empty(len(work), dtype=np.int64)
    place[order] = np.arange(len(work))
    return names[place[rows]], names[place[rows] + 2]


def _change(capture: Capture, rows: Ints) -> tuple[float, float, int, int]:
    """How much longer the last third of runs takes than the first (by time), time lost, worst row, since when."""
    work = capture.work
    if not len(rows):
        return 0.0, 0.0, NONE, NONE
    # Persistent products of any shape have one grid: what runs before and after tells places in a layer apart.
    before, after = _neighbours(capture, rows)
    columns = np.stack([work.name[rows], work.blocks[rows], work.threads[rows], work.matrix[rows], before, after])
    _, which = np.unique(columns, axis=1, return_inverse=True)
    first_ns = last_ns = lost_ns = 0.0
    worst, most, since = NONE, 0.0, NONE
    for group in range(int(which.max()) + 1):
        mine = rows[which.reshape(-1) == group]
        if len(mine) < FEWEST:
            continue
        third = len(mine) // 3
        parts = work.dur_ns[mine[:third]], work.dur_ns[mine[-third:]]
        early, late = (float(np.median(part)) for part in parts)
        # A pace that differs from run to run anyway (other shapes under one grid) tells nothing.
        if any(float(np.median(np.abs(part - np.median(part)))) > STEADY * early for part in parts) and not _falls(
            work.dur_ns[mine], early
        ):
            continue
        first_ns, last_ns = first_ns + early * len(mine), last_ns + late * len(mine)
        over = np.maximum(work.dur_ns[mine] - early, 0.0)
        lost_ns += float(over.sum())
        if over.sum() > most:
            slower = np.flatnonzero(work.dur_ns[mine] > (1 + FALLEN / 2) * early)
            if len(slower):
                worst, most, since = (
                    int(mine[int(np.argmax(over))]),
                    float(over.sum()),
                    int(work.start_ns[mine[slower[0]]]),
                )
    change = last_ns / first_ns - 1 if first_ns else 0.0
    return change, lost_ns, worst if first_ns else NONE, since


def _falls(dur_ns: Ints, early_ns: float) -> bool:
    """Whether a pace falls little by little, as that of a card that warms up: no run much unlike the one before it,
    no part quicker than the one before."""
    medians = np.array([float(np.median(part)) for part in np.array_split(dur_ns, FALLING_PARTS)])
    little = STEADY * early_ns
    return bool(np.median(np.abs(np.diff(dur_ns))) <= little and (np.diff(medians) >= -little).all())
