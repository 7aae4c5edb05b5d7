"""Layers of one model that differ in size: heads, widths, values smaller than keys, weights shared between layers."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from tests.family_configs import Config
from tests.family_configs_latest import LATEST
from tests.family_configs_uneven import MIMO_V2_FLASH, NEMOTRON_49B, UNEVEN, ZAMBA2_7B
from tests.test_workloads_families import read
from workloads import Layout, Options, WorkloadError, build_program, load_model
from workloads.memory import MemoryLoad, memory_need
from workloads.params import facts
from workloads.program import Kernel
from workloads.work import AttentionWork, ElementwiseWork, GemmWork


def kernels(config: Config, phase: str, *, seq_len: int, tp: int = 1, batch: int = 1) -> list[tuple[int, Kernel]]:
    """Kernels of rank 0 and how often each runs."""
    options = Options(lm_head=False)
    program = build_program(read(config), Layout(tp=tp), phase=phase, batch=batch, seq_len=seq_len, options=options)  # type: ignore[arg-type]
    return [(segment.repeat, one) for segment in program.ranks[0].phases[0].segments for one in segment.kernels]


@pytest.mark.parametrize("name", UNEVEN)
def test_weights_and_cache_are_the_published_ones(name: str) -> None:
    config, billions, kv = UNEVEN[name]
    found = facts(read(config))
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert found["kv_bytes_per_token"] == kv


@pytest.mark.parametrize("name", UNEVEN)
def test_two_ranks_do_the_work_of_one(name: str) -> None:
    def flops(tp: int) -> float:
        found = kernels(UNEVEN[name][0], "prefill", seq_len=1024, tp=tp)
        return sum(times * one.flops for times, one in found if not isinstance(one.work, ElementwiseWork))

    # Low ranks, gates of each layer's own embedding and Zamba's product after attention are every rank's own.
    assert 0.49 * flops(1) <= flops(2) <= 0.6 * flops(1)


@pytest.mark.parametrize("name", UNEVEN)
def test_a_key_that_nobody_has_read_is_refused(name: str) -> None:
    config = UNEVEN[name][0]
    with pytest.raises(WorkloadError, match="kernel_of_tomorrow"):
        read(config | {"kernel_of_tomorrow": 3})


def test_attention_of_gemma_4_has_two_sizes() -> None:
    """31B at 2,048 tokens: 50 layers of 16 key heads of 256 over 1,024, and 10 of 4 of 512 over all."""
    found = kernels(UNEVEN["gemma-4-31b"][0], "decode", seq_len=2048, tp=2)
    works = [(times, one.work) for times, one in found if isinstance(one.work, AttentionWork)]
    sliding, full = ([times for times, work in works if work.head_dim == size] for size in (256, 512))
    assert (sum(sliding), sum(full)) == (50, 10)
    assert {(work.kv_heads, work.q_heads, work.kv_len) for _, work in works} == {(8, 16, 1024), (2, 16, 2048)}
    # a key that is its value too needs one product: queries and 4 heads of 512, of 32 + 4
    widths = {one.name: one.work.n for _, one in found if isinstance(one.work, GemmWork)}
    assert widths["qk_gemm"] == (16 + 2) * 512
    assert widths["qkv_gemm"] == (16 + 2 * 8) * 256


def test_a_rank_holds_the_cache_of_each_layer_s_own_size() -> None:
    model = read(UNEVEN["gemma-4-31b"][0])
    need = memory_need(model, Layout(tp=2), MemoryLoad(batch=3, context=5000, layers=60, lm_head=True))
    assert need.kv_bytes == 3 * 2 * 2 * (50 * 8 * 256 * 1024 + 10 * 2 * 512 * 5000)


def test_embeddings_of_each_layer_need_room() -> None:
    model = read(UNEVEN["gemma-4-e2b"][0])
    need = memory_need(model, Layout(), MemoryLoad(batch=1, context=1, layers=35, lm_head=True))
    assert need.weight_bytes == pytest.approx(2 * 5.12e9, rel=0.07)  # norms, projector and the tower's tables left out


def test_layers_without_attention_run_their_feed_forward() -> None:
    found = kernels(NEMOTRON_49B, "decode", seq_len=100)
    assert sum(times for times, one in found if one.name == "attention") == 49
    assert sum(times for times, one in found if one.name == "down_gemm") == 80
    widths = {one.work.k for _, one in found if one.name == "down_gemm" and isinstance(one.work, GemmWork)}
    assert widths == {2816, 5632, 7168, 14336, 17920, 28672}  # multiples of 256


def test_a_product_in_place_of_attention() -> None:
    blocks = [dict(one) for one in NEMOTRON_49B["block_configs"]]
    blocks[6] = blocks[6] | {"attention": {"no_op": False, "replace_with_linear": True}}
    more = facts(read(NEMOTRON_49B | {"block_configs": blocks}))["parameters"]
    assert more - facts(read(NEMOTRON_49B))["parameters"] == 8192 * 8192 + 8192


@pytest.mark.parametrize("key", ["num_sink_tokens", "window_length"])
def test_windows_and_sinks_of_one_layer_are_refused_by_name(key: str) -> None:
    blocks = [dict(one) for one in NEMOTRON_49B["block_configs"]]
    blocks[3] = blocks[3] | {"attention": blocks[3]["attention"] | {key: 64}}
    with pytest.raises(WorkloadError, match=rf"block_configs\[3\]: attention: key '{key}' = 64 is not understood"):
        read(NEMOTRON_49B | {"block_configs": blocks})
    with pytest.raises(WorkloadError, match=r"block_configs = .*: give one for each of the 80 layers"):
        read(NEMOTRON_49B | {"block_configs": NEMOTRON_49B["block_configs"][:-1]})


def test_values_of_mimo_are_smaller_than_keys() -> None:
    works = [one.work for _, one in kernels(MIMO_V2_FLASH, "prefill", seq_len=512, tp=4)]
    attention = [work for work in works if isinstance(work, AttentionWork)]
    assert {(work.head_dim, work.v_head_dim, work.kv_heads) for work in attention} == {(192, 128, 1), (192, 128, 2)}
    found = kernels(MIMO_V2_FLASH, "prefill", seq_len=64)
    full = next(one for _, one in found if isinstance(one.work, AttentionWork))
    assert full.flops == 2 * 64 * (64 * 65 / 2) * (192 + 128)
    assert full.bytes_moved == 2 * 64 * (64 + 4) * (192 + 128)
    with pytest.raises(WorkloadError, match="values of another size than keys"):
        build_program(read(MIMO_V2_FLASH), Layout(cp=2, cp_mode="ring"), phase="prefill", batch=1, seq_len=64,
                      options=Options())  # fmt: skip


def test_zamba_s_layers_share_their_attention_blocks() -> None:
    """Two blocks of 334 million serve 13 layers; each reads both halves of its input, and reads its weights anew."""
    model = read(ZAMBA2_7B)
    one = 3 * 7168 * 7168 + 7168 * 3584 + 3 * 3584 * 14336
    alone = facts(read(ZAMBA2_7B | {"num_mem_blocks": 13}))["parameters"]
    assert alone - facts(model)["parameters"] == 11 * (one + 3584)
    found = kernels(ZAMBA2_7B, "decode", seq_len=100)
    products = [(times, gemm.work) for times, gemm in found if gemm.name == "qkv_gemm"]
    assert sum(times for times, _ in products) == 13
    assert {(work.n, work.k) for _, work in products if isinstance(work, GemmWork)} == {(3 * 7168, 7168)}
    with pytest.raises(WorkloadError, match="weights of earlier ones: use tp"):
        build_program(model, Layout(pp=2), phase="decode", batch=2, seq_len=9, options=Options())


def test_layers_may_be_cut_in_pieces_of_their_own(tmp_path: Path) -> None:
    """``chunks`` of a family's node is an expression: 4 where all tokens are attended to, 2 over a window."""
    text = (files("workloads") / "data" / "families" / "gemma4_text.toml").read_text(encoding="utf-8")
    for name in ("gate_up_gemm", "down_gemm"):
        cut = f'name = "{name}", overlap_stage = 1, chunks = "4 if full else 2", comm_ctas = 16,'
        text = text.replace(f'name = "{name}",', cut)
    (tmp_path / "family.toml").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(UNEVEN["gemma-4-31b"][0]["text_config"]))
    model = load_model(str(tmp_path))
    program = build_program(model, Layout(tp=2), phase="prefill", batch=1, seq_len=64, options=Options(lm_head=False))
    pieces = {
        (segment.name, [one.name for one in segment.kernels].count("all_reduce_down"))
        for segment in program.ranks[0].phases[0].segments
    }
    assert pieces == {("sliding layer", 2), ("full layer", 4)}


def test_layers_that_draft_are_counted_where_the_published_total_counts_them() -> None:
    """MiMo-7B: one of 210.8 million in 7.83 billion; DeepSeek-V3's 11.6 billion are beside its 671."""
    mimo = facts(read(LATEST["mimo-7b"][0]))
    assert mimo["draft_parameters"] == pytest.approx(4096 * (2 * 4096 + 2 * 1024 + 3 * 11008 + 2 * 4096), rel=1e-3)
    without = facts(read(LATEST["mimo-7b"][0] | {"num_nextn_predict_layers": 0}))
    assert mimo["parameters"] - without["parameters"] == mimo["draft_parameters"]
    assert mimo["active_parameters"] == without["parameters"]
    assert mimo["weight_bytes"] == pytest.approx(2 * mimo["parameters"])
    assert facts(read(MIMO_V2_FLASH))["draft_parameters"] == 3 * 4096 * (72 * 320 + 3 * 16384 + 2 * 4096)
