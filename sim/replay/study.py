"""A real trace run again: as it was, and as it would have been under other assumptions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hardware.catalog import load_gpu
from sim.replay.boards import gpu_id_of
from sim.replay.changes import Changes, beside_products
from sim.replay.evidence import evidence_of
from sim.replay.load import fitted, host_waits, load_of, shown_pause_ns, with_lags, with_tiles
from sim.replay.own import RunConditions, as_run, clocks_of, head_ns_of, own_of, recorded_loads
from sim.replay.price import Jobs, jobs_of
from sim.replay.run import replay
from sim.replay.setting import ReplaySetup, ReplayTimes, ReplayTrace, graph_pause_ns, over_ranks
from sim.result.status import STATUSES, Standing, standing_of_laws
from sim.scenario.machine import Machine, Policy, machine
from traces.capture import NONE, Capture
from traces.classify import Classes, classify, load_rules
from traces.dag import Dag, dag_of
from traces.read.load import Window, read_trace
from traces.rounds import sms_of
from traces.summary import RankTimes, summarise

# Traces of one replayed on the other are held against its own (docs/replay.md, tests/test_replay_other_gpu.py).
BOTH_MEASURED = {"h100-sxm-80gb", "h200-sxm-141gb"}
UNSIZED_SHARE = 0.1  # of the kernels' time: products without sizes beyond it are said


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """A capture, its replay as it was (``unchanged``), and under the changes asked for (the same without any).

    ``gpu`` and ``standing`` tell whose laws gave the energy (with those of ``other_gpu`` where it is run on another),
    and what they and a run of ours rest on (None: unknown GPU); ``by_shape`` kernels were priced by recorded
    shapes, the others by their class and time. ``recorded``: ours, whose joules and clocks are the file's.
    ``chunked_collectives`` were cut into parts. ``unsure`` kernels are of unknown work: what bounds them nobody knows,
    and ``span_range_us`` is the span of the first rank if all are bound by what changes least, or most (None: no such
    kernel, or nothing changed by law). ``taken`` counts what the unchanged replay of a real trace takes from its file
    beside durations, launches and waits (:attr:`Evidence.taken`), and ``by_rules`` is the replay without it (None:
    ours).
    """

    capture: Capture
    classes: Classes
    dag: Dag
    pause_ns: int
    measured: Sequence[RankTimes]
    unchanged: ReplayTimes
    simulated: ReplayTimes
    gpu: str | None
    other_gpu: str | None
    standing: Standing | None
    recorded: bool
    by_shape: int
    chunked_collectives: int
    unsure: int
    span_range_us: tuple[float, float] | None
    taken: Mapping[str, int]
    by_rules: Sequence[RankTimes] | None


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
    by_rules, taken = load, dict[str, int]()
    if recorded is None:
        evidence = evidence_of(capture, dag, load)
        load = evidence.on(load, (capture.work.launch == NONE) | (capture.work.graph != NONE))
        taken = evidence.taken
    usual = load
    if recorded is not None:
        load, asking = recorded_loads(load, capture, dag, recorded)
    trace = ReplayTrace(capture=capture, classes=classes, dag=dag, recorded=recorded, clock_hz=clock_hz)
    run = ReplaySetup(trace, load, waits, target, jobs)
    if recorded is not None:
        run.correct(head_ns_of(capture, recorded))
    times = replay(dag, load)
    unchanged = run.outcome(load, times, None if run.correction is not None else target, run.base)
    # Before anything changes: chunks give the run other rows.
    ruled = run.outcome(by_rules, replay(dag, by_rules), None, None).ranks if any(taken.values()) else None
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
        other_gpu=None if changes.gpu is None else load_gpu(changes.gpu).id,
        standing=None if target is None or jobs is None else _standing(target, changes, capture, classes, jobs),
        recorded=run.correction is not None,
        by_shape=0 if jobs is None else jobs.by_shape,
        chunked_collectives=chunked,
        unsure=unsure,
        span_range_us=span_range_us,
        taken=taken,
        by_rules=ruled,
    )


def _standing(target: Machine, changes: Changes, capture: Capture, classes: Classes, jobs: Jobs) -> Standing:
    """What a replay rests on: the laws under ``changes``, what the trace lets them know, and a run of ours itself."""
    unmeasured = []
    own, recorded = own_of(capture) or {}, RunConditions.of(capture)
    if recorded is not None and recorded.steady and changes.regime == "cold":
        unmeasured.append("what a steady run does cold was never measured")
    unsized = capture.work.dur_ns[classes.is_class("gemm") & ~jobs.sized].sum() / max(1, capture.work.dur_ns.sum())
    scenario = own.get("scenario")
    by_law = (changes.sm_clock_mhz, changes.power_cap_w, changes.gpu) != (None, None, None)
    if by_law and isinstance(scenario, dict) and scenario.get("sm_partitions"):
        unmeasured.append("kernels on SM partitions change here as they would on the whole GPU")
    if not jobs.by_shape:
        unmeasured.append("no kernel's sizes are in the trace: each is taken for one of its class that takes its time")
    elif unsized > UNSIZED_SHARE:
        unmeasured.append(f"products of {unsized:.0%} of the kernels' time have no sizes in the trace")
    there = machine(
        changes.gpu or target.gpu.id, policy=Policy(power_cap_w=changes.power_cap_w, sm_clock_mhz=changes.sm_clock_mhz)
    )
    pair = {target.gpu.id, there.gpu.id}
    if len(pair) > 1 and pair != BOTH_MEASURED:
        unmeasured.append(f"no trace of {target.gpu.id} was ever replayed beside one of {there.gpu.id}")
    laws = standing_of_laws(there, unmeasured=unmeasured)
    laws = replace(laws, card=max(laws.card, target.profile.status, key=STATUSES.index))  # durations go by both's laws
    status, said = own.get("status"), own.get("status_reasons")
    if status not in STATUSES:
        return laws
    reasons = tuple(reason for reason in said if isinstance(reason, str)) if isinstance(said, list) else ()
    return replace(
        laws,
        card=max(laws.card, status if status not in ("unchecked", "extrapolated") else laws.card, key=STATUSES.index),
        unchecked=(*laws.unchecked, *(reasons if status == "unchecked" else ())),
        extrapolated=(*laws.extrapolated, *(reasons if status == "extrapolated" else ())),
    )
