"""Layouts: what is split adds up to the whole, who meets whom, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workloads import (
    DType,
    Generation,
    Layout,
    MemoryLoad,
    Options,
    Program,
    WorkloadError,
    build_generate,
    build_program,
    load_model,
)
from workloads import memory_need as need_of
from workloads.kernel_names import CollectiveOp
from workloads.placement import groups_of, place_of, stage_pairs
from workloads.popularity import Zipf
from workloads.program import Kernel, RankProgram
from workloads.routing import Routing
from workloads.work import CollectiveWork, GroupedGemmWork

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(cp=2),
    Layout(cp=4, tp=2),
    Layout(pp=2, micro_batches=4),
    Layout(pp=4, micro_batches=2, pp_schedule="1f1b"),
    Layout(dp=4),
    Layout(tp=2, cp=2, pp=2, dp=2, micro_batches=2),
]


def kernels_of(rank: RankProgram) -> Iterator[Kernel]:
    """Every kernel that a rank runs, repetitions counted."""
    for phase in rank.phases:
        for segment in phase.segments:
            yield from segment.kernels * segment.repeat


def matrix_flops(program: Program) -> float:
    """FLOPs of GEMMs and attention over all ranks (what a layout must neither add nor lose)."""
    names = ("qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm", "lm_head", "attention")
    return sum(k.flops for rank in program.ranks for k in kernels_of(rank) if k.name in names)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_together_do_the_flops_of_the_unsplit_model(layout: Layout, phase: str) -> None:
    model = load_model("llama3-8b")
    one, many = (
        build_program(model, split, phase=phase, batch=16, seq_len=256)  # type: ignore[arg-type]
        for split in (Layout(), layout)
    )
    assert matrix_flops(many) == pytest.approx(matrix_flops(one), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stages_run_every_layer_once_and_the_head_on_the_last(layout: Layout) -> None:
    program = build_program(load_model("llama3-8b"), layout, phase="decode", batch=16, seq_len=256)
    for replica in range(layout.dp):
        layers: list[int] = []
        for stage in range(layout.pp):
            rank = (replica * layout.pp + stage) * layout.stage_ranks
            segments = program.ranks[rank].phases[0].segments
            own = [s for s in segments if s.name.endswith("layer") and "micro-batch 1" not in s.name]
            layers += [n for s in own[:1] for n in range(s.first, s.first + s.repeat)]
            heads = sum(s.name.endswith("lm_head") for s in segments)
            assert heads == (layout.micro_batches if stage == layout.pp - 1 else 0)
        assert layers == list(range(32))


def test_uneven_layers_go_to_the_last_stages() -> None:
    sizes = [len(Layout(pp=5).stage_layers(32, stage)) for stage in range(5)]
    assert sizes == [6, 6, 6, 7, 7]


def test_sixteen_gpus_on_two_nodes_meet_as_the_mapping_says() -> None:
    # Two nodes of eight: tensor groups are pairs, context groups skip one, stages stay in a node, replicas do not.
    layout = Layout(tp=2, cp=2, pp=2, dp=2)
    place = place_of(layout, 13)
    assert (place.replica, place.stage, place.context, place.member) == (1, 1, 0, 1)
    groups = groups_of(layout, 13)
    assert groups[layout.ranks] == (12, 13)
    assert groups[layout.context_ranks] == (13, 15)
    assert [groups[pair] for pair in stage_pairs(layout)] == [(9, 13), (13, 9)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_member_of_a_group_runs_the_same_collectives_in_the_same_order(layout: Layout) -> None:
    program = build_generate(load_model("llama3-8b"), layout, batch=16, generation=Generation.of(64, 3))
    seen: dict[tuple[int, ...], dict[int, list[tuple[CollectiveOp, int]]]] = {}
    for rank, own in enumerate(program.ranks):
        for kernel in kernels_of(own):
            if isinstance(kernel.work, CollectiveWork):
                work = kernel.work
                assert rank in work.ranks
                seen.setdefault(work.ranks, {}).setdefault(rank, []).append((work.op, work.buffer_bytes))
    for ranks, by_rank in seen.items():
        assert sorted(by_rank) == sorted(ranks)
        assert len({tuple(run) for run in by_rank.values()}) == 1


def test_what_travels_between_stages_is_one_activation_a_token() -> None:
    model = load_model("llama3-8b")
    program = build_program(model, Layout(pp=4, micro_batches=4), phase="prefill", batch=8, seq_len=512)
    sent = [k.work.buffer_bytes for r in program.ranks for k in kernels_of(r) if k.name == "send"]
    assert sum(w for w in sent if w) == 3 * 8 * 512 * model.d_model * DType.BF16.bytes


def test_ulysses_moves_what_its_paper_says() -> None:
    """Four tensors of s/P x h a rank with all heads (arXiv 2309.14509, section 3.2: 4 N h / P); fewer with GQA."""
    model, cp, tokens = load_model("llama3-70b"), 4, 4096
    program = build_program(model, Layout(cp=cp), phase="prefill", batch=1, seq_len=tokens)
    layer = [k for k in program.ranks[0].phases[0].segments[0].kernels if isinstance(k.work, CollectiveWork)]
    moved = sum(k.bytes_moved for k in layer)
    queries_and_output = 2 * tokens // cp * model.q_heads * model.head_dim
    keys_and_values = 2 * tokens // cp * model.kv_heads * model.head_dim
    assert moved == (queries_and_output + keys_and_values) * DType.BF16.bytes


def test_a_tokens_blocks_reach_every_collective() -> None:
    layout = Layout(tp=2, ep=2, ep_mode="all_reduce", pp=2, micro_batches=2)
    program = build_program(
        load_model("qwen3-30b-a3b"), layout, phase="prefill", batch=2, seq_len=64, options=Options(comm_ctas=6)
    )
    works = [k.work for r in program.ranks for k in kernels_of(r) if isinstance(k.work, CollectiveWork)]
    assert {w.op for w in works} == {CollectiveOp.ALL_REDUCE, CollectiveOp.SEND}
    assert {w.ctas for w in works} == {6}


def test_sequence_parallel_layers_keep_their_head() -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    program = build_program(load_model("llama3-70b"), layout, phase="prefill", batch=2, seq_len=64)
    assert [k.name for k in program.ranks[0].phases[0].segments[-1].kernels] == ["broadcast_last", "lm_head"]


def test_ranks_that_meet_the_same_ranks_share_one_program() -> None:
    program = build_program(load_model("llama3-8b"), Layout(tp=4, dp=2), phase="decode", batch=2, seq_len=64)
    assert len({id(rank) for rank in program.ranks}) == 2


def test_weights_and_cache_of_all_ranks_are_those_of_the_model() -> None:
    model = load_model("llama3-8b")
    held = MemoryLoad(batch=16, context=1024, layers=32, lm_head=True)
    one, split = need_of(model, Layout(), held), need_of(model, Layout(tp=2, pp=2, micro_batches=2), held)
    assert split.weight_bytes * 4 == pytest.approx(one.weight_bytes)  # embedding on one end, head on the other
    assert split.kv_bytes * 4 == pytest.approx(one.kv_bytes)
    context = need_of(model, Layout(cp=4, dp=2), held)
    assert context.weight_bytes == pytest.approx(one.weight_bytes)  # replicated
    assert context.kv_bytes * 8 == pytest.approx(one.kv_bytes)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=3), "dp = 3 does not divide batch = 8: use 1, 2, 4, 8"),
        (Layout(pp=2, micro_batches=3), "micro_batches = 3 does not divide the 8 sequences of a replica: "
         "use 1, 2, 4, 8"),
        (Layout(micro_batches=2), "micro_batches = 2 needs pp of at least 2: without stages there is nothing to fill"),
        (Layout(pp=33), "pp = 33: 32 layers fill at most 32 stages: use pp = 32 or less"),
        (Layout(cp=3), "cp = 3 does not divide the 32 query heads of a rank of llama3-8b: use 1, 2, 4, 8, 16, 32"),
        (Layout(cp=16, tp=4), "cp = 16 does not divide the 8 query heads of a rank of llama3-8b: use 1, 2, 4, 8"),
        (Layout(cp=0), "cp = 0: give a positive whole number"),
        (Layout(tp=2, cp=2, sequence_parallel=True), "cp = 2 with sequence_parallel: both split the tokens of a layer: "
         "use one of them"),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_that_do_not_fit_say_what_would(layout: Layout, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        build_program(load_model("llama3-8b"), layout, phase="prefill", batch=8, seq_len=64)
    assert str(caught.value) == message


def test_tokens_must_divide_over_a_context() -> None:
    model = load_model("llama3-8b")
    with pytest.raises(WorkloadError, match="cp = 4 does not divide the 510 tokens of a sequence: use a multiple of 4"):
        build_program(model, Layout(cp=4), phase="prefill", batch=1, seq_len=510)
    with pytest.raises(WorkloadError, match="cp = 4: a prompt of seq_len = 1 fills at most 1 ranks"):
        build_program(model, Layout(cp=4), phase="prefill", batch=4, seq_len=1)
    with pytest.raises(WorkloadError, match="cp = 4 does not divide the 6 sequences that a decode step runs at once"):
        build_program(model, Layout(cp=4), phase="decode", batch=6, seq_len=510)


def test_an_uneven_exchange_gives_what_others_take() -> None:
    layout = Layout(ep=4, ep_mode="all_to_all")
    options = Options(routing=Routing(popularity=Zipf(exponent=1.0)))
    program = build_program(load_model("qwen3-30b-a3b"), layout, phase="prefill", batch=2, seq_len=512, options=options)
    sent, received = [], []
    for rank in program.ranks:
        for kernel in rank.phases[0].segments[0].kernels:
            work = kernel.work
            if isinstance(work, CollectiveWork) and work.sent_bytes is not None and work.received_bytes is not None:
                sent.append(work.sent_bytes)
                received.append(work.received_bytes)
    assert len(sent) == 8  # four ranks, there and back
    assert sum(sent) == pytest.approx(sum(received), rel=1e-3)
    assert max(sent) > 1.2 * min(sent)


def test_tensor_groups_side_by_side_share_their_experts() -> None:
    """Eight ranks, four tensor groups of two with a batch each: a rank sends half of its group's tokens."""
    model = load_model("qwen3-30b-a3b")
    layout = Layout(tp=2, ep=8, ep_mode="all_to_all")
    assert (layout.world, layout.own_batches) == (8, 4)
    assert groups_of(layout, 5) == {(0, 1, 2, 3, 4, 5, 6, 7): (0, 1, 2, 3, 4, 5, 6, 7), (0, 1): (4, 5)}
    program = build_program(model, layout, phase="prefill", batch=1, seq_len=512)
    rows = sum(k.work.rows for r in program.ranks for k in kernels_of(r) if isinstance(k.work, GroupedGemmWork))
    assert rows == pytest.approx(2 * model.layers * 4 * 512 * model.top_k, rel=1e-3)
    layer = [k for k in kernels_of(program.ranks[5]) if isinstance(k.work, CollectiveWork)][:4]
    assert [k.name for k in layer] == ["all_reduce_attn", "all_to_all_dispatch", "all_to_all_combine", "all_gather_ff"]
    assert [k.work.ranks for k in layer if isinstance(k.work, CollectiveWork)][::3] == [(4, 5), (4, 5)]
    message = "ep = 8 with tp = 3: tensor groups must fill an expert group: use tp = 1, 2, 4, 8"
    with pytest.raises(WorkloadError, match=message):
        build_program(model, Layout(tp=3, ep=8, ep_mode="all_to_all"), phase="prefill", batch=1, seq_len=512)
