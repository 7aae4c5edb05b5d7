"""Families that nobody has seen: a TOML and a configuration each, and no Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sim import simulate
from workloads import Layout, Options, build_program, load_model
from workloads.params import facts
from workloads.work import AttentionWork, ElementwiseWork, GemmWork

QKV = (
    '{ node = "gemm", name = "qkv_gemm", ops = [{ label = "Q", pattern = "bsm,mHh->bsHh", parallel = "H" }, '
    '{ label = "K", pattern = "bsm,mKh->bsKh", parallel = "K" }, { label = "V", pattern = "bsm,mKh->bsKh", '
    'parallel = "K" }] }'
)
GATE = '{ label = "output gate", pattern = "bsm,mHh->bsHh", parallel = "H" }'
GATED_QKV = QKV.replace('{ label = "K"', f'{GATE}, {{ label = "K"', 1)
ATTENTION = 'scores = "bKrsh,bKzh->bKrsz", values = "bKrsz,bKzh->bKrsh", parallel = "K"'
OUT = '{ node = "gemm", name = "o_gemm", ops = [{ label = "O", pattern = "bsHh,mHh->bsm", parallel = "H" }] }'
NORM = '{ node = "pointwise", name = "add_rmsnorm_%s", op = "add_rmsnorm" }'
SIZES = """
[sizes]
d_model = "width"
layers = "depth"
q_heads = "heads"
kv_heads = "kv_heads"
head_dim = "head_size"
d_ff = "inner"
vocab = "vocab_size"
"""


def feed(axis: str, source: str = "") -> list[str]:
    """A gated feed-forward of a width."""
    read = f', source = "{source}"' if source else ""
    return [
        f'{{ node = "gemm", name = "gate_up_gemm"{read}, ops = [{{ label = "gate", pattern = "bsm,m{axis}->bs{axis}", '
        f'parallel = "{axis}" }}, {{ label = "up", pattern = "bsm,m{axis}->bs{axis}", parallel = "{axis}" }}] }}',
        f'{{ node = "pointwise", name = "silu_mul", op = "silu_mul", axis = "{axis}" }}',
        f'{{ node = "gemm", name = "down_gemm", ops = [{{ label = "down", pattern = "bs{axis},m{axis}->bsm", '
        f'parallel = "{axis}" }}] }}',
    ]  # fmt: skip


def layer(name: str, *nodes: str) -> str:
    return f"{name} = [\n" + "".join(f"  {node},\n" for node in nodes) + "]\n"


BASE: dict[str, Any] = {"width": 2048, "depth": 12, "heads": 16, "kv_heads": 4, "head_size": 128, "inner": 1024,
                        "vocab_size": 64000}  # fmt: skip

# Alternating windows with sinks, soft caps, norms of heads, half-turned heads and a gate on attention's output; dense
# layers first, then sigmoid-routed experts in groups with a shared one.
MOSAIC = (
    'model_types = ["mosaic"]\nsource = "invented"\nchecked = "not at all"\n'
    'ignored = ["score", "logit_softcap", "rope_theta", "rope_parameters"]\n'
    'extra_parameters = "depth * heads"\n'
    "kind = \"'dense' if i < first_dense else ('full' if (i + 1) % 3 == 0 else 'near')\"\n"
    + SIZES
    + 'experts = "experts"\ntop_k = "chosen"\nshared_d_ff = "inner"\nroute_groups = "groups"\n'
    'top_groups = "top_groups"\n'
    "[axes]\nW = \"dense_inner\"\n[layer]\n"
    + layer("dense", NORM % "attn", GATED_QKV, '{ node = "pointwise", name = "qk_norm", op = "rmsnorm" }',
            '{ node = "pointwise", name = "rope", op = "rope" }',
            f'{{ node = "attention", name = "attention", {ATTENTION} }}', OUT, NORM % "ff", *feed("W"))
    + "".join(
        layer(kind, NORM % "attn", GATED_QKV, '{ node = "pointwise", name = "qk_norm", op = "rmsnorm" }',
              '{ node = "pointwise", name = "rope", op = "rope" }',
              f'{{ node = "attention", name = "attention", {ATTENTION}{window} }}', OUT, NORM % "ff",
              '{ node = "experts", name = "experts", shared = true }')
        for kind, window in (("near", ', window = "window"'), ("full", ""))
    )
)  # fmt: skip
MOSAIC_CONFIG = BASE | {
    "model_type": "mosaic", "first_dense": 2, "dense_inner": 8192, "experts": 32, "chosen": 4, "groups": 4,
    "top_groups": 2, "window": 512, "score": "sigmoid", "logit_softcap": 30.0,
    "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
}  # fmt: skip

# Delta-rule mixers, every fourth layer latent attention beside its feed-forward (a parallel block).
TIDE = (
    'model_types = ["tide"]\nsource = "invented"\nchecked = "not at all"\n'
    "kind = \"'latent' if i % 4 == 3 else 'delta'\"\n"
    + SIZES.replace('"head_size"', '"value_size"').replace('"kv_heads"\nhead', '"heads"\nhead')
    + '[axes]\nW = "inner"\n[latent]\nkv_rank = "rank"\nnope_dim = "head_size"\nrope_dim = "turned"\n'
    '[state_space]\nheads = "states"\nhead_dim = 64\ngroups = "states"\nstate = "head_size"\nchunk = 64\n'
    'rule = "delta"\n'
    "[layer]\n"
    + layer("delta", NORM % "mix",
            '{ node = "gemm", name = "in_gemm", ops = [{ label = "V", pattern = "bsm,mi->bsi", parallel = "i" }, '
            '{ label = "Q", pattern = "bsm,mg->bsg", parallel = "g" }, { label = "K", pattern = "bsm,mg->bsg", '
            'parallel = "g" }, { label = "beta", pattern = "bsm,mt->bst", parallel = "t" }] }',
            '{ node = "state_space", name = "mixer" }',
            '{ node = "gemm", name = "out_gemm", ops = [{ label = "out", pattern = "bsi,mi->bsm", parallel = "i" }] }',
            NORM % "ff", *feed("W"))
    + layer("latent", NORM % "both", '{ node = "latent_attention", name = "attention", q_latent = false }', OUT,
            *feed("W", source="add_rmsnorm_both"))
)  # fmt: skip
TIDE_CONFIG = {key: value for key, value in BASE.items() if key != "kv_heads"} | {
    "model_type": "tide", "rank": 256, "turned": 64, "states": 32, "value_size": 128,
}  # fmt: skip

# An encoder of a window in each layer and a decoder that crosses to it in every other layer, LayerNorm throughout.
SCRIBE = (
    'model_types = ["scribe"]\nsource = "invented"\nchecked = "not at all"\n'
    "kind = \"'cross' if i % 2 else 'plain'\"\n"
    + SIZES
    + "[layer]\n"
    + layer("plain", '{ node = "pointwise", name = "layernorm_attn", op = "layernorm", axis = "m" }', QKV,
            f'{{ node = "attention", name = "attention", {ATTENTION} }}', OUT,
            '{ node = "pointwise", name = "add_attn", op = "add", axis = "m" }')
    + layer("cross", '{ node = "pointwise", name = "layernorm_cross", op = "layernorm", axis = "m" }',
            '{ node = "gemm", name = "q_gemm", ops = [{ label = "Q", pattern = "bsm,mHh->bsHh", parallel = "H" }] }',
            '{ node = "gemm", name = "kv_gemm", source = "encoder", ops = [{ label = "K", pattern = "bsm,mKh->bsKh", '
            'parallel = "K" }, { label = "V", pattern = "bsm,mKh->bsKh", parallel = "K" }] }',
            f'{{ node = "attention", name = "cross", {ATTENTION}, cross = true }}', OUT, *feed("f"),
            '{ node = "pointwise", name = "add_cross", op = "add", axis = "m" }')
    + "[encoder]\n[encoder.sizes]\n" + SIZES.replace("[sizes]\n", "").replace('"depth"', '"encoder_depth"')
    + "[encoder.layer]\n"
    + layer("near", NORM % "attn", QKV, f'{{ node = "attention", name = "attention", {ATTENTION}, window = "window" }}',
            OUT, NORM % "ff", *feed("f"))
)  # fmt: skip
SCRIBE_CONFIG = BASE | {"model_type": "scribe", "encoder_depth": 4, "window": 256}

# A plain decoder with an image tower of its own kind before it.
LUMEN = (
    'model_types = ["lumen"]\nsource = "invented"\nchecked = "not at all"\n'
    + SIZES
    + "[layer]\n"
    + layer("only", NORM % "attn", QKV, f'{{ node = "attention", name = "attention", {ATTENTION} }}', OUT, NORM % "ff",
            *feed("f"))
    + '[vision]\nkey = "eye"\ntower = "siglip_vision_model"\npatches = "(image_size // patch_size) * (image_size // '
    'patch_size)"\ntokens = "(image_size // patch_size) * (image_size // patch_size) // 4"\n'
    'projector = [["4 * hidden_size", "language_width"]]\n'
)  # fmt: skip
LUMEN_CONFIG = BASE | {
    "model_type": "lumen",
    "eye": {"model_type": "siglip_vision_model", "hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12,
            "intermediate_size": 3072, "image_size": 448, "patch_size": 16},
}  # fmt: skip
# The same with the layers of the tower written out beside it.
PRISM = LUMEN.replace('tower = "siglip_vision_model"\n', "").replace('"lumen"', '"prism"') + (
    "[vision.sizes]\n"
    'd_model = "hidden_size"\nlayers = "num_hidden_layers"\nq_heads = "num_attention_heads"\n'
    'kv_heads = "num_attention_heads"\nhead_dim = "hidden_size // num_attention_heads"\nd_ff = "intermediate_size"\n'
    'vocab = "3 * patch_size * patch_size"\n[vision.layer]\n'
    + layer("all", NORM % "attn", QKV, f'{{ node = "attention", name = "attention", {ATTENTION} }}', OUT, NORM % "ff",
            *feed("f"))
)  # fmt: skip
PRISM_CONFIG = LUMEN_CONFIG | {
    "model_type": "prism", "eye": {key: value for key, value in LUMEN_CONFIG["eye"].items() if key != "model_type"},
}  # fmt: skip
FAMILIES = {
    "prism": (PRISM, PRISM_CONFIG),
    "mosaic": (MOSAIC, MOSAIC_CONFIG),
    "tide": (TIDE, TIDE_CONFIG),
    "scribe": (SCRIBE, SCRIBE_CONFIG),
    "lumen": (LUMEN, LUMEN_CONFIG),
}


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A folder with the family and its configuration, as a user would write them."""
    text, config = FAMILIES[request.param]
    (tmp_path / "family.toml").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


