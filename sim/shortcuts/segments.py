"""Where programs are cut into repeating pieces: at instants in which every GPU ends what it runs.

One class of GPUs is level wherever its streams join: at the end of every layer. Several classes (uneven experts,
slices of a context) run at paces of their own, and are level only when a collective of all of them ends. Layers of
one stream are therefore cut after the last such collective; what follows it opens the next piece. Layers of several
streams are cut at their ends, which are level if such a collective ends them. Layers without one (dense layers before
experts) end level only if all GPUs have the same clock: they are joined to the first layer behind them that has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from inputs.same import Same
from sim.shortcuts.fold import Folding
from workloads.program import Kernel, Segment
from workloads.work import CollectiveWork

# Most repetitions of a layer without a collective of all GPUs that are joined to the next piece.
MOST_JOINED = 8


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
    steps = list(steps)
    meeting = {_key(step): _all_meet(step, folding) for step, _ in steps}
    left = sum(meeting[_key(step)] for step, _ in steps)  # steps yet to come in which all GPUs meet
    open_: tuple[SegmentStep, ...] = ()
    # Equal steps give equal parts.
    splits: dict[tuple[Same[tuple[Kernel, ...]], ...], tuple[SegmentStep, SegmentStep] | None] = {}
    for step, repeat in steps:
        key = _key(step)
        left -= meeting[key]
        if key not in splits:
            splits[key] = _split(step, folding)
        parts = splits[key]
        if parts is None:
            if repeat == 1 or (left and not meeting[key] and repeat <= MOST_JOINED):
                open_ = (*open_, *[step] * repeat)
                continue
            if open_ and meeting[key]:
                yield (*open_, step), 1
                yield (step,), repeat - 1
            else:
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


def _key(step: SegmentStep) -> tuple[Same[tuple[Kernel, ...]], ...]:
    return tuple(Same(segment.kernels) for segment in step.segments)


def _all_meet(step: SegmentStep, folding: Folding) -> bool:
    """Whether all GPUs meet in some collective of the step."""
    return all(any(_meets_all(kernel, folding) for kernel in segment.kernels) for segment in step.segments)


def _meets_all(kernel: Kernel, folding: Folding) -> bool:
    work = kernel.work
    return isinstance(work, CollectiveWork) and len(folding.groups[work.ranks]) == len(folding.classes)


def _split(step: SegmentStep, folding: Folding) -> tuple[SegmentStep, SegmentStep] | None:
    """The step up to the end of its last collective of all GPUs, and the rest; None where it has none."""
    before: list[Segment] = []
    after: list[Segment] = []
    for segment in step.segments:
        last = 0
        for position, kernel in enumerate(segment.kernels):
            if kernel.stream or kernel.after:
                return None
            if _meets_all(kernel, folding):
                last = position + 1
        if not last:
            return None
        before.append(replace(segment, kernels=segment.kernels[:last], repeat=1))
        after.append(replace(segment, kernels=segment.kernels[last:], repeat=1))
    return SegmentStep(phase=step.phase, segments=tuple(before)), SegmentStep(phase=step.phase, segments=tuple(after))
