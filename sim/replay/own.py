"""The state in which a trace of ours was recorded: each kernel's clock, joules and pauses, and under which policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hardware.scheduling import scheduling
from sim.errors import SimError
from sim.replay.energy import energy_j
from sim.replay.price import Priced
from sim.replay.run import NEVER, ReplayRows
from sim.scenario.machine import Machine, Nodes, Policy, machine
from traces.capture import NONE, Capture
from traces.classify import Classes
from traces.dag import Dag
from traces.read.own import CLOCK
from traces.records import Floats, Ints

STEP = "step"  # the class of a served run's steps, where its kernels were not written
GRAPH_HEAD_NS = 5_000  # the first kernel of a graph begins within this
CLOSE_NS = 5  # of times that the file has in whole nanoseconds
CLOCK_STEP_HZ = 1e6  # recorded clocks are distinguished to this, so that kernels share prices


def is_ours(capture: Capture) -> bool:
    """Whether a simulated run wrote the trace."""
    return own_of(capture) is not None


def own_of(capture: Capture) -> Mapping[str, Any] | None:
    """What a simulated run says of itself, None in any other trace."""
    found = [known.get("wattline") for known in capture.metadata.values()]
    return next((own for own in found if isinstance(own, dict)), None)


def as_run(capture: Capture, classes: Classes) -> Capture:
    """``capture`` without host calls: those of ours stand for no host (readers of other tools pair kernels by them).

    Steps of a served run carry the joules of all GPUs of a replica: they get one GPU's.
    """
    own, work = own_of(capture) or {}, capture.work
    steps = classes.is_class(STEP)
    if steps.any():
        gpus = _gpus_of_replicas(own, work.rank)
        capture = replace(capture, work=replace(work, energy_j=np.where(steps, work.energy_j / gpus, work.energy_j)))
    none = np.full(len(capture.work), NONE, dtype=np.int64)
    calls = replace(capture.calls, **{name: getattr(capture.calls, name)[:0] for name in type(capture.calls).__slots__})
    return replace(capture, work=replace(capture.work, launch=none, graph=none), calls=calls)


def _gpus_of_replicas(own: Mapping[str, Any], replica: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """GPUs of each ``replica`` as a served run states them; sides of one replica, and older traces, have one number."""
    world, worlds = own.get("world"), own.get("worlds")
    every = np.full(len(replica), world if type(world) is int and world > 0 else 1)
    if not isinstance(worlds, list) or not all(type(one) is int and one > 0 for one in worlds):
        return every
    known = replica < len(worlds)
    return np.where(known, np.array([*worlds, 1])[np.where(known, replica, -1)], every)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConditions:
    """Under what a run of ours was simulated; ``steady``: repeated until the limiters had settled.

    ``graph``: no host delays it, else a host that needs ``host_issue_s`` a launch.
    """

    policy: Policy
    steady: bool
    world: int
    node: str | None
    graph: bool
    host_issue_s: float

    @classmethod
    def of(cls, capture: Capture) -> RunConditions | None:
        """That of ``capture``, None where it is not ours."""
        own = own_of(capture)
        if own is None:
            return None
        scenario = own.get("scenario")
        said: dict[str, Any] = scenario if isinstance(scenario, dict) else {}

        def number(name: str) -> float | None:
            value = said.get(name)
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

        def count(name: str) -> int:
            return max(1, int(number(name) or 1))

        world = count("tp") * count("cp") * count("pp") * count("dp") * (2 if said.get("guidance") == "parallel" else 1)
        if type(stated := own.get("world")) is int:
            world = stated
        node, issue_s = said.get("node"), own.get("host_issue_s")
        return cls(
            policy=Policy(
                power_cap_w=number("power_cap_w"),
                uncapped=said.get("uncapped") is True,
                sm_clock_mhz=number("sm_clock_mhz"),
                chip_temperature_c=number("chip_temperature_c"),
                chip_power_factor=number("chip_power_factor"),
                links_asleep=world == count("dp"),
            ),
            steady=said.get("regime") == "steady",
            world=max(world, len(capture.ranks)),
            node=node if isinstance(node, str) else None,
            graph=said.get("launch") != "eager",
            host_issue_s=float(issue_s) if isinstance(issue_s, int | float) else 0.0,
        )

    def machine(self, gpu_id: str, *, own: bool, cap_w: float | None = None, clock_mhz: float | None = None) -> Machine:
        """GPUs ``gpu_id`` under this policy but for what is given; another GPU than its ``own`` has its own limits."""
        policy = self.policy if own else replace(self.policy, power_cap_w=None, uncapped=False, sm_clock_mhz=None)
        if cap_w is not None:
            policy = replace(policy, power_cap_w=cap_w, uncapped=False)
        if clock_mhz is not None:
            policy = replace(policy, sm_clock_mhz=clock_mhz)
        try:
            return machine(gpu_id, self.world, policy, nodes=Nodes(node=self.node if own else None))
        except SimError:
            return machine(gpu_id, 1, policy)  # a machine that this release cannot lay out: one GPU's laws will do


def clocks_of(capture: Capture) -> Floats | None:
    """The mean SM clock of each row (Hz), to ``CLOCK_STEP_HZ``; None where the trace has no clocks."""
    work = capture.work
    found = np.full(len(work), np.nan)
    for samples in capture.samples:
        if samples.name != CLOCK or not len(samples.value):
            continue
        mine = np.flatnonzero(work.rank == samples.rank)
        start_ns, end_ns = work.start_ns[mine], np.maximum(work.end_ns[mine], work.start_ns[mine] + 1)
        last_ns = max(int(end_ns.max(initial=0)), int(samples.time_ns[-1])) + 1
        edges_ns = np.append(samples.time_ns, last_ns)
        so_far = np.append(0.0, np.cumsum(samples.value * np.diff(edges_ns)))
        passed = np.interp(end_ns, edges_ns, so_far) - np.interp(start_ns, edges_ns, so_far)
        found[mine] = passed / (end_ns - start_ns) * 1e6
    found = np.rint(found / CLOCK_STEP_HZ) * CLOCK_STEP_HZ
    return found if len(found) and (found > 0).all() else None


def recorded_loads(
    load: ReplayRows, capture: Capture, dag: Dag, recorded: RunConditions
) -> tuple[ReplayRows, ReplayRows]:
    """The load as the trace has it, every pause and all, and the one of other assumptions.

    In the first each kernel begins so long after what it waited for as the trace says, and has room. In the second a
    collective that waited longer than its own lead waited for SMs: how long, is simulated.
    """
    work = capture.work
    released_ns = np.full(len(work), NEVER)
    for queue in dag.queues:
        released_ns[queue[1:]] = work.end_ns[queue[:-1]]
    np.maximum.at(released_ns, dag.after, work.end_ns[dag.before])
    issue_ns = np.where(released_ns == NEVER, work.start_ns, 0)
    if not recorded.graph:
        for rank in capture.ranks:  # rows go by rank, then start: about the order in which the host issued them
            rows = np.flatnonzero(work.rank == rank)
            ready_ns = np.rint(np.arange(1, len(rows) + 1) * recorded.host_issue_s * 1e9).astype(np.int64)
            issue_ns[rows] = np.maximum(issue_ns[rows], np.minimum(ready_ns, work.start_ns[rows]))
    waits = released_ns != NEVER
    lead_ns = np.where(waits, work.start_ns - np.where(waits, released_ns, 0) - load.pause_ns, 0)
    # Behind a launch that came late nothing is known of the pause; the usual one is not longer.
    hosted = waits & (issue_ns >= work.start_ns)
    lead_ns = np.where(hosted, np.minimum(lead_ns, 0), lead_ns)
    true = replace(load, issue_ns=issue_ns, lead_ns=lead_ns, graph_lead_ns=lead_ns, asks=False)
    asking_ns = np.where(load.is_collective, np.minimum(lead_ns, load.graph_lead_ns), lead_ns)
    # One of a ring asks at the end of what it waits for, begins a gap later, and is first: 1 ns before other kernels.
    joins = np.abs(lead_ns + load.pause_ns - round(scheduling().joining_gap_s * 1e9)) <= CLOSE_NS
    asking_ns = np.where(load.is_collective & joins, -1, asking_ns)
    graph_lead_ns = asking_ns if recorded.graph else load.graph_lead_ns
    return true, replace(true, lead_ns=asking_ns, graph_lead_ns=graph_lead_ns, asks=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PowerCorrection:
    """What makes of the laws' watts those that the trace recorded: factors of each row, and watts that no law gives."""

    dynamic: Floats
    added_w: Floats
    idle: Floats

    @classmethod
    def of(
        cls, capture: Capture, prices: Priced, works_ns: Floats, idle_j: Mapping[int, float], head_ns: int
    ) -> PowerCorrection:
        """The correction at which ``prices`` give the joules that the rows have, and each rank's GPU its ``idle_j``.

        A simulated kernel's joules hold the idle power of its GPU, shared with what runs beside it.
        """
        work = capture.work
        beneath_j = np.minimum(prices.idle_w * alone_ns(capture) * 1e-9, work.energy_j)
        own_j = work.energy_j - beneath_j
        by_law_j = (prices.dynamic_w * works_ns + prices.waiting_w * (work.dur_ns - works_ns)) * 1e-9
        lawful = by_law_j > 0.0
        dynamic = np.where(lawful, own_j / np.where(lawful, by_law_j, 1.0), 0.0)
        added_w = np.where(lawful, 0.0, own_j / (np.maximum(work.dur_ns, 1) * 1e-9))
        nothing = replace(prices, dynamic_w=np.zeros(len(work)), waiting_w=np.zeros(len(work)))
        _, per_rank_j = energy_j(capture, nothing, (work.start_ns, work.end_ns), works_ns=works_ns, head_ns=head_ns)
        idle = np.ones(len(work))
        for rank, by_law in zip(capture.ranks, per_rank_j.tolist(), strict=True):
            mine = work.rank == rank
            idle[mine] = (idle_j[rank] + float(beneath_j[mine].sum())) / by_law if by_law > 0.0 else 1.0
        return cls(dynamic=dynamic, added_w=added_w, idle=idle)

    def of_rows(self, rows: Ints) -> PowerCorrection:
        """That of parts of rows."""
        return PowerCorrection(dynamic=self.dynamic[rows], added_w=self.added_w[rows], idle=self.idle[rows])

    def on(self, prices: Priced) -> Priced:
        """``prices`` corrected."""
        return replace(
            prices,
            dynamic_w=prices.dynamic_w * self.dynamic + self.added_w,
            waiting_w=prices.waiting_w * self.dynamic + self.added_w,
            idle_w=prices.idle_w * self.idle,
            free_w=prices.free_w * self.idle,
        )


