"""What every rank runs, kernel by kernel, before any machine is known.

A :class:`Program` keeps structure (phases, repeated segments, ranks that share one program), so that later
stages can tile, fold and replay without finding the structure again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from workloads.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of one rank: what a stream executes.

    ``after`` lists indices of earlier kernels of the same segment (on other streams) that must end first;
    order within a stream is implied. A negative index is a kernel of the segment's previous repetition, counted
    from its end: a segment with such kernels rolls on, its streams join before the first repetition and after the
    last only. ``flops`` and ``bytes_moved`` are the
    einsum's own figures, for conservation; FLOPs of attention without those behind its mask, which no kernel computes.
    Of a ``chained`` kernel and its neighbour rows were measured in turn in a graph: its time holds the pause before it.
    """

    name: str
    work: Work
    flops: float
    bytes_moved: float
    stream: int = 0
    priority: int = 0
    after: tuple[int, ...] = ()
    chained: bool = False


def in_turn(*parts: Iterable[Kernel]) -> list[Kernel]:
    """Kernels one part after the other, each part's ``after`` counted from its own first: -1 is the one before it."""
    kernels: list[Kernel] = []
    for part in parts:
        base = len(kernels)
        kernels += [replace(k, after=tuple(base + i for i in k.after)) if k.after else k for k in part]
    return kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Kernels that repeat as a unit (a layer, the head); streams join at the end of each repetition.

    ``first`` numbers its first repetition. ``mark`` names its end, and ``waits`` the marks of earlier segments
    that must have ended before it starts. An ``asynchronous`` segment (a transfer between pipeline stages)
    runs on streams that nobody joins: only marks tie it to the others. Its repetitions are ``layers`` of the model, or
    it runs once a step, before, between or behind them.
    """

    name: str
    kernels: tuple[Kernel, ...]
    repeat: int = 1
    first: int = 0
    mark: str | None = None
    waits: tuple[str, ...] = ()
    asynchronous: bool = False
    layers: bool = False

    @property
    def rolls(self) -> bool:
        """True when repetitions run into one another: some kernels wait for those of the one before."""
        return any(before < 0 for kernel in self.kernels for before in kernel.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One pass through the model: a prefill, or one decode step."""

    name: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """All phases of one rank, in order."""

    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program per rank; ranks that do the same work share one object (identity, not equality)."""

    ranks: tuple[RankProgram, ...]
