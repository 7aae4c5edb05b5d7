"""Families that are data: sizes against published ones, and what runs of them cost."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from sim import simulate
from tests.family_configs import PUBLISHED, Config
from workloads import Generation, Layout, Options, WorkloadError, build_generate, build_program, load_model
from workloads.catalog import aliases
from workloads.expressions import evaluate
from workloads.families import layer_kernels
from workloads.family_file import family_files, parse_family
from workloads.huggingface import how_checked, parse_config, supported_types
from workloads.model import ModelSpec
from workloads.params import facts
from workloads.program import Kernel, Program
from workloads.work import AttentionWork, CollectiveWork, ElementwiseWork, GemmWork, GroupedGemmWork


def read(config: Config) -> ModelSpec:
    return parse_config(json.dumps(config), where="c.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_and_cache_are_the_published_ones(name: str) -> None:
    config, billions, kv = PUBLISHED[name]
    found = facts(read(config))
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=0.01)
    assert found["kv_bytes_per_token"] == kv


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    "changed", [{"attention_chunk_size": 128}, {"attention_k_eq_v": True}, {"use_bidirectional_attention": True}]
)
def test_a_key_of_another_family_that_changes_the_work_is_refused(name: str, changed: Config) -> None:
    config = PUBLISHED[name][0]
    text = config.get("text_config")  # what is said of the language model lies there, where there is one
    inner = config | changed if text is None else config | {"text_config": text | changed}
    if "attention_chunk_size" in changed and config["model_type"] == "llama4":  # its own windows are chunks
        assert read(inner) != read(config)
        return
    with pytest.raises(WorkloadError, match=next(iter(changed))):
        read(inner)


# -- a family of one's own, as docs/families.md shows it ---------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The folder that the page describes."""
    page = (Path(__file__).parent.parent / "docs" / "families.md").read_text(encoding="utf-8")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(re.search(r"```\n(\{.*?)```", page, re.S)[1])  # type: ignore[index]
    (folder / "family.toml").write_text(re.search(r"```toml\n(model_types.*?)```", page, re.S)[1])  # type: ignore[index]
    return folder


def kernels(model: ModelSpec, phase: str, *, seq_len: int, tp: int = 1, batch: int = 1) -> dict[str, list[Kernel]]:
    """Kernels of rank 0 by name of their segment."""
    options = Options(lm_head=False)
    program = build_program(model, Layout(tp=tp), phase=phase, batch=batch, seq_len=seq_len, options=options)  # type: ignore[arg-type]
    return {segment.name: list(segment.kernels) for segment in program.ranks[0].phases[0].segments}


def test_the_family_of_the_page_needs_no_python(mine: Path) -> None:
    model = load_model(str(mine))
    attention = 4096 * 128 * (2 * 32 + 2 * 8) + 2 * 4096
    sparse = 4096 * 64 + 3 * 4096 * (64 * 1408 + 2816)
    layers = 32 * attention + 2 * 3 * 4096 * 14336 + 30 * sparse
    assert facts(model)["parameters"] == layers + 2 * 128000 * 4096 + 4096 + 32 * 32
    assert facts(model)["kv_bytes_per_token"] == 32 * 2 * 2 * 8 * 128
    names = [name for name, _, _ in model.layer_groups(range(8))]
    assert names == ["dense layer", "sliding layer", "full layer", "sliding layer", "full layer"]
    run = simulate(model=str(mine), gpu="h100", phase="decode", batch=8, seq_len=4096, layers=4, lm_head=False)
    assert run.standing.status == "unchecked"


def test_windows_of_the_page_limit_what_their_layers_read_and_keep(mine: Path) -> None:
    model = load_model(str(mine))
    found = kernels(model, "decode", seq_len=8192)
    lengths = {
        name: one.work.kv_len for name, run in found.items() for one in run if isinstance(one.work, AttentionWork)
    }
    assert lengths == {"dense layer": 8192, "sliding layer": 1024, "full layer": 8192}
    # 2 dense, 8 full (every fourth) and 22 of a window
    assert sum(tokens for _, tokens in model.caching(range(32), 8192)) == 10 * 8192 + 22 * 1024
    split = kernels(model, "prefill", seq_len=2048, tp=4)["dense layer"]
    assert [one.name for one in split if isinstance(one.work, CollectiveWork)] == ["all_reduce_attn", "all_reduce_down"]
    shapes = {one.name: one.work.n for one in split if isinstance(one.work, GemmWork)}
    assert shapes["gate_up_gemm"] == 2 * 14336 // 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("global_every = 6", "global_every = '6 +'", "family.toml: '6 +' is no expression"),
        ('W = "intermediate_size"', 'W = ""', "axes = {'W': ''}: give a table of numbers and expressions, none empty"),
        ('d_ff = "expert_size"', 'd_ff = "expert_sise"', "key 'expert_size' = 1408 is not understood"),
        ('W = "intermediate_size"', 'V = "intermediate_size"',
         "gate_up_gemm: size of axis 'W' is missing: give it under [axes]"),
        ("else 'sliding'", "else 'slide'", "layer 2 is 'slide' by"),
        ('[sizes]', '[sises]', "unknown key 'sises': did you mean 'sizes'?"),
        ('model_types = ["tidepool"]', 'model_types = ["tide"]', "model_type = 'tidepool': "),
        ('ignored = ["logit_cap"]', 'ignored = []', "key 'logit_cap' = 30.0 is not understood"),
        ('parallel = "W" }, { label = "up"', 'parallel = "m" }, { label = "up"',
         "gate is split along 'm' and up along 'W'"),
        ('op = "rope"', 'op = "ropes"', "op = 'ropes': known are"),
        ('window = "window"', 'window = "window - 2000"', "window = -976: give a positive whole number"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_family_is_said_in_one_line(mine: Path, old: str, new: str, message: str) -> None:
    path = mine / "family.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(WorkloadError) as error:
        kernels(load_model(str(mine)), "prefill", seq_len=128)
    assert "\n" not in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b", "[i for i in x]", "f(1)", "lambda: 1", "2 ** 9", "'a' * 9"]
)
def test_expressions_are_arithmetic_and_nothing_else(text: str) -> None:
    with pytest.raises(WorkloadError):
        evaluate(text, {"a": 1, "x": [1], "f": 1}.__getitem__)


# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_two_ranks_do_the_work_of_one(name: str, phase: str) -> None:
    model = read(PUBLISHED[name][0])
    tokens = min(2048, model.max_positions - 1 if model.learned_positions else 2048)

    def flops(tp: int) -> float:
        found = kernels(model, phase, seq_len=tokens, tp=tp, batch=2)
        found.pop("front of the encoder", None)  # convolutions that every rank runs
        return sum(one.flops for run in found.values() for one in run if not isinstance(one.work, ElementwiseWork))

    # Routers, latents and small heads are not split; all else is.
    assert 0.45 * flops(1) <= flops(2) <= 0.56 * flops(1)


def test_a_parallel_block_sums_once_and_reads_its_norm_twice() -> None:
    layer = kernels(read(PUBLISHED["falcon-40b"][0]), "prefill", seq_len=512, tp=2)
    (run,) = layer.values()
    assert [one.name for one in run if isinstance(one.work, CollectiveWork)] == ["all_reduce_down"]


def test_experts_without_a_gate_have_one_matrix_up() -> None:
    run = kernels(read(PUBLISHED["nemotron-3-nano"][0]), "prefill", seq_len=512)["experts layer"]
    up = next(one.work for one in run if one.name == "gate_up_grouped")
    assert isinstance(up, GroupedGemmWork) and (up.n, up.k) == (1856, 2688)
    assert "activation" in [one.name for one in run]


def test_linear_attention_keeps_a_state_and_no_cache() -> None:
    model = read(PUBLISHED["qwen3-next-80b"][0])
    short, long = (kernels(model, "decode", seq_len=tokens)["linear layer"] for tokens in (1024, 65536))
    assert short == long
    assert sum(tokens for _, tokens in model.caching(range(48), 1000)) == 12 * 1000
    delta = [one.name for one in kernels(model, "prefill", seq_len=1024)["linear layer"]]
    assert [name for name in delta if name.startswith("delta")] == [
        "delta_keys", "delta_inverse", "delta_apply", "delta_states",
    ]  # fmt: skip
    lightning = kernels(read(PUBLISHED["minimax-text-01"][0]), "prefill", seq_len=1024)["linear layer"]
    assert not any("delta" in one.name for one in lightning)


DSA = {
    "model_type": "deepseek_v32", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
}  # fmt: skip


def test_sparse_attention_reads_the_best_keys_and_scores_them_all() -> None:
    model = read(DSA)
    found = facts(model)
    assert found["parameters"] / 1e9 == pytest.approx(671.9, rel=1e-3)
    assert found["kv_bytes_per_token"] == 70272

    def attends(phase: str, seq_len: int) -> dict[str, AttentionWork]:
        layer = kernels(model, phase, seq_len=seq_len)["sparse layer"]
        return {one.name: one.work for one in layer if isinstance(one.work, AttentionWork)}

    short, long = attends("decode", 1024), attends("decode", 65536)
    assert (short["attention"].kv_len, long["attention"].kv_len) == (1024, 2048)
    assert (short["indexer_scores"].kv_len, long["indexer_scores"].kv_len) == (1024, 65536)
    # A prompt of up to 2,048 tokens is dense; in a longer one each token is a sequence with keys of its own.
    assert attends("prefill", 2048)["attention"].q_len == 2048
    sparse = attends("prefill", 8192)["attention"]
    assert (sparse.batch, sparse.q_len, sparse.kv_len) == (8192, 1, 1793)
    (scores,) = (one for one in kernels(model, "prefill", seq_len=8192)["sparse layer"] if one.name == "indexer_scores")
    assert scores.flops == 2.0 * (8192 * 8193 / 2) * 64 * 128  # what the mask leaves


