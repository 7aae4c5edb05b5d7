"""The kernel graphs of a scenario on one machine, shared by all scenarios that differ in power policy only.

The plan finds equal ranks (:mod:`sim.shortcuts.fold`) and cuts the programs into repeating pieces
(:mod:`sim.shortcuts.pieces`); where it cannot, it raises :class:`FoldError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from hardware.cluster import Cluster
from hardware.profile import Profile
from inputs.same import Same
from sim.build.cost import Pricer, drawn
from sim.build.lower import Classify, lower
from sim.engine.between import overloaded_ports
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.running import GpuModel
from sim.errors import FoldError
from sim.result.outcome import Outcome
from sim.run.guide import PowerGuide
from sim.scenario.machine import Machine
from sim.scenario.partition import Partitions, partitioned
from sim.shortcuts.context_buckets import error_bound
from sim.shortcuts.fold import Folding, fold, unfolded
from sim.shortcuts.pieces import MAX_KEPT_KERNELS, Piece, Repeated, RepeatedPiece, play
from sim.shortcuts.segments import SegmentStep, split_into_pieces
from sim.shortcuts.serial import SerialLayout
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import CollectiveWork

# Prices remembered for one GPU type and world; beyond it they are computed again.
MAX_PRICES = 200_000
MAX_PRICERS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceSequence:
    """Work as the engine gets it: pieces in order, the phases of each, where each begins in every GPU's program."""

    folding: Folding
    sequence: tuple[Repeated, ...]
    phases: tuple[tuple[str, ...], ...]
    first_op: tuple[NDArray[np.int64], ...]

    @cached_property
    def guide(self) -> PowerGuide:
        """Of searches for its settled clock, where it is of one GPU; they learn from one another."""
        return PowerGuide(self.sequence)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """``repeat`` equal pieces of work in a row, the phases of each, where they begin in every GPU's program."""

    graph: KernelGraph
    repeat: int
    phases: tuple[str, ...]
    first_op: NDArray[np.int64]


