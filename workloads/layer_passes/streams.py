"""The last pass: steps of a layer as kernels on streams, pieces of a stage beside their neighbours' collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from inputs.changed import changed
from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.kernels import elementwise_kernel
from workloads.layer_passes.overlap import BesideExchange, Stage, Step
from workloads.layer_passes.schedule import (
    COMM_PRIORITY,
    COMM_STREAM,
    Schedule,
    collective_piece,
    leave_sms,
    piece_of,
)
from workloads.layer_passes.tree import Placed
from workloads.program import Kernel
from workloads.work import CollectiveWork, DType, ElementwiseWork, GemmWork

KernelsOf = Callable[[Placed], list[Kernel]]
_OF_SLICES = (CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)


def streamed(steps: Iterable[Step], kernels_of: KernelsOf, *, margin_ctas: int = 0) -> list[Kernel]:
    """Kernels of ``steps`` in launch order; products beside whole collectives leave them ``margin_ctas`` blocks."""
    layer = _Layer(kernels_of=kernels_of, margin_ctas=margin_ctas)
    for step in steps:
        match step:
            case Stage():
                layer.stage(step)
            case BesideExchange():
                layer.beside(step)
            case _:
                layer.plain(step)
    return layer.kernels


@dataclass(slots=True)
class _Layer:
    """Kernels so far, and those of the second stream that the next one of the first waits for."""

    kernels_of: KernelsOf
    margin_ctas: int
    kernels: list[Kernel] = field(default_factory=list)
    pending: tuple[int, ...] = ()

    def plain(self, node: Placed) -> None:
        self._in_turn(self.kernels_of(node))

    def beside(self, step: BesideExchange) -> None:
        for kernel in self.kernels_of(step.exchange):
            last = len(self.kernels) - 1
            self._add(changed(kernel, stream=COMM_STREAM, priority=COMM_PRIORITY), last)
        exchange = len(self.kernels) - 1
        for node in step.nodes:
            for kernel in self.kernels_of(node):
                self._add(leave_sms(kernel, self.margin_ctas))
        self.pending = (exchange,)

    def stage(self, stage: Stage) -> None:
        schedule = stage.schedule
        (fed,) = self.kernels_of(stage.feeds) or (None,) if stage.feeds else (None,)
        (ended,) = self.kernels_of(stage.ends) or (None,) if stage.ends else (None,)
        if schedule.sequential or (fed is None and ended is None):
            for node in (stage.feeds, *stage.nodes, stage.ends):
                if node is not None:
                    self._in_turn(self._on(one, schedule.ctas) for one in self.kernels_of(node))
            return
        parts = [kernel for node in stage.nodes for kernel in self.kernels_of(node)]
        if fed is None:  # what stands before the product (a cast) is one kernel
            first = next(i for i, kernel in enumerate(parts) if isinstance(kernel.work, GemmWork))
            self._in_turn(parts[:first])
            parts = parts[first:]
        _check(stage, parts, fed, ended)
        match schedule.kind:
            case "chunks" | "tile_signal":
                self._pieces(parts, schedule, fed, ended)
            case "ring_exchange":
                if fed is not None:
                    self._ring_in(parts, schedule, fed)
                else:
                    assert ended is not None
                    self._ring_out(parts, schedule, ended)
            case _:
                assert_never(schedule.kind)

    def _on(self, kernel: Kernel, ctas: int | None) -> Kernel:
        """A collective on the blocks that an operator asks for."""
        work = kernel.work
        return changed(kernel, work=changed(work, ctas=ctas)) if isinstance(work, CollectiveWork) and ctas else kernel

    def _in_turn(self, kernels: Iterable[Kernel]) -> None:
        base = len(self.kernels)
        for kernel in kernels:
            after = (*[base + i for i in kernel.after], *self.pending)
            self.kernels.append(kernel if after == kernel.after else changed(kernel, after=after))
            self.pending = ()

    def _add(self, kernel: Kernel, *after: int) -> int:
        self.kernels.append(changed(kernel, after=after))
        return len(self.kernels) - 1

    def _pieces(self, parts: Sequence[Kernel], schedule: Schedule, fed: Kernel | None, ended: Kernel | None) -> None:
        """Each piece waits for its rows, and is sent on while the next is computed.

        Of one kernel of all tiles what follows its product runs once, on all rows.
        """
        one_kernel = schedule.kind == "tile_signal"
        cut = [one for one in parts if isinstance(one.work, GemmWork)] if one_kernel else parts
        waits, self.pending = self.pending, ()
        for i in range(schedule.pieces):
            if fed is not None:
                before = () if i else (len(self.kernels) - 1,)
                waits = (self._add(collective_piece(fed, schedule), *before),)
            pieces = [piece_of(one, schedule, i) for one in cut]
            for piece in pieces:
                self._add(piece, *waits)
                waits = ()
            if ended is not None:
                comm = collective_piece(ended, schedule)
                if schedule.kind == "chunks" and i + 1 < schedule.pieces:
                    comm = self._contested(comm, pieces[0])
                self.pending = (self._add(comm, len(self.kernels) - 1),)
        for one in parts if one_kernel else ():
            if not isinstance(one.work, GemmWork):
                self._in_turn([one])
        if ended is None and len(parts) == 1 and schedule.kind == "chunks":  # the others write into one output
            work = parts[0].work
            assert isinstance(work, GemmWork)
            moved = 2 * work.m * work.n * DType.BF16.bytes
            name = f"concat_{parts[0].name.split('_')[0]}"
            self._add(elementwise_kernel(name, Elementwise.COPY, work.m, work.n, moved))

    def _contested(self, comm: Kernel, product: Kernel) -> Kernel:
        """A reduce-scatter beside the next piece's product, which is like ``product``."""
        assert isinstance(comm.work, CollectiveWork) and isinstance(product.work, GemmWork)
        if comm.work.op is not CollectiveOp.REDUCE_SCATTER:
            return comm
        turn = sum(isinstance(k.work, CollectiveWork) and k.work.rival is not None for k in self.kernels)
        return changed(comm, work=changed(comm.work, rival=product.work, turn=turn))

    def _ring_in(self, parts: Sequence[Kernel], schedule: Schedule, fed: Kernel) -> None:
        """Each rank starts on its own rows, while it passes on what it has and takes what comes."""
        arrived: tuple[int, ...] = self.pending
        self.pending = ()
        for i in range(schedule.pieces):
            sent = -1
            if i < schedule.pieces - 1:
                before = () if i else (len(self.kernels) - 1,)
                sent = self._add(_passed_on(fed, schedule), *before)
            for one in parts:
                self._add(leave_sms(piece_of(one, schedule, i), schedule.ctas or 0), *arrived)
                arrived = ()
            arrived = (sent,)

    def _ring_out(self, parts: Sequence[Kernel], schedule: Schedule, ended: Kernel) -> None:
        """Partial sums travel: a rank adds its product to what arrived and passes it on; the last sum is its own."""
        (product,) = parts
        work = product.work
        assert isinstance(work, GemmWork)
        rows, width = work.m // schedule.pieces, work.n
        moved = 3 * rows * width * DType.BF16.bytes
        last = self._add(leave_sms(piece_of(product, schedule, 0), schedule.ctas or 0), *self.pending)
        for i in range(1, schedule.pieces):
            sent = self._add(_passed_on(ended, schedule), last)
            self._add(leave_sms(piece_of(product, schedule, i), schedule.ctas or 0))
            last = self._add(elementwise_kernel("add_partial", Elementwise.COPY, rows, width, moved), sent)
        self.pending = (last,)