ATTENTION_WEIGHTS = 2048 * 128 * (2 * 16 + 2 * 4)
EMBEDDINGS = 2 * 64000 * 2048 + 2048
COUNTS = {
    # gate, Q and O of 16 heads; norms of heads; experts of 1024 and one more for all
    "mosaic": EMBEDDINGS + 12 * (ATTENTION_WEIGHTS + 2048 * 128 * 16 + 2 * 128 + 2 * 2048 + 16)
    + 2 * 3 * 2048 * 8192 + 10 * (2048 * 32 + 33 * 3 * 2048 * 1024),
    "tide": EMBEDDINGS
    + 9 * (2048 * (2 * 32 * 64 + 2 * 32 * 128 + 32) + 3 * 2048 * 1024 + 2 * 2048)
    + 3 * (2048 * 16 * (128 + 64) + 2048 * (256 + 64) + 256 * 16 * 2 * 128 + 2048 * 16 * 128 + 256
           + 3 * 2048 * 1024 + 2048),
    "scribe": EMBEDDINGS + 12 * (ATTENTION_WEIGHTS + 2 * 2048) + 6 * 3 * 2048 * 1024
    + EMBEDDINGS + 4 * (ATTENTION_WEIGHTS + 3 * 2048 * 1024 + 2 * 2048),
}  # fmt: skip
KV = {"prism": 12 * 2048, "mosaic": 12 * 2048, "tide": 3 * 2 * 320, "scribe": 6 * 2048, "lumen": 12 * 2048}


