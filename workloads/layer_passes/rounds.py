"""Attention whose keys lie on several ranks, and the pass that makes a gather of keys the rounds of a ring.

In a ring each rank's block is attended to while the next one travels. The gather is the shard pass's; here it gets its
schedule. Its gradient, a sum of what each rank has of the keys' gradients, goes round in the same way, in 32 bit.
"""

from __future__ import annotations

from dataclasses import replace

from workloads.kernel_names import CollectiveOp
from workloads.layer_passes.backward import transposed
from workloads.layer_passes.tree import Exchange, KeyRounds, Permute, Placed, RankSplit
from workloads.ops import Attention
from workloads.work import DType


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


def over_context(node: Attention, split: RankSplit) -> tuple[Placed, ...]:
    """``node`` with what it needs where ranks have other tokens: it reads keys and values of the whole context (``z``),
    and each rank has those of its own (``s``). They are gathered, or heads are given away for tokens and taken back.
    """
    own = tuple(part.einsum.inputs[1].replace("z", "s") for part in (node.scores, node.values))
    gathered: tuple[Placed, ...] = ()
    if "gathered" in split.context:
        gathered = (Exchange(name="all_gather_kv", op=CollectiveOp.ALL_GATHER, axes=own, group="context"),)
    if "heads" not in split.context:
        return (*gathered, node)
    # What an earlier layer cached lies by heads already.
    given = (node.scores.einsum.inputs[0], *(() if node.shared else own))
    taken = (node.values.einsum.output,)
    return (
        Permute(name="permute_qkv", axes=given),
        Exchange(name="all_to_all_qkv", op=CollectiveOp.ALL_TO_ALL, axes=given, group="context"),
        *gathered,
        replace(node, keys="heads"),
        Exchange(name="all_to_all_out", op=CollectiveOp.ALL_TO_ALL, axes=taken, group="context"),
        Permute(name="permute_out", axes=taken),
    )


def gradients_home(gather: Exchange) -> Exchange:
    """The sum of the gradients of what ``gather`` brought, each at the rank that gave it."""
    op = transposed(gather.op)
    assert op is not None
    return replace(gather, name=f"{op.value}_kv_grad", op=op, element_bytes=DType.FP32.bytes)
