"""The shard pass: which arrays of a block the ranks of a tensor group hold in slices, and the collectives that follow.

An axis that is summed over while it is split leaves partial sums, which are reduced before anyone reads them. A node
that wants the whole of an axis that it finds split gets an all-gather. Slices of what is whole cost nothing. Nobody
types a collective: :func:`shard` puts them in, from the ``parallel`` of each op.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import assert_never

from workloads.errors import WorkloadError
from workloads.ops import (
    Attention,
    Exchange,
    Experts,
    Gemm,
    LatentAttention,
    Node,
    Op,
    Pointwise,
    StateSpace,
)
from workloads.work import CollectiveOp, Elementwise

# Heads are written by query or by key/value head: both are split alike.
_ALIKE = {"K": "H"}
_ROWS = "bs"
_HEADS = "bsHh"
# Work on the residual stream, which every rank holds whole.
_WHOLE = (Elementwise.ADD_RMSNORM, Elementwise.LAYERNORM, Elementwise.ADD)
_PER_HEAD = (Elementwise.ROPE, Elementwise.RMSNORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What a rank holds of one node's output: its arrays, which axes are split, whether the sums are partial."""

    name: str
    arrays: tuple[str, ...] = ("bsm",)
    split: frozenset[str] = frozenset()
    partial: bool = False
    of_heads: bool = False

    def found_split(self, axes: str) -> frozenset[str]:
        """The split axes that an input of ``axes`` has."""
        return self.split & {_ALIKE.get(axis, axis) for axis in axes}


