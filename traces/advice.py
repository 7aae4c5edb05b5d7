"""What an engineer can act on; none where nothing is amiss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from traces.advice_collectives import exposed, skew, untraced
from traces.advised import NAME_SHOWN, Advice, span_of, us_of
from traces.capture import Capture, Category
from traces.classify import COMMUNICATION, Classes
from traces.collectives import match_collectives, waiting_ns
from traces.slowing import slowing
from traces.summary import Region, Summary

HOST_SHARE = 0.02  # of the span, idle in one launch-bound region
IDLE_SHARE = 0.2  # of the span, idle for the host without such a region
SMALL_SHARE = 0.15  # of the span, in small kernels and the pauses behind them
SMALL_NS = 5_000  # a kernel shorter than what it costs to launch one
PAUSE_LIMIT_NS = 20_000  # a longer gap is no pause between kernels that queue
FEWEST_SMALL = 50


def advise(capture: Capture, classes: Classes, summary: Summary) -> list[Advice]:
    """All findings, of each rule the worst rank's."""
    collective = match_collectives(capture, classes)
    found = [*skew(capture, classes, collective)]
    found += _worst(untraced(capture, classes, collective))
    found += _worst(_host_bound(capture, summary))
    found += _worst(_small(capture, classes))
    found += _worst(exposed(capture, classes, waiting_ns(capture, collective)))
    for slow in slowing(capture, classes):
        name = capture.names[capture.work.name[slow.row]][:NAME_SHOWN]
        advice = Advice(
            rule="clock-throttling", rank=slow.rank, start_us=us_of(capture, slow.start_ns),
            end_us=us_of(capture, slow.end_ns), kernel=name, seen=slow.seen,
            remedy="look at power and temperature (nvidia-smi -q -d PERFORMANCE): a lower cap or locked clock that "
            "holds, better cooling, or fewer GPUs of the node at once",
            saves_us=slow.lost_ns / 1e3,
        )  # fmt: skip
        found.append(advice)
    return found


def _worst(found: Iterator[Advice]) -> list[Advice]:
    """The one that would save most, over ranks."""
    return sorted(found, key=lambda advice: -(advice.saves_us or 0.0))[:1]


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
                rule="host-bound", rank=times.rank, start_us=us_of(capture, since_ns),
                end_us=us_of(capture, int(work.start_ns[row])), kernel=capture.names[work.name[row]][:NAME_SHOWN],
                seen=f"this piece of work waits for its launch longest; {in_all}",
                remedy="find what the host does meanwhile (data, synchronisation, Python), and launch ahead of the GPU",
                saves_us=idle_us,
            )  # fmt: skip
        if not regions:
            continue
        worst = max(regions, key=lambda r: r.idle_us)
        inside = np.flatnonzero((work.rank == times.rank) & (work.start_ns >= worst.start_us * 1e3))
        yield Advice(
            rule="host-bound", rank=times.rank, start_us=us_of(capture, round(worst.start_us * 1e3)),
            end_us=us_of(capture, round(worst.end_us * 1e3)), kernel=capture.names[work.name[inside[0]]][:NAME_SHOWN],
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
        span_ns = span_of(capture, mine)
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
            rule="small-launches", rank=rank, start_us=us_of(capture, int(work.start_ns[rows[first]])),
            end_us=us_of(capture, int(work.end_ns[rows[after - 1]])), kernel=capture.names[top][:NAME_SHOWN],
            seen=f"{int(small.sum()):,} kernels of less than {SMALL_NS / 1e3:.0f} us and the pauses behind them take "
            f"{cost.sum() / 1e3:,.0f} us ({cost.sum() / span_ns:.0%} of its time), up to {after - first:,} in a row",
            remedy="fuse what follows one another (torch.compile, the engine's fused norm, RoPE and activation "
            "kernels), or batch more",
            saves_us=saved_ns / 1e3,
        )  # fmt: skip
