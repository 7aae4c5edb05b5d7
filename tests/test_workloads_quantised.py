"""Quantised checkpoints: every format read as what it stores, or refused by its name, never read as bf16."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config_kit import DEEPSEEK, KIMI, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, Config
from tests.transformer_kit import build
from workloads import DType, Layout, Routing, WorkloadError, choice_of, expert_loads, load_model
from workloads.families.moe import expert_kernels
from workloads.huggingface import parse_config
from workloads.kernels import Shape
from workloads.layer_passes.lower import lower
from workloads.layer_passes.tree import ExpertRows, Grouped
from workloads.model import ModelSpec
from workloads.ops import Experts
from workloads.params import facts
from workloads.precision import Precision, resolve
from workloads.work import GemmWork, GroupedGemmWork

NAMES = ("precision", "activations", "kv_cache", "quantisation")
LINEAR = (
    6_979_321_856  # weights of Llama 3.1 8B's 224 linear layers: 32 x (2 x 4096^2 + 2 x 4096 x 1024 + 3 x 4096 x 14336)
)
REST = 8_030_261_248 - LINEAR
# Bytes of those weights with a scale of s bits a row of outputs: rows of Q, K, V, O, gate, up, down.
ROWS = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def read(config: Config, table: Any = None, **change: Any) -> ModelSpec:
    told = {} if table is None else {"quantization_config": table}
    return parse_config(json.dumps(config | told | change), where="c.json")


def refusal(config: Config, table: Any = None, **change: Any) -> str:
    with pytest.raises(WorkloadError) as error:
        read(config, table, **change)
    return str(error.value)


def ct(weights: Any, inputs: Any = None, packed: str = "float-quantized", **more: Any) -> Config:
    """A table of compressed-tensors with one group of all linear layers, the head left out."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": packed, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    } | more  # fmt: skip


