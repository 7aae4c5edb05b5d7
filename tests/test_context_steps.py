"""Kernels of a server's step over caches that are spread over ranks: what a rank computes, what ranks exchange."""

from __future__ import annotations

from typing import Any

import pytest

from workloads import Group, Layout, Options, RaggedStep, SharedTokens, build_ragged, load_model
from workloads.families.ragged_groups import own_tokens, tokens_of
from workloads.program import Kernel
from workloads.work import AttentionWork, CollectiveWork, GemmWork

LLAMA = load_model("llama3-8b")
GATHER: dict[str, Any] = {"cp": 2, "cp_mode": "all_gather"}


def layer(layout: Layout, groups: list[Group], *, model: str = "llama3-8b", rank: int = 0, **more: Any) -> list[Kernel]:
    """The kernels of one layer on one rank."""
    options = Options(stack="paged-kv", layers=1)
    program = build_ragged(load_model(model), layout, RaggedStep(groups=groups, scored=1, **more), options=options)
    return [k for one in program.ranks[rank].phases[0].segments if one.layers for k in one.kernels]


def exchanges(kernels: list[Kernel]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(k.name, k.work.ranks, k.work.buffer_bytes) for k in kernels if isinstance(k.work, CollectiveWork)]


# -- what a rank computes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [64, 1000, 4096])
@pytest.mark.parametrize("before", [0, 4096])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_ranks_together_attend_to_what_one_does(cp: int, before: int, tokens: int) -> None:
    """Pairs of a query and a key that it sees; parts are filled up."""
    kernels = layer(
        Layout(cp=cp, cp_mode="all_gather"),
        [Group(phase="prefill", sequences=1, new_tokens=tokens, context=before + tokens)],
    )
    works = [k.work for k in kernels if isinstance(k.work, AttentionWork)]
    pairs = cp * sum(one.batch * one.pairs for one in works)
    filled = -(-tokens // (2 * cp)) * 2 * cp
    assert pairs == pytest.approx(filled * (filled + 1) / 2 + filled * before, rel=2 / tokens)
    assert all(one.q_heads == 32 for one in works) and len(works) == 1 + (before > 0)


@pytest.mark.parametrize("split", [{"cp": 2, "cp_mode": "all_gather"}, {"cp": 4}, {"tp": 4, "dcp": 2}])
def test_flops_of_all_ranks_are_those_of_one(split: dict[str, Any]) -> None:
    """Of a prompt, as they are counted: without those behind the mask."""
    groups = [Group(phase="prefill", sequences=1, new_tokens=640, context=640)]
    model = "qwen2-1.5b" if "dcp" in split else "llama3-8b"
    found = []
    for one in (split, {"tp": split.get("tp", 1)}):
        ranks = range(Layout(**one).stage_ranks)
        works = [k for rank in ranks for k in layer(Layout(**one), groups, model=model, rank=rank)]
        products = sum(k.flops for k in works if isinstance(k.work, GemmWork))
        scores = sum(k.flops for k in works if isinstance(k.work, AttentionWork))
        found.append((products, scores))
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_ranks_have_equal_parts_of_prompts_and_all_sequences_that_decode() -> None:
    groups = [
        Group(phase="decode", sequences=5, new_tokens=1, context=700),
        Group(phase="prefill", sequences=1, new_tokens=1000, context=1000),
        Group(phase="prefill", sequences=1, new_tokens=30, context=90),
    ]
    gathered, swapped = Layout(cp=4, cp_mode="all_gather"), Layout(cp=4)
    assert tokens_of(gathered, groups) == 5 + 1000 // 4 + 32 // 4
    assert tokens_of(swapped, groups) == -(-1035 // 4)
    assert tokens_of(Layout(), groups) == own_tokens(Layout(), decoding=5, prompts=[1000, 30]) == 1035
    for one in (gathered, swapped):
        (rows,) = {k.work.m for k in layer(one, groups) if isinstance(k.work, GemmWork)}
        assert rows == tokens_of(one, groups)


def test_heads_of_ulysses_are_those_of_a_wider_tensor_group() -> None:
    group = Group(phase="decode", sequences=8, new_tokens=1, context=900)
    for more in ([], [Group(phase="prefill", sequences=1, new_tokens=500, context=700)]):
        ours, other = (
            [k.work for k in layer(one, [group, *more]) if isinstance(k.work, AttentionWork)]
            for one in (Layout(cp=4), Layout(tp=4))
        )
        assert ours == other


# -- what ranks exchange -----------------------------------------------------------------------------------------


def test_bytes_of_each_exchange_of_gathered_keys_are_those_counted_by_hand() -> None:
    """Llama 3 8B on 2 x 2: a rank of the tensor group has 16 query and 4 key heads of 128."""
    groups = [
        Group(phase="decode", sequences=3, new_tokens=1, context=1001),
        Group(phase="prefill", sequences=1, new_tokens=10, context=10),
        Group(phase="prefill", sequences=1, new_tokens=20, context=120),
    ]
    kernels = layer(Layout(tp=2, **GATHER), groups, rank=3)
    context, tensor = (1, 3), (2, 3)
    rows = 3 + 12 // 2 + 20 // 2  # pieces are filled up to four parts
    assert exchanges(kernels) == [
        ("all_gather_lse", context, 2 * 3 * 16 * 4),
        ("all_reduce_out", context, 3 * 16 * 128 * 2),
        ("all_gather_kv", context, 32 * 4 * 2 * 128 * 2),
        ("all_gather_q", context, 20 * 16 * 128 * 2),
        ("all_gather_lse", context, 2 * 20 * 16 * 4),
        ("reduce_scatter_out", context, 20 * 16 * 128 * 2),
        ("all_reduce_attn", tensor, rows * 4096 * 2),
        ("all_reduce_down", tensor, rows * 4096 * 2),
    ]
    reads = [(k.name, k.work.batch, k.work.q_len, k.work.kv_len) for k in kernels if isinstance(k.work, AttentionWork)]
    assert reads == [
        ("attention", 3, 1, 501), ("attention", 2, 3, 8), ("attention_cached", 1, 20, 50), ("attention", 2, 5, 13),
    ]  # fmt: skip


def test_bytes_of_each_exchange_inside_a_tensor_group_are_those_counted_by_hand() -> None:
    """Llama 3 8B on 16: a rank has 2 query heads, and two of them the same key head."""
    groups = [
        Group(phase="decode", sequences=3, new_tokens=1, context=1001),
        Group(phase="prefill", sequences=1, new_tokens=20, context=120),
    ]
    kernels = layer(Layout(tp=16, dcp=2), groups, rank=5)
    assert exchanges(kernels)[:6] == [
        ("all_gather_q", (4, 5), 3 * 4 * 128 * 2),
        ("all_gather_lse", (4, 5), 2 * 3 * 4 * 4),
        ("reduce_scatter_out", (4, 5), 3 * 4 * 128 * 2),
        ("all_gather_q", (4, 5), 20 * 4 * 128 * 2),
        ("all_gather_lse", (4, 5), 2 * 20 * 4 * 4),
        ("reduce_scatter_out", (4, 5), 20 * 4 * 128 * 2),
    ]
    reads = [
        (k.name, k.work.q_heads, k.work.q_len, k.work.kv_len) for k in kernels if isinstance(k.work, AttentionWork)
    ]
    assert reads == [
        ("attention", 4, 1, 501), ("attention_new", 2, 1, 1), ("attention_cached", 4, 20, 50), ("attention", 2, 20, 20),
    ]  # fmt: skip


def test_latents_are_shared_out_inside_a_tensor_group() -> None:
    """DeepSeek-V3 on 8: 16 heads a rank, 64 of four ranks, over a quarter of the latents of 512 and 64."""
    groups = [
        Group(phase="decode", sequences=3, new_tokens=1, context=1000),
        Group(phase="prefill", sequences=1, new_tokens=20, context=120),
    ]
    kernels = layer(Layout(tp=8, dcp=4), groups, model="deepseek-v3", rank=6)
    assert exchanges(kernels)[:4] == [
        ("all_gather_q", (4, 5, 6, 7), 3 * 64 * 576 * 2),
        ("all_gather_lse", (4, 5, 6, 7), 4 * 3 * 64 * 4),
        ("reduce_scatter_out", (4, 5, 6, 7), 3 * 64 * 512 * 2),
        ("all_gather_latents", (4, 5, 6, 7), 100 * 576 * 2),
    ]
    (decode, prompt) = (k.work for k in kernels if isinstance(k.work, AttentionWork))
    assert (decode.q_heads, decode.kv_len, decode.batch) == (64, 250, 3)
    assert (prompt.q_heads, prompt.kv_len, prompt.q_len) == (16, 120, 20)


def test_latents_of_prompts_are_gathered_and_rebuilt_on_every_rank() -> None:
    """DeepSeek-V3 on 2 x 4: 64 heads a rank; parts of 5 and what was cached before."""
    groups = [
        Group(phase="decode", sequences=3, new_tokens=1, context=1000),
        Group(phase="prefill", sequences=1, new_tokens=40, context=140),
    ]
    kernels = layer(Layout(tp=2, cp=4, cp_mode="all_gather"), groups, model="deepseek-v3", rank=3)
    context = (1, 3, 5, 7)
    assert exchanges(kernels)[:4] == [
        ("all_gather_lse", context, 4 * 3 * 64 * 4),
        ("all_reduce_out", context, 3 * 64 * 512 * 2),
        ("all_gather_latents", context, 40 * 576 * 2),
        ("all_gather_latents", context, 100 * 576 * 2),
    ]
    (decode, prompt) = (k.work for k in kernels if isinstance(k.work, AttentionWork))
    assert (decode.q_heads, decode.kv_len, decode.batch) == (64, 250, 3)
    assert (prompt.batch, prompt.q_len, prompt.kv_len, prompt.causal) == (2, 5, 100 + 23, True)
    rows = {k.name: k.work.m for k in kernels if isinstance(k.work, GemmWork)}
    assert (rows["q_up_gemm"], rows["kv_up_gemm"], rows["o_gemm"]) == (10, 40, 3 + 10)


def test_bytes_of_heads_exchanged_for_tokens_are_those_counted_by_hand() -> None:
    groups = [
        Group(phase="decode", sequences=3, new_tokens=1, context=1001),
        Group(phase="prefill", sequences=1, new_tokens=9, context=9),
    ]
    kernels = layer(Layout(cp=2), groups, rank=1)
    assert exchanges(kernels) == [
        ("all_to_all_qkv", (0, 1), 6 * (32 + 2 * 8) * 128 * 2),
        ("all_to_all_out", (0, 1), 6 * 32 * 128 * 2),
    ]


def test_hidden_states_of_all_ranks_are_gathered_before_the_head() -> None:
    groups = [
        Group(phase="decode", sequences=3, new_tokens=1, context=1001),
        Group(phase="prefill", sequences=1, new_tokens=40, context=40),
    ]
    for one, rows in ((Layout(**GATHER), 23), (Layout(cp=2), 22)):
        program = build_ragged(LLAMA, one, RaggedStep(groups=groups, scored=4), options=Options(stack="paged-kv"))
        *_, gather, head = program.ranks[1].phases[0].segments
        assert exchanges(list(gather.kernels)) == [("all_gather_hidden", (0, 1), 2 * rows * 4096 * 2)]
        assert next(k.work.m for k in head.kernels if isinstance(k.work, GemmWork)) == 4


def test_shared_tokens_of_none_are_none() -> None:
    assert (
        SharedTokens.of(Layout(**GATHER), [Group(phase="decode", sequences=8, new_tokens=1, context=9)])
        == SharedTokens()
    )
