"""Layouts: how a model is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workloads.kernel_names import EpKernels
from workloads.work import DType

CpMode = Literal["ulysses", "ring", "striped", "zigzag", "all_gather"]
Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism. Ranks are numbered tensor (or expert) innermost, then context, stage, replica.

    ``tp`` and ``ep`` name one group: its ranks split a layer's tensors, its experts, or both (``ep_mode`` as in
    the measurement records). ``micro_batches`` of a replica's batch travel through ``pp`` stages.
    ``ep_kernels`` dispatch tokens to experts and combine what these return, in place of an all-to-all and the kernels
    around it; ``dispatch_dtype`` is the type that they send tokens in (None: as experts read them). ``dcp`` ranks of a
    tensor group that would hold the same key/value heads share out the tokens of a server's caches.

    >>> Layout(tp=2, cp=2, pp=2, dp=2).world
    16
    """

    tp: int = 1
    ep: int = 1
    ep_mode: Literal["all_reduce", "all_to_all"] | None = None
    sequence_parallel: bool = False
    cp: int = 1
    cp_mode: CpMode = "ulysses"
    dcp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batches: int = 1
    pp_schedule: Schedule = "gpipe"
    ep_kernels: EpKernels | None = None
    dispatch_dtype: DType | None = None

    @property
    def group(self) -> int:
        """Ranks that share one layer's tensors or experts."""
        return max(self.tp, self.ep)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage of one replica."""
        return self.group * self.cp

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.stage_ranks * self.pp * self.dp

    @property
    def ranks(self) -> tuple[int, ...]:
        """The tensor or expert group of rank 0; :mod:`workloads.placement` gives every other rank its own."""
        return tuple(range(self.group))

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The tensor group of rank 0: all of its group, or the first of several that share experts."""
        return tuple(range(self.tp))

    @property
    def own_batches(self) -> int:
        """Batches that one expert group holds: where experts exchange tokens, each tensor group has its own."""
        return self.ep // self.tp if self.ep_mode == "all_to_all" else 1

    @property
    def context_ranks(self) -> tuple[int, ...]:
        """The context-parallel group of rank 0."""
        return tuple(range(0, self.stage_ranks, self.group))

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks of rank 0's tensor group that share out the tokens of its caches."""
        return tuple(range(self.dcp))

    @property
    def cache_shards(self) -> int:
        """Ranks over which the cached tokens of a sequence are spread.

        >>> [Layout(cp=2, cp_mode=mode).cache_shards for mode in ("ulysses", "all_gather")]
        [1, 2]
        """
        return self.dcp * (1 if self.cp_mode == "ulysses" else self.cp)

    @property
    def spreads(self) -> bool:
        """True where decoding reads a cache whose tokens lie on several ranks."""
        return self.dcp > 1 or (self.cp > 1 and self.cp_mode == "all_gather")

    def stage_layers(self, layers: int, stage: int) -> range:
        """The layers of ``stage``; what does not divide evenly goes to the last stages.

        >>> [len(Layout(pp=3).stage_layers(32, stage)) for stage in range(3)]
        [10, 11, 11]
        """
        base, over = divmod(layers, self.pp)
        ends = [base * s + max(0, s - (self.pp - over)) for s in range(self.pp + 1)]
        return range(ends[stage], ends[stage + 1])
