"""The kernel graph: what the engine executes, as columns.

Order within a queue (one stream of one GPU) is implied by ``queue_ops``; other dependencies are edges in CSR
form. Kernels that cost the same are one class, so that memo keys are small integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hardware.laws.terms import KernelTerms
from hardware.network import Streams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transit:
    """What a collective of ``ranks`` sends between nodes: streams of ``stream_bytes`` each."""

    ranks: tuple[int, ...]
    streams: Streams
    stream_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelClass:
    """One kind of kernel: its cost terms and how it queues.

    ``gap_s`` is the pause between the end of its predecessor on the stream and its own start; the engine
    counts it at idle power and the recorder has no span for it; ``joining_gap_s`` is that after a kernel of another
    stream, where it is longer. ``lead_s`` passes before the kernel requests SMs, so that others may get them first.
    ``clearing_s`` of a kernel's own time (its floor) passes before its blocks start: other streams may get the SMs
    first. ``describe`` is shown in traces.
    """

    name: str
    family: str
    terms: KernelTerms
    gap_s: float = 0.0
    joining_gap_s: float = 0.0
    lead_s: float = 0.0
    clearing_s: float = 0.0
    beside: KernelTerms | None = None
    priority: int = 0
    collective: bool = False
    describe: Mapping[str, object] = field(default_factory=dict, compare=False)
    transit: Transit | None = field(default=None, compare=False)  # follows from the ranks, which ``describe`` names


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelGraph:
    """All kernels of all GPUs. ``op_collective`` is -1 for kernels of one rank.

    ``issue_ps`` holds the host's launch time of every kernel in eager mode, and is None for graphs.
    ``asynchronous_segments`` are transfers that run beside the other segments of their rank.
    ``partition_sms``: SMs of each partition of a GPU (none: all SMs are one), ``queue_partition`` that of each queue.
    """

    gpus: int
    classes: tuple[KernelClass, ...]
    op_class: list[int]
    op_gpu: list[int]
    op_queue: list[int]
    op_segment: list[int]
    op_collective: list[int]
    queue_gpu: tuple[int, ...]
    queue_stream: tuple[int, ...]
    queue_ops: tuple[Sequence[int], ...]
    successors: dict[int, tuple[int, ...]]
    predecessor_count: dict[int, int]
    collective_members: list[tuple[int, ...]]
    segments: tuple[tuple[str, str, int], ...]
    issue_ps: list[int] | None = None
    asynchronous_segments: frozenset[int] = frozenset()
    partition_sms: tuple[float, ...] = ()
    queue_partition: tuple[int, ...] = ()

    @property
    def kernels(self) -> int:
        """Number of kernels over all GPUs (a collective counts once a rank)."""
        return len(self.op_class)