def _passed_on(kernel: Kernel, schedule: Schedule) -> Kernel:
    """A piece of what ``kernel`` moves, to the neighbour; Transformer Engine's ring copies by copy engines."""
    piece = collective_piece(kernel, changed(schedule, ctas=schedule.ctas or 0))
    assert isinstance(piece.work, CollectiveWork)
    word = kernel.name.rsplit("_", 1)[-1]
    return changed(piece, name=f"exchange_{word}", work=changed(piece.work, op=CollectiveOp.SEND_RECV))


def _check(stage: Stage, parts: Sequence[Kernel], *collectives: Kernel | None) -> None:
    """Refuse pieces that do not come out even, and ways to run one product only for several."""
    schedule, pieces = stage.schedule, stage.schedule.pieces
    products = [one for one in parts if isinstance(one.work, GemmWork)]
    if not all(isinstance(one.work, GemmWork | ElementwiseWork) for one in parts):
        raise WorkloadError(f"overlap: {stage.nodes[0].name}: is not cut along tokens")
    if schedule.kind != "chunks" and (len(products) > 1 or (stage.feeds and stage.ends)):
        names = " and ".join(one.name for one in products)
        raise WorkloadError(f"overlap = '{schedule.kind}': is for one product and its collective, not {names}")
    for collective in collectives:
        if collective is not None and isinstance(collective.work, CollectiveWork):
            work = products[0].work
            assert isinstance(work, GemmWork)
            ranks = len(collective.work.ranks) if collective.work.op in _OF_SLICES else 1
            if work.m % (pieces * ranks) and (schedule.kind == "chunks" or ranks > 1):
                over = f" over tp = {ranks} ranks" if ranks > 1 else f" of {products[0].name}"
                raise WorkloadError(f"overlap_chunks = {pieces}: does not divide the {work.m} tokens{over}")
