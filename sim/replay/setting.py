"""A replay set up: what is needed to run it under any changes, and what a run amounts to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from hardware.catalog import load_gpu
from hardware.gpu import GpuSpec
from hardware.profile import BASE_GPU, profile_for
from sim.replay.boards import unknown_board
from sim.replay.changes import Changes, ReplayError, beside_products, changed
from sim.replay.chunks import chains_of, split, split_jobs, split_load
from sim.replay.energy import energy_j
from sim.replay.own import STEP, PowerCorrection, RunConditions, idle_j_of
from sim.replay.price import Jobs, Priced, Toward, launched_of, priced, slowdown, unpriced, with_ctas
from sim.replay.run import HostWait, ReplayRows, Times, replay
from sim.run.steady import held_clocks
from sim.scenario.machine import Machine, Policy, machine
from traces.capture import NONE, Capture, Category
from traces.classify import Classes
from traces.dag import Dag
from traces.records import Floats, Ints
from traces.summary import RankTimes, summarise

Column = TypeVar("Column", Ints, Floats)

FAST_SHARE = 0.995  # a kernel at less of its GPU's highest clock was slowed by the fast limiter
BESIDE_ROUNDS = 2  # what runs beside what changes durations, and these what runs beside what


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayTimes:
    """Work at the times that a replay gave it: times by rank; joules of each rank's GPU, in ``over_s``, if known.

    ``limit_w``: what each board may draw. All of the work went through SimPy, in ``simpy_events``.
    """

    capture: Capture
    classes: Classes
    ranks: Sequence[RankTimes]
    energy_j_per_rank: Floats | None
    over_s: Floats
    limit_w: float | None
    simpy_events: int

    @property
    def energy_j(self) -> float | None:
        """Joules of all GPUs."""
        return None if self.energy_j_per_rank is None else float(self.energy_j_per_rank.sum())

    @property
    def power_w(self) -> float | None:
        """Mean power of one GPU."""
        return None if self.energy_j is None else self.energy_j / float(self.over_s.sum())

    @property
    def power_w_per_rank(self) -> list[float]:
        """Mean power of each rank's GPU; nothing where it is not known."""
        return [] if self.energy_j_per_rank is None else (self.energy_j_per_rank / self.over_s).tolist()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayTrace:
    """A trace and what it says of itself; a trace of ours, how it was ``recorded`` and the clock of each row."""

    capture: Capture
    classes: Classes
    dag: Dag
    recorded: RunConditions | None
    clock_hz: Floats | None