@pytest.mark.parametrize(("folder", "name"), [(name, name) for name in FAMILIES], indirect=["folder"])
def test_sizes_are_those_of_the_layers_as_written(folder: str, name: str) -> None:
    found = facts(load_model(folder))
    if name in COUNTS:
        assert found["parameters"] == COUNTS[name]
    assert (found["kv_bytes_per_token"], found["family"], found["precision"]) == (KV[name], name, "bf16")


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_they_run_and_two_ranks_do_the_work_of_one(folder: str, phase: str) -> None:
    def products(tp: int) -> float:
        program = build_program(load_model(folder), Layout(tp=tp), phase=phase, batch=2, seq_len=2048,
                                options=Options(lm_head=False))  # type: ignore[arg-type]  # fmt: skip
        segments = program.ranks[0].phases[0].segments
        return sum(
            one.repeat * kernel.flops
            for one in segments
            for kernel in one.kernels
            if not isinstance(kernel.work, ElementwiseWork)
        )

    assert 0.5 * products(1) <= products(2) <= 0.53 * products(1)  # routers and latents are not split
    one, two = (simulate(model=folder, phase=phase, batch=2, seq_len=2048, tp=tp) for tp in (1, 2))
    assert 0.0 < one.latency_s < 2 * two.latency_s
    assert one.standing.status == "unchecked"


