"""A matrix product and the collective that feeds or follows it, run beside each other in one of three ways."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from workloads.errors import WorkloadError
from workloads.kernels import Shape, elementwise_kernel, product_bytes, stored_kernel
from workloads.ops import Gemm
from workloads.program import Kernel
from workloads.work import CollectiveOp, CollectiveWork, DType, Elementwise, GemmWork, GroupedGemmWork

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


@dataclass(slots=True)
class LayerBuilder:
    """Kernels of one layer in launch order, with the index of each as it is added."""

    shape: Shape
    schedule: Schedule
    kernels: list[Kernel] = field(default_factory=list)

    def add(self, kernel: Kernel, *after: int) -> int:
        """Append ``kernel``; ``after`` are kernels of the other stream, left out where there is only one."""
        self.kernels.append(replace(kernel, after=() if self.schedule.sequential else after))
        return len(self.kernels) - 1

    def gathered(self, name: str, node: Gemm, normed: int, then: Pointwise | None = None) -> None:
        """All rows from the ranks' slices, then the product; ``then`` follows it on as many rows."""
        match self.schedule.kind:
            case "chunks" | "tile_signal":
                self._gathered_in_pieces(name, node, normed, then)
            case "ring_exchange":
                self._gathered_in_ring(name, node, normed, then)
            case _:
                assert_never(self.schedule.kind)

    def scattered(self, name: str, node: Gemm) -> int:
        """The product, then the sum over ranks of each one's slice; returns the kernel that ends it."""
        match self.schedule.kind:
            case "chunks" | "tile_signal":
                last = -1
                for i in range(self.schedule.pieces):
                    piece = self._piece(node, i)
                    made = self.add(piece)
                    comm = self._collective(f"reduce_scatter_{name}", CollectiveOp.REDUCE_SCATTER)
                    if self.schedule.kind == "chunks" and i + 1 < self.schedule.pieces:
                        comm = self._contested(comm, piece)
                    last = self.add(comm, made)
                return last
            case "ring_exchange":
                return self._scattered_in_ring(name, node)
        assert_never(self.schedule.kind)

    def _contested(self, comm: Kernel, product: Kernel) -> Kernel:
        """``comm`` beside the next piece's product, which is like ``product``."""
        assert isinstance(comm.work, CollectiveWork) and isinstance(product.work, GemmWork)
        turn = sum(isinstance(k.work, CollectiveWork) and k.work.rival is not None for k in self.kernels)
        return replace(comm, work=replace(comm.work, rival=product.work, turn=turn))

    @property
    def _rows(self) -> int:
        return self.shape.tokens // self.schedule.pieces

    def _gathered_in_pieces(self, name: str, node: Gemm, normed: int, then: Pointwise | None) -> None:
        """The product of each piece waits for its rows; ``then`` follows each chunk, or the one kernel of all tiles."""
        one_kernel = self.schedule.kind == "tile_signal"
        for i in range(self.schedule.pieces):
            comm = self._collective(f"all_gather_{name}", CollectiveOp.ALL_GATHER)
            gather = self.add(comm, normed) if i == 0 else self.add(comm)
            self.add(self._piece(node, i), gather)
            if then is not None and not one_kernel:
                self.add(then.kernel(self._rows))
        if then is not None and one_kernel:
            self.add(then.kernel(self.shape.tokens))

    def _gathered_in_ring(self, name: str, node: Gemm, normed: int, then: Pointwise | None) -> None:
        """Each rank starts on its own rows, while it passes on what it has and takes what comes."""
        arrived: tuple[int, ...] = ()
        for i in range(self.schedule.pieces):
            sent = -1
            if i < self.schedule.pieces - 1:
                sent = self.add(self._exchange(f"exchange_{name}"), *((normed,) if i == 0 else ()))
            self.add(self._piece(node, i), *arrived)
            if then is not None:
                self.add(then.kernel(self._rows))
            arrived = (sent,)

    def _scattered_in_ring(self, name: str, node: Gemm) -> int:
        """Partial sums travel: a rank adds its product to what arrived and passes it on; the last sum is its own."""
        width = self.shape.model.d_model
        moved = 3 * self._rows * width * DType.BF16.bytes
        last = self.add(self._piece(node, 0))
        for i in range(1, self.schedule.pieces):
            sent = self.add(self._exchange(f"exchange_{name}"), last)
            self.add(self._piece(node, i))
            last = self.add(elementwise_kernel("add_partial", Elementwise.COPY, self._rows, width, moved), sent)
        return last

    def _piece(self, node: Gemm, index: int) -> Kernel:
        """The product of one piece; a ring's leaves SMs to its exchanges."""
        schedule = self.schedule
        product, *others = dict.fromkeys(self.shape.precision.of(one) for one in node.ops)
        if others:
            raise WorkloadError(
                f"sequence_parallel: parts of {node.name} are stored otherwise than others: leave it out"
            )
        piece = product_piece(stored_kernel(node.name, node.ops, self.shape, product), schedule, index)
        return leave_sms(piece, self._exchange_ctas) if schedule.kind == "ring_exchange" else piece

    def _collective(self, name: str, op: CollectiveOp) -> Kernel:
        return self._communication(name, op, self._rows, self.schedule.ctas)

    def _exchange(self, name: str) -> Kernel:
        return self._communication(name, CollectiveOp.SEND_RECV, self._rows, self._exchange_ctas)

    @property
    def _exchange_ctas(self) -> int:
        return self.schedule.ctas or 0  # by itself Transformer Engine's ring copies by copy engines

    def _communication(self, name: str, op: CollectiveOp, rows: int, ctas: int | None) -> Kernel:
        buffer = rows * self.shape.model.d_model * DType.BF16.bytes
        beside = not self.schedule.sequential
        return Kernel(
            name=name,
            work=CollectiveWork(op=op, ranks=self.shape.layout.ranks, buffer_bytes=buffer, ctas=ctas),
            flops=0.0,
            bytes_moved=float(buffer),
            stream=COMM_STREAM if beside else 0,
            priority=COMM_PRIORITY if beside else 0,
        )


