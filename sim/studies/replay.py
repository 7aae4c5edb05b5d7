"""A real trace run again: as it was, and as it would have been under other assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from hardware.catalog import load_gpu
from hardware.gpu import GpuSpec
from hardware.profile import BASE_GPU, profile_for
from sim.machine import Machine, Policy, machine
from sim.standing import Standing, standing_of_laws
from sim.studies.replay_changes import Changes, ReplayError, beside_products, changed
from sim.studies.replay_chunks import chains_of, split, split_jobs, split_load
from sim.studies.replay_load import fitted, host_waits, load_of, with_lags, with_tiles
from sim.studies.replay_price import Jobs, Priced, energy_j, gpu_id_of, jobs_of, priced, with_ctas
from sim.studies.replay_run import HostWait, Load, Times, replay
from traces.capture import NONE, Capture, Category, GpuWork
from traces.classify import Classes, classify, load_rules
from traces.dag import Dag, dag_of
from traces.read.load import Window, read_trace
from traces.records import Floats, Ints
from traces.rounds import sms_of
from traces.summary import RankTimes, summarise

Column = TypeVar("Column", Ints, Floats)

CLOCK_TOLERANCE_HZ = 2e6  # how near a settled clock is found: far below the steps of the boards, 15 MHz
BESIDE_ROUNDS = 2  # what runs beside what changes durations, and these what runs beside what


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Work at the times that a replay gave it: times by rank; joules of all GPUs where the GPU is known."""

    capture: Capture
    classes: Classes
    ranks: Sequence[RankTimes]
    energy_j: float | None

    @property
    def power_w(self) -> float | None:
        """Mean power of one GPU."""
        if self.energy_j is None:
            return None
        return self.energy_j / max(sum(times.span_us for times in self.ranks) * 1e-6, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """A capture, its replay as it was (``unchanged``), and under the changes asked for (the same without any).

    ``gpu`` and ``status`` tell whose laws gave the energy (None: unknown GPU); ``by_shape`` kernels were priced by
    recorded shapes, the others by their class and time. ``chunked_collectives`` were cut into parts.
    """

    capture: Capture
    classes: Classes
    dag: Dag
    pause_ns: int
    measured: Sequence[RankTimes]
    unchanged: Outcome
    simulated: Outcome
    gpu: str | None
    status: str | None
    by_shape: int
    chunked_collectives: int


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
    dag = dag_of(capture, classes)
    gpu_id = trace_gpu or gpu_id_of(capture)
    target = None if gpu_id is None else machine(gpu_id)
    load = load_of(
        capture,
        classes,
        dag,
        sms=sms_of(capture) or (0 if target is None else target.gpu.sms),
        clusters=target is not None and target.gpu.clusters,
    )
    # A collective takes its least time over the ranks: the others waited for the last one.
    load = replace(load, dur_ns=over_ranks(load.dur_ns, dag.collective, np.minimum))
    jobs = None if target is None else jobs_of(capture, classes, load.dur_ns, target)
    if jobs is not None:
        load = with_tiles(load, capture, jobs)
    if target is not None and load.early.all():  # a trace of ours, or one of graphs whose launches are not in it
        load = replace(load, pause_ns=graph_pause_ns(target.gpu))
    waits = host_waits(capture)
    load = fitted(load, dag, waits)
    run = _Setting(capture, classes, dag, load, waits, target, jobs)
    times = replay(dag, load)
    unchanged = run.outcome(load, times, target, run.base)
    simulated, chunked = unchanged, 0
    if not changes.none:
        run.waits, run.load = with_lags(waits, times.end_ns), replace(load, rounds=times.rounds)
        run.beside = beside_products(load, times.start_ns, times.end_ns)
        if changes.chunks is not None:
            run, chunked = run.chunked(changes.chunks)
        simulated = run.under(changes)
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
        by_shape=0 if jobs is None else jobs.by_shape,
        chunked_collectives=chunked,
    )


