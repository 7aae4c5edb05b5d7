"""Einsum to kernels: hand figures for Llama-3, conservation, exact kernel lists, models and configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workloads import (
    DType,
    Layout,
    Options,
    WorkloadError,
    build_generate,
    build_program,
    load_model,
    memory_need,
    params,
)
from workloads.einsum import parse
from workloads.model import parse_model
from workloads.program import Program, Segment
from workloads.routing import expert_loads
from workloads.work import AttentionWork, CollectiveWork, ElementwiseWork, GemmWork, GroupedGemmWork

LLAMA_8B = {"b": 2, "s": 64, "z": 64, "m": 4096, "H": 32, "K": 8, "r": 4, "h": 128, "f": 14336, "v": 128256}
MADE_UP = """
id = "made-up"
source = "test"
d_model = 5120
layers = 4
q_heads = 40
kv_heads = 8
head_dim = 128
d_ff = 17408
vocab = 32000
"""


def layer(program: Program, rank: int = 0, phase: int = 0) -> Segment:
    return program.ranks[rank].phases[phase].segments[0]


def names(segment: Segment) -> list[str]:
    return [kernel.name for kernel in segment.kernels]


@pytest.mark.parametrize(
    ("pattern", "flops", "gemm"),
    [
        # tokens 128: 2 x 128 x 4096 x (32 x 128), and so on by hand
        ("bsm,mHh->bsHh", 2 * 128 * 4096 * 4096, (128, 4096, 4096)),
        ("bsm,mKh->bsKh", 2 * 128 * 4096 * 1024, (128, 1024, 4096)),
        ("bsHh,mHh->bsm", 2 * 128 * 4096 * 4096, (128, 4096, 4096)),
        ("bsm,mf->bsf", 2 * 128 * 4096 * 14336, (128, 14336, 4096)),
        ("bsf,mf->bsm", 2 * 128 * 14336 * 4096, (128, 4096, 14336)),
        ("bsm,vm->bsv", 2 * 128 * 4096 * 128256, (128, 128256, 4096)),
    ],
)
def test_flops_and_matrix_of_every_weight_op(pattern: str, flops: int, gemm: tuple[int, int, int]) -> None:
    einsum = parse(pattern)
    assert einsum.flops(LLAMA_8B) == flops
    assert einsum.gemm(LLAMA_8B) == gemm


def test_attention_ops() -> None:
    scores, values = parse("bKrsh,bKzh->bKrsz"), parse("bKrsz,bKzh->bKrsh")
    assert scores.flops(LLAMA_8B) == values.flops(LLAMA_8B) == 2 * 2 * 32 * 64 * 64 * 128
    assert scores.input_elements(0, LLAMA_8B) == 2 * 64 * 32 * 128
    assert scores.input_elements(1, LLAMA_8B) == 2 * 64 * 8 * 128
    assert scores.output_elements(LLAMA_8B) == 2 * 32 * 64 * 64


@pytest.mark.parametrize(
    ("pattern", "parallel", "collective"),
    [
        ("bsm,mHh->bsHh", "H", None),
        ("bsHh,mHh->bsm", "H", "all_reduce"),
        ("bsf,mf->bsm", "f", "all_reduce"),
        ("bKrsh,bKzh->bKrsz", "K", None),
        ("bsm,vm->bsv", "v", None),
    ],
)
def test_collective_follows_from_the_sharded_axis(pattern: str, parallel: str, collective: str | None) -> None:
    assert parse(pattern).reduction(parallel) == collective


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("bsm,mHh", "'bsm,mHh': an einsum has exactly one '->' between inputs and output"),
        ("bsm,->bs", "'bsm,->bs': an operand is empty; write its axes, for example 'bsm'"),
        ("bsq,qH->bsH", "'bsq,qH->bsH': unknown axis 'q'; known axes are b s z m H K r h f e k v"),
        ("bss,sH->bH", "'bss,sH->bH': axis 's' stands twice in 'bss'; traces are not supported"),
        ("bsm,mf->bsv", "'bsm,mf->bsv': output axis 'v' is in no input"),
    ],
)
def test_bad_patterns_quote_what_is_wrong(pattern: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse(pattern)
    assert str(error.value) == message


def test_a_missing_size_names_the_axis() -> None:
    with pytest.raises(WorkloadError) as error:
        parse("bsm,mf->bsf").flops({"b": 1, "s": 1, "m": 8})
    assert str(error.value) == "'bsm,mf->bsf': size of axis 'f' (feed-forward width) is missing"


@pytest.mark.parametrize(
    ("model", "billions"),
    # published totals: model cards of the three families
    [("llama3-8b", 8.03), ("llama3-70b", 70.6), ("llama3-405b", 405.9), ("qwen3-8b", 8.19), ("qwen3-14b", 14.77),
     ("qwen3-32b", 32.76), ("qwen3-30b-a3b", 30.53), ("mixtral-8x7b", 46.7)],
)  # fmt: skip
def test_parameters_match_the_model_cards(model: str, billions: float) -> None:
    assert params(load_model(model)) == pytest.approx(billions * 1e9, rel=0.005)


def test_reference_kernels_of_a_prefill_layer() -> None:
    program = build_program(load_model("llama3-8b"), Layout(), phase="prefill", batch=1, seq_len=128)
    assert names(layer(program)) == [
        "add_rmsnorm_attn", "qkv_gemm", "rope", "attention", "reshape_copy", "o_gemm", "add_rmsnorm_ff",
        "gate_up_gemm", "silu_mul", "down_gemm",
    ]  # fmt: skip
    assert layer(program).repeat == 32
    [head] = program.ranks[0].phases[0].segments[1].kernels
    assert head.work == GemmWork(m=1, n=128256, k=4096)


def test_reference_kernels_of_a_decode_layer_with_tensor_parallelism() -> None:
    program = build_program(load_model("llama3-70b"), Layout(tp=4), phase="decode", batch=8, seq_len=2048)
    assert names(layer(program)) == [
        "add_rmsnorm_attn", "qkv_gemm", "rope", "copy_k", "copy_v", "attention", "o_gemm", "all_reduce_attn",
        "add_rmsnorm_ff", "gate_up_gemm", "silu_mul", "down_gemm", "all_reduce_down",
    ]  # fmt: skip
    works = {k.name: k.work for k in layer(program).kernels}
    assert works["qkv_gemm"] == GemmWork(m=8, n=(16 + 2 * 2) * 128, k=8192)
    assert works["o_gemm"] == GemmWork(m=8, n=8192, k=2048)
    assert works["gate_up_gemm"] == GemmWork(m=8, n=2 * 7168, k=8192)
    attention = works["attention"]
    assert isinstance(attention, AttentionWork)
    assert (attention.q_len, attention.kv_len, attention.q_heads, attention.kv_heads) == (1, 2048, 16, 2)
    reduce = works["all_reduce_attn"]
    assert isinstance(reduce, CollectiveWork)
    assert (reduce.ranks, reduce.buffer_bytes) == ((0, 1, 2, 3), 8 * 8192 * 2)
    assert len({id(rank) for rank in program.ranks}) == 1


def test_elementwise_bytes_follow_the_records() -> None:
    # elementwise.jsonl: one token of width 4096 moves 32,768; silu 3,584 wide 21,504; rope over 40 heads 20,480
    program = build_program(load_model("llama3-8b"), Layout(tp=4), phase="decode", batch=1, seq_len=128)
    works = {k.name: k.work for k in layer(program).kernels}
    norm, silu = works["add_rmsnorm_attn"], works["silu_mul"]
    assert isinstance(norm, ElementwiseWork) and isinstance(silu, ElementwiseWork)
    assert (norm.bytes_moved, silu.bytes_moved) == (32768, 21504)
    whole = build_program(load_model("llama3-8b"), Layout(), phase="decode", batch=1, seq_len=128)
    rope = {k.name: k.work for k in layer(whole).kernels}["rope"]
    assert isinstance(rope, ElementwiseWork)
    assert (rope.bytes_moved, rope.blocks) == (20480, 40)


def test_fp8_casts_each_weight_gemms_input_and_leaves_the_head_alone() -> None:
    program = build_program(
        load_model("llama3-8b"), Layout(), phase="decode", batch=4, seq_len=64, options=Options(dtype=DType.FP8)
    )
    listed = names(layer(program))
    for gemm in ("qkv_gemm", "o_gemm", "gate_up_gemm", "down_gemm"):
        assert listed[listed.index(gemm) - 1] == f"cast_{gemm}"
    head = program.ranks[0].phases[0].segments[1].kernels[0].work
    assert isinstance(head, GemmWork) and head.dtype is DType.BF16


def test_experts_in_both_modes() -> None:
    model = load_model("qwen3-30b-a3b")
    reduce = build_program(
        model, Layout(tp=2, ep=2, ep_mode="all_reduce"), phase="decode", batch=32, seq_len=64,
        options=Options(tokens_per_ep_rank=(111, 145)),
    )  # fmt: skip
    listed = names(layer(reduce))
    assert listed[-7:] == [
        "router_gemm", "gather", "gate_up_grouped", "silu_mul", "down_grouped", "index_add", "all_reduce_ff",
    ]  # fmt: skip
    rows = []
    for rank in (0, 1):
        work = {k.name: k.work for k in layer(reduce, rank).kernels}["gate_up_grouped"]
        assert isinstance(work, GroupedGemmWork)
        rows.append(work.rows)
    assert rows == [111, 145]
    exchange = build_program(
        model, Layout(ep=2, ep_mode="all_to_all"), phase="decode", batch=32, seq_len=64
    )  # fmt: skip
    assert [n for n in names(layer(exchange)) if "all_to_all" in n] == ["all_to_all_dispatch", "all_to_all_combine"]


def test_overlap_puts_collectives_on_a_second_stream_with_edges() -> None:
    model = load_model("llama3-70b")
    layout = Layout(tp=2, sequence_parallel=True)
    options = Options(overlap_chunks=2, comm_ctas=8, lm_head=False)
    segment = layer(build_program(model, layout, phase="prefill", batch=2, seq_len=4096, options=options))
    side = [k for k in segment.kernels if k.stream == 1]
    assert [k.name for k in side] == [
        *["all_gather_attn"] * 2, *["reduce_scatter_attn"] * 2, *["all_gather_ff"] * 2, *["reduce_scatter_ff"] * 2,
    ]  # fmt: skip
    assert all(k.priority < 0 for k in side)
    place = names(segment)
    first_gemm = place.index("qkv_gemm")
    assert segment.kernels[first_gemm].after == (place.index("all_gather_attn"),)
    chunk = segment.kernels[first_gemm].work
    assert isinstance(chunk, GemmWork) and chunk.m == 4096
    gather = side[0].work
    assert isinstance(gather, CollectiveWork) and (gather.buffer_bytes, gather.ctas) == (4096 * 8192 * 2, 8)
    sequential = layer(
        build_program(model, layout, phase="prefill", batch=2, seq_len=4096, options=Options(lm_head=False))
    )
    assert {k.stream for k in sequential.kernels} == {0} and all(not k.after for k in sequential.kernels)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_flops_are_conserved_from_einsum_to_kernels_and_over_ranks(model: str, phase: str) -> None:
    spec = load_model(model)

    def flops(tp: int, stack: str) -> float:
        program = build_program(
            spec,
            Layout(tp=tp),
            phase=phase,
            batch=2,
            seq_len=256,
            options=Options(stack=stack),  # type: ignore[arg-type]
        )
        return sum(
            k.flops * s.repeat
            for rank in program.ranks
            for p in rank.phases
            for s in p.segments
            for k in s.kernels
            if isinstance(k.work, GemmWork | AttentionWork)
        )

    tokens, new = (512, 256) if phase == "prefill" else (2, 1)
    d, h, ff = spec.d_model, spec.head_dim, spec.d_ff
    weights = d * h * (2 * spec.q_heads + 2 * spec.kv_heads) + 3 * d * ff
    by_hand = spec.layers * (2 * tokens * weights + 4 * 2 * spec.q_heads * new * 256 * h) + 2 * 2 * d * spec.vocab
    assert flops(1, "reference-torch") == by_hand
    assert flops(4, "reference-torch") == by_hand
    assert flops(1, "unfused-torch") == by_hand


def test_generate_grows_its_context() -> None:
    program = build_generate(load_model("llama3-8b"), Layout(), batch=2, seq_len=100, output_len=4)
    assert [p.name for p in program.ranks[0].phases] == ["prefill", "decode 1", "decode 2", "decode 3"]
    lengths = [
        k.work.kv_len for i in range(4) for k in layer(program, phase=i).kernels if isinstance(k.work, AttentionWork)
    ]
    assert lengths == [100, 100, 101, 102]


def test_a_made_up_model_needs_no_python() -> None:
    model = parse_model(MADE_UP, where="made-up.toml")
    program = build_program(model, Layout(tp=2), phase="prefill", batch=1, seq_len=64)
    works = {k.name: k.work for k in layer(program).kernels}
    assert works["gate_up_gemm"] == GemmWork(m=64, n=17408, k=5120)


def test_a_model_may_list_its_own_ops() -> None:
    own = (
        MADE_UP
        + """
