"""Whole collectives beside compute that does not need them: two micro-batches in turn, or independent kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from workloads.errors import WorkloadError
from workloads.families.pairs import COMM_PRIORITY, COMM_STREAM, Schedule, leave_sms, product_piece
from workloads.program import Kernel
from workloads.work import CollectiveOp, CollectiveWork, GemmWork


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


def cut_sums(layer: Sequence[Kernel], schedule: Schedule) -> list[Kernel]:
    """``layer`` with each all-reduce right behind a product cut in pieces: one is summed while the next is computed.

    Pieces are chunks of the tokens, or groups of the one product's tiles (``tile_signal``).
    """
    made: list[Kernel] = []
    pending: tuple[int, ...] = ()
    pairs = iter(zip(layer, [*layer[1:], None], strict=True))
    for kernel, following in pairs:
        if not isinstance(kernel.work, GemmWork) or following is None or not _is_sum(following):
            made.append(replace(kernel, after=pending))
            pending = ()
            continue
        next(pairs)  # the sum
        for index in range(schedule.pieces):
            made.append(replace(product_piece(kernel, schedule, index), after=pending if index == 0 else ()))
            made.append(replace(_sum_piece(following, schedule), after=(len(made) - 1,)))
        pending = (len(made) - 1,)
    return made


def _is_sum(kernel: Kernel) -> bool:
    return isinstance(kernel.work, CollectiveWork) and kernel.work.op is CollectiveOp.ALL_REDUCE


def _sum_piece(kernel: Kernel, schedule: Schedule) -> Kernel:
    assert isinstance(kernel.work, CollectiveWork)
    buffer = kernel.work.buffer_bytes // schedule.pieces
    return replace(
        kernel,
        work=replace(kernel.work, buffer_bytes=buffer, ctas=schedule.ctas),
        bytes_moved=float(buffer),
        stream=COMM_STREAM,
        priority=COMM_PRIORITY,
    )


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


def beside(layer: Sequence[Kernel], partners: dict[str, tuple[str, ...]], *, margin_ctas: int = 0) -> list[Kernel]:
    """``layer`` with each collective named in ``partners`` on its own stream, beside the kernels named with it.

    The partners move to where the collective starts, and leave it the SMs of ``margin_ctas`` blocks; what stood
    behind it waits for it.
    """
    by_name = {kernel.name: kernel for kernel in layer}
    moved = {name for names in partners.values() for name in names}
    made: list[Kernel] = []
    pending: tuple[int, ...] = ()
    for kernel in layer:
        if kernel.name in moved:
            continue
        if kernel.name in partners:
            made.append(replace(kernel, stream=COMM_STREAM, priority=COMM_PRIORITY, after=(len(made) - 1,)))
            pending = (len(made) - 1,)
            made += [leave_sms(by_name[name], margin_ctas) for name in partners[kernel.name] if name in by_name]
        else:
            made.append(replace(kernel, after=pending))
            pending = ()
    return made
