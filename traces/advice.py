"""What an engineer can act on: what was seen, where, and what to try; none where nothing is amiss.

Times count from the first GPU work, as ``--window`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.capture import NONE, Capture, Category
from traces.classify import COMMUNICATION, Classes
from traces.collectives import SEND_KERNEL, match_collectives, waiting_ns
from traces.intervals import length, union
from traces.records import Ints
from traces.slowing import slowing
from traces.summary import Region, Summary
from traces.untraced import untraced_waits

SKEW_SHARE = 0.03  # of the span, that others wait for one rank
FEWEST_LATE = 4  # collectives: a barrier at the end of a pipeline is no skew
EXPOSED_SHARE = 0.05  # of the span, in collectives beside which nothing runs
HOST_SHARE = 0.02  # of the span, idle in one launch-bound region
IDLE_SHARE = 0.2  # of the span, idle for the host without such a region
SMALL_SHARE = 0.15  # of the span, in small kernels and the pauses behind them
SMALL_NS = 5_000  # a kernel shorter than what it costs to launch one
PAUSE_LIMIT_NS = 20_000  # a longer gap is no pause between kernels that queue
FEWEST_SMALL = 50
NAME_SHOWN = 80
SMALL_COLLECTIVE_NS = 60_000  # mostly latency: cut in parts it takes longer


REMEDY = (
    "cut the product next to each in parts, so that a part's transfer runs beside the next (replay --chunks 4), or run "
    "two batches in turn"
)
SMALL_REMEDY = (
    "use one-shot or multicast kernels (the engine's custom all-reduce, NVLS), fuse them with the norm behind, or "
    "fewer ranks (replay --communication-faster 2)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One finding: where (rank, microseconds, kernel), what was seen, what to try, and what that would save at most.

    ``saves_us`` and ``saves_j`` are None where nobody can tell; the simulator fills in what it can.
    """

    rule: str
    rank: int
    start_us: float
    end_us: float
    kernel: str
    seen: str
    remedy: str
    saves_us: float | None = None
    saves_j: float | None = None


def advise(capture: Capture, classes: Classes, summary: Summary) -> list[Advice]:
    """All findings, of each rule the worst rank's."""
    collective = match_collectives(capture, classes)
    found = [*_skew(capture, classes, collective)]
    found += _worst(_untraced(capture, classes, collective))
    found += _worst(_host_bound(capture, summary))
    found += _worst(_small(capture, classes))
    found += _worst(_exposed(capture, classes, waiting_ns(capture, collective)))
    for slow in slowing(capture, classes):
        name = capture.names[capture.work.name[slow.row]][:NAME_SHOWN]
        advice = Advice(
            rule="clock-throttling", rank=slow.rank, start_us=_us(capture, slow.start_ns),
            end_us=_us(capture, slow.end_ns), kernel=name, seen=slow.seen,
            remedy="look at power and temperature (nvidia-smi -q -d PERFORMANCE): a lower cap or locked clock that "
            "holds, better cooling, or fewer GPUs of the node at once",
            saves_us=slow.lost_ns / 1e3,
        )  # fmt: skip
        found.append(advice)
    return found


def _worst(found: Iterator[Advice]) -> list[Advice]:
    """The one that would save most, over ranks."""
    return sorted(found, key=lambda advice: -(advice.saves_us or 0.0))[:1]


def _us(capture: Capture, at_ns: int) -> float:
    return float(at_ns - capture.work.start_ns.min()) / 1e3


def _span_ns(capture: Capture, mine: NDArray[np.bool_]) -> int:
    work = capture.work
    return int(work.end_ns[mine].max() - work.start_ns[mine].min())