def _standing(target: Machine, changes: Changes) -> Standing:
    """What the laws rest on under ``changes``: another GPU's, another limit or clock."""
    policy = Policy(power_cap_w=changes.power_cap_w, sm_clock_mhz=changes.sm_clock_mhz)
    return standing_of_laws(machine(changes.gpu or target.gpu.id, policy=policy))


class _Setting:
    """A replay set up: what is needed to run it under any changes."""

    def __init__(
        self, capture: Capture, classes: Classes, dag: Dag, load: Load, waits: list[HostWait],
        target: Machine | None, jobs: Jobs | None,
    ) -> None:  # fmt: skip
        self.capture, self.classes, self.dag, self.load, self.waits = capture, classes, dag, load, waits
        self.target, self.jobs = target, jobs
        # A trace is short: its kernels run at the clock that the fast limiter allows.
        self.base = None if target is None or jobs is None else priced(jobs, target, target.model.max_clock_hz)

        group = np.array([args.group_size for args in capture.collectives] + [NONE])[capture.work.collective]
        self.beside = np.zeros(len(capture.work))
        self.lonely = group > len(capture.ranks)  # collectives with ranks that were not captured

    def chunked(self, chunks: int) -> tuple[_Setting, int]:
        """The same with chains of product and collective in ``chunks`` parts; the number of collectives cut.

        A part takes the row's measured time times the laws' ratio of the part to the whole.
        """
        target, jobs, base = self._known()
        chains = chains_of(self.capture, self.classes, self.dag, beside=self.beside, chunks=chunks)
        if not chains.collectives:
            raise ReplayError(
                f"chunks = {chunks}: nothing to cut: no reduce-scatter, all-reduce, all-gather or all-to-all of the "
                "trace is exposed and directly before or after a matrix product: leave chunks out"
            )
        work = self.capture.work
        parts = split(work, self.dag, chains, chunks)
        jobs = split_jobs(jobs, parts, whole=(work.category != Category.KERNEL)[parts.origin])
        factor = np.nan_to_num(
            priced(jobs, target, target.model.max_clock_hz).time_s / base.time_s[parts.origin], nan=1.0
        )
        capture = self.capture.keep(parts.origin)
        run = _Setting(
            replace(capture, work=replace(capture.work, stream=parts.stream)),
            replace(self.classes, index=self.classes.index[parts.origin]),
            parts.dag,
            split_load(self.load, parts, factor, chains.units),
            [replace(wait, rows=tuple(parts.last[list(wait.rows)].tolist())) for wait in self.waits],
            target,
            jobs,
        )
        run.beside = self.beside[parts.origin]
        return run, parts.chunked

    def _known(self) -> tuple[Machine, Jobs, Priced]:
        if self.target is None or self.jobs is None or self.base is None:
            raise ReplayError("trace_gpu is missing: the trace names no GPU of the catalog: give --trace-gpu ID")
        return self.target, self.jobs, self.base

    def under(self, changes: Changes) -> Outcome:
        """Run under ``changes``; where power settles, at the highest clock that keeps the mean within the cap."""
        if not changes.by_law:
            return self._run(changes, self.target, self.base)
        known, jobs, _ = self._known()
        target = machine(
            changes.gpu or known.gpu.id,
            policy=Policy(power_cap_w=changes.power_cap_w, sm_clock_mhz=changes.sm_clock_mhz),
        )
        if changes.ctas is not None and changes.ctas > target.gpu.sms:
            raise ReplayError(f"ctas = {changes.ctas}: {target.gpu.id} has {target.gpu.sms} SMs: give at most as many")
        jobs = jobs if changes.ctas is None else with_ctas(jobs, changes.ctas)

        def at(clock_hz: float) -> Outcome:
            return self._run(changes, target, priced(jobs, target, clock_hz))

        low_hz, high_hz = target.model.min_clock_hz, target.model.max_clock_hz
        outcome = at(high_hz)
        if not changes.steady or (outcome.power_w or 0.0) <= target.limits.slow_limit_w:
            return outcome
        outcome = at(low_hz)
        while high_hz - low_hz > CLOCK_TOLERANCE_HZ:
            middle_hz = 0.5 * (low_hz + high_hz)
            tried = at(middle_hz)
            if (tried.power_w or 0.0) <= target.limits.slow_limit_w:
                low_hz, outcome = middle_hz, tried
            else:
                high_hz = middle_hz
        return outcome

    def _run(self, changes: Changes, target: Machine | None, prices: Priced | None) -> Outcome:
        load, beside = self.load, self.beside.copy()
        if prices is not None and self.base is not None:
            dur_ns = load.dur_ns.astype(np.float64)
            if changes.launch == "graph":  # ranks are launched together: none waits for one that the trace lacks
                waited = self.lonely & (dur_ns > self.base.time_s * 1e9)
                dur_ns[waited], beside[waited] = self.base.time_s[waited] * 1e9, 0.0
            factor = np.nan_to_num(prices.time_s / self.base.time_s, nan=1.0)
            load = replace(load, dur_ns=np.rint(dur_ns * factor).astype(np.int64))
        gpu = target.gpu if target is not None else load_gpu(BASE_GPU)
        pause_ns = graph_pause_ns(gpu)
        dag, load, waits = changed(changes, self.classes, self.dag, load, self.waits, graph_pause_ns=pause_ns)
        times = replay(dag, load, waits)
        if prices is None:
            return self.outcome(load, times, target, prices)
        for _ in range(BESIDE_ROUNDS):
            now = beside_products(load, times.start_ns, times.end_ns)
            stretch = (1.0 + (prices.beside - 1.0) * now) / (1.0 + (prices.beside - 1.0) * beside)
            stretch = over_ranks(stretch, dag.collective, np.maximum)
            load = replace(load, dur_ns=np.rint(load.dur_ns * stretch).astype(np.int64))
            times, beside = replay(dag, load, waits), now
        return self.outcome(load, times, target, prices)

    def outcome(self, load: Load, times: Times, target: Machine | None, prices: Priced | None) -> Outcome:
        """What a run of ``load`` amounts to."""
        start_ns, end_ns, own_j, whole_j = times.start_ns, times.end_ns, None, None
        if target is not None and prices is not None:
            # Beyond its law's time, a collective of ranks that were not captured waits for them.
            works_ns = np.where(self.lonely, np.fmin(load.dur_ns, prices.time_s * 1e9), load.dur_ns)
            own_j, whole_j = energy_j(self.capture, prices, target, start_ns=start_ns, end_ns=end_ns, works_ns=works_ns)
        capture, classes = timed(self.capture, self.classes, start_ns, end_ns, own_j)
        return Outcome(capture=capture, classes=classes, ranks=summarise(capture, classes).ranks, energy_j=whole_j)


