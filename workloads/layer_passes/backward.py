"""Which exchanges the pass of gradients needs, from the same annotations as the forward ones.

The gradient of an einsum's input is an einsum of the output's gradient and the weight, that of its weight one of the
input and the output's gradient: an axis that is contracted in it while ranks hold slices of it leaves partial sums.
Columns split over ranks (``bsm,mf->bsf`` along ``f``) are contracted in the input's gradient, rows (``bsf,mf->bsm``)
are not; the tokens, which no weight has, are contracted in every weight's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from workloads.kernel_names import CollectiveOp
from workloads.layer_passes.tree import Grouped, Placed, RankSplit
from workloads.ops import Gemm, Op

TOKENS = "bs"
Sharding = Literal["ddp", "zero1", "zero2", "zero3"]


def partial_inputs(nodes: tuple[Placed, ...], split: RankSplit) -> frozenset[str]:
    """Names of the nodes of which each rank knows a part of their input's gradient only.

    >>> from workloads.ops import fuse, op
    >>> up = fuse("up_gemm", op("bsm,mf->bsf", parallel="f", label="up"))
    >>> down = fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down"))
    >>> sorted(partial_inputs((up, down), RankSplit()))
    ['up_gemm']
    """
    return frozenset(
        node.name
        for node in nodes
        if isinstance(node, Gemm | Grouped) and any(_partial(one, split) for one in node.ops)
    )


def _partial(one: Op, split: RankSplit) -> bool:
    """Whether the axis that ``one`` is split along is summed over in its input's gradient; of experts that others hold
    no rank of the same tokens has the gradient."""
    if one.parallel is None:
        return False
    if one.parallel in one.einsum.selected:
        return split.experts == "same_tokens"
    return one.einsum.gradient(0).reduction(one.parallel) is not None


def summed_over(one: Op, axes: str = TOKENS) -> bool:
    """Whether ranks that hold slices of ``axes`` (their own tokens) must sum the gradient of the weight of ``one``.

    >>> from workloads.ops import op
    >>> summed_over(op("bsm,mf->bsf", label="up")), summed_over(op("bsm,mf->bsf", label="up"), "f")
    (True, False)
    """
    gradient = one.einsum.gradient(1)
    return any(gradient.reduction(axis) is not None for axis in axes)


def transposed(op: CollectiveOp) -> CollectiveOp | None:
    """The collective of the gradients of what ``op`` moved; None: each rank has them already, as the gradient of a sum
    is whole on every rank that added to it.

    >>> transposed(CollectiveOp.ALL_GATHER).value, transposed(CollectiveOp.ALL_REDUCE)
    ('reduce_scatter', None)
    """
    match op:
        case CollectiveOp.ALL_GATHER:
            return CollectiveOp.REDUCE_SCATTER
        case CollectiveOp.REDUCE_SCATTER:
            return CollectiveOp.ALL_GATHER
        case CollectiveOp.ALL_REDUCE:
            return None
    return op


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSplit:
    """What ranks with the same weights and other tokens hold in slices (ZeRO, arXiv 1910.02054): the optimiser's
    ``state``, the ``gradients`` as well, or the ``weights`` too."""

    state: bool = False
    gradients: bool = False
    weights: bool = False

    @classmethod
    def of(cls, sharding: Sharding) -> Self:
        """What a stage of ZeRO splits.

        >>> StateSplit.of("zero2")
        StateSplit(state=True, gradients=True, weights=False)
        """
        stage = ("ddp", "zero1", "zero2", "zero3").index(sharding)
        return cls(state=stage >= 1, gradients=stage >= 2, weights=stage >= 3)


def read_weight(split: StateSplit) -> CollectiveOp | None:
    """What a product, which reads the whole of its weight, waits for in either pass."""
    return CollectiveOp.ALL_GATHER if split.weights else None


def sum_gradient(one: Op, split: StateSplit) -> CollectiveOp | None:
    """What the gradient of the weight of ``one`` needs before the optimiser reads it: the tokens are contracted in it,
    of which each rank has its own, so it is a sum, and an optimiser with a slice of the state reads that slice.

    >>> from workloads.ops import op
    >>> up = op("bsm,mf->bsf", label="up")
    >>> sum_gradient(up, StateSplit()).value, sum_gradient(up, StateSplit.of("zero1")).value
    ('all_reduce', 'reduce_scatter')
    """
    if not summed_over(one):
        return None
    return CollectiveOp.REDUCE_SCATTER if split.state else CollectiveOp.ALL_REDUCE


def keep_weight(split: StateSplit) -> CollectiveOp | None:
    """What follows the optimiser's step: slices that it has written, of weights that ranks keep whole."""
    return CollectiveOp.ALL_GATHER if split.state and not split.weights else None
