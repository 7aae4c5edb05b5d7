"""The overlap pass: which neighbours are cut in pieces, and which collectives run beside them.

A stage is a product, or several neighbours, with the collective that feeds its first node or ends its last one. The
pieces of a stage go through its nodes one after the other; while the collective works on one, the next is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workloads.errors import WorkloadError
from workloads.kernel_names import CollectiveOp
from workloads.layer_passes.schedule import Schedule
from workloads.layer_passes.tree import Combine, Exchange, ExpertRows, Join, Placed
from workloads.ops import WIDE, Gemm, Overlap, Pointwise

Wish = Callable[[Gemm], "Schedule | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Nodes whose tokens go through in pieces, between the collective that ``feeds`` and that which ``ends``."""

    nodes: tuple[Gemm | Pointwise, ...]
    schedule: Schedule
    feeds: Exchange | None = None
    ends: Exchange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideExchange:
    """A whole collective beside nodes that do not read what it brings."""

    exchange: Exchange
    nodes: tuple[Placed, ...]


Step = Placed | Stage | BesideExchange


def overlap(nodes: Sequence[Placed], wish: Wish) -> tuple[Step, ...]:
    """``nodes`` with stages where ``wish`` has a schedule for a product that a collective feeds or ends.

    >>> from workloads.ops import fuse, op
    >>> from workloads.layer_passes.shard import shard
    >>> down = fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down"))
    >>> (stage,) = overlap(shard((down,)), lambda node: Schedule(pieces=4))
    >>> [node.name for node in stage.nodes], stage.ends.name
    (['down_gemm'], 'all_reduce_down')
    """
    made: list[Step] = []
    at = 0
    while at < len(nodes):
        stage, after = _stage(nodes, at, wish)
        if stage is None:
            made.append(nodes[at])
            at += 1
            continue
        made.append(stage)
        at = after
    return tuple(made)


def _stage(nodes: Sequence[Placed], at: int, wish: Wish) -> tuple[Step | None, int]:
    """The stage that starts with node ``at``, and where it ends; None: it starts none."""
    start = nodes[at]
    gathers = isinstance(start, Exchange) and start.rows and start.op is CollectiveOp.ALL_GATHER
    feeds = start if isinstance(start, Exchange) and gathers else None
    first = at if feeds is None else at + 1
    node = nodes[first] if first < len(nodes) else None
    schedule = wish(node) if isinstance(node, Gemm) and not node.ops[0].einsum.of_activations else None
    if schedule is None or not isinstance(node, Gemm):
        return None, at
    members: list[Gemm | Pointwise] = [node]
    after = first + 1
    for last in range(after, _last_of_stage(nodes, first, node.overlap) + 1):
        member = nodes[last]
        if not (isinstance(member, Gemm) or (isinstance(member, Pointwise) and member.op in WIDE)):
            raise WorkloadError(
                f"{member.name}: stands between nodes of overlap_stage = {node.overlap and node.overlap.stage}, and is "
                "not cut along tokens: give the nodes before and after it stages of their own"
            )
        members.append(member)
        after = last + 1
    while feeds is not None and after < len(nodes):  # what works on each element follows the product piece by piece
        follower = nodes[after]
        if not isinstance(follower, Pointwise) or follower.op not in WIDE:
            break
        members.append(follower)
        after += 1
    ends = nodes[after] if after < len(nodes) else None
    if isinstance(ends, Exchange) and ends.op in (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER):
        after += 1
    else:
        ends = None
    if feeds is None and ends is None:
        return None, at
    return Stage(nodes=tuple(members), schedule=schedule, feeds=feeds, ends=ends), after


def _last_of_stage(nodes: Sequence[Placed], first: int, asked: Overlap | None) -> int:
    """The last node that asks for the stage of node ``first``; itself where it asks for none."""
    if asked is None or asked.stage is None:
        return first
    same = [first]
    for at in range(first + 1, len(nodes)):
        node = nodes[at]
        if isinstance(node, Gemm) and node.overlap is not None and node.overlap.stage == asked.stage:
            if (node.overlap.chunks, node.overlap.comm_ctas) != (asked.chunks, asked.comm_ctas):
                raise WorkloadError(
                    f"{node.name}: overlap_stage = {asked.stage} with chunks = {node.overlap.chunks}, comm_ctas = "
                    f"{node.overlap.comm_ctas}, and {nodes[first].name} with chunks = {asked.chunks}, comm_ctas = "
                    f"{asked.comm_ctas}: nodes of one stage are cut alike"
                )
            same.append(at)
    return same[-1]


def beside_shared(nodes: Sequence[Placed]) -> tuple[Step, ...]:
    """``nodes`` with the shared expert beside the others' rows on their way: its last product beside the way home."""
    start = next((i for i, node in enumerate(nodes) if isinstance(node, ExpertRows)), None)
    join = next((i for i, node in enumerate(nodes) if isinstance(node, Join)), None)
    if start is None or join is None:
        return tuple(nodes)
    router = next(i for i, node in enumerate(nodes) if not isinstance(node, Gemm | Pointwise) and i < start
                  and all(isinstance(one, Gemm | Pointwise) for one in nodes[i + 1 : start]))  # fmt: skip
    shared = nodes[router + 1 : start]
    made: list[Step] = [*nodes[: router + 1]]
    for node in nodes[start:]:
        if isinstance(node, Exchange) and node.travel is not None:
            made.append(
                BesideExchange(exchange=node, nodes=tuple(shared[:-1] if node.travel == "away" else shared[-1:]))
            )
        else:
            made.append(node)
    return tuple(made)


def has_experts(nodes: Sequence[Placed]) -> bool:
    """Whether rows go to experts."""
    return any(isinstance(node, Combine) for node in nodes)