def test_an_encoder_runs_once_and_its_keys_are_attended_to() -> None:
    model = read(PUBLISHED["whisper-tiny"][0])
    prefill, decode = (kernels(model, phase, seq_len=64, batch=2) for phase in ("prefill", "decode"))
    assert [*prefill] == ["front of the encoder", "encoder layer", "layer"] and [*decode] == ["layer"]
    front = [(one.work.m, one.work.n, one.work.k) for one in prefill["front of the encoder"]
             if isinstance(one.work, GemmWork)]  # fmt: skip
    assert front == [(6000, 384, 240), (3000, 384, 1152)]  # windows of 3 frames of 80 bands, then every other one
    inside = next(one.work for one in prefill["encoder layer"] if isinstance(one.work, AttentionWork))
    assert (inside.q_len, inside.kv_len, inside.causal) == (1500, 1500, False)
    for run, tokens in ((prefill, 64), (decode, 1)):
        cross = next(one.work for one in run["layer"] if one.name == "cross_attention")
        assert isinstance(cross, AttentionWork)
        assert (cross.q_len, cross.kv_len, cross.causal) == (tokens, 1500, False)
    keys = next(one.work for one in prefill["layer"] if one.name == "cross_kv_gemm")
    assert isinstance(keys, GemmWork) and (keys.m, keys.n, keys.k) == (3000, 768, 384)
    assert "cross_kv_gemm" not in [one.name for one in decode["layer"]]  # cached since the prefill


def test_how_long_a_source_is_can_be_said_where_an_encoder_leaves_it_open(tmp_path: Path) -> None:
    for name in ("t5-base", "whisper-tiny"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
    base = {"model": str(tmp_path / "t5-base"), "seq_len": 1, "phase": "generate", "output_len": 8}
    short, long = (simulate(**base, source_len=tokens) for tokens in (128, 4096))
    assert short.latency_s < long.latency_s
    assert (short.standing.status, simulate(**base).latency_s < short.latency_s) == ("unchecked", True)
    with pytest.raises(Exception, match=r"source_len = 10: the encoder of .* always reads 1500"):
        simulate(model=str(tmp_path / "whisper-tiny"), seq_len=4, source_len=10)
    with pytest.raises(Exception, match="source_len = 10: llama3-8b has no encoder to read a source"):
        simulate(model="llama3-8b", source_len=10)
    with pytest.raises(Exception, match="its encoder runs on every tensor group: leave pp and cp out"):
        simulate(**base, pp=2)


def test_images_of_a_family_go_through_its_own_tower_and_projector() -> None:
    model = read(PUBLISHED["mistral-small-3.1"][0])
    program = build_program(model, Layout(), phase="prefill", batch=1, seq_len=4096, options=Options(images=1))
    found = {segment.name: segment for segment in program.ranks[0].phases[0].segments}
    assert found["vision layer"].repeat == 24
    shapes = [
        (one.work.m, one.work.n, one.work.k) for one in found["projector"].kernels if isinstance(one.work, GemmWork)
    ]
    assert shapes == [(3025, 1024, 4096), (3025, 5120, 1024), (3025, 5120, 5120)]


def test_names_that_people_use_mean_the_catalog() -> None:
    assert load_model("meta-llama/Llama-3.1-8B").d_model == load_model("llama-3.1-8b").d_model == 4096
    assert load_model("llama-3.1-8b").max_positions == 131072
    assert load_model("meta-llama/Meta-Llama-3-8B") == load_model("llama3-8b")
    for name in aliases():
        assert load_model(name)


def test_every_type_says_how_well_it_was_checked() -> None:
    for kind in supported_types():
        checked, refused = how_checked(kind)
        assert checked
        assert not refused, kind


def test_each_family_is_found_by_the_types_that_its_file_says() -> None:
    folder = files("workloads") / "data" / "families"
    said = {
        kind: one.name
        for one in folder.iterdir()
        if one.name.endswith(".toml")
        for kind in parse_family(one.read_text(encoding="utf-8"), where=one.name).model_types
    }
    assert {kind: family.where for kind, family in family_files().items()} == said


@pytest.mark.parametrize("stack", ["reference-torch", "eager-torch", "vllm"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_and_ranks_share_kernels_that_do_not_differ(
    name: str, stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = read(PUBLISHED[name][0])
    layout = Layout(ep=2, ep_mode="all_to_all") if model.experts and stack != "vllm" else Layout()
    generation = Generation(seq_len=96, contexts=(96, 700, 9000))
    options = Options(stack=stack)

    def program() -> Program:
        return build_generate(model, layout, batch=2, generation=generation, options=options)

    try:
        shared = program()
    except WorkloadError as refused:
        pytest.skip(str(refused))
    for question in ("of_context", "of_experts"):
        monkeypatch.setattr(layer_kernels, question, lambda _: True)
    assert program() == shared
