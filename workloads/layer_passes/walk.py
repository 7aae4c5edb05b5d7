"""What the ranks of a group hold while the shard pass goes through a layer, and the collectives that this asks for."""

from __future__ import annotations

from dataclasses import replace

from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp
from workloads.layer_passes.held import INPUT, RESIDUAL, Held, said, word_of
from workloads.layer_passes.tree import Exchange, ExpertRouter, Placed, RankSplit
from workloads.ops import Gemm, Group, LatentAttention

ROWS = "bs"
QKV = ("bsHh", "bsKh", "bsKj")


class Walk:
    """Nodes made so far, what the last one left, and branches that nobody has read yet."""

    def __init__(self, split: RankSplit) -> None:
        self.split = split
        self.residual = frozenset("s") if split.rows else frozenset()
        self.made: list[Placed] = []
        self.held = Held(name=INPUT, split=self.residual)
        self.by_name: dict[str, Held] = {}
        self.waiting: list[Held] = []
        self.read = self.held  # by the experts: what their router reads
        self.half = "in"  # the last word of the last norm's name: which half of a layer this is

    def settle(self) -> None:
        """The residual stream as ranks hold it, of all that waits: one sum for all partial ones, a gather for each in
        other slices."""
        held = [*self.waiting, self.held]
        self.waiting = []
        for last in {one.group: one for one in held if one.partial}.values():
            self._sum(last)
        for one in held:
            if one.split - self.residual:
                self._gather(one)
            if one.name in self.by_name:
                self.by_name[one.name] = replace(one, split=one.split & self.residual, partial=False)
        # Sums of other arrays than the residual stream are whole on every rank.
        left = self.held.split & self.residual if self.held.arrays != (RESIDUAL,) else self.residual
        self.held = replace(self.held, split=left, partial=False, group="tensor")

    def _sum(self, last: Held) -> None:
        if self.split.rows and last.arrays == (RESIDUAL,):
            name = f"reduce_scatter_{self.half}"
            self.made.append(Exchange(name=name, op=CollectiveOp.REDUCE_SCATTER, axes=last.arrays, rows=True))
            return
        word = "attn" if last.of_heads else word_of(last.name)
        self._exchange(CollectiveOp.ALL_REDUCE, f"all_reduce_{word}", last.arrays, group=last.group)

    def _whole_rows(self) -> None:
        """Every rank has all tokens of the residual stream."""
        if self.held.partial:
            self.settle()
        if self.held.split:
            self._gather_whole()

    def _from(self, node: Gemm | LatentAttention | ExpertRouter) -> None:
        """A node that reads an earlier one: what the one before it left waits for its reader."""
        if node.source is None:
            return
        if node.source not in self.by_name:
            raise WorkloadError(f"{node.name}: source = '{node.source}': no node before it has that name")
        self.waiting.append(self.held)
        self.held = self.by_name[node.source]

    def _heads(self) -> list[str]:
        """Arrays of heads that are held, or wait for attention."""
        arrays = (array for one in (*self.waiting, self.held) for array in one.arrays)
        return [array for array in arrays if array in QKV]

    def _meet(self, name: str, split: frozenset[str]) -> None:
        """Attention reads queries and keys of several products, and a gate of its output waits as it is."""
        for one in [*self.waiting, self.held]:
            if all(array in QKV for array in one.arrays) and not one.partial:
                if one.split and one.split != split:
                    if not one.split <= {*ROWS}:
                        raise WorkloadError(
                            f"{name}: heads of {one.name} are split along {said(min(one.split))} and its own along "
                            f"{said(min(split, default=None))}: give both the same parallel"
                        )
                    self._gather(one)  # each rank has made the heads of some tokens
                    if one is self.held:
                        self.held = replace(one, split=frozenset())
                if one in self.waiting:
                    self.waiting.remove(one)

    def _gather_whole(self) -> None:
        """What is held, whole on every rank from here on."""
        self._gather(self.held)
        self.held = replace(self.held, split=frozenset())
        if self.held.name in self.by_name:
            self.by_name[self.held.name] = self.held

    def _exchange(self, op: CollectiveOp, name: str, arrays: tuple[str, ...], *, group: Group = "tensor") -> None:
        self.made.append(Exchange(name=name, op=op, axes=arrays, group=group))

    def _gather(self, held: Held) -> None:
        wanted = tuple(one for one in held.arrays if held.found_split(one))
        rows = self.split.rows and held.split == self.residual
        word = self.half if rows else word_of(held.name)
        self.made.append(Exchange(name=f"all_gather_{word}", op=CollectiveOp.ALL_GATHER, axes=wanted, rows=rows))
