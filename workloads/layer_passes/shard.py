"""The shard pass: which arrays of a layer the ranks of a group hold in slices, and the collectives that follow.

An axis that is summed over while it is split leaves partial sums, which are reduced before anyone reads them (scattered
where the residual stream is held in slices of the tokens). A node that wants the whole of an axis that it finds split
gets an all-gather. Rows of experts on other ranks travel there and back, heads are exchanged for tokens where a
sequence is split, and logits are gathered where one reads them all. Slices of what is whole cost nothing. Nobody types
a collective: :func:`shard` puts them in, from the ``parallel`` of each op.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal, assert_never

from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.layer_passes.held import (
    ALIKE,
    RESIDUAL,
    TOKEN_BYTES,
    Held,
    check_alike,
    check_heads,
    check_reads,
    check_together,
    handed_on,
    makes_keys,
    said,
    split_of,
)
from workloads.layer_passes.rounds import over_context
from workloads.layer_passes.tree import (
    Combine,
    Embedding,
    Exchange,
    ExpertAct,
    ExpertRouter,
    ExpertRows,
    Grouped,
    Head,
    Join,
    KeyRounds,
    LastTokens,
    Permute,
    Placed,
    RankSplit,
    SampleToken,
    StageEnd,
)
from workloads.layer_passes.walk import ROWS, Walk
from workloads.ops import Attention, Gemm, Group, Indexer, LatentAttention, Op, Pointwise, StateSpace

_HEADS = "bsHh"
_ROUTED = "bskm"
# Work on the residual stream, whose width every rank holds whole.
_WHOLE = (Elementwise.ADD_RMSNORM, Elementwise.LAYERNORM, Elementwise.ADD)
_PER_HEAD = (Elementwise.ROPE, Elementwise.RMSNORM)


@lru_cache(maxsize=512)
def shard(nodes: tuple[Placed, ...], split: RankSplit | None = None, *, returns: bool = True) -> tuple[Placed, ...]:
    """``nodes`` of a layer with their collectives; they start from the residual stream and, if it ``returns``, leave
    it: whole, or in the slices of the tokens that ``split`` says.

    >>> from workloads.ops import fuse, op
    >>> up = fuse("up_gemm", op("bsm,mf->bsf", parallel="f", label="up"))
    >>> down = fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down"))
    >>> [node.name for node in shard((up, down))]
    ['up_gemm', 'down_gemm', 'all_reduce_down']
    """
    walk = _Rules(split or RankSplit())
    for node in nodes:
        walk.visit(node)
    if returns:
        walk.settle()
    return tuple(walk.made)


class _Rules(Walk):
    """What each node reads and leaves."""

    def visit(self, node: Placed) -> None:
        match node:
            case Gemm(source="encoder"):  # keys and values beside the queries that the node before made
                check_alike(node.name, node.ops)
                if split_of(node.ops) != self.held.split:
                    raise WorkloadError(
                        f"{node.name}: keys of the encoder and the queries of {self.held.name} are split in different "
                        "ways: give both the same parallel"
                    )
                self.made.append(node)
                return
            case Gemm():
                self._product(node)
            case Pointwise():
                self._pointwise(node)
            case Attention():
                self._attention(node)
            case LatentAttention():
                self._from(node)
                self._meet(node.name, frozenset("H"))
                check_reads(node.name, RESIDUAL, self.held)
                self._whole_rows()
                self.made.append(node)
                self.held = Held(name=node.name, arrays=(_HEADS,), split=frozenset("H"), of_heads=True)
            case Indexer():
                self._whole_rows()
                self.made.append(node)
            case StateSpace():
                self.made.append(node)
                self.held = Held(name=node.name, arrays=("bsi",), split=self.held.split & {"i"})
            case ExpertRouter() | ExpertRows() | Grouped() | ExpertAct() | Combine() | Join():
                self._experts(node)
            case Embedding():
                self.made.append(node)
                self.held = Held(name=node.name, partial=node.op.einsum.reduction(node.op.parallel) is not None)
            case LastTokens():
                if self.split.rows:  # these tokens lie on the last rank
                    self._exchange(CollectiveOp.BROADCAST, f"broadcast_{node.name}", (RESIDUAL,))
                self.made.append(node)
                self.held = Held(name=node.name)
            case Head():
                if self.held.split:
                    self._gather(self.held)
                self.made.append(node)
                self.held = Held(name="logits", arrays=(node.op.einsum.output,), split=split_of((node.op,)))
            case SampleToken():
                if self.held.split:
                    self._gather(self.held)
                self.made.append(node)
                self.held = Held(name="token", arrays=("bs",), element_bytes=TOKEN_BYTES)
            case StageEnd():
                if self.held.partial:
                    self.settle()
                self.made.append(handed_on(node.name, self.held))
            case Exchange() | Permute() | KeyRounds():
                self.made.append(node)
            case _:
                assert_never(node)
        if not isinstance(node, Exchange | Permute):
            self.by_name[node.name] = self.held

    def _product(self, node: Gemm) -> None:
        """A product reads slices of the axis that it is split along, and all else whole."""
        check_alike(node.name, node.ops)
        if self.split.context and node.ops[0].einsum.of_activations:
            raise WorkloadError(
                f"{node.name}: '{node.ops[0].einsum.pattern}' multiplies tokens by tokens, of which a rank holds some "
                "with cp: write it as node = 'attention', or use cp = 1"
            )
        self._from(node)
        first = node.ops[0]
        if not first.einsum.of_activations:
            check_reads(node.name, first.einsum.inputs[0], self.held)
        parallel = ALIKE.get(first.parallel or "", first.parallel)
        if self.held.partial:
            self.settle()
        if self.held.found_split(first.einsum.inputs[0]) - {parallel}:
            self._gather_whole()
        self.made.append(node)
        self.held = Held(
            name=node.name,
            arrays=tuple(one.einsum.output for one in node.ops),
            split=split_of(node.ops),
            partial=first.einsum.reduction(first.parallel) is not None,
            of_heads=parallel == "H",
            group=node.group,
        )

    def _pointwise(self, node: Pointwise) -> None:
        """Norms and sums of the residual stream want its width; what works on each element takes slices as they are."""
        whole = node.op in _WHOLE
        if not whole and node.op not in _PER_HEAD and self.held.arrays != (RESIDUAL,):
            check_reads(node.name, ROWS + node.axis, self.held)
        if node.op is Elementwise.ADD and self._summed_alike(node):  # the sum of partial sums is one
            whole = False
            self.held = replace(self.held, name=node.name)
        elif whole or self.held.partial:
            self.settle()
        if node.beside is not None:
            self._beside(node)
        split = self.held.found_split("H" if node.op in _PER_HEAD else node.axis) or self.held.found_split(ROWS)
        heads = self._heads()
        queries = node.op in _PER_HEAD and bool(heads) and not makes_keys(heads)
        self.made.append(replace(node, parallel=min(split, default=None), queries=queries))
        if whole:
            self.half = node.name.rsplit("_", 1)[-1]
            self.held = Held(name=node.name, split=self.residual)
        elif node.op not in _PER_HEAD:
            self.held = replace(self.held, arrays=self.held.arrays[:1])  # a gate and what it gates become one

    def _summed_alike(self, node: Pointwise) -> bool:
        """Whether both inputs are partial sums over the same ranks, as of the halves of a parallel block."""
        other = None if node.beside is None else self._other(node)
        return other in self.waiting and other is not None and other.partial and other.group == self.held.group

    def _other(self, node: Pointwise) -> Held:
        if node.beside not in self.by_name:
            raise WorkloadError(f"{node.name}: beside = '{node.beside}': no node before it has that name")
        return self.by_name[node.beside]

    def _beside(self, node: Pointwise) -> None:
        """A second input, which has the elements of the first one."""
        other = self._other(node)
        check_together(node.name, self.held, other)
        if other in self.waiting:
            self.waiting.remove(other)

    def _attention(self, node: Attention) -> None:
        """Heads are independent, all else of an attention is summed over or normalised: only heads are split."""
        parallel = node.scores.parallel
        for part in (node.scores, node.values):
            if part.parallel not in (None, "H", "K", "b"):
                raise WorkloadError(
                    f"{node.name}: parallel = '{part.parallel}' of {part.label}: the softmax needs whole rows of "
                    "scores: split heads ('K' or 'H'), or leave it out"
                )
        if ALIKE.get(parallel or "", parallel) != ALIKE.get(node.values.parallel or "", node.values.parallel):
            raise WorkloadError(
                f"{node.name}: scores are split along {said(parallel)} and values along "
                f"{said(node.values.parallel)}: give both the same parallel"
            )
        if not node.cross:
            check_heads(node, self._heads(), self.held)
        split = None if parallel is None else ALIKE.get(parallel, parallel)
        if split is not None:
            self._meet(node.name, frozenset(split))
        if self.held.partial:
            self.settle()
        if self.held.split - {split}:
            self._gather(self.held)
        self.made += over_context(node, self.split)
        made = "bsHj" if "j" in node.values.einsum.output else _HEADS
        self.held = Held(name=node.name, arrays=(made,), split=frozenset(() if split is None else split), of_heads=True)

    def _experts(self, node: ExpertRouter | ExpertRows | Grouped | ExpertAct | Combine | Join) -> None:
        """Rows go to where their experts are; of experts that others hold, or slices of them, sums are partial."""
        match node:
            case ExpertRouter():
                self._from(node)
                check_reads(node.name, RESIDUAL, self.held)
                self._whole_rows()
                self.held = self.read = replace(self.held, split=frozenset(node.op.parallel or ""))
            case ExpertRows():
                if self.held is not self.read and self.held.name != "rows":
                    self.waiting.append(self.held)  # the shared expert's output
                if node.parallel == "e" and self.split.experts == "own_tokens":
                    self.made.append(ExpertRows(name="gather_dispatch", op=node.op))
                    self._travel("away", node.op)
                self.held = Held(name="rows", arrays=(_ROUTED,), split=frozenset(node.parallel or ""))
            case Grouped():
                self._grouped(node)
            case ExpertAct():
                pass
            case Combine():
                elsewhere = "e" in self.held.split
                if elsewhere and self.split.experts == "own_tokens":
                    self.made.append(ExpertRows(name="gather_return", op=self._last_op()))
                    self._travel("home", self._last_op())
                node = replace(node, partial=elsewhere and self.split.experts == "same_tokens")
                partial = node.partial or self.held.partial
                group: Group = "experts" if node.partial else "tensor"
                made = (self._last_op().einsum.output.replace("k", ""),)
                split = frozenset(node.parallel or "")
                self.held = Held(name="ff", arrays=made, split=split, partial=partial, group=group)
            case Join():
                other = self.by_name.get(node.source)
                if other is None or other not in self.waiting:
                    raise WorkloadError(f"{node.name}: source = '{node.source}': no node before it has that name")
                if (other.partial, other.split, other.group) != (self.held.partial, self.held.split, self.held.group):
                    raise WorkloadError(
                        f"{node.name}: {node.source} and the experts are split in different ways: give both the same "
                        "parallel"
                    )
                self.waiting.remove(other)
        self.made.append(node)

    def _grouped(self, node: Grouped) -> None:
        axis = node.ops[0].parallel
        held = self.held.found_split("ef")
        if held - {axis}:
            raise WorkloadError(
                f"{node.name}: rows are split along {said(min(held))} and its weights along {said(axis)}: give both "
                "the same parallel"
            )
        einsum = node.ops[0].einsum
        stays = axis is not None and (axis in einsum.selected or axis in einsum.output)
        self.held = Held(
            name=node.name,
            arrays=(einsum.output,),
            split=frozenset(axis if stays and axis else ""),
            partial=einsum.reduction(axis) is not None,
        )

    def _last_op(self) -> Op:
        return next(node.ops[0] for node in reversed(self.made) if isinstance(node, Grouped))

    def _travel(self, way: Literal["away", "home"], reader: Op) -> None:
        name = f"all_to_all_{'dispatch' if way == 'away' else 'combine'}"
        self.made.append(
            Exchange(name=name, op=CollectiveOp.ALL_TO_ALL, axes=(_ROUTED,), group="experts", travel=way, reader=reader)
        )
