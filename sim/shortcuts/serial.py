"""Programs of one stream a GPU under fixed power targets: kernels run one after another, so that no events are needed.

Each GPU runs a single kernel at a time, on all SMs that it asks for, at a constant rate. GPUs synchronise in
collectives only: ranks that arrive first spin, all leave at once, at the rate of the slowest. Between two collectives a
GPU's time is the sum of its kernels' times. Spans, power steps and joules are those of
:class:`sim.engine.driver.Engine`: a test runs any such program on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hardware.laws.terms import wanted_sms
from sim.engine.between import overloaded_ports
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import GpuState, Target, bounds
from sim.errors import LivelockError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Kinds = list[tuple[int, int]]  # (GPU, class) of kernels


def is_serial(graph: KernelGraph, model: FluidModel) -> bool:
    """True when each GPU has one stream, whose kernels depend only on each other and their collectives, which do not
    overload the network between nodes."""
    sms, room = float(model.gpu.sms), float(model.gpu.sms)
    if graph.partition_sms:  # a kernel that wants more starts on part of its SMs
        room = min(graph.partition_sms[place] for place in graph.queue_partition)
    return (
        graph.queue_gpu == tuple(range(graph.gpus))
        and graph.issue_ps is None
        and not graph.predecessor_count
        and all(not c.lead_s and wanted_sms(c.terms, sms) <= room for c in graph.classes)
        and not overloaded_ports((c.transit.ranks, c) for c in graph.classes if c.transit is not None)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Kernels between collectives, GPU by GPU: one stretch before each of its parts of collectives, and a last one.

    ``count`` kernels of a ``kind`` are in a ``stretch`` of a ``gpu``, ``last`` is each GPU's last one. ``part_gpu`` and
    ``part_kind`` say whose and what part of a collective it is.
    """

    gpu: Ints
    stretch: Ints
    kind: Ints
    count: Ints
    part_gpu: list[int]
    part_kind: list[int]
    last: list[int]


class SerialLayout:
    """What a serial graph is at any clock and on any GPU; its kernels are numbered GPU by GPU, in order."""

    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.gpu, self.cls = np.asarray(graph.op_gpu), np.asarray(graph.op_class)
        self.first = np.searchsorted(self.gpu, np.arange(graph.gpus))  # kernel of each GPU
        self.kinds, self.kind_of = _kinds(self.gpu, self.cls)
        self.gap_ps = np.array([round(c.gap_s * 1e12) for c in graph.classes])[self.cls]
        members = np.array([*map(len, graph.collective_members), 1])
        self._shared = members[np.asarray(graph.op_collective)] > 1
        self.parts = np.flatnonzero(self._shared)  # each GPU's parts of collectives that it shares
        latest = np.cumsum(self._shared) - 1
        owner = np.append(self.gpu[self.parts], -1)
        # The part that a kernel is, or follows on its GPU; one beyond the last where there is none.
        self.latest = np.where(owner[latest] == self.gpu, latest, len(self.parts))

    @cached_property
    def meetings(self) -> list[list[int]] | None:
        """Collectives in an order in which they can run, each as places in ``parts``; None on a deadlock.

        The order does not depend on clocks: a GPU's parts run in order, and a collective waits for all its ranks.
        """
        graph, ops = self.graph, self.parts.tolist()
        party: dict[int, list[int]] = {}
        of_gpu: list[list[int]] = [[] for _ in range(graph.gpus)]
        for i, op in enumerate(ops):
            party.setdefault(graph.op_collective[op], []).append(i)
            of_gpu[graph.op_gpu[op]].append(i)
        ahead, missing = [iter(mine) for mine in of_gpu], {number: len(met) for number, met in party.items()}
        found, moving = [], list(range(graph.gpus))
        while moving:
            part = next(ahead[moving.pop()], None)
            if part is None:
                continue
            number = graph.op_collective[ops[part]]
            missing[number] -= 1
            if not missing[number]:
                found.append(party[number])
                moving.extend(graph.op_gpu[ops[i]] for i in party[number])
        return None if any(missing.values()) else found

    @cached_property
    def part_kinds(self) -> list[tuple[int, int]]:
        """GPU and class of each part of a collective."""
        return list(zip(self.gpu[self.parts].tolist(), self.cls[self.parts].tolist(), strict=True))

    @cached_property
    def stretches(self) -> Stretches:
        """How many kernels of each kind run between collectives."""
        shared = self._shared.astype(np.int64)
        before = np.cumsum(shared) - shared
        by_itself = np.flatnonzero(shared == 0)
        kinds = len(self.kinds)
        pairs = (before + self.gpu)[by_itself] * kinds + self.kind_of[by_itself]
        pair, count = np.unique(pairs, return_counts=True)
        stretch, kind = np.divmod(pair, kinds)
        return Stretches(
            gpu=np.array([gpu for gpu, _ in self.kinds])[kind],
            stretch=stretch,
            kind=kind,
            count=count,
            part_gpu=self.gpu[self.parts].tolist(),
            part_kind=self.kind_of[self.parts].tolist(),
            last=[int((self.gpu[self.parts] <= gpu).sum()) + gpu for gpu in range(self.graph.gpus)],
        )


