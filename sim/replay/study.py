"""A real trace run again: as it was, and as it would have been under other assumptions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sim.replay.boards import gpu_id_of
from sim.replay.changes import Changes, beside_products
from sim.replay.load import fitted, host_waits, load_of, shown_pause_ns, with_lags, with_tiles
from sim.replay.own import RunConditions, as_run, clocks_of, head_ns_of, recorded_loads
from sim.replay.price import jobs_of
from sim.replay.run import replay
from sim.replay.setting import ReplaySetup, ReplayTimes, graph_pause_ns, over_ranks
from sim.result.status import Standing, standing_of_laws
from sim.scenario.machine import Machine, Policy, machine
from traces.capture import Capture
from traces.classify import Classes, classify, load_rules
from traces.dag import Dag, dag_of
from traces.read.load import Window, read_trace
from traces.rounds import sms_of
from traces.summary import RankTimes, summarise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """A capture, its replay as it was (``unchanged``), and under the changes asked for (the same without any).

    ``gpu`` and ``status`` tell whose laws gave the energy (None: unknown GPU); ``by_shape`` kernels were priced by
    recorded shapes, the others by their class and time. ``recorded``: ours, whose joules and clocks are the file's.
    ``chunked_collectives`` were cut into parts. ``unsure`` kernels are of unknown work: what bounds them nobody knows,
    and ``span_range_us`` is the span of the first rank if all are bound by what changes least, or most (None: no such
    kernel, or nothing changed by law).
    """

    capture: Capture
    classes: Classes
    dag: Dag
    pause_ns: int
    measured: Sequence[RankTimes]
    unchanged: ReplayTimes
    simulated: ReplayTimes
    gpu: str | None
    status: str | None
    recorded: bool
    by_shape: int
    chunked_collectives: int
    unsure: int
    span_range_us: tuple[float, float] | None


def replay_trace(
    paths: Sequence[Path], changes: Changes | None = None, *, window: Window | None = None, rules: Path | None = None,
    trace_gpu: str | None = None,
) -> Replayed:  # fmt: skip
    """Read ``paths`` as one capture and replay it, under ``changes`` if there are any.

    Raises :class:`TraceError` on a trace that cannot be read, :class:`SimError` on one that cannot be replayed.
    """
    own = load_rules(rules) if rules is not None else ()
    capture = read_trace(list(paths), window)
    return replay_capture(capture, classify(capture, own), changes, trace_gpu=trace_gpu)


def replay_capture(
    capture: Capture, classes: Classes, changes: Changes | None = None, *, trace_gpu: str | None = None
) -> Replayed:
    """Replay ``capture``: its durations, host calls and edges, none of its starts."""
    changes = changes or Changes()
    recorded = RunConditions.of(capture)
    if recorded is not None:
        capture = as_run(capture, classes)
    dag = dag_of(capture, classes)
    named = gpu_id_of(capture)
    gpu_id = trace_gpu or named
    target = None if gpu_id is None else machine(gpu_id)
    if gpu_id is not None and recorded is not None:
        target = recorded.machine(gpu_id, own=gpu_id == named)
    load = load_of(
        capture,
        classes,
        dag,
        sms=sms_of(capture) or (0 if target is None else target.gpu.sms),
        clusters=target is not None and target.gpu.clusters,
    )
    # A collective takes its least time over the ranks: the others waited for the last one.
    load = replace(load, dur_ns=over_ranks(load.dur_ns, dag.collective, np.minimum))
    clock_hz = None if recorded is None else clocks_of(capture)
    usual_hz = math.nan if target is None else target.model.max_clock_hz if clock_hz is None else np.median(clock_hz)
    jobs = None if target is None else jobs_of(capture, classes, load.dur_ns, target, float(usual_hz))
    if jobs is not None:
        load = with_tiles(load, capture, jobs)
    if target is not None and load.early.all():  # a trace of ours, or one of graphs whose launches are not in it
        load = replace(load, pause_ns=graph_pause_ns(target.gpu))
    if recorded is None and (shown_ns := shown_pause_ns(capture, dag)) is not None:
        load = replace(load, pause_ns=shown_ns)
    waits = host_waits(capture)
    load = fitted(load, dag, waits)
    usual = load
    if recorded is not None:
        load, asking = recorded_loads(load, capture, dag, recorded)
    run = ReplaySetup(capture, classes, dag, load, waits, target, jobs, recorded=recorded, clock_hz=clock_hz)
    if recorded is not None:
        run.correct(head_ns_of(capture, recorded))
    times = replay(dag, load)
    unchanged = run.outcome(load, times, None if run.correction is not None else target, run.base)
    simulated, chunked = unchanged, 0
    if not changes.none:
        # Parts of what was whole begin as kernels usually do, other kernels as they did.
        other = usual if recorded is None or changes.chunks is not None else asking
        run.waits, run.load = with_lags(waits, times.end_ns), replace(other, rounds=times.rounds)
        run.beside = beside_products(load, times.start_ns, times.end_ns)
        if changes.chunks is not None:
            run, chunked = run.chunked(changes.chunks)
        if changes.launch == "graph" and run.head_ns is not None:
            run.head_ns = min(run.head_ns, load.pause_ns)
        simulated = run.under(changes)
    unsure = 0 if run.jobs is None else int(run.jobs.unsure.sum())
    span_range_us = None
    if changes.by_law and unsure:
        spans = []
        for run.toward in ("least", "most"):
            spans.append(run.under(changes).ranks[0].span_us)
        span_range_us = min(spans), max(spans)
    return Replayed(
        capture=capture,
        classes=classes,
        dag=dag,
        pause_ns=load.pause_ns,
        measured=summarise(capture, classes).ranks,
        unchanged=unchanged,
        simulated=simulated,
        gpu=None if target is None else target.gpu.id,
        status=None if target is None else _standing(target, changes).status,
        recorded=run.correction is not None,
        by_shape=0 if jobs is None else jobs.by_shape,
        chunked_collectives=chunked,
        unsure=unsure,
        span_range_us=span_range_us,
    )


def _standing(target: Machine, changes: Changes) -> Standing:
    """What the laws rest on under ``changes``: another GPU's, another limit or clock."""
    policy = Policy(power_cap_w=changes.power_cap_w, sm_clock_mhz=changes.sm_clock_mhz)
    return standing_of_laws(machine(changes.gpu or target.gpu.id, policy=policy))
