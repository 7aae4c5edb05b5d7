"""Where GPUs do not compute: data that moves alone, ranks that wait, and pipeline bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from inputs.same import Same
from sim.engine.graph import KernelClass, KernelGraph

S_PER_PS = 1e-12
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Of one run: ``by_kind`` holds exposed and waiting GPU-seconds, ``working_s`` seconds of each simulated GPU.

    Exposed: data moves and nothing computes. Waiting: the rank is there, the last one is not, and nothing else
    moves. Both together are the time in which communication runs alone. A GPU works while it computes or moves
    data, the pauses between kernels included; the rest of a run is bubbles.
    """

    by_kind: dict[str, tuple[float, float]]
    working_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpans:
    """Kernels that ran: GPU, class and collective (-1: none) of each, from ``start`` to ``end`` (ps)."""

    gpu: Ints
    cls: Ints
    collective: Ints
    start: Ints
    end: Ints


def exposure(graph: KernelGraph, spans: KernelSpans, multiplicity: Sequence[int]) -> Exposure:
    """Exposure of ``spans`` of ``graph``; GPUs count as often as they stand for one."""
    gpu, cls, start, end = spans.gpu, spans.cls, spans.start, spans.end
    gap_of, names = _of_classes(Same(graph.classes))
    moves = spans.collective >= 0
    moving = moving_ps(spans.collective, start, end)
    working = covered(gpu, np.where(moves, moving, start - gap_of[cls]), end, graph.gpus)
    kinds = sorted({names[number] for number in set(cls[moves].tolist())})
    whose, begins, ends = gpu[~moves], start[~moves], end[~moves]
    length = covered(whose, begins, ends, graph.gpus)
    alone: list[list[float]] = [[], []]
    # What an earlier kind has covered is not counted again, so that the parts sum to the whole.
    for part, (first, last) in enumerate(((moving, end), (start, moving))):
        for kind in kinds:
            these = moves if len(kinds) == 1 else moves & np.array([name == kind for name in names])[cls]
            begin, stop = first[these], last[these]
            grown = length
            if (begin < stop).any():
                whose, begins, ends = (
                    np.concatenate(pair) for pair in ((whose, gpu[these]), (begins, begin), (ends, stop))
                )
                grown = covered(whose, begins, ends, graph.gpus)
            alone[part].append(float((grown - length) @ np.asarray(multiplicity)) * S_PER_PS)
            length = grown
    by_kind = dict(zip(kinds, zip(*alone, strict=True), strict=True))
    return Exposure(by_kind=by_kind, working_s=(working * S_PER_PS).tolist())


@lru_cache(maxsize=64)
def _of_classes(classes: Same[tuple[KernelClass, ...]]) -> tuple[Ints, list[str]]:
    """The pause before each class of kernel (ps), and its operation."""
    gaps = [round(c.gap_s / S_PER_PS) for c in classes.held]
    return np.array(gaps, dtype=np.int64), [str(c.describe.get("op", c.family)) for c in classes.held]


def moving_ps(together: Ints, start: Ints, end: Ints) -> Ints:
    """When data begins to move, for each span: once the last rank of its collective (-1: none) is there.

    >>> moving_ps(np.array([0, 0, -1]), np.array([3, 5, 1]), np.array([9, 9, 9])).tolist()
    [5, 5, 1]
    """
    last = start.copy()
    tied = together >= 0
    if tied.any():
        latest = np.zeros(together.max() + 1, dtype=np.int64)
        np.maximum.at(latest, together[tied], start[tied])
        last[tied] = latest[together[tied]]
    return np.minimum(last, end)


def covered(gpu: Ints, start: Ints, end: Ints, gpus: int) -> Ints:
    """Length of the union of each GPU's intervals, in their unit.

    >>> covered(np.array([0, 0, 0, 1]), np.array([0, 1, 5, 4]), np.array([2, 3, 6, 9]), 3).tolist()
    [4, 5, 0]
    """
    if not len(start):
        return np.zeros(gpus, dtype=np.int64)
    order = np.lexsort((start, gpu))
    gpu, start, end = gpu[order], start[order], end[order]
    after = (end.max() - start.min() + 1) * gpu  # one GPU's time after the other's, so that one pass does for all
    reach = np.maximum.accumulate(end + after)
    new = reach.copy()
    new[1:] -= np.maximum(reach[:-1], start[1:] + after[1:])
    new[0] -= start[0] + after[0]
    lengths = np.zeros(gpus, dtype=np.int64)
    np.add.at(lengths, gpu, np.maximum(new, 0))
    return lengths