def graph_pause_ns(gpu: GpuSpec) -> int:
    """Between the kernels of a graph, as the GPU's profile has it."""
    return round(profile_for(gpu).launch.graph_gap_s * 1e9)


def over_ranks(values: Column, collective: Ints, pick: np.ufunc) -> Column:
    """``values`` of each row; in a collective the one that ``pick`` leaves of its ranks.

    >>> over_ranks(np.array([5, 9, 7]), np.array([0, 0, -1]), np.minimum).tolist()
    [5, 5, 7]
    """
    members = collective != NONE
    number = collective[members]
    common = np.empty(int(number.max(initial=NONE)) + 1, dtype=values.dtype)
    common[number] = values[members]
    pick.at(common, number, values[members])
    found = values.copy()
    found[members] = common[number]
    return found


def timed(
    capture: Capture, classes: Classes, start_ns: Ints, end_ns: Ints, own_j: Floats | None
) -> tuple[Capture, Classes]:
    """``capture`` with its work at other times, and its classes; rows by rank, then start, as everywhere."""
    work = replace(capture.work, start_ns=start_ns, dur_ns=end_ns - start_ns)
    if own_j is not None:
        work = replace(work, energy_j=own_j)
    order = np.lexsort((start_ns, work.rank))
    moved = GpuWork(**{column: getattr(work, column)[order] for column in GpuWork.__slots__})
    return replace(capture, work=moved), replace(classes, index=classes.index[order])