@pytest.mark.parametrize("folder", ["mosaic"], indirect=True)
def test_a_window_stands_in_the_layers_that_have_one(folder: str) -> None:
    program = build_program(load_model(folder), Layout(), phase="decode", batch=1, seq_len=4096)
    found = {segment.name: next(k.work.kv_len for k in segment.kernels if isinstance(k.work, AttentionWork))
             for segment in program.ranks[0].phases[0].segments[:-1]}  # fmt: skip
    assert found == {"dense layer": 4096, "full layer": 4096, "near layer": 512}


@pytest.mark.parametrize("folder", ["scribe"], indirect=True)
def test_only_the_layers_that_cross_read_the_encoder(folder: str) -> None:
    run = build_program(load_model(folder), Layout(), phase="prefill", batch=1, seq_len=8,
                        options=Options(source_len=1024))  # fmt: skip
    segments = run.ranks[0].phases[0].segments
    assert [(one.name, one.repeat) for one in segments[:2]] == [("encoder layer", 4), ("plain layer", 1)]
    keys = [k.work.m for one in segments for k in one.kernels if k.name == "kv_gemm" and isinstance(k.work, GemmWork)]
    assert keys == [1024] * 6
    local = next(k.work for k in segments[0].kernels if isinstance(k.work, AttentionWork))
    assert local.kv_len == 225  # the mean of a window of 256 over 1,024 tokens


@pytest.mark.parametrize("folder", ["lumen", "prism"], indirect=True)
def test_images_go_through_the_tower(folder: str) -> None:
    seen = simulate(model=folder, seq_len=2048, images=2, layers=2)
    blind = simulate(model=folder, seq_len=2048, layers=2)
    assert seen.latency_s > blind.latency_s
    program = build_program(load_model(folder), Layout(), phase="prefill", batch=1, seq_len=2048,
                            options=Options(images=2, layers=2))  # fmt: skip
    tower = next(one for one in program.ranks[0].phases[0].segments if one.name == "vision layer")
    seen_by = next(kernel.work for kernel in tower.kernels if isinstance(kernel.work, AttentionWork))
    assert (tower.repeat, seen_by.batch, seen_by.q_len, seen_by.causal) == (6, 2, 784, False)
