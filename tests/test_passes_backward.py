"""What gradients and weights in slices need, as the einsums of a layer say, on trees of a few lines."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.kernel_names import CollectiveOp
from workloads.layer_passes.backward import (
    Sharding,
    StateSplit,
    keep_weight,
    partial_inputs,
    read_weight,
    sum_gradient,
    summed_over,
    transposed,
)
from workloads.layer_passes.lower import lower
from workloads.layer_passes.tree import RankSplit
from workloads.ops import expert_feed, fuse, op

UP = fuse("up_gemm", op("bsm,mf->bsf", parallel="f", label="up"))
OWN, SAME = RankSplit(experts="own_tokens"), RankSplit(experts="same_tokens")

GRADIENTS = [
    # Columns split: each rank knows a part of the input's gradient; rows split: each knows its slice of it.
    ((fuse("up", op("bsm,mf->bsf", parallel="f", label="up")),
      fuse("down", op("bsf,mf->bsm", parallel="f", label="down"))), RankSplit(), {"up"}),
    ((fuse("qkv", op("bsm,mHh->bsHh", parallel="H", label="Q"), op("bsm,mKh->bsKh", parallel="K", label="K")),
      fuse("o", op("bsHh,mHh->bsm", parallel="H", label="O"))), RankSplit(), {"qkv"}),
    ((fuse("up", op("bsm,mf->bsf", label="up")), fuse("down", op("bsf,mf->bsm", label="down"))), RankSplit(), set()),
    ((fuse("up", op("bsm,mf->bsf", parallel="s", label="up")),), RankSplit(), set()),  # tokens split: nothing is summed
    ((fuse("up", op("bsm,mf->bsf", parallel="m", label="up")),), RankSplit(), set()),
    # Experts cut along their width, whole on other ranks beside the same tokens, or rows sent to them and back.
    (lower((expert_feed(),)), RankSplit(), {"gate_up_grouped"}),
    (lower((expert_feed(),), SAME), SAME, {"gate_up_grouped", "down_grouped"}),
    (lower((expert_feed(),), OWN), OWN, set()),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "split", "partial"), GRADIENTS)
def test_gradients_of_inputs_are_sums_where_the_split_axis_is_contracted(
    nodes: Any, split: RankSplit, partial: set[str]
) -> None:
    assert partial_inputs(nodes, split) == partial


def test_gradients_of_weights_are_summed_over_tokens_and_never_over_what_the_weight_has() -> None:
    ops = [op("bsm,mf->bsf", label="up"), op("bsHh,mHh->bsm", label="O"), op("bsm,mKh->bsKh", label="K")]
    assert [[axis for axis in "bsmfHKh" if axis in one.einsum.axes and summed_over(one, axis)] for one in ops] == [
        ["b", "s"]
    ] * 3


# What a weight in slices needs: before each product that reads it, for the sum of its gradient, and once it is stepped.
WEIGHTS: list[tuple[Sharding, str | None, str, str | None]] = [
    ("ddp", None, "all_reduce", None),
    ("zero1", None, "reduce_scatter", "all_gather"),
    ("zero2", None, "reduce_scatter", "all_gather"),
    ("zero3", "all_gather", "reduce_scatter", None),
]


@pytest.mark.parametrize(("sharding", "read", "summed", "kept"), WEIGHTS)
def test_weights_in_slices_are_gathered_for_products_and_their_gradients_scattered(
    sharding: Sharding, read: str | None, summed: str, kept: str | None
) -> None:
    split = StateSplit.of(sharding)
    found = [read_weight(split), sum_gradient(UP.ops[0], split), keep_weight(split)]
    assert [one and one.value for one in found] == [read, summed, kept]
    # an einsum of two activations has no weight: its second input has the tokens, which are not contracted then
    scores = op("bKrsh,bKzh->bKrsz", label="scores")
    assert not summed_over(scores, "z")


def test_a_collective_goes_back_as_its_transpose_twice_as_itself() -> None:
    for op_ in CollectiveOp:
        back = transposed(op_)
        assert back is None or transposed(back) is op_
    assert transposed(CollectiveOp.ALL_REDUCE) is None