def product_piece(kernel: Kernel, schedule: Schedule, index: int) -> Kernel:
    """Piece ``index`` of a matrix product: over its rows, or over its share of the tiles of the one kernel."""
    work, pieces = kernel.work, schedule.pieces
    assert isinstance(work, GemmWork)
    flops = kernel.flops / pieces
    if schedule.kind == "tile_signal":
        work = replace(work, part=(index, pieces), beside_ctas=schedule.ctas)
        return replace(kernel, work=work, flops=flops, bytes_moved=kernel.bytes_moved / pieces)
    if work.m % pieces:
        raise WorkloadError(f"overlap_chunks = {pieces}: does not divide the {work.m} tokens of {kernel.name}")
    work = replace(work, m=work.m // pieces)
    return replace(kernel, work=work, flops=flops, bytes_moved=float(product_bytes(work)))


def leave_sms(kernel: Kernel, ctas: int) -> Kernel:
    """``kernel`` on the SMs that ``ctas`` blocks of a collective leave, if it is a matrix product."""
    if not isinstance(kernel.work, GemmWork | GroupedGemmWork):
        return kernel
    return replace(kernel, work=replace(kernel.work, beside_ctas=ctas or None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointwise:
    """A memory-bound kernel that follows a product, on any number of its rows; ``passes`` over ``width`` elements."""

    name: str
    op: Elementwise
    width: int
    passes: int

    def kernel(self, rows: int) -> Kernel:
        """The kernel on ``rows`` rows."""
        moved = self.passes * rows * self.width * DType.BF16.bytes
        return elementwise_kernel(self.name, self.op, rows, self.width, moved)
