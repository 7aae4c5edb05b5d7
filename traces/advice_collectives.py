"""Advice about collectives: a rank that others wait for, ranks that were not traced, and time that nothing hides."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from traces.advised import NAME_SHOWN, Advice, span_of, us_of
from traces.capture import NONE, Capture, Category
from traces.classify import COMMUNICATION, Classes
from traces.collectives import SEND_KERNEL
from traces.intervals import length, union
from traces.records import Ints
from traces.untraced import untraced_waits

SKEW_SHARE = 0.03  # of the span, that others wait for one rank
FEWEST_LATE = 4  # collectives: a barrier at the end of a pipeline is no skew
EXPOSED_SHARE = 0.05  # of the span, in collectives beside which nothing runs
SMALL_COLLECTIVE_NS = 60_000  # mostly latency: cut in parts it takes longer

REMEDY = (
    "cut the product next to each in parts, so that a part's transfer runs beside the next (replay --chunks 4), or run "
    "two batches in turn"
)
SMALL_REMEDY = (
    "use one-shot or multicast kernels (the engine's custom all-reduce, NVLS), fuse them with the norm behind, or "
    "fewer ranks (replay --communication-faster 2)"
)


def skew(capture: Capture, classes: Classes, collective: Ints) -> list[Advice]:
    """One rank that the others wait for: by how much it is the last to arrive, and why."""
    work = capture.work
    rows = np.flatnonzero((collective != NONE) & ~_pairs(capture, collective))
    if not len(rows):
        return []
    order = rows[np.lexsort((work.start_ns[rows], collective[rows]))]
    last = np.append(collective[order][1:] != collective[order][:-1], True)
    late_row, before_row = order[last], order[np.flatnonzero(last) - 1]
    ranks = np.unique(work.rank[rows])
    # Before its first work in the trace nobody knows what a rank did: its profiler may have started later.
    first_ns = np.array([work.start_ns[work.rank == rank].min() for rank in ranks])[
        np.searchsorted(ranks, work.rank[late_row])
    ]
    late_ns = work.start_ns[late_row] - np.maximum(work.start_ns[before_row], first_ns)
    sums = np.array([late_ns[work.rank[late_row] == rank].sum() for rank in ranks])
    # What ranks are late in turn is noise: one rank must be late beyond the others.
    worst = int(np.argmax(sums))
    rank, lost_ns = int(ranks[worst]), float(sums[worst] - np.median(np.delete(sums, worst)))
    mine = work.rank == rank
    span_ns = span_of(capture, mine)
    times = work.rank[late_row] == rank
    if lost_ns < SKEW_SHARE * span_ns or times.sum() < FEWEST_LATE:
        return []
    at = late_row[times][int(np.argmax(late_ns[times]))]
    why, remedy = _why_late(capture, classes, rank, ranks, lost_ns)
    return [
        Advice(
            rule="rank-skew", rank=rank, start_us=us_of(capture, int(work.start_ns[at] - late_ns[times].max())),
            end_us=us_of(capture, int(work.start_ns[at])), kernel=capture.names[work.name[at]][:NAME_SHOWN],
            seen=f"it comes last to {int(times.sum()):,} of {len(late_row):,} collectives, and the others wait "
            f"{lost_ns / 1e3:,.0f} us ({lost_ns / span_ns:.0%} of its time) for it: {why}",
            remedy=remedy, saves_us=lost_ns / 1e3,
        )
    ]  # fmt: skip


def _pairs(capture: Capture, collective: Ints) -> NDArray[np.bool_]:
    """Sends and receives of two ranks: of stages in a row one always waits for the other."""
    work = capture.work
    sends = np.array([SEND_KERNEL.search(name) is not None for name in capture.names])[work.name]
    size = np.bincount(collective[collective != NONE], minlength=1)
    return np.asarray(sends & (collective != NONE) & (size[np.maximum(collective, 0)] <= 2))


def _why_late(capture: Capture, classes: Classes, rank: int, ranks: Ints, lost_ns: float) -> tuple[str, str]:
    """Whether its kernels take longer, and which, or its host launches late."""
    work = capture.work
    labels = [cls for cls in classes.labels if cls != COMMUNICATION]
    of = {cls: classes.is_class(cls) for cls in labels}
    more = {}
    for cls in labels:
        sums = {rank: int(work.dur_ns[of[cls] & (work.rank == rank)].sum()) for rank in ranks.tolist()}
        own = sums.pop(rank)
        more[cls] = own - float(np.median(list(sums.values())))
    cls = max(more, key=lambda name: more[name])
    if sum(more.values()) >= 0.5 * lost_ns:
        return (
            f"its {cls} kernels take {more[cls] / 1e3:,.0f} us longer than the other ranks'",
            "give the ranks equal work (experts, lengths, stages), or find why that GPU's clock is lower",
        )
    return (
        "its kernels take no longer than the other ranks'",
        "its host launches late: look at that process (data loading, logging, a busy core, another NUMA node)",
    )


def untraced(capture: Capture, classes: Classes, collective: Ints) -> Iterator[Advice]:
    """Collectives in which a rank waits for others that were not traced."""
    work = capture.work
    for wait in untraced_waits(capture, classes, collective):
        span_ns, at = span_of(capture, work.rank == wait.rank), int(wait.rows[0])
        if wait.lost_ns < EXPOSED_SHARE * span_ns:
            continue
        yield Advice(
            rule="waits-for-untraced-ranks", rank=wait.rank, start_us=us_of(capture, int(work.start_ns[at])),
            end_us=us_of(capture, int(work.end_ns[at])), kernel=capture.names[work.name[at]][:NAME_SHOWN],
            seen=f"{len(wait.rows):,} collectives take {wait.lost_ns / 1e3:,.0f} us ({wait.lost_ns / span_ns:.0%} of "
            "its time) more than others of their size, the longest here",
            remedy="it waits for ranks that the trace lacks: give the files of all ranks, and see which is late",
            saves_us=wait.lost_ns / 1e3,
        )  # fmt: skip


def exposed(capture: Capture, classes: Classes, waited: Ints) -> Iterator[Advice]:
    """Collectives beside which nothing runs, where a product before or after them could have."""
    work = capture.work
    is_communication, products = classes.is_class(COMMUNICATION), classes.is_class("gemm")
    for rank in capture.ranks:
        mine = work.rank == rank
        rows = np.flatnonzero(mine & is_communication)
        computes = mine & ~is_communication & (work.category == Category.KERNEL)
        if not len(rows) or not (mine & products).any():
            continue
        begin, end = union(work.start_ns[computes], work.end_ns[computes])
        alone = _alone_ns(work.start_ns[rows] + waited[rows], work.end_ns[rows], begin, end)
        product_ns = length(work.start_ns[mine & products], work.end_ns[mine & products])
        exposed_ns, span_ns = int(alone.sum()), span_of(capture, mine)
        if exposed_ns < EXPOSED_SHARE * span_ns or product_ns < exposed_ns / 4:
            continue
        at = rows[int(np.argmax(alone))]
        small = float(np.median((work.dur_ns - waited)[rows[alone > 0]])) < SMALL_COLLECTIVE_NS
        yield Advice(
            rule="exposed-small-collectives" if small else "exposed-collectives", rank=rank,
            start_us=us_of(capture, int(work.start_ns[at])), end_us=us_of(capture, int(work.end_ns[at])),
            kernel=capture.names[work.name[at]][:NAME_SHOWN],
            seen=f"{int((alone > 0).sum()):,} collectives run {exposed_ns / 1e3:,.0f} us "
            f"({exposed_ns / span_ns:.0%} of its time) with nothing beside them, the longest here",
            remedy=SMALL_REMEDY if small else REMEDY,
            saves_us=min(exposed_ns, product_ns) / 1e3,
        )  # fmt: skip


def _alone_ns(start: Ints, end: Ints, busy_begin: Ints, busy_end: Ints) -> Ints:
    """Of each interval, what lies in none of the disjoint, sorted busy ones."""
    if not len(busy_begin):
        return end - start
    so_far = np.concatenate([[0], np.cumsum(busy_end - busy_begin)])

    def busy_until(at: Ints) -> Ints:
        place = np.searchsorted(busy_begin, at, side="right")
        inside = np.clip(busy_end[np.maximum(place - 1, 0)] - at, 0, None) * (place > 0)
        return np.asarray(so_far[place] - inside)

    busy = busy_until(np.maximum(end, start)) - busy_until(start)
    return np.asarray(np.maximum(end - start, 0) - np.maximum(busy, 0))
