"""What a rank holds of a node's output, and which annotations of one node contradict each other."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp
from workloads.layer_passes.tree import Exchange
from workloads.ops import Attention, Group, Op
from workloads.work import DType

# Heads are written by query or by key/value head: both are split alike.
ALIKE = {"K": "H"}
RESIDUAL = "bsm"
INPUT = "input"  # the name of what a layer starts from
TOKEN_BYTES = 8  # one token id, 64 bits, as frameworks keep them


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds of one node's output: its arrays, which axes are split, whether the sums are partial."""

    name: str
    arrays: tuple[str, ...] = (RESIDUAL,)
    split: frozenset[str] = frozenset()
    partial: bool = False
    of_heads: bool = False
    group: Group = "tensor"
    element_bytes: int = DType.BF16.bytes

    def found_split(self, axes: str) -> frozenset[str]:
        """The split axes that an input of ``axes`` has."""
        return self.split & {ALIKE.get(axis, axis) for axis in axes}


def handed_on(stage: str, held: Held) -> Exchange:
    """What the next stage starts from, in the slices that its ranks hold too."""
    return Exchange(
        name=f"send_{stage}",
        op=CollectiveOp.SEND,
        axes=held.arrays,
        group="stages",
        parallel=min(held.split, default=None),
        element_bytes=held.element_bytes,
    )


def split_of(ops: tuple[Op, ...]) -> frozenset[str]:
    """Axes of the outputs that are left in slices."""
    left = {one.parallel for one in ops if one.parallel is not None and one.parallel in one.einsum.output}
    return frozenset(ALIKE.get(axis, axis) for axis in left)


def check_alike(name: str, ops: tuple[Op, ...]) -> None:
    """Arrays of the same axes from one product are read together, so that they must be split alike."""
    for one in ops[1:]:
        for other in ops:
            if one.einsum.output == other.einsum.output and one.parallel != other.parallel:
                raise WorkloadError(
                    f"{name}: {other.label} is split along {said(other.parallel)} and {one.label} along "
                    f"{said(one.parallel)}, both yield '{one.einsum.output}': give both the same parallel"
                )
    for one in ops:
        if one.einsum.reduction(one.parallel) != ops[0].einsum.reduction(ops[0].parallel):
            raise WorkloadError(
                f"{name}: {one.label} and {ops[0].label} share one kernel, and only one of them leaves partial sums: "
                "give both the same parallel"
            )


def check_reads(name: str, axes: str, held: Held) -> None:
    """Refuse a node whose input is no array of what it reads; latents of queries (``q``) are inside attention."""
    if held.name == INPUT:  # a tree that starts inside a layer
        return
    wanted = {ALIKE.get(axis, axis) for axis in axes} - {*"bsq"}
    if not any(wanted <= {ALIKE.get(axis, axis) for axis in one} for one in held.arrays):
        raise WorkloadError(
            f"{name}: reads '{axes}', and {held.name} yields {' and '.join(map(repr, held.arrays))}: mend one of them, "
            "or name what it reads as its source"
        )


def check_heads(node: Attention, heads: list[str], held: Held) -> None:
    """Refuse attention that lacks queries, keys or values, or that reads an earlier layer's keys and makes some too."""
    if held.name == INPUT or not heads:  # what it reads is of axes of the model's own
        return
    if node.shared and makes_keys(heads):
        raise WorkloadError(
            f"{node.name}: reads the cache of an earlier layer, and {held.name} yields {len(heads)} arrays of heads: "
            "leave keys and values out, or cache"
        )
    if not node.shared and len(heads) < 3 - node.keys_are_values:
        raise WorkloadError(
            f"{node.name}: reads queries, keys and values, and {held.name} yields {' and '.join(heads)}: yield all "
            "three, or name the layer whose keys and values it reads: cache"
        )


def makes_keys(heads: list[str]) -> bool:
    """Whether arrays of heads are more than queries and a gate of theirs."""
    return len(heads) > 2 or any("K" in array for array in heads)


def check_together(name: str, held: Held, other: Held) -> None:
    """Refuse two inputs of one node of which ranks hold other parts."""
    if (other.split, other.partial) != (held.split, held.partial):
        raise WorkloadError(
            f"{name}: {held.name} is split along {said(min(held.split, default=None))} and {other.name} along "
            f"{said(min(other.split, default=None))}: give both the same parallel"
        )


def said(parallel: str | None) -> str:
    return "nothing" if parallel is None else f"'{parallel}'"


def word_of(name: str) -> str:
    return name.split("_")[0]
