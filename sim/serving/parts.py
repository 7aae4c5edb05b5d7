"""Prices of the parts of a server's steps, one table a (model, stack, layout, machine): shared by all its servers.

What a part runs does not depend on the clock, so that tables at several clocks share it as well. A part whose ranks
are alike and run one stream is a sum over its kernels, each by itself; any other is run by the engine. What is known
outlives the process in the :mod:`~sim.serving.price_cache`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import workloads
from hardware.cluster import Cluster
from hardware.gpu import GpuSpec
from hardware.laws.terms import dynamic_power_w, own_clock_hz, wanted_sms
from hardware.power import highest_clock
from hardware.profile import Profile
from inputs.same import Same
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass
from sim.engine.record import Recorder
from sim.engine.running import PS_PER_S, GpuModel, Member
from sim.errors import FoldError
from sim.run.plan import PieceSequence, Plan
from sim.run.work import Work
from sim.scenario.machine import Machine
from sim.scenario.partition import Partitions
from sim.scenario.resolved import POLICY
from sim.scenario.spec import Scenario
from sim.serving.cost import Cost
from sim.serving.price_cache import Known, StoredPrices, stored_prices
from sim.shortcuts.pieces import RepeatedPiece, play
from sim.shortcuts.solo import whole_ps
from workloads.model import ModelSpec

# Tables of one process; beyond it the oldest are read or worked out again.
MAX_TABLES = 64


@dataclass(frozen=True, slots=True)
class SumPart:
    """Kernels that follow one another on each of ``world`` equal GPUs: which kinds, and how often each comes."""

    kinds: tuple[int, ...]
    counts: tuple[int, ...]
    world: int


@dataclass(slots=True, eq=False)
class LaidParts:
    """What parts run, at any clock; ``classes`` are the kinds of kernels in all of them."""

    parts: dict[tuple[str, int, int], SumPart | Work] = field(default_factory=dict)
    classes: list[KernelClass] = field(default_factory=list)
    kind_of: dict[KernelClass, int] = field(default_factory=dict)

    def kind(self, cls: KernelClass) -> int:
        """The number of a class."""
        found = self.kind_of.setdefault(cls, len(self.classes))
        if found == len(self.classes):
            self.classes.append(cls)
        return found

    def summed(self, work: Work, sms: int) -> SumPart | Work:
        """``work`` as a sum, where its ranks are alike and run one stream that waits for nothing else."""
        if work.issue_s is not None or work.partitions is not None:
            return work
        try:
            if len(work.folding.classes) > 1:
                return work
        except FoldError:
            return work
        counts: dict[int, int] = {}
        (rank,) = work.folding.representatives(work.program).ranks
        for segment in (segment for phase in rank.phases for segment in phase.segments):
            for kernel in segment.kernels:
                cls = work.classify(kernel)
                partly = wanted_sms(cls.terms, float(sms)) > sms or cls.terms.few_sms_saving
                if kernel.stream or kernel.after or cls.lead_s or partly:
                    return work
                kind = self.kind(cls)
                counts[kind] = counts.get(kind, 0) + segment.repeat
        return SumPart(tuple(counts), tuple(counts.values()), len(work.program.ranks))


@dataclass(frozen=True, slots=True)
class _TableKey:
    """What tells one table from another; without its ``gpu``, which has the clock, what tells what runs."""

    fields: tuple[tuple[str, object], ...]
    model: Same[ModelSpec]
    card: Same[GpuSpec]
    profile: Same[Profile]
    cluster: Cluster
    partitions: Partitions | None
    gpu: GpuModel | None

    def text(self) -> str:
        """The same in every process: for prices that are stored."""
        profile = _content(self.profile)
        return repr((self.fields, self.model.held, self.card.held, profile, self.cluster, self.partitions, self.gpu))


@lru_cache(maxsize=16)
def _content(profile: Same[Profile]) -> str:
    return hashlib.sha256(repr(profile.held).encode()).hexdigest()


@dataclass(eq=False)
class PartTable:
    """Prices of parts under power targets on one machine."""

    key: _TableKey
    gpu: GpuModel
    laid: LaidParts
    _new: Known = field(default_factory=dict)
    _alone: dict[tuple[int, float], tuple[int, float, float]] = field(default_factory=dict)  # see _kernel
    _lone: dict[int, LoneKernel] = field(default_factory=dict)  # by kind

    @cached_property
    def _model(self) -> FluidModel:
        return FluidModel(self.gpu, (), [])

    @cached_property
    def _stored(self) -> StoredPrices:
        return stored_prices(self.key.text())

    @cached_property
    def _known(self) -> Known:
        return self._stored.read()

    def cost(self, part: str, rows: int, context: int, target_w: float, work_of: Callable[[int, int], Work]) -> Cost:
        """Of a part under a power target; ``work_of`` (rows, context) lays it out where it was never run."""
        key = (part, rows, context, target_w)
        known = self._known.get(key)
        if known is None:
            laid = self.laid.parts.get((part, rows, context))
            if laid is None:
                laid = self.laid.summed(work_of(rows, context), self.gpu.sms)
                self.laid.parts[part, rows, context] = laid
            known = self._sum(laid, target_w) if isinstance(laid, SumPart) else played(self.plan(laid), target_w)
            self._known[key] = self._new[key] = known
        return known

    def plan(self, work: Work) -> Plan:
        """``work`` on the GPUs of this table."""
        return Plan(work=work, model=self.gpu)

    def save(self) -> None:
        """Store what is new."""
        if self._new:
            self._stored.write(self._new)
            self._new = {}

    def _sum(self, part: SumPart, target_w: float) -> Cost:
        spent_ps, energy, cycles = 0, 0.0, 0.0
        for kind, count in zip(part.kinds, part.counts, strict=True):
            kernel_ps, power_w, clock_hz = self._alone.get((kind, target_w)) or self._kernel(kind, target_w)
            took_ps = count * kernel_ps
            spent_ps += took_ps
            energy += took_ps * power_w
            cycles += took_ps * clock_hz
        return Cost(time_s=spent_ps * 1e-12, energy_j=part.world * energy * 1e-12, cycles=cycles * 1e-12)

    def _kernel(self, kind: int, target_w: float) -> tuple[int, float, float]:
        """Picoseconds, watts and clock (Hz) of one kernel of a kind by itself."""
        kernel = self._lone.get(kind)
        if kernel is None:
            model = self._model
            if kind >= len(model.classes):
                model.classes = tuple(self.laid.classes)
            kernel = LoneKernel(model.member(kind, model.grid(kind).sms, False), self.gpu)
            self._lone[kind] = kernel
        found = self._alone[kind, target_w] = kernel.below(target_w)
        return found


class LoneKernel:
    """A kernel by itself: what it draws at the ends of the clock is remembered, since every limit asks about them."""

    __slots__ = ("_ends", "_gpu", "_kernel")

    def __init__(self, kernel: Member, gpu: GpuModel) -> None:
        self._kernel, self._gpu = kernel, gpu
        self._ends: dict[float, tuple[float, float]] = {}  # watts and completions a picosecond by clock (Hz)

    def below(self, limit_w: float) -> tuple[int, float, float]:
        """Picoseconds, watts and clock (Hz) below ``limit_w``: to the bit those of
        :meth:`~sim.engine.fluid.FluidModel.solve`, without what several kernels would take from one another.
        """
        gpu, asked = self._gpu, self._ends.copy()

        def power_w(clock_hz: float) -> float:
            known = asked.get(clock_hz)
            if known is None:
                known = asked[clock_hz] = self._at(clock_hz)
            return known[0]

        clock_hz = highest_clock(power_w, limit_w, gpu.min_clock_hz, gpu.max_clock_hz, gpu.clock_step_hz)
        self._ends = {end: asked[end] for end in (gpu.min_clock_hz, gpu.max_clock_hz) if end in asked}
        drawn_w, per_ps = asked[clock_hz]
        return whole_ps(per_ps), drawn_w, clock_hz

    def _at(self, clock_hz: float) -> tuple[float, float]:
        kernel, gpu = self._kernel, self._gpu
        work_s = kernel.pace.seconds(clock_hz)
        whole_s = work_s + kernel.cls.gap_s
        per_ps = 1.0 / whole_s / PS_PER_S
        held_hz = own_clock_hz(kernel.terms, clock_hz)
        above_w = dynamic_power_w(
            kernel.terms,
            sms=kernel.sms * (work_s / whole_s),
            gpu_sms=gpu.sms,
            progress_per_s=per_ps * PS_PER_S,
            voltage_scale=gpu.voltage_scale(held_hz),
            clock_fraction=held_hz / gpu.reference_clock_hz,
        )
        return above_w * gpu.chip_power_factor + gpu.idle_w(clock_hz), per_ps


def table_of(scenario: Scenario, machine: Machine, partitions: Partitions | None) -> PartTable:
    """The table of a group of GPUs; equal groups share it, stages of pipelines among them, those at another clock share
    what runs.
    """
    return _table(
        _TableKey(
            fields=tuple((name, value) for name, value in scenario.__dict__.items() if name not in POLICY | {"pp"}),
            model=Same(workloads.load_model(scenario.model)),
            card=Same(machine.gpu),
            profile=Same(machine.profile),
            cluster=machine.cluster,
            partitions=partitions,
            gpu=machine.model,
        )
    )


@lru_cache(maxsize=MAX_TABLES)
def _table(key: _TableKey) -> PartTable:
    assert key.gpu is not None
    return PartTable(key, key.gpu, _laid(replace(key, gpu=None)))


@lru_cache(maxsize=MAX_TABLES)
def _laid(_: _TableKey) -> LaidParts:
    return LaidParts()


def played(plan: Plan, target_w: float) -> Cost:
    """The cost of ``plan`` by the quickest way to run it that its ranks and layers allow."""
    layout, parts = _quickest(plan, target_w)
    members = [len(ranks) for ranks in layout.folding.classes]
    return Cost(
        time_s=sum(part.repeat * part.played.records.end_ps for part in parts) * 1e-12,
        energy_j=sum(
            part.repeat * sum(m * j for m, j in zip(members, part.played.energy_j, strict=True)) for part in parts
        ),
        cycles=sum(part.repeat * _cycles(part.played.records, members) for part in parts),
    )


def _quickest(plan: Plan, target_w: float) -> tuple[PieceSequence, list[RepeatedPiece]]:
    for way in ("segments", "folded"):
        try:
            layout: PieceSequence = getattr(plan, way)
            return layout, play(layout.sequence, (target_w,) * len(layout.folding.classes))
        except FoldError:
            continue
    return plan.full, play(plan.full.sequence, (target_w,) * len(plan.full.folding.classes))


def _cycles(records: Recorder, members: Sequence[int]) -> float:
    """SM clock cycles of a mean GPU; ``members`` are the ranks that each simulated GPU stands for."""
    cycles, since = 0.0, dict[int, tuple[int, float]]()
    for gpu, time_ps, state in zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True):
        if gpu in since:
            begun_ps, clock_hz = since[gpu]
            cycles += members[gpu] * clock_hz * (time_ps - begun_ps)
        since[gpu] = time_ps, records.states[state].clock_hz
    cycles += sum(members[gpu] * clock_hz * (records.end_ps - begun_ps) for gpu, (begun_ps, clock_hz) in since.items())
    return cycles * 1e-12 / sum(members)