[[block]]
node = "gemm"
name = "up_gemm"
ops = [{ label = "up", pattern = "bsm,mf->bsf", parallel = "f" }]
[[block]]
node = "pointwise"
name = "act"
op = "gelu"
[[block]]
node = "gemm"
name = "down_gemm"
ops = [{ label = "down", pattern = "bsf,mf->bsm", parallel = "f" }]
"""
    )
    program = build_program(parse_model(own, where="own.toml"), Layout(tp=2), phase="prefill", batch=1, seq_len=64)
    assert names(layer(program)) == ["up_gemm", "act", "down_gemm", "all_reduce_down"]


def test_hugging_face_configuration(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    mine, ours = load_model(str(tmp_path)), load_model("qwen3-8b")
    assert params(mine) == params(ours)
    assert mine.sizes() == ours.sizes()


def test_memory_counts_weights_and_cache() -> None:
    need = memory_need(
        load_model("llama3-8b"),
        Layout(),
        batch=32,
        context=2048,
        new_tokens=1,
        layers=32,
        lm_head=True,
        dtype=DType.BF16,
    )
    assert need.weight_bytes == pytest.approx(2 * params(load_model("llama3-8b")), rel=1e-3)  # norms left out
    assert need.kv_bytes == 2 * 32 * 2048 * 8 * 128 * 32 * 2


def test_routing_is_seeded_and_counts_every_row() -> None:
    loads = expert_loads(tokens=256, experts=128, top_k=8, skew=0.8, ranks=4)
    assert sum(load.rows for load in loads) == 256 * 8
    assert loads == expert_loads(tokens=256, experts=128, top_k=8, skew=0.8, ranks=4)
    assert all(load.distinct <= load.tiles128 and load.distinct <= 32 for load in loads)
    even = expert_loads(tokens=8192, experts=128, top_k=8, skew=0.0, ranks=1)[0]
    assert even.distinct == 128 and even.tiles128 == pytest.approx(577, abs=25)  # grouped_gemm.jsonl: 577


def test_layout_errors_name_the_degree() -> None:
    with pytest.raises(WorkloadError, match="overlap_chunks = 3: does not divide the 256 tokens over tp = 2 ranks"):
        build_program(
            load_model("llama3-8b"), Layout(tp=2, sequence_parallel=True), phase="prefill", batch=1, seq_len=256,
            options=Options(overlap_chunks=3),
        )  # fmt: skip
