"""The kernel graphs of a scenario on one machine, shared by all scenarios that differ in power policy only.

The plan finds equal ranks (:mod:`sim.shortcuts.fold`) and cuts the programs into repeating pieces
(:mod:`sim.shortcuts.pieces`); where it cannot, it raises :class:`FoldError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from hardware.cluster import Cluster
from hardware.profile import Profile
from inputs.same import Same
from sim.build.cost import Pricer, drawn
from sim.build.lower import Classify, lower
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.running import GpuModel
from sim.errors import FoldError
from sim.result.looks import Looks
from sim.result.outcome import Outcome
from sim.result.tally import TallyLayout
from sim.run.guide import PowerGuide
from sim.run.work import Work
from sim.scenario.machine import Machine
from sim.shortcuts.context_buckets import error_bound
from sim.shortcuts.fold import Folding, unfolded
from sim.shortcuts.pieces import MAX_KEPT_KERNELS, Piece, Repeated, RepeatedPiece, play
from workloads.program import Kernel, Program

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


@dataclass(kw_only=True, eq=False)
class Plan:
    """The ways to run some work on one GPU model, which every power policy shares."""

    work: Work
    model: GpuModel
    _pieces: dict[Same[KernelGraph], Piece] = field(default_factory=dict)
    _full: PieceSequence | None = None
    _of_phases: dict[str | tuple[str, ...], Plan | None] = field(default_factory=dict)

    @property
    def full(self) -> PieceSequence:
        """Every rank, every layer."""
        if self._full is not None:
            return self._full
        layout = self._whole(unfolded(len(self.work.program.ranks)), self.work.full_graph())
        if self.work.kernels <= MAX_KEPT_KERNELS:
            self._full = layout
        return layout

    def of_phases(self, name: str | tuple[str, ...]) -> Plan | None:
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
                work = replace(self.work, program=program, _graphs={}, _layouts={}, _tally_layouts={})
                self._of_phases[name] = Plan(work=work, model=self.model)
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
        self,
        layout: PieceSequence,
        parts: Sequence[RepeatedPiece],
        *,
        detail: str,
        why: str,
        bucket_error: float = 0.0,
        looks: Looks | None = None,
    ) -> Outcome:
        """The outcome of a run of ``layout``."""
        multiplicity = layout.folding.multiplicity
        return Outcome(
            folding=layout.folding,
            parts=parts,
            phases=layout.phases,
            first_op=layout.first_op,
            detail=detail,
            why=why,
            kernels=self.work.kernels,
            full_graph=(lambda: parts[0].piece.graph) if detail == "full" else self.work.full_graph,
            layout=self.work.tally_layout if detail == "segment" else partial(TallyLayout, multiplicity=multiplicity),
            context_buckets=len(set(self.work.contexts or ())),
            context_bucket_error=bucket_error,
            looks=looks or Looks(),
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


class _Prices:
    """A pricer and what it has priced so far."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.known: dict[tuple[str, int, float, bool, object], KernelClass] = {}

    def price(self, kernel: Kernel) -> KernelClass:
        work = drawn(kernel.work)
        key = (kernel.name, kernel.priority, kernel.flops, kernel.chained, work)  # all that a price follows from
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