class Serial:
    """A serial graph on a GPU type, prepared once for all power targets."""

    def __init__(self, graph: KernelGraph, model: FluidModel, layout: SerialLayout | None = None) -> None:
        self.graph, self.model = graph, model
        self.layout = layout or SerialLayout(graph)

    def run(self, targets: Sequence[Target]) -> Recorder | None:
        """Its records under power targets (W of each GPU); None on a deadlock."""
        solo, own = _SoloKernels(self.model, targets), self.layout
        lasts_ps, power_w, state = solo.columns(own.kinds, own.kind_of)
        lasts_ps[own.parts] = 0
        end_ps = np.cumsum(lasts_ps)
        end_ps -= (end_ps - lasts_ps)[own.first][own.gpu]
        begin_ps = end_ps - lasts_ps
        early = come_ps = own.parts[:0]
        if len(own.parts):
            met = _meet(own, solo, end_ps[own.parts])
            if met is None:
                return None
            delay_ps = np.append(met.end_ps - end_ps[own.parts], 0)[own.latest]
            end_ps, begin_ps = end_ps + delay_ps, begin_ps + delay_ps
            begin_ps[own.parts], state[own.parts], power_w[own.parts] = met.begin_ps, met.state, met.power_w
            early = np.flatnonzero(met.come_ps < met.begin_ps)
            come_ps = met.come_ps[early]
        start_ps, energy_j = begin_ps, power_w * ((end_ps - begin_ps) * 1e-12)
        steps = [(own.gpu, begin_ps, state)]
        if len(early):  # they spin until the others arrive
            spin = own.parts[early]
            _, spin_w, spin_state = solo.columns(*_kinds(own.gpu[spin], own.cls[spin]), waits=True)
            energy_j[spin] += spin_w * ((begin_ps[spin] - come_ps) * 1e-12)
            steps.append((own.gpu[spin], come_ps, spin_state))
            start_ps = begin_ps.copy()
            start_ps[spin] = come_ps
        records = Recorder(states=self.model.states, end_ps=int(end_ps.max()), idle_energy_j=[0.0] * self.graph.gpus)
        for gpu, done_ps in enumerate(end_ps[np.append(own.first[1:], len(own.gpu)) - 1].tolist()):
            if done_ps < records.end_ps:
                idle = solo.idle(gpu)
                records.idle_energy_j[gpu] = idle.power_w * ((records.end_ps - done_ps) * 1e-12)
                steps.append((np.array([gpu]), np.array([done_ps]), np.array([idle.index])))
        records.energy_j = (np.bincount(own.gpu, energy_j, self.graph.gpus) + records.idle_energy_j).tolist()
        _record_spans(records, np.minimum(start_ps + own.gap_ps, end_ps), end_ps, energy_j)
        _record_steps(records, *(np.concatenate(column) for column in zip(*steps, strict=True)))
        return records


def _kinds(gpu: Ints, cls: Ints) -> tuple[Kinds, Ints]:
    """The different (GPU, class), and which of them each kernel is."""
    classes = int(cls.max()) + 1
    used, kind_of = np.unique(gpu * classes + cls, return_inverse=True)
    return [divmod(kind, classes) for kind in used.tolist()], kind_of