def alone_ns(capture: Capture) -> Floats:
    """Nanoseconds of each row, those that it shares with other rows of its rank divided among them."""
    work = capture.work
    found = np.zeros(len(work))
    for rank in capture.ranks:
        mine = np.flatnonzero(work.rank == rank)
        moments, place = np.unique(np.concatenate([work.start_ns[mine], work.end_ns[mine]]), return_inverse=True)
        begins, ends = place.reshape(2, -1)
        steps = np.bincount(begins, minlength=len(moments)) - np.bincount(ends, minlength=len(moments))
        running = np.maximum(np.cumsum(steps)[:-1], 1)
        so_far = np.append(0.0, np.cumsum(np.diff(moments) / running))
        found[mine] = so_far[ends] - so_far[begins]
    return found


def head_ns_of(capture: Capture, recorded: RunConditions) -> int:
    """Nanoseconds from the run's start to its first kernel, 0 where the trace begins later."""
    starts_ns = [int(samples.time_ns[0]) for samples in capture.samples if samples.name == CLOCK and len(samples.value)]
    head_ns = int(capture.work.start_ns.min()) - min(starts_ns, default=0)
    longest_ns = GRAPH_HEAD_NS if recorded.graph else max(GRAPH_HEAD_NS, round(1.5e9 * recorded.host_issue_s))
    return head_ns if 0 <= head_ns <= longest_ns else 0


def idle_j_of(capture: Capture, head_ns: int) -> dict[int, float] | None:
    """Joules of each rank's GPU beside its kernels', from ``head_ns`` before any rank's first to the last end.

    None where the trace does not say.
    """
    work = capture.work
    if not np.isfinite(work.energy_j).all():
        return None
    begin_ns, end_ns = int(work.start_ns.min()) - head_ns, int(work.end_ns.max())
    found = {}
    first_ns = {samples.rank: int(samples.time_ns[0]) for samples in capture.samples if samples.name == CLOCK}
    for samples in capture.samples:
        if samples.name == CLOCK or not len(samples.value):
            continue
        time_ns, value_j = samples.time_ns, samples.value
        if (zero_ns := first_ns.get(samples.rank, 0)) < time_ns[0]:  # each value is that of the end of a step
            time_ns, value_j = np.append(zero_ns, time_ns), np.append(0.0, value_j)
        passed_j = float(np.diff(np.interp([begin_ns, end_ns], time_ns, value_j))[0])
        found[samples.rank] = passed_j - float(work.energy_j[work.rank == samples.rank].sum())
    return found if set(capture.ranks) <= set(found) else None
