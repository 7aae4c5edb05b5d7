"""Decoder transformers: hand figures of every op, kernel lists."""

from __future__ import annotations

import pytest

from tests.transformer_kit import build, head, kernels, layer, names
from workloads import DType, Generation, Layout, build_generate, load_model
from workloads.program import Program
from workloads.work import AttentionWork, CollectiveWork, ElementwiseWork, GemmWork, GroupedGemmWork

# -- hand figures -----------------------------------------------------------------------------------------------

# Llama-3-8B, prefill of 2 x 1024 tokens on one GPU: (m, n, k), FLOPs = 2 m n k, bytes = 2 (mk + nk + mn).
PREFILL_8B = {
    "qkv_gemm": ((2048, 6144, 4096), 103_079_215_104, 92_274_688),
    "o_gemm": ((2048, 4096, 4096), 68_719_476_736, 67_108_864),
    "gate_up_gemm": ((2048, 28672, 4096), 481_036_337_152, 369_098_752),
    "down_gemm": ((2048, 4096, 14336), 240_518_168_576, 192_937_984),
}
# The same, decoding one token of 16 sequences: weights dominate the bytes.
DECODE_8B = {
    "qkv_gemm": ((16, 6144, 4096), 805_306_368, 50_659_328),
    "o_gemm": ((16, 4096, 4096), 536_870_912, 33_816_576),
    "gate_up_gemm": ((16, 28672, 4096), 3_758_096_384, 235_929_600),
    "down_gemm": ((16, 4096, 14336), 1_879_048_192, 118_030_336),
}
# Llama-3-70B, prefill of 2 x 1024 tokens on each of 4 ranks: (64 + 16) / 4 heads, 28672 / 4 wide.
PREFILL_70B_TP4 = {
    "qkv_gemm": ((2048, 2560, 8192), 85_899_345_920, 85_983_232),
    "o_gemm": ((2048, 8192, 2048), 68_719_476_736, 75_497_472),
    "gate_up_gemm": ((2048, 14336, 8192), 481_036_337_152, 327_155_712),
    "down_gemm": ((2048, 8192, 7168), 240_518_168_576, 180_355_072),
}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (build("llama3-8b", batch=2), PREFILL_8B),
        (build("llama3-8b", "decode", batch=16, seq_len=2048), DECODE_8B),
        (build("llama3-70b", batch=2, tp=4), PREFILL_70B_TP4),
    ],
    ids=["8b-prefill", "8b-decode", "70b-tp4-prefill"],
)
def test_matrix_products_by_hand(program: Program, expected: dict[str, tuple[tuple[int, int, int], int, int]]) -> None:
    found = layer(program)
    for name, (shape, flops, moved) in expected.items():
        work = found[name].work
        assert isinstance(work, GemmWork)
        assert ((work.m, work.n, work.k), found[name].flops, found[name].bytes_moved) == (shape, flops, moved), name


@pytest.mark.parametrize(
    ("program", "heads", "flops", "moved"),
    [
        # 4 x 2 sequences x 32 heads x 1024 x 1025 / 2 pairs x 128; bytes 2 (Q 2048 x 4096 + K, V 2048 x 1024 + output)
        (build("llama3-8b", batch=2), (32, 8), 17_196_646_400, 41_943_040),
        # 4 x 16 x 32 x 2048 x 128; bytes 2 (2 x 16 x 4096 + 2 x 16 x 2048 x 1024)
        (build("llama3-8b", "decode", batch=16, seq_len=2048), (32, 8), 536_870_912, 134_479_872),
        # a quarter of 4 x 2 x 64 x 1024 x 1025 / 2 x 128
        (build("llama3-70b", batch=2, tp=4), (16, 2), 8_598_323_200, 18_874_368),
        # an eighth of 4 x 16 x 64 x 2048 x 128
        (build("llama3-70b", "decode", batch=16, seq_len=2048, tp=8), (8, 1), 134_217_728, 16_842_752),
    ],
    ids=["8b-prefill", "8b-decode", "70b-tp4-prefill", "70b-tp8-decode"],
)
def test_attention_by_hand(program: Program, heads: tuple[int, int], flops: int, moved: int) -> None:
    kernel = layer(program)["attention"]
    assert isinstance(kernel.work, AttentionWork)
    assert (kernel.work.q_heads, kernel.work.kv_heads) == heads
    assert (kernel.flops, kernel.bytes_moved) == (flops, moved)


