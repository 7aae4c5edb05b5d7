"""How a product and its collective run beside each other, and the pieces that they are cut in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inputs.changed import changed
from workloads.errors import WorkloadError
from workloads.kernels import product_bytes
from workloads.program import Kernel
from workloads.work import CollectiveWork, ElementwiseWork, GemmWork, GroupedGemmWork

COMM_STREAM = 1
COMM_PRIORITY = -1  # lower runs first, as in CUDA
PairKind = Literal["chunks", "ring_exchange", "tile_signal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How a pair runs: in ``pieces`` along tokens, communication on ``ctas`` blocks (None: the library's choice).

    ``chunks``: a product and a collective a piece; one piece is sequential in one stream. ``ring_exchange``: a
    piece a rank, each passed to the neighbour while the last one is multiplied (``ctas`` None or 0: by copy engines).
    ``tile_signal``: one product whose waves of tiles signal the collective of their piece, or wait for it.
    The products of the last two leave the SMs of ``ctas`` blocks free, so that communication never waits for SMs
    (Transformer Engine's userbuffers: math SMs = SMs - communication SMs; FlashOverlap, arXiv 2504.19519).
    """

    kind: PairKind = "chunks"
    pieces: int = 1
    ctas: int | None = None

    @property
    def sequential(self) -> bool:
        """True when nothing runs beside anything: one stream."""
        return self.pieces == 1


def piece_of(kernel: Kernel, schedule: Schedule, index: int) -> Kernel:
    """Piece ``index`` of a product or of what follows it: over its rows, or its share of the one kernel's tiles."""
    work, pieces = kernel.work, schedule.pieces
    assert isinstance(work, GemmWork | ElementwiseWork)
    flops = kernel.flops / pieces
    if isinstance(work, ElementwiseWork):
        part = changed(work, rows=work.rows // pieces, bytes_moved=work.bytes_moved // pieces)
        return changed(kernel, work=part, flops=flops, bytes_moved=float(part.bytes_moved))
    if schedule.kind == "tile_signal":
        work = changed(work, part=(index, pieces), beside_ctas=schedule.ctas)
        return changed(kernel, work=work, flops=flops, bytes_moved=kernel.bytes_moved / pieces)
    if work.m % pieces:
        raise WorkloadError(f"overlap_chunks = {pieces}: does not divide the {work.m} tokens of {kernel.name}")
    work = changed(work, m=work.m // pieces)
    return changed(kernel, work=work, flops=flops, bytes_moved=float(product_bytes(work)))


def collective_piece(kernel: Kernel, schedule: Schedule) -> Kernel:
    """A piece of a collective, on the stream of those that run beside compute."""
    assert isinstance(kernel.work, CollectiveWork)
    buffer = kernel.work.buffer_bytes // schedule.pieces
    work = changed(kernel.work, buffer_bytes=buffer, ctas=schedule.ctas)
    return changed(kernel, work=work, bytes_moved=float(buffer), stream=COMM_STREAM, priority=COMM_PRIORITY)


def leave_sms(kernel: Kernel, ctas: int) -> Kernel:
    """``kernel`` on the SMs that ``ctas`` blocks of a collective leave, if it is a matrix product."""
    if not isinstance(kernel.work, GemmWork | GroupedGemmWork):
        return kernel
    return changed(kernel, work=changed(kernel.work, beside_ctas=ctas or None))
