"""Equal ranks are simulated once: which ranks are equal is derived from their programs; FoldError where they are not.

Two ranks are equal when they run kernels of the same cost in the same order on the same streams, and when every
collective that they take part in meets equal ranks at equal places. Colour refinement finds the coarsest such
partition: start from equal programs, then split ranks whose collectives meet different colours, until none does.
Everything else that could distinguish ranks (chip, clock, power policy, launch times) is the same for all here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from inputs.same import Same
from sim.build.lower import Classify, Group
from sim.engine.graph import KernelClass
from sim.errors import FoldError
from workloads.program import Kernel, Program, RankProgram, Segment
from workloads.work import CollectiveWork

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """``classes[i]`` are the ranks that simulated GPU ``i`` stands for; the first one's program represents them.

    ``groups`` maps every group of ranks that meets in collectives to the simulated GPUs it becomes.
    """

    classes: tuple[Ranks, ...]
    groups: Mapping[Ranks, Group]

    @property
    def multiplicity(self) -> Ranks:
        """How many ranks each simulated GPU stands for."""
        return tuple(len(ranks) for ranks in self.classes)

    def representatives(self, program: Program) -> Program:
        """The program of one rank of each class."""
        return Program(ranks=tuple(program.ranks[ranks[0]] for ranks in self.classes))


def unfolded(world: int) -> Folding:
    """Each rank its own class."""
    return Folding(classes=tuple((rank,) for rank in range(world)), groups={})


def fold(program: Program, classify: Classify) -> Folding:
    """The coarsest partition of the ranks of ``program`` into equal ones.

    Raises :class:`FoldError` when equal ranks meet in one collective at different places of their programs.
    """
    costs: dict[KernelClass, int] = {}
    cost_of: dict[Same[KernelClass], int] = {}
    price_of: dict[int, int] = {}  # by the kernel's place in memory, where the program keeps it

    def cost(kernel: Kernel) -> int:
        known = price_of.get(id(kernel))
        if known is None:
            priced = Same(classify(kernel))
            known = cost_of.get(priced)
            if known is None:
                known = cost_of[priced] = costs.setdefault(priced.held, len(costs))
            price_of[id(kernel)] = known
        return known

    shapes: dict[object, int] = {}
    shape_of: dict[Same[RankProgram], int] = {}
    slots_of: dict[Same[RankProgram], dict[Ranks, int]] = {}
    programs = [Same(rank_program) for rank_program in program.ranks]
    for one in programs:
        if one not in shape_of:
            shape, slots_of[one] = _shape(one.held, cost)
            shape_of[one] = shapes.setdefault(shape, len(shapes))
    slots = [slots_of[one] for one in programs]
    colour = [shape_of[one] for one in programs]
    groups = {ranks for of_rank in slots for ranks in of_rank}
    while True:
        met = {ranks: _image(ranks, colour, slots) for ranks in groups}
        known: dict[object, int] = {}
        finer = [
            known.setdefault((colour[rank], tuple(met[ranks] for ranks in slots[rank])), len(known))
            for rank in range(len(colour))
        ]
        if len(known) == len(set(colour)):
            break
        colour = finer
    for ranks, image in met.items():
        if len({c for c, _ in image}) != len(image):
            raise FoldError(
                f"ranks {_some(ranks)} run equal programs but meet in one collective at different places of them"
            )
    order = list(dict.fromkeys(colour))
    place = {c: index for index, c in enumerate(order)}
    return Folding(
        classes=tuple(tuple(r for r, mine in enumerate(colour) if mine == c) for c in order),
        groups={ranks: tuple(sorted((place[c], slot) for c, slot in image)) for ranks, image in met.items()},
    )


def _shape(program: RankProgram, cost: Callable[[Kernel], int]) -> tuple[object, dict[Ranks, int]]:
    """What two equal rank programs have in common, and the groups of this one in order of appearance."""
    slots: dict[Ranks, int] = {}

    def slot(work: object) -> int:
        return slots.setdefault(work.ranks, len(slots)) if isinstance(work, CollectiveWork) else -1

    known: dict[Same[tuple[Kernel, ...]], tuple[object, ...]] = {}  # steps of a generation share kernels

    def kernels(segment: Segment) -> tuple[object, ...]:
        key = Same(segment.kernels)
        if key not in known:
            known[key] = tuple((cost(k), k.stream, k.after, slot(k.work)) for k in segment.kernels)
        return known[key]

    shape = tuple(
        (phase.name, tuple((replace(segment, kernels=()), kernels(segment)) for segment in phase.segments))
        for phase in program.phases
    )
    return shape, slots


def _image(ranks: Ranks, colour: Sequence[int], slots: Sequence[Mapping[Ranks, int]]) -> frozenset[tuple[int, int]]:
    try:
        return frozenset((colour[rank], slots[rank][ranks]) for rank in ranks)
    except (KeyError, IndexError):
        raise FoldError(f"ranks {_some(ranks)} do not all take part in the collectives of their group") from None


def _some(ranks: Ranks) -> str:
    return f"{ranks}" if len(ranks) <= 8 else f"({', '.join(map(str, ranks[:6]))}, ... {len(ranks)} in all)"
