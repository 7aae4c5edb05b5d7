"""The overlap attribute of ops: what a model asks for is what its layers run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workloads import Layout, ModelSpec, Options, WorkloadError, build_program, load_model
from workloads.ops import Gemm, Overlap, block
from workloads.work import CollectiveWork


def asking(*overlaps: Overlap) -> ModelSpec:
    """Llama-3-70B whose GEMMs ask for these overlaps in turn."""
    model = load_model("llama3-70b")
    asked = iter(overlaps)
    nodes = [replace(n, overlap=next(asked, overlaps[-1])) if isinstance(n, Gemm) else n for n in model.block.nodes]
    return replace(model, block=block(*nodes))


def collectives(model: ModelSpec, options: Options) -> list[tuple[int, int | None]]:
    """(stream, blocks) of every collective of a layer."""
    layout = Layout(tp=2, sequence_parallel=True)
    program = build_program(model, layout, phase="prefill", batch=2, seq_len=4096, options=options)
    kernels = program.ranks[0].phases[0].segments[0].kernels
    return [(k.stream, k.work.ctas) for k in kernels if isinstance(k.work, CollectiveWork)]


def test_a_model_that_asks_for_overlap_gets_it() -> None:
    # four pairs of four chunks; 16 SMs are 8 blocks
    assert collectives(asking(Overlap(chunks=4, sms=16)), Options(sms_per_cta=2.0)) == [(1, 8)] * 16


def test_the_step_wins_over_the_model() -> None:
    assert collectives(asking(Overlap(chunks=4, sms=16)), Options(overlap_chunks=2, comm_ctas=4)) == [(1, 4)] * 8


def test_without_a_wish_the_layer_is_sequential() -> None:
    assert collectives(load_model("llama3-70b"), Options()) == [(0, None)] * 4


def test_each_operator_has_a_setting_of_its_own() -> None:
    wishes = (Overlap(chunks=1), Overlap(chunks=4, comm_ctas=8), Overlap(chunks=2, comm_ctas=4), Overlap(chunks=1))
    assert collectives(asking(*wishes), Options()) == [(0, None), *[(1, 8)] * 4, *[(1, 4)] * 2, (0, None)]


def test_the_step_says_so_by_name() -> None:
    ops = (("o_gemm", Overlap(chunks=2, comm_ctas=16)),)
    assert collectives(load_model("llama3-70b"), Options(overlap_ops=ops)) == [
        (0, None),
        *[(1, 16)] * 2,
        *[(0, None)] * 2,
    ]
    with pytest.raises(WorkloadError, match=r"overlap_ops: llama3-70b has no product 'o': its layers have qkv_gemm, "):
        collectives(load_model("llama3-70b"), Options(overlap_ops=(("o", Overlap(chunks=2)),)))
    with pytest.raises(WorkloadError, match="overlap_ops gives each operator its own chunks: leave overlap"):
        collectives(load_model("llama3-70b"), Options(overlap_ops=ops, overlap_chunks=2))
    whole = Options(overlap_ops=(("qkv_gemm", Overlap(chunks=4)),))
    with pytest.raises(WorkloadError, match="overlap_ops: qkv_gemm = 4 chunks: no collective feeds or ends it in this"):
        build_program(load_model("llama3-70b"), Layout(tp=2), phase="prefill", batch=2, seq_len=4096, options=whole)
    rows = Layout(tp=2, sequence_parallel=True)  # there a gather feeds it
    assert build_program(load_model("llama3-70b"), rows, phase="prefill", batch=2, seq_len=4096, options=whole)


def test_neighbours_of_one_stage_are_cut_together() -> None:
    model = load_model("llama3-70b")
    stage = Overlap(chunks=2, comm_ctas=8, stage=1)
    cut = [replace(n, overlap=stage) if n.name in ("gate_up_gemm", "down_gemm") and isinstance(n, Gemm) else n
           for n in model.block.nodes]  # fmt: skip
    program = build_program(
        replace(model, block=block(*cut)), Layout(tp=2), phase="prefill", batch=2, seq_len=4096, options=Options()
    )
    kernels = program.ranks[0].phases[0].segments[0].kernels
    assert [(k.name, k.stream, k.after) for k in kernels[-9:]] == [
        ("add_rmsnorm_ff", 0, ()),
        *[("gate_up_gemm", 0, ()), ("silu_mul", 0, ()), ("down_gemm", 0, ()), ("all_reduce_down", 1, (9,))],
        *[("gate_up_gemm", 0, ()), ("silu_mul", 0, ()), ("down_gemm", 0, ()), ("all_reduce_down", 1, (13,))],
    ]
    whole = build_program(model, Layout(tp=2), phase="prefill", batch=2, seq_len=4096, options=Options())
    assert sum(k.flops for k in kernels) == sum(k.flops for k in whole.ranks[0].phases[0].segments[0].kernels)


def test_a_stage_whose_nodes_do_not_fit_is_refused_by_name() -> None:
    def settings(**overlaps: Overlap) -> ModelSpec:
        model = load_model("llama3-70b")
        nodes = [replace(n, overlap=overlaps.get(n.name)) if isinstance(n, Gemm) else n for n in model.block.nodes]
        return replace(model, block=block(*nodes))

    with pytest.raises(
        WorkloadError, match=r"down_gemm: overlap_stage = 1 with chunks = 4, comm_ctas = None, and gate"
    ):
        collectives(settings(gate_up_gemm=Overlap(chunks=2, stage=1), down_gemm=Overlap(chunks=4, stage=1)), Options())
    with pytest.raises(WorkloadError, match="rope: stands between nodes of overlap_stage = 1, and is not cut along"):
        collectives(settings(qkv_gemm=Overlap(chunks=2, stage=1), o_gemm=Overlap(chunks=2, stage=1)), Options())
