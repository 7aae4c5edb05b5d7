"""Ranks that measure together: collectives with a forced number of NCCL blocks, and agreement on the host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from hardware.errors import HardwareError

Tensor = Any
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv_ring")


class Comm(Protocol):
    """One rank's view of the group; host agreement (``share``) and GPU collectives (``collective``)."""

    rank: int
    world: int

    def share(self, value: float) -> list[float]:
        """Every rank's ``value``, in rank order, on the host."""

    def collective(self, op: str, buffer: Tensor, part: Tensor, ctas: int | None) -> None:
        """Launch ``op`` on the current stream with ``ctas`` NCCL blocks (None: NCCL's choice).

        all_reduce (average) works in ``buffer``; all_gather ``part`` -> ``buffer``; reduce_scatter (sum)
        ``buffer`` -> ``part``; all_to_all and sendrecv_ring ``buffer`` -> ``part`` of the same size.
        """

    def all_reduce_sum(self, buffer: Tensor) -> None:
        """Sum over ranks in place, NCCL's choice of blocks: what a tensor-parallel step runs."""

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> None:
        """Send to one rank and receive from another at once, on the current stream; every rank takes part."""

    def close(self) -> None:
        """Leave the group."""


def most(comm: Comm, value: float) -> float:
    """The largest of the ranks' values: what all ranks must agree on before counting repetitions."""
    return max(comm.share(value))


def part_bytes(op: str, full_bytes: int, world: int) -> int:
    """Bytes of the smaller buffer of ``op`` whose full buffer has ``full_bytes``.

    >>> part_bytes("all_gather", 1024, 4), part_bytes("all_to_all", 1024, 4)
    (256, 1024)
    """
    match op:
        case "all_gather" | "reduce_scatter":
            return full_bytes // world
        case "all_reduce" | "all_to_all" | "sendrecv_ring":
            return full_bytes
        case _:
            raise HardwareError(f"unknown collective '{op}': one of {', '.join(COLLECTIVES)}")


class QuietComm:
    """A group of ranks that exchanges nothing: one GPU alone, or a dry run of several."""

    def __init__(self, *, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world

    def share(self, value: float) -> list[float]:
        """The own value for every rank."""
        return [value] * self.world

    def collective(self, op: str, buffer: Tensor, part: Tensor, ctas: int | None) -> None:
        """Only check sizes."""
        if ctas is not None and ctas < 1:
            raise HardwareError(f"ctas = {ctas}: at least one block")
        want = part_bytes(op, buffer.numel(), self.world)
        if op != "all_reduce" and part.numel() != want:
            raise HardwareError(f"{op}: buffer of {buffer.numel()} elements needs a part of {want}, got {part.numel()}")

    def all_reduce_sum(self, buffer: Tensor) -> None:
        """Only check that there is something to reduce."""
        if buffer.numel() == 0:
            raise HardwareError("all_reduce of an empty tensor: give it elements")

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> None:
        """Only check the ranks."""
        for tensor, other in ((send, to), (receive, source)):
            if tensor is not None and not 0 <= other < self.world:
                raise HardwareError(f"cannot exchange {tensor.numel()} elements with rank {other} of {self.world}")

    def close(self) -> None:
        """Nothing to leave."""


class NcclComm:
    """NCCL through torch.distributed, one process a GPU, one communicator per forced block count."""

    def __init__(self, torch: Any, *, rank: int, world: int, port: int, ctas: Sequence[int | None]) -> None:
        import torch.distributed as dist

        # NVLink multicast stays off unless the user says otherwise: records were taken without it.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._torch, self._dist, self.rank, self.world = torch, dist, rank, world
        dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        self._host = dist.new_group(backend="gloo")
        self._groups: dict[int | None, Any] = {None: None}
        for count in sorted({c for c in ctas if c is not None}):
            options = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True
            options.config.min_ctas = count
            options.config.max_ctas = count
            self._groups[count] = dist.new_group(backend="nccl", pg_options=options)
        # Communicators are built by their first collective, which must not happen inside a graph capture.
        warm = torch.zeros(1024 * world, device="cuda", dtype=torch.bfloat16)
        for group in self._groups.values():
            dist.all_reduce(warm, group=group)
            self._ring(warm, torch.empty_like(warm), group)
        torch.cuda.synchronize()

    def share(self, value: float) -> list[float]:
        """See :class:`Comm`; over gloo, so that the GPUs are not disturbed."""
        mine = self._torch.tensor([float(value)], dtype=self._torch.float64)
        all_ranks = [self._torch.zeros(1, dtype=self._torch.float64) for _ in range(self.world)]
        self._dist.all_gather(all_ranks, mine, group=self._host)
        return [float(rank) for rank in all_ranks]

    def collective(self, op: str, buffer: Tensor, part: Tensor, ctas: int | None) -> None:
        """See :class:`Comm`."""
        dist, group = self._dist, self._group(ctas)
        match op:
            case "all_reduce":
                dist.all_reduce(buffer, op=dist.ReduceOp.AVG, group=group)
            case "all_gather":
                dist.all_gather_into_tensor(buffer, part, group=group)
            case "reduce_scatter":
                dist.reduce_scatter_tensor(part, buffer, group=group)
            case "all_to_all":
                dist.all_to_all_single(part, buffer, group=group)
            case "sendrecv_ring":
                self._ring(buffer, part, group)
            case _:
                raise HardwareError(f"unknown collective '{op}': one of {', '.join(COLLECTIVES)}")

    def all_reduce_sum(self, buffer: Tensor) -> None:
        """See :class:`Comm`."""
        self._dist.all_reduce(buffer)

    def exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int) -> None:
        """See :class:`Comm`."""
        self._exchange(send, to, receive, source, None)

    def close(self) -> None:
        """Leave; every captured graph must be gone by now or NCCL waits for it."""
        self._torch.cuda.synchronize()
        self._dist.barrier(group=self._host)
        self._dist.destroy_process_group()

    def _exchange(self, send: Tensor | None, to: int, receive: Tensor | None, source: int, group: Any) -> None:
        # An all-to-all with one non-empty split is the same NCCL send and receive, and it can be captured.
        sizes = [[0] * self.world, [0] * self.world]
        empty = self._torch.empty(0, device="cuda", dtype=self._torch.bfloat16)
        out, inp = empty, empty
        if send is not None:
            inp, sizes[0][to] = send.view(-1), send.numel()
        if receive is not None:
            out, sizes[1][source] = receive.view(-1), receive.numel()
        self._dist.all_to_all_single(out, inp, output_split_sizes=sizes[1], input_split_sizes=sizes[0], group=group)

    def _ring(self, send: Tensor, receive: Tensor, group: Any) -> None:
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        self._exchange(send, after, receive, before, group)

    def _group(self, ctas: int | None) -> Any:
        if ctas not in self._groups:
            known = ", ".join(str(c) for c in self._groups)
            raise HardwareError(f"no communicator of {ctas} blocks: the plan opened {known}")
        return self._groups[ctas]
