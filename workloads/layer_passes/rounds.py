"""The rounds pass: a gather of keys as the rounds of a ring, each rank's block attended to while the next one travels.

The gather is the shard pass's; here it gets its schedule. Its gradient, a sum of what each rank has of the keys'
gradients, goes round in the same way, in 32 bit.
"""

from __future__ import annotations

from dataclasses import replace

from workloads.layer_passes.backward import transposed
from workloads.layer_passes.tree import Exchange, KeyRounds, Placed
from workloads.ops import Attention
from workloads.work import CollectiveOp, DType


def in_rounds(nodes: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """``nodes`` with attention and the gather that feeds it as one node.

    >>> from workloads.layer_passes.shard import shard
    >>> from workloads.layer_passes.tree import RankSplit
    >>> from workloads.ops import attention
    >>> [node.name for node in shard((attention(),), RankSplit(context=("gathered",)), returns=False)]
    ['all_gather_kv', 'attention']
    >>> [node.name for node in in_rounds(shard((attention(),), RankSplit(context=("gathered",)), returns=False))]
    ['attention']
    """
    made: list[Placed] = []
    for node in nodes:
        before = made[-1] if made else None
        if isinstance(node, Attention) and isinstance(before, Exchange) and _of_keys(before):
            made[-1] = KeyRounds(gather=before, attention=node)
        else:
            made.append(node)
    return tuple(made)


def _of_keys(one: Exchange) -> bool:
    return one.group == "context" and one.op is CollectiveOp.ALL_GATHER


def gradients_home(gather: Exchange) -> Exchange:
    """The sum of the gradients of what ``gather`` brought, each at the rank that gave it."""
    op = transposed(gather.op)
    assert op is not None
    return replace(gather, name=f"{op.value}_kv_grad", op=op, element_bytes=DType.FP32.bytes)