class ReplaySetup:
    """A replay set up: what is needed to run it under any changes."""

    def __init__(
        self, trace: ReplayTrace, load: ReplayRows, waits: list[HostWait], target: Machine | None, jobs: Jobs | None
    ) -> None:
        capture, clock_hz = trace.capture, trace.clock_hz
        self.capture, self.classes, self.dag, self.load, self.waits = capture, trace.classes, trace.dag, load, waits
        self.target, self.jobs, self.recorded, self.clock_hz = target, jobs, trace.recorded, clock_hz
        self.correction: PowerCorrection | None = None
        self.toward: Toward = "middle"  # of what kernels of unknown bound may take under changes
        self.head_ns: int | None = None  # of a trace of ours: from the start of all GPUs to the first kernel
        self.base = None
        if target is not None and jobs is not None:
            # A real trace is short: its kernels run at the clock that the fast limiter allows.
            self.base = priced(jobs, target, target.model.max_clock_hz if clock_hz is None else clock_hz)

        group = np.array([args.group_size for args in capture.collectives] + [NONE])[capture.work.collective]
        self.beside = np.zeros(len(capture.work))
        self.lonely = group > len(capture.ranks)  # collectives with ranks that were not captured

    def correct(self, head_ns: int) -> None:
        """From now on give kernels, and GPUs beside them, the joules that the trace says, if it does."""
        self.head_ns = head_ns
        if (idle_j := idle_j_of(self.capture, head_ns)) is None:
            return
        prices = self.base or unpriced(len(self.capture.work))
        works_ns = np.minimum(self._works_ns(self.load, prices), self.capture.work.dur_ns)
        self.correction = PowerCorrection.of(self.capture, prices, works_ns, idle_j, head_ns)

    def chunked(self, chunks: int) -> tuple[ReplaySetup, int]:
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
        clock_hz = None if self.clock_hz is None else self.clock_hz[parts.origin]
        now = priced(jobs, target, target.model.max_clock_hz if clock_hz is None else clock_hz)
        factor = np.nan_to_num(now.time_s / base.time_s[parts.origin], nan=1.0)
        capture = self.capture.keep(parts.origin)
        trace = ReplayTrace(
            capture=replace(capture, work=replace(capture.work, stream=parts.stream)),
            classes=replace(self.classes, index=self.classes.index[parts.origin]),
            dag=parts.dag,
            recorded=self.recorded,
            clock_hz=clock_hz,
        )
        waits = [replace(wait, rows=tuple(parts.last[list(wait.rows)].tolist())) for wait in self.waits]
        load = split_load(self.load, parts, factor, chains.units, launched_of(jobs, target))
        run = ReplaySetup(trace, load, waits, target, jobs)
        run.beside = self.beside[parts.origin]
        run.head_ns = self.head_ns
        run.correction = None if self.correction is None else self.correction.of_rows(parts.origin)
        return run, parts.chunked

    def _known(self) -> tuple[Machine, Jobs, Priced]:
        if self.target is None or self.jobs is None or self.base is None:
            why = unknown_board(self.capture) or "the trace names no GPU of the catalog: give --trace-gpu ID"
            raise ReplayError(f"trace_gpu is missing: {why}")
        return self.target, self.jobs, self.base

    def under(self, changes: Changes) -> ReplayTimes:
        """Run under ``changes``; where power settles, at the clocks that keep each GPU's mean within the cap.

        What was recorded steady stays so unless a regime is asked for: cold, its recorded clocks are not the answer.
        """
        was_steady = self.recorded is not None and self.recorded.steady and self.base is not None
        settles = was_steady and changes.regime is None
        if not (changes.by_law or was_steady):
            return self._run(changes, self.target, self.base)
        known, jobs, _ = self._known()
        if self.classes.is_class(STEP).any():
            raise ReplayError(
                "the trace holds steps of a served run and no kernels, whose times no law gives: write them with "
                "serve --timeline FILE --kernels FROM:TO, or serve under that change"
            )
        target = self._target(changes, known)
        if changes.ctas is not None and changes.ctas > target.gpu.sms:
            raise ReplayError(f"ctas = {changes.ctas}: {target.gpu.id} has {target.gpu.sms} SMs: give at most as many")
        jobs = jobs if changes.ctas is None else with_ctas(jobs, changes.ctas)
        if not (changes.steady or settles):
            return self._run(changes, target, priced(jobs, target, self._cold_hz(changes, target)))
        place = np.searchsorted(self.capture.ranks, self.capture.work.rank)
        tried: dict[tuple[float, ...], ReplayTimes] = {}

        def mean_w(clocks_hz: list[float]) -> list[float]:
            prices = priced(jobs, target, self._settled_hz(np.array(clocks_hz)[place], target, known))
            tried[tuple(clocks_hz)] = outcome = self._run(changes, target, prices)
            return outcome.power_w_per_rank

        gpus = len(self.capture.ranks)
        found = tuple(held_clocks(mean_w, target.limits, target.model, gpus, slow_top=False))
        if found not in tried:
            mean_w(list(found))
        return tried[found]

    def _target(self, changes: Changes, known: Machine) -> Machine:
        """The GPUs under ``changes``; what these leave open is as it was recorded."""
        gpu_id, cap_w, clock_mhz = changes.gpu or known.gpu.id, changes.power_cap_w, changes.sm_clock_mhz
        if self.recorded is None:
            return machine(gpu_id, policy=Policy(power_cap_w=cap_w, sm_clock_mhz=clock_mhz))
        return self.recorded.machine(gpu_id, own=gpu_id == known.gpu.id, cap_w=cap_w, clock_mhz=clock_mhz)

    def _cold_hz(self, changes: Changes, target: Machine) -> Floats | float:
        """The clock of each row where the limiters have no time to settle: the recorded one, or a lock below it."""
        recorded, highest_hz = self.recorded, target.model.max_clock_hz
        if recorded is None or self.clock_hz is None or recorded.steady or recorded.policy.sm_clock_mhz is not None:
            return highest_hz
        return np.minimum(self.clock_hz, highest_hz) if changes.gpu is None else highest_hz

    def _settled_hz(self, clock_hz: Floats, target: Machine, known: Machine) -> Floats:
        """Each row's clock where its GPU is held at ``clock_hz``: less where the fast limiter lowered it before."""
        if self.clock_hz is None or target.limits.fast_limit_w != known.limits.fast_limit_w:
            return clock_hz
        highest_hz = over_ranks(self.clock_hz, self.capture.work.rank, np.maximum)
        lowered = self.clock_hz < FAST_SHARE * highest_hz
        return np.where(lowered, np.minimum(clock_hz, self.clock_hz), clock_hz)

    def _run(self, changes: Changes, target: Machine | None, prices: Priced | None) -> ReplayTimes:
        load, beside = self.load, self.beside.copy()
        if prices is not None and self.base is not None:
            dur_ns = load.dur_ns.astype(np.float64)
            if changes.launch == "graph":  # ranks are launched together: none waits for one that the trace lacks
                waited = self.lonely & (dur_ns > self.base.time_s * 1e9)
                dur_ns[waited], beside[waited] = self.base.time_s[waited] * 1e9, 0.0
            factor = slowdown(prices, self.base, self.toward)
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

    def _works_ns(self, load: ReplayRows, prices: Priced) -> Floats:
        """How long each row works; beyond its law's time, a collective of ranks not captured waits for them."""
        return np.where(self.lonely, np.fmin(load.dur_ns, prices.time_s * 1e9), load.dur_ns)

    def outcome(self, load: ReplayRows, times: Times, target: Machine | None, prices: Priced | None) -> ReplayTimes:
        """What a run of ``load`` amounts to; within the fast limit of ``target``, if there is one."""
        start_ns, end_ns, own_j, ranks_j = times.start_ns, times.end_ns, None, None
        if self.correction is not None:
            prices = self.correction.on(prices or unpriced(len(start_ns)))
        if prices is not None:
            own_j, ranks_j = energy_j(
                self.capture, prices, (start_ns, end_ns), works_ns=self._works_ns(load, prices), head_ns=self.head_ns,
                limit_w=math.inf if target is None else target.limits.fast_limit_w,
            )  # fmt: skip
        capture, classes = timed(self.capture, self.classes, start_ns, end_ns, own_j)
        ranks = summarise(capture, classes).ranks
        span_s = np.array([times.span_us * 1e-6 for times in ranks])
        if self.head_ns is not None:
            span_s[:] = float(end_ns.max() - start_ns.min() + self.head_ns) * 1e-9
        board = target or self.target
        return ReplayTimes(
            capture=capture,
            classes=classes,
            ranks=ranks,
            energy_j_per_rank=ranks_j,
            over_s=np.maximum(span_s, 1e-9),
            limit_w=None if board is None else board.limits.cap_w,
            simpy_events=times.events,
        )


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
    moved = replace(capture, work=work).keep(order)
    return moved, replace(classes, index=classes.index[order])
