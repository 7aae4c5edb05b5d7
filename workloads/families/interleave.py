"""Whole collectives beside compute that does not need them: two micro-batches in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workloads.errors import WorkloadError
from workloads.layer_passes.schedule import COMM_PRIORITY, COMM_STREAM
from workloads.program import Kernel
from workloads.work import CollectiveWork


def two_batches(layer: Sequence[Kernel]) -> list[Kernel]:
    """``layer`` (one stream, one half of the batch) for both halves: one's collectives beside the other's compute.

    Stages of compute, each with the collective that ends it, take turns: half 0's first, half 1's first, half 0's
    second, ... Collectives run on their own stream. Where a layer ends with a collective, the next layer's first
    stage of the same half waits for it (a negative index: that kernel of the previous repetition), and the other
    half's compute goes on beside it. After the schedules of DeepSeek-V3 (arXiv 2412.19437, section 3.4.2).
    """
    stages = list(_stages(layer))
    made: list[Kernel] = []
    last_comm: list[int | None] = [None, None]
    firsts: list[int] = []
    for stage in stages:
        for half in (0, 1):
            before = last_comm[half]
            if len(firsts) < 2:
                firsts.append(len(made))
            for kernel in stage:
                comm = isinstance(kernel.work, CollectiveWork)
                if comm:
                    waits = (len(made) - 1,)
                    made.append(replace(kernel, stream=COMM_STREAM, priority=COMM_PRIORITY, after=waits))
                    last_comm[half] = len(made) - 1
                else:
                    made.append(replace(kernel, after=() if before is None else (before,)))
                before = None
    if isinstance(layer[-1].work, CollectiveWork):
        for half in (0, 1):
            end = last_comm[half]
            assert end is not None
            made[firsts[half]] = replace(made[firsts[half]], after=(end - len(made),))
    return made


def _stages(layer: Sequence[Kernel]) -> Iterator[list[Kernel]]:
    """Runs of compute, each with the collective that follows it."""
    stage: list[Kernel] = []
    for kernel in layer:
        stage.append(kernel)
        if isinstance(kernel.work, CollectiveWork):
            if len(stage) == 1:
                raise WorkloadError(f"overlap = 'two_batch': nothing is computed before {kernel.name}")
            yield stage
            stage = []
    if stage:
        yield stage