@lru_cache(maxsize=512)
def shard(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """``nodes`` of a layer with their collectives; they start from, and leave, a whole residual stream.

    >>> from workloads.ops import fuse, op
    >>> up = fuse("up_gemm", op("bsm,mf->bsf", parallel="f", label="up"))
    >>> down = fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down"))
    >>> [node.name for node in shard((up, down))]
    ['up_gemm', 'down_gemm', 'all_reduce_down']
    """
    walk = _Walk()
    for node in nodes:
        walk.visit(node)
    walk.settle()
    return tuple(walk.made)


class _Walk:
    """The pass at work: nodes made so far, what the last one left, and branches that nobody has read yet."""

    def __init__(self) -> None:
        self.made: list[Node] = []
        self.held = _Held(name="input")
        self.by_name: dict[str, _Held] = {}
        self.waiting: list[_Held] = []

    def visit(self, node: Node) -> None:
        match node:
            case Gemm():
                self._product(node)
            case Pointwise():
                self._pointwise(node)
            case Attention():
                self._attention(node)
            case LatentAttention():
                self.settle()
                self.made.append(node)
                self.held = _Held(name=node.name, arrays=(_HEADS,), split=frozenset("H"), of_heads=True)
            case StateSpace():
                self.made.append(node)
                self.held = _Held(name=node.name, arrays=("bsi",), split=self.held.split & {"i"})
            case Experts():
                self.settle()
                self.made.append(node)
                self.held = _Held(name="experts")
            case Exchange():
                self.made.append(node)
            case _:
                assert_never(node)
        if not isinstance(node, Exchange):
            self.by_name[node.name] = self.held

    def settle(self) -> None:
        """Everyone has the whole of all that waits: one sum for all partial ones, a gather for each in slices."""
        held = [*self.waiting, self.held]
        self.waiting = []
        partial = [one for one in held if one.partial]
        if partial:
            last = partial[-1]
            word = "attn" if last.of_heads else _word(last.name)
            self._exchange(CollectiveOp.ALL_REDUCE, f"all_reduce_{word}", last.arrays)
        for one in held:
            if one.split:
                self._gather(one)
        self.held = replace(self.held, split=frozenset(), partial=False)

    def _exchange(self, op: CollectiveOp, name: str, arrays: tuple[str, ...]) -> None:
        self.made.append(Exchange(name=name, op=op, axes=arrays))

    def _gather(self, held: _Held) -> None:
        wanted = tuple(one for one in held.arrays if held.found_split(one))
        self._exchange(CollectiveOp.ALL_GATHER, f"all_gather_{_word(held.name)}", wanted)

    def _product(self, node: Gemm) -> None:
        """A product reads slices of the axis that it is split along, and all else whole."""
        _check_alike(node.name, node.ops)
        if node.source is not None:
            if node.source not in self.by_name:
                raise WorkloadError(f"{node.name}: source = '{node.source}': no node before it has that name")
            self.waiting.append(self.held)
            self.held = self.by_name[node.source]
        first = node.ops[0]
        parallel = _ALIKE.get(first.parallel or "", first.parallel)
        if self.held.partial:
            self.settle()
        if self.held.found_split(first.einsum.inputs[0]) - {parallel}:
            self._gather(self.held)
            self.held = replace(self.held, split=frozenset())
        self.made.append(node)
        left = {one.parallel for one in node.ops if one.parallel is not None and one.parallel in one.einsum.output}
        self.held = _Held(
            name=node.name,
            arrays=tuple(one.einsum.output for one in node.ops),
            split=frozenset(_ALIKE.get(axis, axis) for axis in left),
            partial=first.einsum.reduction(first.parallel) is not None,
            of_heads=parallel == "H",
        )

    def _pointwise(self, node: Pointwise) -> None:
        """Norms and sums of the residual stream want it whole; what works on each element takes slices as they are."""
        if node.op in _WHOLE or self.held.partial:
            self.settle()
        split = self.held.found_split("H" if node.op in _PER_HEAD else node.axis) or self.held.found_split(_ROWS)
        self.made.append(replace(node, parallel=min(split, default=None)))
        if node.op in _WHOLE:
            self.held = _Held(name=node.name)
        elif node.op not in _PER_HEAD:
            self.held = replace(self.held, arrays=self.held.arrays[:1])  # a gate and what it gates become one

    def _attention(self, node: Attention) -> None:
        """Heads are independent, all else of an attention is summed over or normalised: only heads are split."""
        parallel = node.scores.parallel
        for part in (node.scores, node.values):
            if part.parallel not in (None, "H", "K", "b"):
                raise WorkloadError(
                    f"{node.name}: parallel = '{part.parallel}' of {part.label}: the softmax needs whole rows of "
                    "scores: split heads ('K' or 'H'), or leave it out"
                )
        if _ALIKE.get(parallel or "", parallel) != _ALIKE.get(node.values.parallel or "", node.values.parallel):
            raise WorkloadError(
                f"{node.name}: scores are split along {_said(parallel)} and values along "
                f"{_said(node.values.parallel)}: give both the same parallel"
            )
        split = None if parallel is None else _ALIKE.get(parallel, parallel)
        if self.held.partial:
            self.settle()
        if self.held.split - {split}:
            self._gather(self.held)
        self.made.append(node)
        self.held = _Held(
            name=node.name, arrays=(_HEADS,), split=frozenset(() if split is None else split), of_heads=True
        )


def _check_alike(name: str, ops: tuple[Op, ...]) -> None:
    """Arrays of the same axes from one product are read together, so that they must be split alike."""
    for one in ops[1:]:
        for other in ops:
            if one.einsum.output == other.einsum.output and one.parallel != other.parallel:
                raise WorkloadError(
                    f"{name}: {other.label} is split along {_said(other.parallel)} and {one.label} along "
                    f"{_said(one.parallel)}, both yield '{one.einsum.output}': give both the same parallel"
                )
    for one in ops:
        if one.einsum.reduction(one.parallel) != ops[0].einsum.reduction(ops[0].parallel):
            raise WorkloadError(
                f"{name}: {one.label} and {ops[0].label} share one kernel, and only one of them leaves partial sums: "
                "give both the same parallel"
            )


def _said(parallel: str | None) -> str:
    return "nothing" if parallel is None else f"'{parallel}'"


def _word(name: str) -> str:
    return name.split("_")[0]