def _skew(capture: Capture, classes: Classes, collective: Ints) -> list[Advice]:
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
    span_ns = _span_ns(capture, mine)
    times = work.rank[late_row] == rank
    if lost_ns < SKEW_SHARE * span_ns or times.sum() < FEWEST_LATE:
        return []
    at = late_row[times][int(np.argmax(late_ns[times]))]
    why, remedy = _why_late(capture, classes, rank, ranks, lost_ns)
    return [
        Advice(
            rule="rank-skew", rank=rank, start_us=_us(capture, int(work.start_ns[at] - late_ns[times].max())),
            end_us=_us(capture, int(work.start_ns[at])), kernel=capture.names[work.name[at]][:NAME_SHOWN],
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


def _untraced(capture: Capture, classes: Classes, collective: Ints) -> Iterator[Advice]:
    """Collectives in which a rank waits for others that were not traced."""
    work = capture.work
    for wait in untraced_waits(capture, classes, collective):
        span_ns, at = _span_ns(capture, work.rank == wait.rank), int(wait.rows[0])
        if wait.lost_ns < EXPOSED_SHARE * span_ns:
            continue
        yield Advice(
            rule="waits-for-untraced-ranks", rank=wait.rank, start_us=_us(capture, int(work.start_ns[at])),
            end_us=_us(capture, int(work.end_ns[at])), kernel=capture.names[work.name[at]][:NAME_SHOWN],
            seen=f"{len(wait.rows):,} collectives take {wait.lost_ns / 1e3:,.0f} us ({wait.lost_ns / span_ns:.0%} of "
            "its time) more than others of their size, the longest here",
            remedy="it waits for ranks that the trace lacks: give the files of all ranks, and see which is late",
            saves_us=wait.lost_ns / 1e3,
        )  # fmt: skip


def _longest_gap(capture: Capture, rank: int) -> tuple[int, int]:
    """Row of a rank whose start ended its longest idle time, and since when nothing ran."""
    work = capture.work
    rows = np.flatnonzero(work.rank == rank)
    latest_ns = np.maximum.accumulate(work.end_ns[rows])
    place = 1 + int(np.argmax(work.start_ns[rows][1:] - latest_ns[:-1]))
    return int(rows[place]), int(latest_ns[place - 1])


def _host_bound(capture: Capture, summary: Summary) -> Iterator[Advice]:
    """GPUs that idle for their hosts: stretches where kernel after kernel waits for its launch, or few long gaps."""
    work = capture.work
    by_rank: dict[int, list[Region]] = {}
    for region in summary.launch_bound:
        by_rank.setdefault(region.rank, []).append(region)
    for times in summary.ranks:
        regions = [r for r in by_rank.get(times.rank, []) if r.idle_us >= HOST_SHARE * times.span_us]
        idle_us = times.idle_by_cause_us["host"]
        in_all = f"in all its GPU idles {idle_us:,.0f} us ({idle_us / times.span_us:.0%} of its time) for its host"
        if not regions and idle_us >= IDLE_SHARE * times.span_us:
            row, since_ns = _longest_gap(capture, times.rank)
            yield Advice(
                rule="host-bound", rank=times.rank, start_us=_us(capture, since_ns),
                end_us=_us(capture, int(work.start_ns[row])), kernel=capture.names[work.name[row]][:NAME_SHOWN],
                seen=f"this piece of work waits for its launch longest; {in_all}",
                remedy="find what the host does meanwhile (data, synchronisation, Python), and launch ahead of the GPU",
                saves_us=idle_us,
            )  # fmt: skip
        if not regions:
            continue
        worst = max(regions, key=lambda r: r.idle_us)
        inside = np.flatnonzero((work.rank == times.rank) & (work.start_ns >= worst.start_us * 1e3))
        yield Advice(
            rule="host-bound", rank=times.rank, start_us=_us(capture, round(worst.start_us * 1e3)),
            end_us=_us(capture, round(worst.end_us * 1e3)), kernel=capture.names[work.name[inside[0]]][:NAME_SHOWN],
            seen=f"{worst.kernels:,} pieces of work wait for their launches, idle {worst.idle_us:,.0f} us of "
            f"{worst.end_us - worst.start_us:,.0f}; {in_all}",
            remedy="launch it as a CUDA or HIP graph (replay --launch graph), compile the host's code, or batch more",
            saves_us=idle_us,
        )  # fmt: skip


def _small(capture: Capture, classes: Classes) -> Iterator[Advice]:
    """Kernels so short that launching them costs as much as they do."""
    work = capture.work
    is_communication = classes.is_class(COMMUNICATION)
    for rank in capture.ranks:
        mine = work.rank == rank
        rows = np.flatnonzero(mine)
        rows = rows[np.lexsort((work.start_ns[rows], work.stream[rows]))]
        small = (work.dur_ns[rows] < SMALL_NS) & (work.category[rows] == Category.KERNEL) & ~is_communication[rows]
        follows = np.append(work.stream[rows][1:] == work.stream[rows][:-1], False)
        pause = np.append(work.start_ns[rows][1:] - work.end_ns[rows][:-1], 0)
        pause = np.where(follows & (pause >= 0) & (pause <= PAUSE_LIMIT_NS), pause, 0)
        cost = np.where(small, work.dur_ns[rows] + pause, 0)
        span_ns = _span_ns(capture, mine)
        if small.sum() < FEWEST_SMALL or cost.sum() < SMALL_SHARE * span_ns:
            continue
        # One kernel in the place of each run of them keeps their work and saves the pauses inside the run.
        inside = small & np.append(small[1:], False) & follows
        edges = np.flatnonzero(np.diff(np.concatenate([[0], small.astype(np.int8), [0]])))
        first, after = max(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True), key=lambda run: run[1] - run[0])
        many = np.bincount(work.name[rows], weights=cost, minlength=len(capture.names))
        top = int(np.argmax(many))
        saved_ns = int(pause[inside].sum())
        yield Advice(
            rule="small-launches", rank=rank, start_us=_us(capture, int(work.start_ns[rows[first]])),
            end_us=_us(capture, int(work.end_ns[rows[after - 1]])), kernel=capture.names[top][:NAME_SHOWN],
            seen=f"{int(small.sum()):,} kernels of less than {SMALL_NS / 1e3:.0f} us and the pauses behind them take "
            f"{cost.sum() / 1e3:,.0f} us ({cost.sum() / span_ns:.0%} of its time), up to {after - first:,} in a row",
            remedy="fuse what follows one another (torch.compile, the engine's fused norm, RoPE and activation "
            "kernels), or batch more",
            saves_us=saved_ns / 1e3,
        )  # fmt: skip


def _exposed(capture: Capture, classes: Classes, waited: Ints) -> Iterator[Advice]:
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
        exposed_ns, span_ns = int(alone.sum()), _span_ns(capture, mine)
        if exposed_ns < EXPOSED_SHARE * span_ns or product_ns < exposed_ns / 4:
            continue
        at = rows[int(np.argmax(alone))]
        small = float(np.median((work.dur_ns - waited)[rows[alone > 0]])) < SMALL_COLLECTIVE_NS
        yield Advice(
            rule="exposed-small-collectives" if small else "exposed-collectives", rank=rank,
            start_us=_us(capture, int(work.start_ns[at])), end_us=_us(capture, int(work.end_ns[at])),
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


def shown(found: Sequence[Advice]) -> list[str]:
    """A line each."""
    lines = []
    for advice in found:
        saves = ""
        if advice.saves_us is not None:
            joules = "" if advice.saves_j is None else f", {advice.saves_j:.3g} J"
            saves = f" (saves at most {advice.saves_us:,.0f} us{joules})"
        lines.append(
            f"{advice.rule}: rank {advice.rank}, {advice.start_us / 1e3:,.3f} to {advice.end_us / 1e3:,.3f} ms, "
            f"'{advice.kernel}': {advice.seen}: {advice.remedy}{saves}"
        )
    return lines