def test_elementwise_bytes_by_hand() -> None:
    found = layer(build("llama3-8b", batch=2))
    moved = {k: v.bytes_moved for k, v in found.items() if isinstance(v.work, ElementwiseWork)}
    assert moved == {
        "add_rmsnorm_attn": 4 * 2048 * 4096 * 2,  # input and residual, read and written
        "rope": 2 * 2048 * (32 + 8) * 128 * 2,  # in place
        "add_rmsnorm_ff": 4 * 2048 * 4096 * 2,
        "silu_mul": 3 * 2048 * 14336 * 2,  # gate, up, product
    }


def test_the_head_scores_the_last_token_of_each_sequence() -> None:
    one, split = head(build("llama3-8b", batch=2)), head(build("llama3-70b", batch=2, tp=4))
    assert (one.flops, one.bytes_moved) == (2 * 2 * 128256 * 4096, 2 * (2 * 4096 + 128256 * 4096 + 2 * 128256))
    assert isinstance(split.work, GemmWork)
    assert (split.work.m, split.work.n, split.work.k) == (2, 32064, 8192)


@pytest.mark.parametrize(
    ("phase", "batch", "seq_len", "tp", "buffer"),
    [
        ("prefill", 2, 1024, 4, 2048 * 8192 * 2),
        ("decode", 16, 2048, 8, 16 * 8192 * 2),
    ],
)
def test_sharded_contractions_owe_an_all_reduce_of_the_hidden_state(
    phase: str, batch: int, seq_len: int, tp: int, buffer: int
) -> None:
    found = layer(build("llama3-70b", phase, batch=batch, seq_len=seq_len, tp=tp))
    collectives = {k: v.work for k, v in found.items() if isinstance(v.work, CollectiveWork)}
    assert list(collectives) == ["all_reduce_attn", "all_reduce_down"]
    assert {(w.op.value, w.buffer_bytes, w.ranks) for w in collectives.values()} == {
        ("all_reduce", buffer, tuple(range(tp)))
    }


# -- kernel lists -----------------------------------------------------------------------------------------------

ATTENTION = ["add_rmsnorm_attn", "qkv_gemm", "rope", "attention", "o_gemm"]
FEED = ["add_rmsnorm_ff", "gate_up_gemm", "silu_mul", "down_gemm"]


def test_kernels_of_a_prefill_layer() -> None:
    assert names(build("llama3-8b")) == [*ATTENTION, *FEED]
    assert names(build("llama3-8b", tp=2)) == [*ATTENTION, "all_reduce_attn", *FEED, "all_reduce_down"]


def test_kernels_of_a_decode_layer() -> None:
    assert names(build("llama3-8b", "decode")) == [
        "add_rmsnorm_attn", "qkv_gemm", "rope", "copy_k", "copy_v", "attention", "o_gemm", *FEED,
    ]  # fmt: skip


def test_fp8_casts_the_input_of_every_product_but_the_head() -> None:
    program = build("llama3-8b", dtype=DType.FP8)
    assert names(program) == [
        "add_rmsnorm_attn", "cast_qkv_gemm", "qkv_gemm", "rope", "attention", "cast_o_gemm", "o_gemm",
        "add_rmsnorm_ff", "cast_gate_up_gemm", "gate_up_gemm", "silu_mul", "cast_down_gemm", "down_gemm",
    ]  # fmt: skip
    found = layer(program)
    assert found["cast_down_gemm"].bytes_moved == 1024 * 14336 * 3  # two bytes in, one out
    assert found["qkv_gemm"].bytes_moved == 1024 * 4096 + 6144 * 4096 + 2 * 1024 * 6144
    assert isinstance(head(program).work, GemmWork) and head(program).work.dtype is DType.BF16


def test_kernels_of_experts_on_one_gpu_and_in_both_modes() -> None:
    before = [*ATTENTION, "add_rmsnorm_ff", "router_gemm"]
    experts = ["gather", "gate_up_grouped", "silu_mul", "down_grouped"]
    assert names(build("qwen3-30b-a3b")) == [*before, *experts, "gather_back", "topk_sum"]
    assert names(build("qwen3-30b-a3b", ep=4, tp=4, ep_mode="all_reduce")) == [
        *ATTENTION, "all_reduce_attn", "add_rmsnorm_ff", "router_gemm", *experts, "index_add", "all_reduce_ff",
    ]  # fmt: skip
    assert names(build("qwen3-30b-a3b", ep=4, ep_mode="all_to_all")) == [
        *before, "gather_dispatch", "all_to_all_dispatch", *experts, "gather_return", "all_to_all_combine",
        "gather_back", "topk_sum",
    ]  # fmt: skip