@dataclass(kw_only=True, eq=False)
class Work:
    """The rank programs of a scenario and their prices; ``contexts`` are those of decode steps that run."""

    program: Program
    tokens: float
    classify: Classify
    issue_s: float | None
    contexts: tuple[int, ...] | None = None
    partitions: Partitions | None = None
    _graphs: dict[object, KernelGraph] = field(default_factory=dict)
    _layouts: dict[Same[KernelGraph], SerialLayout] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> int:
        """Kernels over all ranks."""
        alike = Counter(Same(rank) for rank in self.program.ranks)
        segments = ((n, s) for rank, n in alike.items() for phase in rank.held.phases for s in phase.segments)
        return sum(n * len(s.kernels) * s.repeat for n, s in segments)

    def full_graph(self) -> KernelGraph:
        """The kernel graph of every rank."""
        return self.lowered(lower(self.program, self.classify, issue_s=self.issue_s))

    def lowered(self, graph: KernelGraph) -> KernelGraph:
        """``graph`` on the partitions of its GPUs."""
        return graph if self.partitions is None else partitioned(graph, self.partitions)

    @cached_property
    def folding(self) -> Folding:
        """Classes of equal ranks, or :class:`FoldError`: one of equal groups cannot slow the others down."""
        found = fold(self.program, self.classify)
        kinds = [((cls.transit.ranks, stream), cls) for stream, cls in self._between_nodes() if cls.transit]
        for port, transits in overloaded_ports(kinds):
            images = Counter(found.groups[ranks] for ranks in {transit.ranks for transit in transits})
            if max(images.values()) > 1:
                raise FoldError(f"equal groups of ranks crowd '{port.name}' of the network: each is simulated")
        return found

    def _between_nodes(self) -> Iterator[tuple[int, KernelClass]]:
        """Streams and classes of collectives, those that leave their nodes among them."""
        alike = {Same(s.kernels) for rank in self.program.ranks for phase in rank.phases for s in phase.segments}
        kernels = (kernel for one in alike for kernel in one.held if isinstance(kernel.work, CollectiveWork))
        return ((kernel.stream, self.classify(kernel)) for kernel in kernels)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Equal ranks once, equal layers once, at any clock; or :class:`FoldError`."""
        if self.issue_s is not None:
            raise FoldError("launch = 'eager': the host's launch times are absolute, so layers do not repeat")
        ranks = self.folding.representatives(self.program).ranks
        if any(s.asynchronous or s.waits for rank in ranks for phase in rank.phases for s in phase.segments):
            raise FoldError("transfers between pipeline stages run beside the layers: layers do not repeat alone")
        if any(s.rolls for rank in ranks for phase in rank.phases for s in phase.segments):
            raise FoldError("each layer's last collectives run beside the next one: layers do not repeat alone")
        cuts: list[Cut] = []
        at = np.zeros(len(ranks), dtype=np.int64)
        graphs: dict[tuple[Same[tuple[Kernel, ...]], ...], KernelGraph] = {}
        for steps, repeat in split_into_pieces(_side_by_side(ranks), self.folding):
            same = tuple(Same(segment.kernels) for step in steps for segment in step.segments)
            graph = graphs.get(same)
            if graph is None:
                graph = graphs[same] = self.graph_of(steps)
            phases = tuple(steps[int(number)].phase for number, _, _ in graph.segments)
            cuts.append(Cut(graph=graph, repeat=repeat, phases=phases, first_op=at))
            sizes = [[len(segment.kernels) for segment in step.segments] for step in steps]
            at = at + repeat * np.array(sizes).sum(axis=0)
        return tuple(cuts)

    def serial_layout(self, graph: KernelGraph) -> SerialLayout:
        """That of a serial graph of a cut, worked out once."""
        found = self._layouts.get(Same(graph))
        if found is None:
            found = self._layouts[Same(graph)] = SerialLayout(graph)
        return found

    def graph_of(self, steps: Sequence[SegmentStep]) -> KernelGraph:
        """The kernel graph of a few steps on all folded GPUs, phases numbered as the steps are.

        Equal ones (the head of every pass) share it.
        """
        key = tuple(tuple(segment.kernels for segment in step.segments) for step in steps)
        graph = self._graphs.get(key)
        if graph is None:
            ranks = tuple(
                RankProgram(
                    phases=tuple(
                        Phase(name=f"{i}", segments=(Segment(name=s.name, kernels=s.kernels),) if s.kernels else ())
                        for i, s in enumerate(of_rank)
                    )
                )
                for of_rank in zip(*(step.segments for step in steps), strict=True)
            )
            graph = lower(Program(ranks=ranks), self.classify, groups=self.folding.groups)
            graph = self._graphs[key] = self.lowered(graph)
        return graph


@dataclass(kw_only=True, eq=False)
class Plan:
    """The ways to run some work on one GPU model, which every power policy shares."""

    work: Work
    model: GpuModel
    _pieces: dict[Same[KernelGraph], Piece] = field(default_factory=dict)
    _full: PieceSequence | None = None
    _of_phases: dict[str, Plan | None] = field(default_factory=dict)

    @property
    def full(self) -> PieceSequence:
        """Every rank, every layer."""
        if self._full is not None:
            return self._full
        layout = self._whole(unfolded(len(self.work.program.ranks)), self.work.full_graph())
        if self.work.kernels <= MAX_KEPT_KERNELS:
            self._full = layout
        return layout

    def of_phases(self, name: str) -> Plan | None:
        """The plan of the phases alone that begin with ``name``, of equal ones two; None where all do or none does."""
        if name not in self._of_phases:
            ranks = [
                (rank, tuple(phase for phase in rank.phases if phase.name.startswith(name)))
                for rank in self.work.program.ranks
            ]
            some = any(kept for _, kept in ranks) and any(len(kept) < len(rank.phases) for rank, kept in ranks)
            self._of_phases[name] = None
            if some:
                if all(phase.segments == kept[0].segments for _, kept in ranks for phase in kept):
                    ranks = [(rank, kept[:2]) for rank, kept in ranks]
                program = Program(ranks=tuple(replace(rank, phases=kept) for rank, kept in ranks))
                self._of_phases[name] = Plan(work=replace(self.work, program=program, _graphs={}, _layouts={}), model=self.model)
        return self._of_phases[name]

    @cached_property
    def folded(self) -> PieceSequence:
        """Equal ranks once, every layer."""
        folding = self.work.folding
        if len(folding.classes) == len(self.work.program.ranks) > 1:
            raise FoldError(
                f"no two of the {len(self.work.program.ranks)} ranks run equal programs: use detail = 'full'"
            )
        chosen = folding.representatives(self.work.program)
        graph = lower(chosen, self.work.classify, issue_s=self.work.issue_s, groups=folding.groups)
        return self._whole(folding, self.work.lowered(graph))

    @cached_property
    def segments(self) -> PieceSequence:
        """Equal ranks once, equal layers once."""
        cuts = self.work.cuts
        return PieceSequence(
            folding=self.work.folding,
            sequence=tuple(
                Repeated(number=number, piece=self._piece(cut.graph), repeat=cut.repeat)
                for number, cut in enumerate(cuts)
            ),
            phases=tuple(cut.phases for cut in cuts),
            first_op=tuple(cut.first_op for cut in cuts),
        )

    def outcome(
        self, layout: PieceSequence, parts: Sequence[RepeatedPiece], *, detail: str, why: str, bucket_error: float = 0.0
    ) -> Outcome:
        """The outcome of a run of ``layout``."""
        return Outcome(
            folding=layout.folding,
            parts=parts,
            phases=layout.phases,
            first_op=layout.first_op,
            detail=detail,
            why=why,
            kernels=self.work.kernels,
            full_graph=(lambda: parts[0].piece.graph) if detail == "full" else self.work.full_graph,
            context_buckets=len(set(self.work.contexts or ())),
            context_bucket_error=bucket_error,
        )

    def _whole(self, folding: Folding, graph: KernelGraph) -> PieceSequence:
        piece = Piece(graph, FluidModel(self.model, graph.classes, []), whole=True)
        return PieceSequence(
            folding=folding,
            sequence=(Repeated(number=0, piece=piece, repeat=1),),
            phases=(tuple(phase for phase, _, _ in graph.segments),),
            first_op=(np.zeros(graph.gpus, dtype=np.int64),),
        )

    def _piece(self, graph: KernelGraph) -> Piece:
        piece = self._pieces.get(Same(graph))
        if piece is None:
            model = FluidModel(self.model, graph.classes, [])
            piece = Piece(graph, model, layout=self.work.serial_layout)
            self._pieces[Same(graph)] = piece
        return piece

    def context_bucket_error(self, layout: PieceSequence, limits_w: tuple[float, ...]) -> float:
        """Bound on the relative error, of time or energy, of running one decode step for each bucket of contexts."""
        if self.work.contexts is None:
            return 0.0
        free = self.outcome(layout, play(layout.sequence, limits_w), detail="segment", why="").by_phase()
        sums = list(free.values())[1:]  # the first phase is the prefill
        costs = dict(zip(self.work.contexts, sums, strict=True))
        counts = [self.work.contexts.count(context) for context in costs]
        return max(
            error_bound([cost[i] for cost in costs.values()], counts, sum(phase[i] for phase in free.values()))
            for i in (0, 1)
        )


def _side_by_side(ranks: Sequence[RankProgram]) -> Iterator[tuple[SegmentStep, int]]:
    """The ranks' segments in step, and how often; a rank that has fewer (no head) does nothing in the last ones."""
    nothing = Segment(name="", kernels=(), repeat=0)
    for phases in zip(*(rank.phases for rank in ranks), strict=True):
        for segments in zip_longest(*(phase.segments for phase in phases), fillvalue=nothing):
            if len({(s.name, s.repeat) for s in segments if s is not nothing}) > 1:
                raise FoldError(
                    "ranks run different numbers of layers (pipeline stages): layers do not repeat together"
                )
            yield SegmentStep(phase=phases[0].name, segments=segments), max(s.repeat for s in segments)


class _Prices:
    """A pricer and what it has priced so far."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.known: dict[tuple[str, int, float, object], KernelClass] = {}

    def price(self, kernel: Kernel) -> KernelClass:
        work = drawn(kernel.work)
        key = (kernel.name, kernel.priority, kernel.flops, work)  # all that a price follows from
        known = self.known.get(key)
        if known is None:
            if len(self.known) > MAX_PRICES:
                self.known.clear()
            known = self.known[key] = self.pricer.price(kernel if work is kernel.work else replace(kernel, work=work))
        return known


@lru_cache(maxsize=MAX_PRICERS)
def _prices(profile: Profile, cluster: Cluster, *, chips: int, eager: bool) -> _Prices:
    """Remembered prices, by all that they depend on; the power cap is not among it."""
    launch = profile.launch
    gap_s = launch.eager_gap_s if eager else launch.graph_gap_s
    pricer = Pricer(profile=profile, gpu=cluster.gpu, gap_s=gap_s, eager=eager, chips=chips, cluster=cluster)
    return _Prices(pricer)


def classifier(target: Machine, *, eager: bool) -> Classify:
    """Prices kernels on ``target``, and remembers them across scenarios."""
    return _prices(target.profile, target.cluster, chips=target.chips, eager=eager).price
