"""The rank programs of a scenario, cut into repeating pieces, for all scenarios that run the same at any clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from inputs.same import Same
from sim.build.lower import Classify, lower
from sim.engine.between import overloaded_ports
from sim.engine.graph import KernelClass, KernelGraph
from sim.errors import FoldError
from sim.result.tally import TallyLayout
from sim.scenario.partition import Partitions, partitioned
from sim.shortcuts.fold import Folding, fold
from sim.shortcuts.segments import SegmentStep, split_into_pieces
from sim.shortcuts.serial import SerialLayout
from workloads.program import Kernel, Phase, Program, RankProgram, Segment
from workloads.work import CollectiveWork


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkCut:
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
    _tally_layouts: dict[Same[KernelGraph], TallyLayout] = field(default_factory=dict)

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
        segments = (s for rank in self.program.ranks for phase in rank.phases for s in phase.segments)
        alike = dict.fromkeys(Same(s.kernels) for s in segments)  # in their order: the port that is named is the first
        kernels = (kernel for one in alike for kernel in one.held if isinstance(kernel.work, CollectiveWork))
        return ((kernel.stream, self.classify(kernel)) for kernel in kernels)

    @cached_property
    def cuts(self) -> tuple[WorkCut, ...]:
        """Equal ranks once, equal layers once, at any clock; or :class:`FoldError`."""
        if self.issue_s is not None:
            raise FoldError("launch = 'eager': the host's launch times are absolute, so layers do not repeat")
        ranks = self.folding.representatives(self.program).ranks
        if any(s.asynchronous or s.waits for rank in ranks for phase in rank.phases for s in phase.segments):
            raise FoldError("transfers between pipeline stages run beside the layers: layers do not repeat alone")
        if any(s.rolls for rank in ranks for phase in rank.phases for s in phase.segments):
            raise FoldError("each layer's last collectives run beside the next one: layers do not repeat alone")
        cuts: list[WorkCut] = []
        at = np.zeros(len(ranks), dtype=np.int64)
        graphs: dict[tuple[Same[tuple[Kernel, ...]], ...], KernelGraph] = {}
        for steps, repeat in split_into_pieces(_side_by_side(ranks), self.folding):
            same = tuple(Same(segment.kernels) for step in steps for segment in step.segments)
            graph = graphs.get(same)
            if graph is None:
                graph = graphs[same] = self.graph_of(steps)
            phases = tuple(steps[int(number)].phase for number, _, _ in graph.segments)
            cuts.append(WorkCut(graph=graph, repeat=repeat, phases=phases, first_op=at))
            sizes = [[len(segment.kernels) for segment in step.segments] for step in steps]
            at = at + repeat * np.array(sizes).sum(axis=0)
        return tuple(cuts)

    def serial_layout(self, graph: KernelGraph) -> SerialLayout:
        """That of a serial graph of a cut, worked out once."""
        found = self._layouts.get(Same(graph))
        if found is None:
            found = self._layouts[Same(graph)] = SerialLayout(graph)
        return found

    def tally_layout(self, graph: KernelGraph) -> TallyLayout:
        """That of a graph of a cut, worked out once."""
        found = self._tally_layouts.get(Same(graph))
        if found is None:
            found = self._tally_layouts[Same(graph)] = TallyLayout(graph, self.folding.multiplicity)
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
