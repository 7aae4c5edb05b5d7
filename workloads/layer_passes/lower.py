"""The lower pass: nodes that are several operators, spelled out, with the axis that a layout splits each along."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from workloads.layer_passes.tree import (
    Combine,
    Embedding,
    ExpertAct,
    ExpertRouter,
    ExpertRows,
    Grouped,
    Head,
    Join,
    LastTokens,
    Placed,
    RankSplit,
    SampleToken,
)
from workloads.ops import Experts, Gemm, Group, Node, Op, op

EMBEDDING = op("bsv,vm->bsm", parallel="v", label="embedding")
LM_HEAD = op("bsm,vm->bsv", parallel="v", label="lm_head")


def lower(nodes: tuple[Node, ...], split: RankSplit | None = None) -> tuple[Placed, ...]:
    """``nodes`` with experts as router, rows, grouped products and sum.

    >>> from workloads.ops import expert_feed
    >>> [node.name for node in lower((expert_feed(),))]
    ['router_gemm', 'quantise_rows', 'gather', 'gate_up_grouped', 'silu_mul', 'down_grouped', 'combine']
    """
    made: list[Placed] = []
    for node in nodes:
        if isinstance(node, Experts):
            made += _experts(node, split or RankSplit())
        else:
            made.append(node)
    return tuple(made)


def lower_front() -> tuple[Placed, ...]:
    """What comes before the first layer: a row of the vocabulary's table for each token."""
    return (Embedding(name="embedding", op=EMBEDDING),)


def lower_head(*, samples: bool) -> tuple[Placed, ...]:
    """What follows the last layer: the tokens that are scored, their logits, and the choice of the next ones."""
    head = (LastTokens(), Head(name="lm_head", op=LM_HEAD))
    return (*head, SampleToken()) if samples else head


def _experts(node: Experts, split: RankSplit) -> Iterator[Placed]:
    """Ranks hold whole experts (``e``), or a slice of each one's width (``f``).

    Where each rank has its own tokens, those of a tensor group share theirs out (``s``): all of them hold the same.
    """
    axis = "f" if split.experts is None else "e"
    tokens = "s" if split.experts == "own_tokens" else None
    group: Group = "experts" if split.experts == "same_tokens" else "tensor"
    up = tuple(replace(one, parallel=axis) for one in node.up)
    down = replace(node.down, parallel=axis)
    yield ExpertRouter(name="router_gemm", op=replace(node.router, parallel=tokens), source=node.source)
    for part in node.shared:
        if isinstance(part, Gemm):
            ops = tuple(_along(one, tokens) for one in part.ops)
            yield replace(part, ops=ops, group=group)
        else:
            yield replace(part, group=group)
    yield ExpertRows(name="quantise_rows", op=up[0], parallel=tokens)
    yield ExpertRows(name="gather", op=up[0], parallel=axis if axis == "e" else None)
    yield Grouped(name="gate_up_grouped", ops=up, first=True)
    yield ExpertAct(name="silu_mul" if len(up) == 2 else "activation", down=down)
    yield Grouped(name="down_grouped", ops=(down,), first=False)
    yield Combine(parallel=tokens)
    if node.shared:
        yield Join(name="add_shared", source=node.shared[-1].name, parallel=tokens)


def _along(one: Op, tokens: str | None) -> Op:
    return one if tokens is None else replace(one, parallel=tokens)