def test_expert_products_by_hand() -> None:
    found = layer(build("qwen3-30b-a3b"))
    up, down = found["gate_up_grouped"], found["down_grouped"]
    # 1024 tokens x 8 experts each; both gate and up (2 x 768 columns), then back
    assert (up.flops, down.flops) == (2 * 8192 * 1536 * 2048, 2 * 8192 * 2048 * 768)
    assert isinstance(up.work, GroupedGemmWork)
    assert (up.work.distinct, up.work.rows, up.work.experts) == (128, 8192, 128)
    assert up.bytes_moved == 2 * (128 * 1536 * 2048 + 8192 * (1536 + 2048))


def test_sequence_parallel_with_one_chunk_runs_in_one_stream() -> None:
    program = build("llama3-8b", tp=2, sequence_parallel=True)
    assert names(program) == [
        "add_rmsnorm_attn", "all_gather_attn", "qkv_gemm", "rope", "attention", "o_gemm",
        "reduce_scatter_attn", "add_rmsnorm_ff", "all_gather_ff", "gate_up_gemm", "silu_mul", "down_gemm",
        "reduce_scatter_ff",
    ]  # fmt: skip
    assert {(k.stream, k.priority, k.after) for k in kernels(program)} == {(0, 0, ())}
    work = layer(program)["add_rmsnorm_attn"].work
    assert isinstance(work, ElementwiseWork) and work.rows == 512  # norms work on a rank's own slice


def test_four_chunks_cut_collectives_and_products_on_two_streams() -> None:
    program = build("llama3-8b", tp=2, sequence_parallel=True, overlap_chunks=4, comm_ctas=8)
    assert names(program) == [
        "add_rmsnorm_attn",
        *["all_gather_attn", "qkv_gemm"] * 4,
        "concat_qkv", "rope", "attention",
        *["o_gemm", "reduce_scatter_attn"] * 4,
        "add_rmsnorm_ff",
        *["all_gather_ff", "gate_up_gemm", "silu_mul"] * 4,
        *["down_gemm", "reduce_scatter_ff"] * 4,
    ]  # fmt: skip
    found = kernels(program)
    for kernel in found:
        collective = isinstance(kernel.work, CollectiveWork)
        assert (kernel.stream, kernel.priority) == ((1, -1) if collective else (0, 0))
    edges = {i: k.after for i, k in enumerate(found) if k.after}
    assert edges == {
        1: (0,), 2: (1,), 4: (3,), 6: (5,), 8: (7,),  # a gather of normed rows, then its product
        13: (12,), 15: (14,), 17: (16,), 19: (18,), 20: (19,),  # a product, then its scatter; the norm needs all
        21: (20,), 22: (21,), 25: (24,), 28: (27,), 31: (30,),
        34: (33,), 36: (35,), 38: (37,), 40: (39,),
    }  # fmt: skip
    one = found[1].work
    assert isinstance(one, CollectiveWork)
    assert (one.buffer_bytes, one.ctas) == (256 * 4096 * 2, 8)


def test_other_stacks_differ_in_what_they_fuse_and_copy() -> None:
    unfused = names(build("llama3-8b", stack="unfused-torch"))
    assert unfused[:5] == ["add_rmsnorm_attn.add", "add_rmsnorm_attn.norm", "q_gemm", "k_gemm", "v_gemm"]
    assert unfused[-5:] == ["gate_gemm", "up_gemm", "silu_mul.silu", "silu_mul.mul", "down_gemm"]
    paged = names(build("llama3-8b", "decode", stack="paged-kv"))
    assert "copy_k" not in paged


def test_generate_is_a_prefill_and_a_growing_context() -> None:
    program = build_generate(load_model("llama3-8b"), Layout(), batch=1, generation=Generation.of(100, 4))
    phases = program.ranks[0].phases
    assert [phase.name for phase in phases] == ["prefill", "decode 1", "decode 2", "decode 3"]
    contexts = []
    for phase in phases:
        work = next(k.work for k in phase.segments[0].kernels if k.name == "attention")
        assert isinstance(work, AttentionWork)
        contexts.append((work.q_len, work.kv_len))
    assert contexts == [(100, 100), (1, 100), (1, 101), (1, 102)]
