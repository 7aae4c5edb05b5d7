"""Programs of one stream a GPU under fixed power targets: kernels run one after another, so that no events are needed.

Each GPU runs a single kernel at a time, on all SMs that it asks for, at a constant rate. GPUs synchronise in
collectives only: ranks that arrive first spin, all leave at once, at the rate of the slowest. Between two collectives a
GPU's time is the sum of its kernels' times. Spans, power steps and joules are those of
:class:`sim.engine.driver.Engine`: a test runs any such program on both.
"""

from __future__ import annotations

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
from sim.engine.running import Target
from sim.shortcuts.solo import SoloKernels, solo_states

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


class MeetingPart(NamedTuple):
    """A GPU's part of a collective that it shares: its place among all such parts, and the stretch before it."""

    place: int
    gpu: int
    cls: int
    stretch: int


Meeting = list[MeetingPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Kernels between collectives, GPU by GPU: one stretch before each of its parts of collectives, and a last one.

    ``count`` kernels of a ``kind`` are in a ``stretch`` of a ``gpu``. ``gpu_of`` is each stretch's GPU, ``last`` each
    GPU's last one.
    """

    gpu: Ints
    stretch: Ints
    kind: Ints
    count: Ints
    gpu_of: list[int]
    last: list[int]


class SerialLayout:
    """What a serial graph is at any clock and on any GPU; its kernels are numbered GPU by GPU, in order."""

    def __init__(self, graph: KernelGraph) -> None:
        self.graph = graph
        self.gpu, self.cls = np.asarray(graph.op_gpu), np.asarray(graph.op_class)
        self.first = np.searchsorted(self.gpu, np.arange(graph.gpus))  # kernel of each GPU
        self.before = self.first[self.gpu]  # the first kernel of each one's GPU
        self.last = np.append(self.first[1:], len(self.gpu)) - 1
        self.kinds, self.kind_of = _kinds(self.gpu, self.cls)
        self.gap_ps = np.array([round(c.gap_s * 1e12) for c in graph.classes])[self.cls]
        members = np.array([*map(len, graph.collective_members), 1])
        self._shared = members[np.asarray(graph.op_collective)] > 1
        self.parts = np.flatnonzero(self._shared)  # each GPU's parts of collectives that it shares
        latest = np.cumsum(self._shared) - 1
        owner = np.append(self.gpu[self.parts], -1)
        # The part that a kernel is, or follows on its GPU; one beyond the last where there is none.
        self.latest = np.where(owner[latest] == self.gpu, latest, len(self.parts))
        self._costs: dict[int, int] = {}

    def costs(self, model: FluidModel) -> dict[int, int]:
        """The number of each class's cost, by any model of its graph: all have the same."""
        if not self._costs:
            self._costs = {cls: model.cost(cls) for cls in self.classes}
        return self._costs

    @cached_property
    def meetings(self) -> list[Meeting] | None:
        """Collectives in an order in which they can run; None on a deadlock.

        The order does not depend on clocks: a GPU's parts run in order, and a collective waits for all its ranks.
        """
        graph, ops = self.graph, self.parts.tolist()
        party: dict[int, Meeting] = {}
        of_gpu: list[list[int]] = [[] for _ in range(graph.gpus)]
        for place, op in enumerate(ops):
            gpu = graph.op_gpu[op]
            part = MeetingPart(place=place, gpu=gpu, cls=graph.op_class[op], stretch=place + gpu)
            party.setdefault(graph.op_collective[op], []).append(part)
            of_gpu[gpu].append(graph.op_collective[op])
        ahead, missing = [iter(mine) for mine in of_gpu], {number: len(met) for number, met in party.items()}
        found, moving = [], list(range(graph.gpus))
        while moving:
            number = next(ahead[moving.pop()], None)
            if number is None:
                continue
            missing[number] -= 1
            if not missing[number]:
                found.append(party[number])
                moving.extend([part.gpu for part in party[number]])
        return None if any(missing.values()) else found

    @cached_property
    def classes(self) -> list[int]:
        """The classes of its kernels."""
        return sorted({cls for _, cls in self.kinds})

    @cached_property
    def class_place(self) -> Ints:
        """The place of each kernel's class in ``classes``."""
        return np.searchsorted(self.classes, self.cls)

    @cached_property
    def classes_of(self) -> list[list[int]]:
        """The classes of each GPU's kernels: all together they are those of ``kinds``."""
        found: list[list[int]] = [[] for _ in range(self.graph.gpus)]
        for gpu, cls in self.kinds:
            found[gpu].append(cls)
        return found

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
        gpus = np.arange(self.graph.gpus)
        parts_of = np.bincount(self.gpu[self.parts], minlength=self.graph.gpus)
        return Stretches(
            gpu=np.array([gpu for gpu, _ in self.kinds])[kind],
            stretch=stretch,
            kind=kind,
            count=count,
            gpu_of=np.repeat(gpus, parts_of + 1).tolist(),
            last=(np.cumsum(parts_of) + gpus).tolist(),
        )

    @cached_property
    def counts(self) -> tuple[Floats, Floats]:
        """How many kernels of each class (columns) run in each stretch, and on each GPU between its collectives."""
        own = self.stretches
        cls = np.searchsorted(self.classes, [cls for _, cls in self.kinds])[own.kind]
        counts, gpu_counts = (
            np.zeros((len(own.gpu_of), len(self.classes))),
            np.zeros((self.graph.gpus, len(self.classes))),
        )
        counts[own.stretch, cls] = own.count
        np.add.at(gpu_counts, (own.gpu, cls), own.count)
        return counts, gpu_counts


class Serial:
    """A serial graph on a GPU type, prepared once for all power targets."""

    def __init__(self, graph: KernelGraph, model: FluidModel, layout: SerialLayout | None = None) -> None:
        self.graph, self.model = graph, model
        self.layout = layout or SerialLayout(graph)
        self._known = solo_states(model.gpu, model.rules)

    def run(self, targets: Sequence[Target]) -> Recorder | None:
        """Its records under power targets (W of each GPU); None on a deadlock."""
        found = self.ended(targets)
        return None if found is None else found[0]

    def ended(self, targets: Sequence[Target]) -> tuple[Recorder, bool] | None:
        """Its records, and whether all GPUs end their last kernel at the same instant."""
        solo, own = SoloKernels(self.model, targets), self.layout
        state, costs = own.kind_of, own.costs(self.model)
        if solo.one_target:
            solo.all_of(0, own.classes, costs, self._known)
            state = own.class_place
        else:
            for gpu, classes in enumerate(own.classes_of):
                solo.all_of(gpu, classes, costs, self._known)
        lasts_ps, power_w = np.array(solo.lasts_ps)[state], np.array(solo.power_w)[state]
        lasts_ps[own.parts] = 0
        end_ps = np.cumsum(lasts_ps)
        begin_ps = end_ps - lasts_ps
        before_ps = begin_ps[own.before]
        end_ps, begin_ps = end_ps - before_ps, begin_ps - before_ps
        early = come_ps = own.parts[:0]
        if len(own.parts):
            until_ps = end_ps[own.parts]
            met = _meet(own, solo, until_ps)
            if met is None:
                return None
            delays_ps = np.zeros(len(own.parts) + 1, dtype=np.int64)
            delays_ps[:-1] = met.end_ps - until_ps
            delay_ps = delays_ps[own.latest]
            end_ps, begin_ps = end_ps + delay_ps, begin_ps + delay_ps
            begin_ps[own.parts] = met.begin_ps
            state = state.copy()
            state[own.parts] = met.state
            power_w[own.parts] = np.array(solo.power_w)[met.state]
            early = np.flatnonzero(met.come_ps < met.begin_ps)
            come_ps = met.come_ps[early]
        start_ps, energy_j = begin_ps, power_w * ((end_ps - begin_ps) * 1e-12)
        steps = [(own.gpu, begin_ps, state)]
        if len(early):  # they spin until the others arrive
            spin = own.parts[early]
            gpus, who = own.gpu[spin], zip(own.gpu[spin].tolist(), own.cls[spin].tolist(), strict=True)
            spin_state = np.array([solo.number(gpu, cls, waits=True) for gpu, cls in who])
            energy_j[spin] += np.array(solo.power_w)[spin_state] * ((begin_ps[spin] - come_ps) * 1e-12)
            steps.append((gpus, come_ps, spin_state))
            start_ps = begin_ps.copy()
            start_ps[spin] = come_ps
        done_ps = end_ps[own.last].tolist()
        records = Recorder(states=solo.states, end_ps=max(done_ps), idle_energy_j=[0.0] * self.graph.gpus)
        level = min(done_ps) == records.end_ps
        for gpu, ended_ps in enumerate([] if level else done_ps):
            if ended_ps < records.end_ps:
                idle = solo.idle(gpu)
                records.idle_energy_j[gpu] = solo.power_w[idle] * ((records.end_ps - ended_ps) * 1e-12)
                steps.append((np.array([gpu]), np.array([ended_ps]), np.array([idle])))
        records.energy_j = (np.bincount(own.gpu, energy_j, self.graph.gpus) + records.idle_energy_j).tolist()
        _record_spans(records, np.minimum(start_ps + own.gap_ps, end_ps), end_ps, energy_j)
        if len(steps) == 1:  # GPU by GPU in order of time
            _record_steps(records, *steps[0])
        else:
            gpus, times_ps, states = map(np.concatenate, zip(*steps, strict=True))
            order = np.lexsort((times_ps, gpus))
            _record_steps(records, gpus[order], times_ps[order], states[order])
        return records, level


def _kinds(gpu: Ints, cls: Ints) -> tuple[Kinds, Ints]:
    """The different (GPU, class), and which of them each kernel is."""
    classes = int(cls.max()) + 1
    used, kind_of = np.unique(gpu * classes + cls, return_inverse=True)
    return [divmod(kind, classes) for kind in used.tolist()], kind_of


class _Met(NamedTuple):
    """Each GPU's parts of collectives: its arrival, the last arrival, the end, the number of the state between."""

    come_ps: Ints
    begin_ps: Ints
    end_ps: Ints
    state: Ints


def _meet(layout: SerialLayout, solo: SoloKernels, until_ps: Ints) -> _Met | None:
    """Advance the GPUs from collective to collective; ``until_ps``: time of each one's kernels before its parts."""
    meetings, alone_ps = layout.meetings, until_ps.tolist()
    if meetings is None:
        return None
    come, begin, end, states = ([0] * len(alone_ps) for _ in range(4))
    delay = [0] * layout.graph.gpus
    for met in meetings:
        for place, gpu, _, _ in met:
            come[place] = alone_ps[place] + delay[gpu]
        ready = max([come[part.place] for part in met])
        lasts_ps, together = solo.meeting(tuple([(part.gpu, part.cls) for part in met]))
        done = ready + lasts_ps
        for (place, gpu, _, _), state in zip(met, together, strict=True):
            begin[place], end[place], states[place] = ready, done, state
            delay[gpu] = done - alone_ps[place]
    return _Met(*(np.array(column, dtype=np.int64) for column in (come, begin, end, states)))


def _record_spans(records: Recorder, start_ps: Ints, end_ps: Ints, energy_j: Floats) -> None:
    """In the order of their ends."""
    op = np.argsort(end_ps, kind="stable")
    records.span_op.frombytes(op.tobytes())
    records.span_start_ps.frombytes(start_ps[op].tobytes())
    records.span_end_ps.frombytes(end_ps[op].tobytes())
    records.span_energy_j.frombytes(energy_j[op].tobytes())


def _record_steps(records: Recorder, gpu: Ints, time_ps: Ints, state: Ints) -> None:
    """In order of time, of steps GPU by GPU; a GPU whose state does not change gets no step."""
    new = np.empty(len(gpu), dtype=bool)
    new[0] = True
    np.logical_or(state[1:] != state[:-1], gpu[1:] != gpu[:-1], out=new[1:])
    gpu, time_ps, state = gpu[new], time_ps[new], state[new]
    order = np.argsort(time_ps, kind="stable")
    records.step_gpu.frombytes(gpu[order].astype(np.int32).tobytes())
    records.step_time_ps.frombytes(time_ps[order].tobytes())
    records.step_state.frombytes(state[order].tobytes())
