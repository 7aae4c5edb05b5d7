"""Which exchanges the pass of gradients needs, from the same annotations as the forward ones.

The gradient of an einsum's input is an einsum of the output's gradient and the weight, that of its weight one of the
input and the output's gradient: an axis that is contracted in it while ranks hold slices of it leaves partial sums.
Columns split over ranks (``bsm,mf->bsf`` along ``f``) are contracted in the input's gradient, rows (``bsf,mf->bsm``)
are not; the tokens, which no weight has, are contracted in every weight's.
"""

from __future__ import annotations

from workloads.layer_passes.tree import Grouped, Placed, RankSplit
from workloads.ops import Gemm, Op

TOKENS = "bs"


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