_F8, _I8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
_F4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_I4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_TOKEN = {"strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("table", "names", "linear_bytes"),
    [
        (FP8, ("fp8_e4m3_block128", "fp8_e4m3_g128", "bf16", "fp8"), LINEAR + LINEAR // 128**2 * 4),
        ({"quant_method": "fp8"}, ("fp8_e4m3", "fp8_e4m3_channel", "bf16", "fp8"), LINEAR),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ("fp8_e4m3", "fp8_e4m3", "bf16", "fp8"), LINEAR),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            ("fp8_e4m3_channel", "fp8_e4m3_channel", "bf16", "fbgemm_fp8"), LINEAR + ROWS * 4,
        ),
        (
            ct(_F8, _F8 | {"dynamic": True}, kv_cache_scheme=_F8),
            ("fp8_e4m3", "fp8_e4m3", "fp8_e4m3", "compressed-tensors"), LINEAR,
        ),
        (
            ct(_F8 | {"strategy": "channel"}, _F8 | _TOKEN),
            ("fp8_e4m3_channel", "fp8_e4m3_channel", "bf16", "compressed-tensors"), LINEAR + ROWS * 4,
        ),
        (
            ct(_F8 | {"strategy": "block", "block_structure": [128, 128]},
               _F8 | {"strategy": "group", "group_size": 128}),
            ("fp8_e4m3_block128", "fp8_e4m3_g128", "bf16", "compressed-tensors"), LINEAR + LINEAR // 128**2 * 4,
        ),
        (
            ct(_I8 | {"strategy": "channel"}, _I8 | _TOKEN, "int-quantized"),
            ("int8_channel", "int8_channel", "bf16", "compressed-tensors"), LINEAR + ROWS * 4,
        ),
        (
            ct(_I8 | {"strategy": "channel"}, None, "pack-quantized"),
            ("int8_channel", "bf16", "bf16", "compressed-tensors"), LINEAR + ROWS * 4,
        ),
        (ct(_I4, None, "pack-quantized"), ("int4_g128", "bf16", "bf16", "compressed-tensors"),
         LINEAR // 2 + LINEAR // 128 * 2),
        (
            ct(_I4 | {"symmetric": False}, _F8 | _TOKEN, "pack-quantized"),
            ("int4_g128_zero", "fp8_e4m3_channel", "bf16", "compressed-tensors"),
            LINEAR // 2 + LINEAR // 128 * 5 // 2,
        ),
        (ct(_F4, _F4, "nvfp4-pack-quantized"), ("nvfp4", "nvfp4", "bf16", "compressed-tensors"),
         LINEAR // 2 + LINEAR // 16),
        (ct(_F4, None, "nvfp4-pack-quantized"), ("nvfp4", "bf16", "bf16", "compressed-tensors"),
         LINEAR // 2 + LINEAR // 16),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
         ("int4_g128_zero", "bf16", "bf16", "gptq"), LINEAR // 2 + LINEAR // 128 * 5 // 2),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64}, ("int3_g64_zero", "bf16", "bf16", "gptq"),
         LINEAR * 3 // 8 + LINEAR // 64 * 19 // 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("int8_channel_zero", "bf16", "bf16", "gptq"),
         LINEAR + ROWS * 5),
        (AWQ, ("int4_g128_zero", "bf16", "bf16", "awq"), LINEAR // 2 + LINEAR // 128 * 5 // 2),
        (AWQ | {"zero_point": False, "group_size": 64}, ("int4_g64", "bf16", "bf16", "awq"),
         LINEAR // 2 + LINEAR // 64 * 2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
         ("nf4_g64", "bf16", "bf16", "bitsandbytes"), LINEAR // 2 + LINEAR // 64 * 4),
        (
            {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            ("fp4_g64_double", "bf16", "bf16", "bitsandbytes"),
            LINEAR // 2 + LINEAR // 64 + LINEAR // 64 // 64,
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
         ("int8_channel", "int8_channel", "bf16", "bitsandbytes"), LINEAR + ROWS * 4),
        (NVFP4 | {"kv_cache_scheme": _F8}, ("nvfp4", "nvfp4", "fp8_e4m3", "modelopt"), LINEAR // 2 + LINEAR // 16),
        (NVFP4 | {"quant_method": "modelopt_fp4"}, ("nvfp4", "nvfp4", "bf16", "modelopt_fp4"),
         LINEAR // 2 + LINEAR // 16),
        ({"quant_method": "nvfp4"}, ("nvfp4", "nvfp4", "bf16", "nvfp4"), LINEAR // 2 + LINEAR // 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
         ("fp8_e4m3", "fp8_e4m3", "fp8_e4m3", "modelopt"), LINEAR),
        ({"quant_algo": "W4A16_AWQ", "group_size": 128}, ("int4_g128", "bf16", "bf16", "modelopt"),
         LINEAR // 2 + LINEAR // 128 * 2),
        ({"quant_algo": "W4A8_AWQ"}, ("int4_g128", "fp8_e4m3", "bf16", "modelopt"), LINEAR // 2 + LINEAR // 128 * 2),
        (ct(_F4, _F4) | {"quant_method": "modelopt"},
         ("nvfp4", "nvfp4", "bf16", "modelopt"), LINEAR // 2 + LINEAR // 16),
    ],
)  # fmt: skip
def test_a_format_is_read_as_what_it_stores(table: Config, names: tuple[str, ...], linear_bytes: int) -> None:
    found = facts(read(LLAMA, table))
    assert tuple(found[name] for name in NAMES) == names
    assert found["parameters"] == 8_030_261_248
    assert found["weight_bytes"] == pytest.approx(linear_bytes + 2 * REST, rel=1e-6)
    assert found["kv_bytes_per_token"] == (65536 if names[2] == "fp8_e4m3" else 131072)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"quant_method": "quark"}, "Quark (quant_method 'quark'): not simulated yet: take it out to run"),
        ({"quant_method": "torchao"}, "torchao (quant_method 'torchao'): not simulated yet"),
        ({"quant_method": "AQLM"}, "AQLM codebooks (quant_method 'AQLM'): not simulated yet"),
        ({"quant_method": "int3"}, "unknown format 'int3'"),
        ({"quant_method": ["awq"]}, "unknown format ['awq']"),
        ({"bits": 3}, "a quantised format that is not known (bits 3)"),
        ({}, "a quantised format that is not known"),
        (7, "a quantised format that is not known"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2': FP8 weights are read as e4m3 only"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size = [128]: give two positive whole numbers"),
        (FP8 | {"activation_scheme": "odd"}, "activation_scheme = 'odd': known are dynamic, static"),
        (AWQ | {"bits": 5}, "bits = 5: known are 4, 8"),
        (AWQ | {"group_size": 0}, "group_size = 0: give a positive whole number"),
        (AWQ | {"modules_to_not_convert": ["self_atn"]}, "'self_atn' names no module that is known"),
        (AWQ | {"modules_to_not_convert": 3}, "modules_to_not_convert = 3: give a list of names"),
        (AWQ | {"modules_to_not_convert": ["re:("]}, "'re:(' is no regular expression: mend it"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit and load_in_8bit: one of them must be true"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type = 'nf3': known are nf4, fp4"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "tf32"}, "bnb_4bit_compute_dtype = 'tf32': known are bfloat"),
        (NVFP4 | {"quant_algo": "FP3"}, "quant_algo = 'FP3': not simulated: did you mean FP8?"),
        (NVFP4 | {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme = {'num_bits': 4, 'type'"),
        (ct(_F8, packed="marlin-24"), "format = 'marlin-24': known are dense, "),
        (ct({"num_bits": 3, "type": "float"}), "config_groups.group_0: weights: num_bits = 3, type = 'float': known"),
        (ct(_F8 | {"strategy": "odd"}), "config_groups.group_0: weights: strategy = 'odd': known are tensor, "),
        (ct(_I4, _F4), "config_groups.group_0: input_activations of 4 bits with weights in int4_g128"),
        (ct(_F8, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config: sparse weights"),
        ({"quant_method": "compressed-tensors"}, "config_groups is missing"),
        (ct(_F8, transform_config={"config_groups": {"u": {}}}), "'transform_config' = {'config_groups': {'u': {}"),
        (AWQ | {"sparsity": "2:4"}, "'sparsity' = '2:4': other work than is simulated"),
        ({"quant_method": "gptq", "group_size": 128}, "bits is missing: GPTQ says there what weights are stored in"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin_24"}, "checkpoint_format = 'marlin_24'"),
        ({"quant_method": "mxfp4"}, "mxfp4 holds for none of this model's products: take it out"),
        (AWQ | {"modules_to_not_convert": ["self_attn", "mlp"]}, "awq holds for none of this model's products"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(table: Any, message: str) -> None:
    text = refusal(LLAMA, table)
    assert text.startswith("c.json: quantization_config: ")
    assert message in text
    assert "\n" not in text


def stored(model: ModelSpec, layer: int = 0) -> dict[str, str]:
    """How the weights of one layer's products, and of the head, are stored."""
    phase = build(model, "decode", batch=4, seq_len=64).ranks[0].phases[0]
    for segment in phase.segments:
        if segment.first <= layer < segment.first + segment.repeat and segment.name != "lm_head":
            works = {kernel.name: kernel.work for kernel in segment.kernels}
    return {
        name: str(work.weights or work.dtype.value)
        for name, work in works.items()
        if isinstance(work, GemmWork | GroupedGemmWork)
    }


@pytest.mark.parametrize(
    "names",
    [["self_attn"], ["re:.*self_attn.*"], ["*self_attn*"], ["model.layers.*.self_attn"],
     [f"model.layers.{i}.self_attn.{part}_proj" for i in range(32) for part in "qkvo"]],
)  # fmt: skip
def test_modules_that_are_left_out_stay_in_16_bit_however_they_are_named(names: list[str]) -> None:
    model = read(LLAMA, AWQ | {"modules_to_not_convert": names})
    assert stored(model) == {
        "qkv_gemm": "bf16", "o_gemm": "bf16", "gate_up_gemm": "int4_g128_zero", "down_gemm": "int4_g128_zero",
    }  # fmt: skip
    attention = 32 * (2 * 4096**2 + 2 * 4096 * 1024)
    whole, part = (facts(one)["weight_bytes"] for one in (read(LLAMA, AWQ), model))
    assert part - whole == pytest.approx(attention * (2 - 0.5 - 2.5 / 128), rel=1e-9)


def test_layers_that_are_left_out_are_segments_of_their_own() -> None:
    model = read(LLAMA, FP8 | {"ignored_layers": ["model.layers.0", "model.layers.31.mlp.down_proj"]})
    assert [stored(model, layer)["down_gemm"] for layer in (0, 1, 30, 31)] == [
        "bf16", "fp8_e4m3_block128", "fp8_e4m3_block128", "bf16",
    ]  # fmt: skip
    assert stored(model, 31)["gate_up_gemm"] == "fp8_e4m3_block128"
    segments = build(model, seq_len=64).ranks[0].phases[0].segments
    assert [(one.first, one.repeat) for one in segments if one.name == "layer"] == [(0, 1), (1, 30), (31, 1)]


def test_fp32_products_of_four_bits_are_refused_where_the_library_runs_them() -> None:
    told = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    assert stored(read(LLAMA | {"torch_dtype": "bfloat16"}, told))["o_gemm"] == "fp4_g64"  # run in bf16 all the same
    with pytest.raises(WorkloadError, match="bnb_4bit_compute_dtype = 'float32' with weights of fp16: products in fp3"):
        read(LLAMA | {"torch_dtype": "float16"}, told)
    read(LLAMA | {"torch_dtype": "float16"}, told | {"bnb_4bit_compute_dtype": "float16"})


@pytest.mark.parametrize("name", ["gate", "mlp.gate", "re:.*mlp.gate$", "model.layers.*.mlp.gate", "lm_head"])
def test_a_list_of_routers_and_heads_changes_nothing(name: str) -> None:
    # The router is 16-bit in every public scheme, and no gate_proj is meant by its name.
    listed, whole = (read(QWEN3_MOE, FP8 | more) for more in ({"modules_to_not_convert": [name]}, {}))
    assert listed.quantised == whole.quantised
    assert stored(listed)["router_gemm"] == "bf16"
    assert stored(listed)["gate_up_grouped"] == "fp8_e4m3_block128"


@pytest.mark.parametrize(
    "name",
    ["vision_tower.vision_model.encoder.layers.0", "model.visual.blocks.0", "visual.blocks.1.attn.qkv", "mtp.layers.0",
     "re:vision_tower.*", "multi_modal_projector", "model.layers.32", "model.layers.61*", "model.vision_tower.*",
     "model.layers.0.input_layernorm", "model.embed_tokens", "merger"],
)  # fmt: skip
def test_layers_of_encoders_and_of_further_tokens_are_none_of_the_language_model(name: str) -> None:
    assert read(LLAMA, AWQ | {"modules_to_not_convert": [name]}).quantised == read(LLAMA, AWQ).quantised


@pytest.mark.parametrize(
    ("name", "layers"),
    [("model.layers.1*", {1, *range(10, 20)}), ("model.layers.1.*", {1}), (r"re:model\.layers\.1\..*", {1}),
     ("re:model.layers.1.*", {1, *range(10, 20)}), (r"re:.*layers\.(3|5)\..*", {3, 5}), ("layers.7", {7})],
)  # fmt: skip
def test_a_pattern_holds_for_the_layers_that_it_matches(name: str, layers: set[int]) -> None:
    model = read(LLAMA, AWQ | {"modules_to_not_convert": [name]})
    assert {layer for layer in range(32) if stored(model, layer)["down_gemm"] == "bf16"} == layers


def test_mxfp4_holds_for_experts_alone_and_latent_layers_take_blocks() -> None:
    experts = read(MIXTRAL, {"quant_method": "mxfp4"})
    assert stored(experts) == {
        "qkv_gemm": "bf16", "o_gemm": "bf16", "router_gemm": "bf16", "gate_up_grouped": "mxfp4",
        "down_grouped": "mxfp4",
    }  # fmt: skip
    weights = 56 * 8 * 3 * 6144 * 16384
    assert facts(experts)["weight_bytes"] == 2 * (facts(experts)["parameters"] - weights) + weights * 17 // 32
    kimi = facts(read(KIMI, FP8))
    assert kimi["weight_bytes"] == pytest.approx(1.0264e12 + 1.17e9 * 2 * 2, rel=0.01)
    blocks = stored(read(KIMI, FP8), 1)
    quantised = ("latent_down_gemm", "q_up_gemm", "o_gemm", "down_grouped", "down_shared_gemm")
    assert {blocks[name] for name in quantised} == {"fp8_e4m3_block128"}
    assert blocks["absorb_k_gemm"] == "bf16"


def test_groups_of_compressed_tensors_hold_for_their_own_modules() -> None:
    mixed = ct(_F8, _F8)
    mixed["config_groups"]["group_1"] = {"targets": ["re:.*mlp.*"], "weights": _I4, "input_activations": None}
    assert stored(read(LLAMA, mixed))["down_gemm"] == "int4_g128"
    assert stored(read(LLAMA, mixed))["o_gemm"] == "fp8_e4m3"
    # The head is a linear layer like any other unless it is left out, or is the embedding itself.
    whole = ct(_I4) | {"ignore": []}
    head = read(LLAMA, whole).quantised
    assert head is not None
    assert str(head.head and head.head.weights) == "int4_g128"
    assert read(QWEN3, whole).quantised == Precision(**{**_fields(read(QWEN3, ct(_I4)).quantised), "head": None})


def _fields(precision: Precision | None) -> dict[str, Any]:
    assert precision is not None
    return {name: getattr(precision, name) for name in ("base", "product", "kv", "exceptions", "method", "own")}


def test_dynamic_and_mixed_tables_hold_for_their_own_modules() -> None:
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    rules = {"-:.*self_attn.*": {}, r"+:.*layers\.0\..*down.*": {"bits": 8, "group_size": 32}}
    model = read(LLAMA, gptq | {"dynamic": rules})
    assert stored(model)["down_gemm"] == "int8_g32_zero"
    assert stored(model, 1) == {
        "qkv_gemm": "bf16", "o_gemm": "bf16", "gate_up_gemm": "int4_g128_zero", "down_gemm": "int4_g128_zero",
    }  # fmt: skip
    layers = {f"model.layers.{i}.mlp.down_proj": {"quant_algo": "NVFP4"} for i in range(32)}
    layers |= {f"model.layers.{i}.self_attn.o_proj": {"quant_algo": "FP8"} for i in range(32)}
    mixed = read(LLAMA, {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    assert stored(mixed)["o_gemm"] == "fp8_e4m3"
    assert stored(mixed)["qkv_gemm"] == "bf16"
    inside = read(LLAMA, gptq | {"modules_in_block_to_quantize": [["self_attn.o_proj"], ["mlp.down_proj"]]})
    assert stored(inside)["o_gemm"] == "int4_g128_zero"
    assert stored(inside)["gate_up_gemm"] == "bf16"


def test_quantisation_is_found_wherever_it_stands(tmp_path: Path) -> None:
    assert facts(read(LLAMA, kv_cache_scheme=_F8))["kv_bytes_per_token"] == 65536
    assert facts(read(LLAMA, kv_cache_scheme=_F8))["weight_bytes"] == 2 * 8_030_261_248
    assert refusal(LLAMA, kv_cache_scheme={"num_bits": 8, "type": "odd"}).startswith("c.json: kv_cache_scheme = ")
    assert facts(read(LLAMA, compression_config=ct(_F8, _F8)))["precision"] == "fp8_e4m3"
    assert refusal(LLAMA, quantization={"bits": 4, "group_size": 64}).startswith("c.json: quantization: a quantised")
    assert refusal(LLAMA, AWQ, compression_config=AWQ).startswith("c.json: quantization_config and compression_config")
    assert refusal(LLAMA, torch_dtype="float8_e4m3fn").startswith("c.json: torch_dtype = 'float8_e4m3fn': weights are")
    vision = {"model_type": "clip_vision_model", "hidden_size": 1024, "num_hidden_layers": 24,
              "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 336, "patch_size": 14}  # fmt: skip
    llava = {"model_type": "llava", "text_config": LLAMA, "vision_config": vision}
    for model in (read(llava, AWQ), read(llava | {"text_config": LLAMA | {"quantization_config": AWQ}})):
        assert facts(model)["precision"] == "int4_g128_zero"
        assert facts(model)["weight_bytes"] == pytest.approx(
            facts(read(LLAMA, AWQ))["weight_bytes"] + 2 * (facts(model)["parameters"] - 8_030_261_248), rel=1e-6
        )
    eight = {"vision_config": vision | {"quantization_config": AWQ}}
    assert refusal(llava, **eight).startswith("c.json: vision_config: a quantised image encoder is not simulated")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    beside = tmp_path / "hf_quant_config.json"
    cache = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    beside.write_text(json.dumps({"quantization": cache}), encoding="utf-8")
    assert facts(load_model(str(tmp_path)))["kv_bytes_per_token"] == 65536
    assert facts(load_model(str(tmp_path)))["precision"] == "bf16"
    inside = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inside}), encoding="utf-8")
    found = facts(load_model(str(tmp_path)))
    assert tuple(found[name] for name in NAMES) == ("nvfp4", "nvfp4", "fp8_e4m3", "modelopt")
    beside.write_text('{"quantization": {"quant_algo": "FP3"}}', encoding="utf-8")
    with pytest.raises(
        WorkloadError, match=r"hf_quant_config.json: quantization: quant_algo = 'FP3': not simulated: did"
    ):
        load_model(str(tmp_path))


def test_a_quantised_latent_model_has_no_16_bit_experts() -> None:
    model = read(DEEPSEEK, FP8)
    assert facts(model)["weight_bytes"] < 1.05 * facts(model)["parameters"]
    assert facts(model)["kv_bytes_per_token"] == facts(read(DEEPSEEK))["kv_bytes_per_token"]


@pytest.mark.parametrize("ups", [1, 2])
def test_rows_are_quantised_once_before_each_product_of_experts_with_a_gate_or_without(ups: int) -> None:
    model = load_model("mixtral-8x7b")
    (experts,) = (node for node in model.blocks[0].nodes if isinstance(node, Experts))
    precision = resolve(model.quantised, dtype=DType.FP8)
    shape = Shape(model=model, layout=Layout(), batch=64, new_tokens=1, context=1, precision=precision)
    (load,) = expert_loads(tokens=64, choice=choice_of(model), routing=Routing(), ranks=1)
    nodes = lower((replace(experts, up=experts.up[-ups:]),))
    kernels = [
        kernel
        for node in nodes
        if isinstance(node, ExpertRows | Grouped)
        for kernel in expert_kernels(node, shape, load, slots=model.experts)
    ]
    assert [kernel.name for kernel in kernels] == [
        "cast_gate_up_grouped", "gather", "gate_up_grouped", "cast_down_grouped", "down_grouped",
    ]  # fmt: skip
