"""Where a rank stands in its layout, and which ranks it meets: tensor group, context group, neighbour stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from inputs.changed import changed
from workloads.kernel_names import AllReduce, CollectiveOp
from workloads.parallel import Layout
from workloads.program import Kernel, Phase, RankProgram, Segment
from workloads.work import CollectiveWork

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Coordinates of a rank: replica, pipeline stage, context slice, and member of its tensor or expert group."""

    replica: int
    stage: int
    context: int
    member: int


def place_of(layout: Layout, rank: int) -> Place:
    """The coordinates of ``rank``: member innermost, then context, stage, replica.

    >>> place_of(Layout(tp=2, cp=2, pp=2), 5)
    Place(replica=0, stage=1, context=0, member=1)
    """
    rest, member = divmod(rank, layout.group)
    rest, context = divmod(rest, layout.cp)
    replica, stage = divmod(rest, layout.pp)
    return Place(replica=replica, stage=stage, context=context, member=member)


def groups_of(layout: Layout, rank: int) -> Mapping[Ranks, Ranks]:
    """What the groups that a layer is written for (rank 0's, and rank 0's stages) are for ``rank``."""
    place = place_of(layout, rank)
    replica = rank - rank % (layout.stage_ranks * layout.pp)
    stage = replica + place.stage * layout.stage_ranks
    groups = {
        layout.ranks: tuple(rank - place.member + m for m in layout.ranks),
        layout.tensor_ranks: tuple(rank - place.member % layout.tp + m for m in layout.tensor_ranks),
        layout.context_ranks: tuple(stage + place.member + c for c in layout.context_ranks),
    }
    if layout.dcp > 1:
        groups[layout.shard_ranks] = tuple(rank - place.member % layout.dcp + m for m in layout.shard_ranks)
    inside = rank - stage
    for pair in stage_pairs(layout):
        groups[pair] = (replica + pair[0] + inside, replica + pair[1] + inside)
    return {written: own for written, own in groups.items() if len(own) > 1}


def stage_pairs(layout: Layout) -> list[tuple[int, int]]:
    """(from, to) of the transfers between rank 0's stages, the way back of tokens last."""
    heads = [stage * layout.stage_ranks for stage in range(layout.pp)]
    pairs = list(pairwise(heads))
    return [*pairs, (heads[-1], heads[0])] if pairs else []


def bind(
    program: RankProgram, groups: Mapping[Ranks, Ranks], *, ctas: int | None, all_reduce: AllReduce
) -> RankProgram:
    """``program`` with every collective on its rank's own groups, ``ctas`` where it names no number of blocks."""

    def bound(kernel: Kernel) -> Kernel:
        work = kernel.work
        if not isinstance(work, CollectiveWork):
            return kernel
        kind = all_reduce if work.op is CollectiveOp.ALL_REDUCE else work.algorithm
        # Zero blocks (copy engines) are for exchanges, which say so themselves.
        blocks = (ctas or None) if work.ctas is None else work.ctas
        own = changed(work, ranks=groups[work.ranks], ctas=blocks, algorithm=kind)
        return kernel if own == work else changed(kernel, work=own)

    segments: dict[int, Segment] = {}  # micro-batches and steps share kernels: bind each tuple once

    def rebuilt(segment: Segment) -> Segment:
        known = segments.get(id(segment.kernels))
        kernels = known.kernels if known else tuple(bound(k) for k in segment.kernels)
        made = changed(segment, kernels=kernels)
        segments.setdefault(id(segment.kernels), made)
        return made

    return RankProgram(
        phases=tuple(
            Phase(name=phase.name, segments=tuple(rebuilt(s) for s in phase.segments)) for phase in program.phases
        )
    )
