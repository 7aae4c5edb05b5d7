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


def test_contradicting_wishes_are_refused() -> None:
    with pytest.raises(WorkloadError, match="llama3-70b: ops ask for different overlaps"):
        collectives(asking(Overlap(chunks=4), Overlap(chunks=2)), Options())
