"""Layers that read the keys and values of earlier ones, and more families that are data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sim import simulate
from tests.family_configs import PUBLISHED
from tests.family_configs_latest import LATEST
from tests.family_configs_recent import GEMMA_3N_E4B, HUNYUAN_LARGE, PHI_4_MINI_FLASH, RECENT
from tests.test_workloads_families import kernels, read
from workloads import Layout, Options, WorkloadError, build_program, load_model
from workloads.kernel_names import Elementwise
from workloads.layer_passes.shard import shard
from workloads.layer_passes.tree import Exchange, RankSplit
from workloads.memory import MemoryLoad, memory_need
from workloads.ops import Pointwise, attention, fuse, op, qkv_gemm
from workloads.params import facts
from workloads.work import AttentionWork, ElementwiseWork, GemmWork

NEWER = {**RECENT, **LATEST}


@pytest.mark.parametrize("name", NEWER)
def test_weights_and_cache_are_the_published_ones(name: str) -> None:
    config, billions, kv = NEWER[name]
    found = facts(read(config))
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert found["kv_bytes_per_token"] == kv


@pytest.mark.parametrize("name", NEWER)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_two_ranks_do_the_work_of_one(name: str, phase: str) -> None:
    model = read(NEWER[name][0])

    def flops(tp: int) -> float:
        found = kernels(model, phase, seq_len=2048, tp=tp, batch=2)
        return sum(one.flops for run in found.values() for one in run if not isinstance(one.work, ElementwiseWork))

    assert 0.45 * flops(1) <= flops(2) <= 0.56 * flops(1)


# -- a cache that several layers read ------------------------------------------------------------------------------


def test_a_layer_that_reads_an_earlier_cache_makes_no_keys() -> None:
    """HunYuan Large: every second layer has queries of its own only, turns only them, and keeps nothing."""
    model = read(HUNYUAN_LARGE)
    program = build_program(model, Layout(), phase="prefill", batch=1, seq_len=512, options=Options(lm_head=False))
    own, shared = program.ranks[0].phases[0].segments[:2]
    assert (own.first, shared.first, own.repeat, shared.repeat) == (0, 1, 1, 1)
    widths = [{k.name: k.work.n for k in one.kernels if isinstance(k.work, GemmWork)} for one in (own, shared)]
    assert (widths[0]["qkv_gemm"], widths[1]["q_gemm"]) == (6400 + 2 * 640, 6400)
    turned = [next(k.work.width for k in one.kernels if k.name == "rope" and isinstance(k.work, ElementwiseWork))
              for one in (own, shared)]  # fmt: skip
    assert turned == [6400 + 640, 6400]
    # ... and attends to as many keys as the layer that made them
    assert len({k.work for one in (own, shared) for k in one.kernels if isinstance(k.work, AttentionWork)}) == 1
    need = memory_need(model, Layout(), MemoryLoad(batch=1, context=1000, layers=64, lm_head=True))
    assert need.kv_bytes == 32 * 1000 * 2 * 8 * 80 * 2


def test_an_engine_writes_no_cache_where_a_layer_makes_no_keys() -> None:
    options = Options(stack="vllm", lm_head=False)
    program = build_program(read(HUNYUAN_LARGE), Layout(), phase="decode", batch=4, seq_len=512, options=options)
    own, shared = (segment.kernels for segment in program.ranks[0].phases[0].segments[1:3])  # behind the embedding
    written = [[k.name for k in one if k.name in ("rope", "cache_write")] for one in (own, shared)]
    assert written == [["rope", "cache_write"], ["rope"]]
    widths = [next(k.work.width for k in one if k.name == "rope" and isinstance(k.work, ElementwiseWork))
              for one in (own, shared)]  # fmt: skip
    assert widths == [6400 + 640, 6400]


# Others are refused under stack vllm: state-space layers, cross attention.
@pytest.mark.parametrize("name", [
    "gpt-oss-120b", "gemma-3-1b", "llama-4-maverick", "qwen3-vl-30b-a3b", "qwen2.5-vl-72b", "falcon-40b", "phi-2",
    "hunyuan-large", "gemma-3n-e4b", "smollm3-3b", "exaone-4-32b", "command-r7b", "starcoder2-3b",
])  # fmt: skip
def test_an_engine_writes_what_is_cached(name: str) -> None:
    """With or without rotation, over windows or all tokens; encoders of images keep nothing."""
    config, _, kv = {**PUBLISHED, **RECENT}[name]
    model = read(config)
    for phase, batch, tokens in (("decode", 3, 3), ("prefill", 1, 4096)):
        options = Options(stack="vllm", lm_head=False, images=1 if model.vision and phase == "prefill" else 0)
        program = build_program(model, Layout(), phase=phase, batch=batch, seq_len=4096, options=options)  # type: ignore[arg-type]
        written = sum(segment.repeat * kernel.bytes_moved for segment in program.ranks[0].phases[0].segments
                      for kernel in segment.kernels if kernel.name == "cache_write")  # fmt: skip
        assert written == 2 * tokens * kv  # read and written


def test_sources_are_of_the_same_kind_of_layer() -> None:
    """Gemma 3n: from layer 20 on, those over a window read layer 18, those over all tokens layer 19."""
    model = read(GEMMA_3N_E4B)
    kept = [block.caches for _, block, run in model.layer_groups(range(35)) for _ in run]
    assert kept == [True] * 20 + [False] * 15
    windows = [block.attention.window for _, block, run in model.layer_groups(range(35)) for _ in run
               if block.attention]  # fmt: skip
    assert windows == [512, 512, 512, 512, 0] * 7
    assert sum(tokens for _, tokens in model.caching(range(35), 4096)) == 16 * 512 + 4 * 4096


def test_one_cache_serves_half_a_model() -> None:
    """Phi-4-mini-flash: eight windows and one cache over all tokens, which seven more layers read."""
    model = read(PHI_4_MINI_FLASH)
    groups = [(name, block) for name, block, run in model.layer_groups(range(32)) for _ in run]
    assert [i for i, (_, block) in enumerate(groups) if block.caches] == [*range(1, 16, 2), 17]
    assert [i for i, (_, block) in enumerate(groups) if block.shares] == [*range(19, 32, 2)]
    assert [i for i, (name, _) in enumerate(groups) if name == "gated_memory layer"] == [*range(18, 32, 2)]
    # Queries of the second half meet all cached tokens, those of the first a window of them.
    met = {segment.first: kernel.work.kv_len for segment in build_program(
               model, Layout(), phase="decode", batch=1, seq_len=4096).ranks[0].phases[0].segments
           for kernel in segment.kernels if isinstance(kernel.work, AttentionWork)}  # fmt: skip
    assert met == {i: 512 if i < 16 else 4096 for i in range(1, 32, 2)}


def test_exchanges_are_of_what_a_layer_makes() -> None:
    rope, node = Pointwise(name="rope", op=Elementwise.ROPE), replace(attention("scale"), shared=True)
    queries = fuse("q_gemm", op("bsm,mHh->bsHh", parallel="H", label="Q"))
    made = shard((queries, rope, node), RankSplit(context=("heads",)), returns=False)
    sent = next(one for one in made if isinstance(one, Exchange))
    assert sent.axes == ("bKrsh",)  # keys lie by heads since the layer that made them
    assert next(one for one in made if isinstance(one, Pointwise)).queries
    assert not next(one for one in shard((qkv_gemm(), rope), returns=False) if isinstance(one, Pointwise)).queries
    gate = op("bsm,mHh->bsHh", parallel="H", label="gate")
    gated = shard(
        (fuse("q_gemm", gate, *queries.ops), rope, node), returns=False
    )  # a gate of the output beside queries
    assert next(one for one in gated if isinstance(one, Pointwise)).queries
    with pytest.raises(WorkloadError, match="attention: reads queries, keys and values, and q_gemm yields bsHh: yield"):
        shard((queries, rope, attention("scale")), returns=False)
    with pytest.raises(WorkloadError, match="the cache of an earlier layer, and qkv_gemm yields 3 arrays of heads"):
        shard((qkv_gemm(), node), returns=False)


def test_stages_cannot_part_a_cache_from_its_readers() -> None:
    with pytest.raises(WorkloadError, match=r"pp = 2: layers of c.json read the keys of earlier ones: use tp"):
        build_program(read(HUNYUAN_LARGE), Layout(pp=2), phase="decode", batch=1, seq_len=64)


# -- in a model of one's own ---------------------------------------------------------------------------------------

MODEL = """
id = "pairs"
source = "made up: every other layer reads the keys of the one before"
d_model = 1024
layers = 8
q_heads = 8
kv_heads = 4
head_dim = 128
d_ff = 4096
vocab = 32000
"""
ATTENTION = 'node = "attention", name = "attention", scores = "bKrsh,bKzh->bKrsz", values = "bKrsz,bKzh->bKrsh"'
BLOCK = """
block = [
  {{ node = "pointwise", name = "norm_attn", op = "add_rmsnorm" }},
  {{ node = "gemm", name = "q_gemm", when = "i % 2 == 1", ops = [{{ label = "Q", pattern = "bsm,mHh->bsHh", parallel = "H" }}] }},
  {{ node = "gemm", name = "qkv_gemm", when = "i % 2 == 0", ops = [{{ label = "Q", pattern = "bsm,mHh->bsHh", parallel = "H" }}, {{ label = "K", pattern = "bsm,mKh->bsKh", parallel = "K" }}, {{ label = "V", pattern = "bsm,mKh->bsKh", parallel = "K" }}] }},
  {{ {attention}, parallel = "K", cache = "{cache}" }},
  {{ node = "gemm", name = "o_gemm", ops = [{{ label = "O", pattern = "bsHh,mHh->bsm", parallel = "H" }}] }},
]
"""  # noqa: E501


def _model(tmp_path: Path, cache: str) -> str:
    path = tmp_path / "pairs.toml"
    path.write_text(MODEL + BLOCK.format(attention=ATTENTION, cache=cache))
    return str(path)


def test_a_model_file_says_whose_cache_a_layer_reads(tmp_path: Path) -> None:
    found = load_model(_model(tmp_path, "i - i % 2"))
    assert facts(found)["kv_bytes_per_token"] == 4 * 2 * 4 * 128 * 2
    run = simulate(model=_model(tmp_path, "i - i % 2"), phase="decode", seq_len=4096, tp=2, batch=4)
    assert run.standing.status == "unchecked"


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("i + 1", "layer 0: attention: cache = 1: give the number of this layer or of an earlier one"),
        ("i - 1", "layer 0: attention: cache = -1: give the number of this layer or of an earlier one"),
        ("i", "attention: reads queries, keys and values, and q_gemm yields bsHh: yield all three, or name the layer"),
        ("0 if i < 2 else 1", "layer 2: attention: cache = 1: that layer keeps no keys and values of its own"),
    ],
)
def test_a_cache_that_is_not_there_is_refused(tmp_path: Path, cache: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        load_model(_model(tmp_path, cache))
    assert message in str(error.value)
