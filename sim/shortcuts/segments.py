"""Where programs are cut into repeating pieces: at instants in which every GPU ends what it runs.

One class of GPUs is level wherever its streams join: at the end of every layer. Several classes (uneven experts,
slices of a context) run at paces of their own, and are level only when a collective of all of them ends. Layers of
one stream are therefore cut after the last such collective; what follows it opens the next piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from inputs.same import Same
from sim.shortcuts.fold import Folding
from workloads.program import Kernel, Segment
from workloads.work import CollectiveWork


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStep:
    """One repetition of a segment, or a part of one, on all simulated GPUs."""

    phase: str
    segments: tuple[Segment, ...]


def split_into_pieces(
    steps: Iterable[tuple[SegmentStep, int]], folding: Folding
) -> Iterator[tuple[tuple[SegmentStep, ...], int]]:
    """Pieces of ``steps`` (each with its repetitions): the steps of a piece, and how often it comes in a row."""
    if len(folding.classes) == 1:
        for step, repeat in steps:
            yield (step,), repeat
        return
    open_: tuple[SegmentStep, ...] = ()
    # Equal steps give equal parts.
    splits: dict[tuple[Same[tuple[Kernel, ...]], ...], tuple[SegmentStep, SegmentStep] | None] = {}
    for step, repeat in steps:
        key = tuple(Same(segment.kernels) for segment in step.segments)
        if key not in splits:
            splits[key] = _split(step, folding)
        parts = splits[key]
        if parts is None:
            if repeat == 1:
                open_ = (*open_, step)
                continue
            if open_:
                yield open_, 1
            yield (step,), repeat
            open_ = ()
            continue
        upto, rest = (replace(part, phase=step.phase) for part in parts)
        tail = (rest,) if any(segment.kernels for segment in rest.segments) else ()
        yield (*open_, upto), 1
        if repeat > 1:
            yield (*tail, upto), repeat - 1
        open_ = tail
    if open_:
        yield open_, 1


def _split(step: SegmentStep, folding: Folding) -> tuple[SegmentStep, SegmentStep] | None:
    """The step up to the end of its last collective of all GPUs, and the rest; None where it has none."""
    before: list[Segment] = []
    after: list[Segment] = []
    for segment in step.segments:
        last = 0
        for position, kernel in enumerate(segment.kernels):
            if kernel.stream or kernel.after:
                return None
            work = kernel.work
            if isinstance(work, CollectiveWork) and len(folding.groups[work.ranks]) == len(folding.classes):
                last = position + 1
        if not last:
            return None
        before.append(replace(segment, kernels=segment.kernels[:last], repeat=1))
        after.append(replace(segment, kernels=segment.kernels[last:], repeat=1))
    return SegmentStep(phase=step.phase, segments=tuple(before)), SegmentStep(phase=step.phase, segments=tuple(after))
