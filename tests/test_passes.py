"""The passes from a layer's nodes to its kernels, each on a tree of a few lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workloads import WorkloadError
from workloads.kernel_names import CollectiveOp, Elementwise
from workloads.layer_passes.lower import lower, lower_head
from workloads.layer_passes.overlap import BesideExchange, Stage, Step, beside_shared, overlap
from workloads.layer_passes.rounds import gradients_home, in_rounds
from workloads.layer_passes.schedule import Schedule
from workloads.layer_passes.shard import shard
from workloads.layer_passes.stack import stacked
from workloads.layer_passes.streams import streamed
from workloads.layer_passes.tree import Exchange, Grouped, KeyRounds, Placed, RankSplit, StageEnd
from workloads.ops import (
    Gemm,
    Overlap,
    Pointwise,
    attention,
    decoder_block,
    expert_feed,
    fuse,
    gated_feed,
    op,
    qkv_gemm,
)
from workloads.program import Kernel
from workloads.stack import load_stack
from workloads.work import CollectiveWork, GemmWork

NORM = Pointwise(name="norm_ff", op=Elementwise.ADD_RMSNORM)
UP = fuse("up_gemm", op("bsm,mf->bsf", parallel="f", label="up"))
GELU = Pointwise(name="gelu", op=Elementwise.GELU)
DOWN = fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down"))
FEED = (NORM, UP, GELU, DOWN)
ROWS = RankSplit(rows=True)
OWN, SAME = RankSplit(experts="own_tokens"), RankSplit(experts="same_tokens")


def said(nodes: tuple[Placed, ...]) -> str:
    """Names, collectives in brackets."""
    return " ".join(f"[{node.name}]" if isinstance(node, Exchange) else node.name for node in nodes)


# -- lower --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "axis", "tokens", "group"),
    [(None, "f", None, "tensor"), (SAME, "e", None, "experts"), (OWN, "e", "s", "tensor")],
)
def test_experts_are_spelled_out_with_the_axis_that_the_layout_splits(
    split: RankSplit | None, axis: str, tokens: str | None, group: str
) -> None:
    nodes = lower((NORM, expert_feed(shared=True)), split)
    assert said(nodes) == (
        "norm_ff router_gemm gate_up_shared_gemm silu_mul_shared down_shared_gemm quantise_rows gather "
        "gate_up_grouped silu_mul down_grouped combine add_shared"
    )
    assert {one.parallel for node in nodes if isinstance(node, Grouped) for one in node.ops} == {axis}
    shared = [node for node in nodes if isinstance(node, Gemm)]
    assert {one.parallel for node in shared for one in node.ops} == {tokens or "u"}
    assert {node.group for node in shared} == {group}


def test_what_is_one_operator_stays_as_it_is() -> None:
    assert lower(FEED) == FEED


# -- shard --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "right"),
    [
        (None, "router_gemm quantise_rows gather gate_up_grouped silu_mul down_grouped combine [all_reduce_ff]"),
        (SAME, "router_gemm quantise_rows gather gate_up_grouped silu_mul down_grouped combine [all_reduce_ff]"),
        (
            OWN,
            "router_gemm quantise_rows gather_dispatch [all_to_all_dispatch] gather gate_up_grouped silu_mul "
            "down_grouped gather_return [all_to_all_combine] combine [all_gather_ff]",
        ),
        (
            ROWS,
            "[all_gather_in] router_gemm quantise_rows gather gate_up_grouped silu_mul down_grouped combine "
            "[reduce_scatter_in]",
        ),
    ],
)
def test_rows_travel_where_experts_are_elsewhere_and_sums_of_some_experts_are_partial(
    split: RankSplit | None, right: str
) -> None:
    assert said(shard(lower((expert_feed(),), split), split)) == right


def test_the_shared_expert_joins_the_sum_of_the_others() -> None:
    for split in (None, SAME):
        nodes = shard(lower((NORM, expert_feed(shared=True)), split), split)
        assert said(nodes).endswith("combine add_shared [all_reduce_ff]")
        (found,) = (node for node in nodes if isinstance(node, Exchange))
        assert found.group == ("experts" if split else "tensor")


def test_slices_of_the_tokens_are_gathered_before_and_scattered_after_a_pair() -> None:
    assert said(shard(FEED, ROWS)) == "norm_ff [all_gather_ff] up_gemm gelu down_gemm [reduce_scatter_ff]"
    norm = shard(FEED, ROWS)[0]
    assert isinstance(norm, Pointwise) and norm.parallel == "s"
    # products along the tokens keep their slices: nothing to gather, nothing to sum
    rows = tuple(fuse(node.name, op(node.ops[0].einsum.pattern, parallel="s", label="x")) for node in (UP, DOWN))
    assert said(shard(rows, ROWS)) == "up_gemm down_gemm"


def test_sums_of_other_arrays_than_the_residual_stream_are_whole_on_every_rank() -> None:
    """Only the residual stream is left in slices of the tokens: what an all-reduce has summed is not gathered again."""
    up = fuse("up_gemm", op("bsm,mf->bsf", parallel="m", label="up"))
    assert said(shard((NORM, up, GELU, DOWN), ROWS)) == (
        "norm_ff [all_gather_ff] up_gemm [all_reduce_up] gelu down_gemm [reduce_scatter_ff]"
    )


def test_attention_gathers_heads_that_ranks_have_made_for_some_tokens() -> None:
    rows = Gemm(name="qkv_gemm", ops=tuple(replace(one, parallel="s") for one in qkv_gemm().ops))
    out = fuse("o_gemm", op("bsHh,mHh->bsm", parallel="H", label="O"))
    for split, right in ((RankSplit(), "all_reduce_attn"), (ROWS, "reduce_scatter_in")):
        made = shard((rows, attention("scale"), out), split)
        gather = next(one for one in made if isinstance(one, Exchange))
        assert (gather.op, gather.axes) == (CollectiveOp.ALL_GATHER, ("bsHh", "bsKh", "bsKh"))
        assert said(made).endswith(f"attention o_gemm [{right}]")
    # ... and those of one product only, where queries and keys are made by two
    keys = Gemm(name="kv_gemm", ops=rows.ops[1:], source="norm_ff")
    queries = fuse("q_gemm", op("bsm,mHh->bsHh", parallel="H", label="Q"))
    made = shard((NORM, queries, keys, attention("scale"), out))
    assert said(made) == "norm_ff q_gemm kv_gemm [all_gather_kv] attention o_gemm [all_reduce_attn]"


def test_heads_are_exchanged_for_tokens_where_a_sequence_is_split() -> None:
    layer = (qkv_gemm(), attention("scale"))
    assert said(shard(layer, RankSplit(context=("heads",)), returns=False)) == (
        "qkv_gemm permute_qkv [all_to_all_qkv] attention [all_to_all_out] permute_out"
    )
    assert getattr(shard(layer, returns=False)[1], "keys", None) == "own"


def test_keys_that_others_hold_are_gathered_and_a_ring_is_a_schedule_of_that() -> None:
    layer = (qkv_gemm(), attention("scale"))
    gathered = shard(layer, RankSplit(context=("gathered",)), returns=False)
    assert said(gathered) == "qkv_gemm [all_gather_kv] attention"
    (gather,) = (node for node in gathered if isinstance(node, Exchange))
    assert gather.elements({"b": 2, "s": 3, "K": 4, "h": 5, "H": 16}) == 2 * 2 * 3 * 4 * 5  # keys and values, no query
    product, ring = in_rounds(gathered)
    assert isinstance(ring, KeyRounds) and (product, ring.gather, ring.attention) == gathered
    back = gradients_home(ring.gather)
    assert (back.op, back.axes, back.element_bytes) == (CollectiveOp.REDUCE_SCATTER, gather.axes, 4)
    assert in_rounds(shard(layer, RankSplit(context=("heads",)), returns=False))[3:4] == (
        replace(attention("scale"), keys="heads"),
    )
    # What a tensor group gathers for attention, heads of which all ranks want the whole, is no ring.
    whole = replace(
        attention("scale"), scores=op("bKrsh,bKzh->bKrsz", label="s"), values=op("bKrsz,bKzh->bKrsh", label="v")
    )
    assert said(in_rounds(shard((qkv_gemm(), whole), returns=False))) == "qkv_gemm [all_gather_qkv] attention"
    # Groups of ranks exchange heads, groups of those pass keys round: the gather is of the heads that a rank has then.
    both = shard(layer, RankSplit(context=("heads", "gathered")), returns=False)
    assert said(both) == "qkv_gemm permute_qkv [all_to_all_qkv] [all_gather_kv] attention [all_to_all_out] permute_out"


def test_a_stage_hands_on_what_is_held_where_it_ends() -> None:
    down, end = fuse("down_gemm", op("bsf,mf->bsm", parallel="f", label="down")), StageEnd()
    assert said(shard((down, end))) == "down_gemm [all_reduce_down] [send_stage]"
    assert said(shard((*FEED, end), ROWS)).endswith("down_gemm [reduce_scatter_ff] [send_stage]")
    sizes = {"b": 2, "s": 8, "m": 16}
    whole, rows = shard((end,))[0], shard((end,), ROWS)[0]
    assert isinstance(whole, Exchange) and isinstance(rows, Exchange)
    assert (whole.parallel, rows.parallel, whole.elements(sizes)) == (None, "s", 2 * 8 * 16)
    token = shard((*lower_head(samples=True), end), returns=False)[-1]
    assert isinstance(token, Exchange) and (token.axes, token.element_bytes) == (("bs",), 8)


def test_logits_are_gathered_for_who_reads_the_whole_vocabulary() -> None:
    assert said(shard(lower_head(samples=False), returns=False)) == "last lm_head"
    assert said(shard(lower_head(samples=True), returns=False)) == "last lm_head [all_gather_logits] sample"
    assert said(shard(lower_head(samples=False), ROWS, returns=False)) == "[broadcast_last] last lm_head"


def test_neighbours_that_do_not_fit_are_refused_by_name() -> None:
    sliced = next(node for node in lower((expert_feed(),)) if isinstance(node, Grouped))
    wrong = tuple(sliced if node.name == sliced.name else node for node in lower((expert_feed(),), OWN))
    with pytest.raises(WorkloadError, match="gate_up_grouped: rows are split along 'e' and its weights along 'f'"):
        shard(wrong, OWN)
    scores = Gemm(name="values", ops=(op("bKrsz,bKzh->bKrsh", parallel="K", label="PV"),))
    with pytest.raises(WorkloadError, match=r"values: .* multiplies tokens by tokens, of which a rank holds some with"):
        shard((scores,), RankSplit(context=("heads",)))
    joined = lower((NORM, expert_feed(shared=True)))
    with pytest.raises(WorkloadError, match="add_shared: down_shared_gemm and the experts are split in different ways"):
        shard((*joined[:5], *lower((NORM, expert_feed(shared=True)), SAME)[5:]), SAME)


# -- overlap ------------------------------------------------------------------------------------------------------


def stages(steps: tuple[Step, ...]) -> list[tuple[str, ...]]:
    found = []
    for step in steps:
        if isinstance(step, Stage):
            parts = (step.feeds, *step.nodes, step.ends)
            found.append(tuple(part.name for part in parts if part is not None))
    return found


def test_a_stage_is_a_product_with_the_collective_that_feeds_or_ends_it() -> None:
    def all_in_two(_: Gemm) -> Schedule:
        return Schedule(pieces=2)

    assert stages(overlap(shard(FEED), all_in_two)) == [("down_gemm", "all_reduce_down")]
    rows = [("all_gather_ff", "up_gemm", "gelu"), ("down_gemm", "reduce_scatter_ff")]
    assert stages(overlap(shard(FEED, ROWS), all_in_two)) == rows
    assert stages(overlap(shard(FEED), lambda _: None)) == []
    assert overlap(shard(FEED), lambda _: None) == shard(FEED)


def test_one_stage_spans_the_nodes_that_share_its_number() -> None:
    asked = Overlap(chunks=2, stage=1)
    up, down = (fuse(node.name, *node.ops, overlap=asked) for node in (UP, DOWN))

    def wish(node: Gemm) -> Schedule | None:
        return Schedule(pieces=node.overlap.chunks) if node.overlap else None

    assert stages(overlap(shard((NORM, up, GELU, down)), wish)) == [("up_gemm", "gelu", "down_gemm", "all_reduce_down")]
    all_of_it = ("all_gather_ff", "up_gemm", "gelu", "down_gemm", "reduce_scatter_ff")
    assert stages(overlap(shard((NORM, up, GELU, down), ROWS), wish)) == [all_of_it]


def test_a_shared_expert_runs_beside_the_journeys_of_the_others_rows() -> None:
    steps = beside_shared(shard(lower((NORM, expert_feed(shared=True)), OWN), OWN))
    found = [
        (step.exchange.name, [node.name for node in step.nodes]) for step in steps if isinstance(step, BesideExchange)
    ]
    assert found == [
        ("all_to_all_dispatch", ["gate_up_shared_gemm", "silu_mul_shared"]),
        ("all_to_all_combine", ["down_shared_gemm"]),
    ]
    assert beside_shared(shard(FEED)) == shard(FEED)


# -- stack --------------------------------------------------------------------------------------------------------


def test_a_stack_splits_what_it_does_not_fuse_and_leaves_the_rest() -> None:
    layer = lower(decoder_block(*gated_feed(), qk_norm=True).nodes)
    assert [node.name for node in stacked(layer, load_stack("unfused-torch")) if isinstance(node, Pointwise)] == [
        "add_rmsnorm_attn.add", "add_rmsnorm_attn.norm", "qk_norm", "rope", "add_rmsnorm_ff.add",
        "add_rmsnorm_ff.norm", "silu_mul.silu", "silu_mul.mul",
    ]  # fmt: skip
    names = [node.name for node in stacked(layer, load_stack("reference-torch")) if isinstance(node, Pointwise)]
    assert names == ["add_rmsnorm_attn", "rope", "add_rmsnorm_ff", "silu_mul"]  # measured without a norm of heads
    assert stacked(layer, load_stack("paged-kv")) == layer


# -- kernels ------------------------------------------------------------------------------------------------------


def toy(node: Placed) -> list[Kernel]:
    """One kernel a node: a product of 64 rows, or a sum of 1 kB over two ranks."""
    if isinstance(node, Exchange):
        sums = CollectiveWork(op=CollectiveOp.ALL_REDUCE, ranks=(0, 1), buffer_bytes=1024)
        return [Kernel(name=node.name, work=sums, flops=0.0, bytes_moved=1024.0)]
    return [Kernel(name=node.name, work=GemmWork(m=64, n=8, k=8), flops=8192.0, bytes_moved=2176.0)]


def test_pieces_run_beside_the_collective_of_the_one_before() -> None:
    nodes = (UP, DOWN, Exchange(name="sum", op=CollectiveOp.ALL_REDUCE, axes=("bsm",)), NORM)
    made = streamed(overlap(nodes, lambda node: Schedule(pieces=2, ctas=4) if node.name == "down_gemm" else None), toy)
    assert [(kernel.name, kernel.stream, kernel.after) for kernel in made] == [
        ("up_gemm", 0, ()), ("down_gemm", 0, ()), ("sum", 1, (1,)), ("down_gemm", 0, ()), ("sum", 1, (3,)),
        ("norm_ff", 0, (4,)),
    ]  # fmt: skip
    assert sum(kernel.flops for kernel in made) == 3 * 8192
    assert [k.work.ctas for k in made if isinstance(k.work, CollectiveWork)] == [4, 4]


def test_a_whole_collective_runs_beside_what_does_not_read_it() -> None:
    exchange = Exchange(name="x", op=CollectiveOp.ALL_TO_ALL, axes=("bsm",))
    made = streamed((UP, BesideExchange(exchange=exchange, nodes=(DOWN,)), GELU), toy)
    assert [(kernel.name, kernel.stream, kernel.after) for kernel in made] == [
        ("up_gemm", 0, ()), ("x", 1, (0,)), ("down_gemm", 0, ()), ("gelu", 0, (1,)),
    ]  # fmt: skip
