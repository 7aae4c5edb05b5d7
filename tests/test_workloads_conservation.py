"""Decoder transformers: ranks, chunks and experts together do the whole work, and kernels that of their einsums."""

from __future__ import annotations

import pytest

from tests.transformer_kit import build, gemm_flops, kernels, layer, names
from workloads import load_model
from workloads.ops import Attention, Experts
from workloads.program import Program
from workloads.work import AttentionWork, CollectiveWork, GemmWork, GroupedGemmWork


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "llama3-405b", "qwen3-14b"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_flops_over_ranks_are_the_whole(model: str, phase: str, tp: int) -> None:
    whole = gemm_flops(build(model, phase, batch=4, seq_len=256))
    assert sum(gemm_flops(build(model, phase, batch=4, seq_len=256, tp=tp))) == whole[0]


def test_more_ranks_than_key_value_heads_copy_the_keys_and_nothing_else() -> None:
    whole, split = layer(build("llama3-8b")), layer(build("llama3-8b", tp=16))
    assert 16 * split["attention"].flops == whole["attention"].flops
    copied = 2 * 1024 * 4096 * 2 * 8 * 128  # FLOPs of K and V once more: 16 ranks share 8 heads
    assert 16 * split["qkv_gemm"].flops == whole["qkv_gemm"].flops + copied


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [2, 4])
def test_chunks_and_sequence_parallelism_conserve_flops_and_traffic(chunks: int, tp: int) -> None:
    whole = build("llama3-70b")
    cut = build("llama3-70b", tp=tp, sequence_parallel=True, overlap_chunks=chunks)
    assert sum(gemm_flops(cut)) == gemm_flops(whole)[0]
    buffers = [k.work.buffer_bytes for k in kernels(cut) if isinstance(k.work, CollectiveWork)]
    assert (len(buffers), sum(buffers)) == (4 * chunks, 4 * 1024 * 8192 * 2)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_over_ranks_do_the_whole_work(ranks: int) -> None:
    def grouped(program: Program) -> float:
        works = [k.flops for r in range(len(program.ranks)) for k in kernels(program, r) if "grouped" in k.name]
        return sum(works)

    whole = grouped(build("qwen3-30b-a3b", seq_len=512))
    assert grouped(build("qwen3-30b-a3b", seq_len=512, ep=ranks, ep_mode="all_reduce")) == pytest.approx(whole)
    # Ranks with their own sequences: as many times the work.
    assert grouped(build("qwen3-30b-a3b", seq_len=512, ep=ranks, ep_mode="all_to_all")) == pytest.approx(ranks * whole)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_experts_are_each_split(tp: int) -> None:
    whole, split = layer(build("mixtral-8x7b", seq_len=512)), layer(build("mixtral-8x7b", seq_len=512, tp=tp))
    for name in ("gate_up_grouped", "down_grouped"):
        assert tp * split[name].flops == whole[name].flops
    up, down = split["gate_up_grouped"].work, split["down_grouped"].work
    assert isinstance(up, GroupedGemmWork) and isinstance(down, GroupedGemmWork)
    assert (up.experts, up.n, down.k) == (8, 2 * 14336 // tp, 14336 // tp)
    assert names(build("mixtral-8x7b", tp=tp))[-2:] == ["topk_sum", "all_reduce_ff"]


def test_expert_kernels_have_the_flops_of_their_einsums() -> None:
    model = load_model("qwen3-30b-a3b")
    node = next(node for node in model.block.nodes if isinstance(node, Experts))
    sizes = model.sizes() | {"b": 1, "s": 512}
    found = layer(build(model, seq_len=512))
    assert found["gate_up_grouped"].flops == sum(one.einsum.flops(sizes) for one in node.up)
    assert found["down_grouped"].flops == node.down.einsum.flops(sizes)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_a_kernel_has_the_flops_of_its_einsums(model: str, phase: str) -> None:
    """Attention's without the pairs of a query and a later key."""
    node = next(node for node in load_model(model).block.nodes if isinstance(node, Attention))
    for kernel in (*kernels(build(model, phase, batch=3, tp=2)),):
        if isinstance(kernel.work, GemmWork):
            assert kernel.flops == 2 * kernel.work.m * kernel.work.n * kernel.work.k
        if isinstance(kernel.work, AttentionWork):
            work = kernel.work
            whole = 4 * work.batch * work.q_heads * work.q_len * work.kv_len * work.head_dim
            sizes = load_model(model).sizes() | {"b": 3, "s": work.q_len, "z": work.kv_len, "K": work.kv_heads}
            assert node.scores.einsum.flops(sizes) + node.values.einsum.flops(sizes) == whole
            assert kernel.flops == whole * (work.q_len + 1) / (2 * work.q_len)


def test_equal_ranks_share_one_program() -> None:
    program = build("llama3-70b", tp=8)
    assert len(program.ranks) == 8 and len({id(rank) for rank in program.ranks}) == 1