class _SoloKernels:
    """Kernels by themselves on a GPU, each under its power target."""

    def __init__(self, model: FluidModel, targets: Sequence[Target]) -> None:
        self.model = model
        self.bounds = [bounds(target, model.gpu.max_clock_hz) for target in targets]
        self._meetings: dict[object, tuple[int, list[GpuState]]] = {}
        self._states: dict[object, GpuState] = {}  # of kernels that GPUs under one target have in common

    def state(self, gpu: int, cls: int, *, waits: bool = False, pace: float | None = None) -> GpuState:
        """The state of one kernel; it may spin, or be held to ``pace``."""
        key = (cls, waits, pace, self.bounds[gpu])
        found = self._states.get(key)
        if found is None:
            caps = None if pace is None else (pace,)
            running = ((cls, self.model.grid(cls).sms, waits, 1.0),)
            found = self._states[key] = self.model.solve(running, *self.bounds[gpu], caps)
        return found

    def idle(self, gpu: int) -> GpuState:
        """Nothing runs."""
        return self.model.solve((), *self.bounds[gpu])

    def columns(self, kinds: Kinds, kind_of: Ints, *, waits: bool = False) -> tuple[Ints, Floats, Ints]:
        """How long each kernel lasts (0 of one that spins), the watts of its GPU, and the state's number."""
        states = [self.state(gpu, cls, waits=waits) for gpu, cls in kinds]
        lasts_ps = np.array([0 if waits else whole_ps(state.rates[0]) for state in states], dtype=np.int64)
        power_w, number = np.array([state.power_w for state in states]), [state.index for state in states]
        return lasts_ps[kind_of], power_w[kind_of], np.array(number, dtype=np.int64)[kind_of]

    def meeting(self, members: tuple[tuple[int, int], ...]) -> tuple[int, list[GpuState]]:
        """Picoseconds of a collective of these (GPU, class) once all are there, and the state of each.

        The common pace is found as :class:`sim.engine.core.Core` finds it.
        """
        found = self._meetings.get(members)
        if found is None:
            states = [self.state(gpu, cls) for gpu, cls in members]
            for _ in range(8 * len(members)):
                pace = min(state.rates[0] for state in states)
                if max(state.rates[0] for state in states) <= pace * (1.0 + 1e-9):
                    break
                states = [self.state(gpu, cls, pace=pace) for gpu, cls in members]
            else:
                raise LivelockError(f"the collective of (GPU, kernel class) {members} finds no common pace")
            found = self._meetings[members] = whole_ps(pace), states
        return found


def meeting_of(
    model: FluidModel, members: tuple[tuple[int, int], ...], targets: Sequence[Target]
) -> tuple[int, list[GpuState]]:
    """Picoseconds of a collective of these (GPU, class) under each GPU's target, and the state of each."""
    return _SoloKernels(model, targets).meeting(members)


def whole_ps(rate: float) -> int:
    """How long a kernel at ``rate`` (1/ps) lasts, in whole picoseconds."""
    return max(1, math.ceil(1.0 / rate - 1e-6))


class _Met(NamedTuple):
    """Each GPU's parts of collectives: its arrival, the last arrival, the end; state and watts between."""

    come_ps: Ints
    begin_ps: Ints
    end_ps: Ints
    state: Ints
    power_w: Floats


def _meet(layout: SerialLayout, solo: _SoloKernels, until_ps: Ints) -> _Met | None:
    """Advance the GPUs from collective to collective; ``until_ps``: time of each one's kernels before its parts."""
    meetings, kind, alone_ps = layout.meetings, layout.part_kinds, until_ps.tolist()
    if meetings is None:
        return None
    come, begin, end, states = ([0] * len(alone_ps) for _ in range(4))
    power_w, delay = [0.0] * len(alone_ps), [0] * layout.graph.gpus
    for met in meetings:
        for i in met:
            come[i] = alone_ps[i] + delay[kind[i][0]]
        ready = max([come[i] for i in met])
        lasts_ps, together = solo.meeting(tuple([kind[i] for i in met]))
        for i, state in zip(met, together, strict=True):
            begin[i], end[i], states[i], power_w[i] = ready, ready + lasts_ps, state.index, state.power_w
            delay[kind[i][0]] = end[i] - alone_ps[i]
    come_ps, begin_ps, end_ps, numbers = (np.array(column, dtype=np.int64) for column in (come, begin, end, states))
    return _Met(come_ps, begin_ps, end_ps, numbers, np.array(power_w))


def _record_spans(records: Recorder, start_ps: Ints, end_ps: Ints, energy_j: Floats) -> None:
    """In the order of their ends."""
    op = np.argsort(end_ps, kind="stable")
    records.span_op.frombytes(op.tobytes())
    records.span_start_ps.frombytes(start_ps[op].tobytes())
    records.span_end_ps.frombytes(end_ps[op].tobytes())
    records.span_energy_j.frombytes(energy_j[op].tobytes())


def _record_steps(records: Recorder, gpu: Ints, time_ps: Ints, state: Ints) -> None:
    """In order of time; a GPU whose state does not change gets no step."""
    order = np.lexsort((time_ps, gpu))
    same = (state[order][1:] == state[order][:-1]) & (gpu[order][1:] == gpu[order][:-1])
    order = order[np.append(True, ~same)]
    order = order[np.argsort(time_ps[order], kind="stable")]
    records.step_gpu.frombytes(gpu[order].astype(np.int32).tobytes())
    records.step_time_ps.frombytes(time_ps[order].tobytes())
    records.step_state.frombytes(state[order].tobytes())
