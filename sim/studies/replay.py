"""A real trace run again: as it was, and as it would have been under other assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sim.errors import SimError
from sim.studies.replay_load import fitted, host_waits, load_of
from sim.studies.replay_run import replay
from traces.capture import NONE, Capture, GpuWork
from traces.classify import Classes, classify, load_rules
from traces.dag import Dag, dag_of
from traces.read.load import Window, read_trace
from traces.records import Ints
from traces.summary import RankTimes, summarise


class ReplayError(SimError):
    """A wish about a replay that cannot be met as written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """A capture, and the same work at the times that the replay gave it.

    ``measured``, ``unchanged`` and ``simulated`` are times by rank: of the trace, of its replay as it was, and of the
    replay under the changes asked for (the same as ``unchanged`` without any).
    """

    capture: Capture
    classes: Classes
    dag: Dag
    pause_ns: int
    simulated_capture: Capture
    simulated_classes: Classes
    measured: Sequence[RankTimes]
    unchanged: Sequence[RankTimes]
    simulated: Sequence[RankTimes]


def replay_trace(paths: Sequence[Path], *, window: Window | None = None, rules: Path | None = None) -> Replayed:
    """Read ``paths`` as one capture and replay it.

    Raises :class:`TraceError` on a trace that cannot be read, :class:`SimError` on one that cannot be replayed.
    """
    own = load_rules(rules) if rules is not None else ()
    capture = read_trace(list(paths), window)
    return replay_capture(capture, classify(capture, own))


def replay_capture(capture: Capture, classes: Classes) -> Replayed:
    """Replay ``capture``: its durations, host calls and edges, none of its starts."""
    dag = dag_of(capture, classes)
    load = load_of(capture, classes)
    load = replace(load, dur_ns=cost_of_collectives(load.dur_ns, dag.collective))
    waits = host_waits(capture)
    load = fitted(load, dag, waits)
    start_ns, end_ns = replay(dag, load)
    unchanged, sorted_classes = timed(capture, classes, start_ns, end_ns)
    times = summarise(unchanged, sorted_classes).ranks
    return Replayed(
        capture=capture,
        classes=classes,
        dag=dag,
        pause_ns=load.pause_ns,
        simulated_capture=unchanged,
        simulated_classes=sorted_classes,
        measured=summarise(capture, classes).ranks,
        unchanged=times,
        simulated=times,
    )


def cost_of_collectives(dur_ns: Ints, collective: Ints) -> Ints:
    """Durations in which a collective takes its least time over the ranks: the others waited for the last one.

    >>> cost_of_collectives(np.array([5, 9, 7]), np.array([0, 0, -1])).tolist()
    [5, 5, 7]
    """
    members = np.flatnonzero(collective != NONE)
    if not len(members):
        return dur_ns
    least = np.full(int(collective.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, collective[members], dur_ns[members])
    cost_ns = dur_ns.copy()
    cost_ns[members] = least[collective[members]]
    return cost_ns


def timed(capture: Capture, classes: Classes, start_ns: Ints, end_ns: Ints) -> tuple[Capture, Classes]:
    """``capture`` with its work at other times, and its classes; rows by rank, then start, as everywhere."""
    work = replace(capture.work, start_ns=start_ns, dur_ns=end_ns - start_ns)
    order = np.lexsort((start_ns, work.rank))
    moved = GpuWork(**{column: getattr(work, column)[order] for column in GpuWork.__slots__})
    return replace(capture, work=moved), replace(classes, index=classes.index[order])
