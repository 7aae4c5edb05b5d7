"""Formats of libraries of quantisation over Llama 3.1 8B: names, and bytes counted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.family_configs import Config
from tests.test_workloads_quantised import LINEAR, LLAMA, NAMES, REST, read
from workloads.errors import WorkloadError
from workloads.params import facts
from workloads.quantised_libraries import LIBRARIES
from workloads.quantised_modules import Scheme

_MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
_CACHE = {"*k_proj": {"weight": _FP8, "input_tensors": _FP8, "output_tensors": _FP8},
          "*v_proj": {"weight": _FP8, "input_tensors": _FP8, "output_tensors": _FP8}}  # fmt: skip
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
         "packing_format": "auto_round:auto_gptq"}  # fmt: skip
HQQ = {"quant_method": "hqq", "skip_modules": ["lm_head"],
       "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}, "scale_quant_params": None,
                        "zero_quant_params": None, "offload_meta": False}}  # fmt: skip


def quark(weight: object, inputs: object = None, **more: object) -> Config:
    whole = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": whole, "exclude": ["lm_head"], **more}


def ao(kind: str, **data: object) -> Config:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 1, "_data": data}}}


@pytest.mark.parametrize(
    ("table", "names", "linear_bytes"),
    [
        (quark(_FP8, _FP8), ("fp8_e4m3", "fp8_e4m3", "bf16", "quark"), LINEAR),
        (quark(_FP8, _FP8, layer_quant_config=_CACHE, export={"kv_cache_group": ["*k_proj", "*v_proj"]}),
         ("fp8_e4m3", "fp8_e4m3", "fp8_e4m3", "quark"), LINEAR),
        (quark(_MX, _MX | {"is_dynamic": True}), ("mxfp4", "mxfp4", "bf16", "quark"), LINEAR // 2 + LINEAR // 32),
        (quark([_FP8, {"dtype": "int4", "qscheme": "per_channel"}], _FP8),
         ("int4_channel", "fp8_e4m3", "bf16", "quark"), LINEAR // 2 + 4 * LINEAR // 4096),
        (quark({"dtype": "uint4", "qscheme": "per_group", "group_size": 128, "symmetric": False}),
         ("int4_g128_zero", "bf16", "bf16", "quark"), LINEAR // 2 + LINEAR // 128 * 5 // 2),
        (ao("Int4WeightOnlyConfig", group_size=128), ("int4_g128_zero16", "bf16", "bf16", "torchao"),
         LINEAR // 2 + LINEAR // 128 * 4),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only", "quant_type_kwargs": {"group_size": 64}},
         ("int4_g64_zero16", "bf16", "bf16", "torchao"), LINEAR // 2 + LINEAR // 64 * 4),
        (ao("Float8DynamicActivationFloat8WeightConfig"), ("fp8_e4m3", "fp8_e4m3", "bf16", "torchao"), LINEAR),
        (ao("Int8DynamicActivationInt4WeightConfig"), ("int4_g32", "int8_channel", "bf16", "torchao"),
         LINEAR // 2 + LINEAR // 32 * 2),
        (ROUND, ("int4_g128_zero", "bf16", "bf16", "auto-round"), LINEAR // 2 + LINEAR // 128 * 5 // 2),
        (ROUND | {"quant_method": "intel/auto-round", "bits": 2, "group_size": 64},
         ("int2_g64_zero", "bf16", "bf16", "intel/auto-round"), LINEAR // 4 + LINEAR // 64 * 9 // 4),
        (HQQ, ("int4_g64_zero16", "bf16", "bf16", "hqq"), LINEAR // 2 + LINEAR // 64 * 4),
        ({"quant_method": "quanto", "weights": "int4", "activations": None},
         ("int4_g128_zero16", "bf16", "bf16", "quanto"), LINEAR // 2 + LINEAR // 128 * 4),
        ({"quant_method": "bitnet", "modules_to_not_convert": None}, ("int2", "int8_channel", "bf16", "bitnet"),
         LINEAR // 4),
    ],
)  # fmt: skip
def test_a_format_is_read_as_what_it_stores(table: Config, names: tuple[str, ...], linear_bytes: int) -> None:
    found = facts(read(LLAMA, table))
    assert tuple(found[name] for name in NAMES) == names
    assert found["parameters"] == 8_030_261_248
    rows_of_wider = 5e-4 if "channel" in names[0] else 1e-6  # rows of down are 14,336 long, not 4,096
    assert found["weight_bytes"] == pytest.approx(linear_bytes + 2 * REST, rel=rows_of_wider)
    assert found["kv_bytes_per_token"] == (65536 if names[2] == "fp8_e4m3" else 131072)


def test_8_bit_rows_of_eetq_have_a_scale_each() -> None:
    found = facts(read(LLAMA, {"quant_method": "eetq", "weights": "int8"}))
    rows = 32 * (4096 * 2 + 2 * 1024 + 2 * 14336 + 4096)
    assert found["weight_bytes"] == LINEAR + 4 * rows + 2 * REST
    assert (found["precision"], found["activations"]) == ("int8_channel", "bf16")


def test_modules_that_are_left_out_or_have_their_own_bits() -> None:
    up = 32 * 4096 * 14336
    wide = facts(
        read(LLAMA, ROUND | {"extra_config": {f"model.layers.{i}.mlp.up_proj": {"bits": 16} for i in range(32)}})
    )
    assert wide["weight_bytes"] - facts(read(LLAMA, ROUND))["weight_bytes"] == up * 2 - up // 2 - up // 128 * 5 // 2
    own = {
        "quant_method": "torchao",
        "quant_type": {
            "default": {
                "_type": "ModuleFqnToConfig",
                "_data": {
                    "module_fqn_to_config": {
                        "_default": {"_type": "Int8WeightOnlyConfig", "_data": {}},
                        "mlp.up_proj": None,
                    }
                },
            }
        },
    }
    eight = facts(read(LLAMA, {"quant_method": "eetq", "weights": "int8"}))["weight_bytes"]
    assert facts(read(LLAMA, own))["weight_bytes"] - eight == up - 4 * 32 * 14336


def _spoilt(value: Any) -> Iterator[Any]:
    """``value`` with each entry in it left out, and with each replaced by what does not belong there."""
    if isinstance(value, dict):
        for key, own in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield from (value | {key: worse} for worse in (*JUNK, *_spoilt(own)))


JUNK = (None, 0, -1, 7, 2**70, 1.5, True, "", "x" * 400, [], [1], [[]], {}, {"a": {"b": 1}})


@pytest.mark.parametrize(
    "table",
    [
        quark(_FP8, _FP8, layer_quant_config=_CACHE), quark({"dtype": "uint4", "group_size": 64}),
        ao("Int4WeightOnlyConfig", group_size=128), ao("ModuleFqnToConfig", modules={"_default": {"_type": "a"}}), HQQ,
        ROUND | {"extra_config": {"up_proj": {"bits": 16}}}, {"quant_method": "eetq", "weights": "int8"},
        {"quant_method": "quanto", "weights": "int4", "activations": None}, {"quant_method": "bitnet"},
    ],
)  # fmt: skip
def test_a_spoilt_table_is_read_or_refused_in_one_line(table: Config) -> None:
    reading = LIBRARIES[table["quant_method"].replace("-", "_")]
    for spoilt in _spoilt(table):
        try:
            assert isinstance(reading(spoilt, "quantization_config"), Scheme | None)
        except WorkloadError as error:
            assert "\n" not in str(error) and len(str(error)) <= 290


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (quark({"dtype": "fp6_e2m3", "qscheme": "per_group"}), "weight: dtype = 'fp6_e2m3': known are fp8_e4m3, "),
        (quark(_FP8 | {"qscheme": "per_block"}), "weight: qscheme = 'per_block': known are per_tensor, "),
        (quark(_FP8, layer_quant_config=7), "layer_quant_config = 7: give a table of tables"),
        (quark("fp8"), "global_quant_config: weight = 'fp8': give a table with dtype and qscheme"),
        (ao("Int3WeightOnlyConfig"), "torchao (quant_method 'torchao'): not simulated yet"),
        (ROUND | {"data_type": "mx_fp"}, "AutoRound weights (quant_method 'auto-round', bits 4): not simulated yet"),
        (HQQ | {"quant_config": {"weight_quant_params": {"nbits": 4}, "scale_quant_params": {"nbits": 8}}},
         "HQQ integer weights (quant_method 'hqq'): not simulated yet"),
        (HQQ | {"quant_config": {}}, "HQQ integer weights (quant_method 'hqq'): not simulated yet"),
        (ao("ModuleFqnToConfig", module_fqn_to_config=7),
         "quant_type: _data = {'module_fqn_to_config': 7}: give a table of modules by name"),
        (ao("ModuleFqnToConfig"), "quant_type: _data = {}: give a table of modules by name"),
        ({"quant_method": "quanto", "weights": ["int4"]}, "Quanto (quant_method 'quanto'): not simulated yet"),
        ({"quant_method": "quanto", "weights": "int4", "activations": {}}, "Quanto (quant_method 'quanto'): not sim"),
        ({"quant_method": "quanto", "weights": "int3"}, "Quanto (quant_method 'quanto'): not simulated yet"),
        ({"quant_method": "eetq"}, "EETQ 8-bit integer weights (quant_method 'eetq'): not simulated yet"),
        ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "'store_dtype' = 'mxfp4': other work than is simulated"),
        ({"quant_method": "higgs", "bits": 4}, "HIGGS codebooks (quant_method 'higgs', bits 4): not simulated yet"),
        ({"quant_method": "exl2", "bits": 4.0}, "EXL2 integer weights (quant_method 'exl2'): not simulated yet"),
        ({"quant_method": "spqr", "bits": 3}, "SpQR integer weights (quant_method 'spqr', bits 3): not simulated"),
        ({"quant_method": "vptq"}, "VPTQ codebooks (quant_method 'vptq'): not simulated yet"),
        ({"quant_method": "gguf"}, "GGUF (quant_method 'gguf'): not simulated yet"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_its_name(table: Config, message: str) -> None:
    with pytest.raises(WorkloadError, match="quantization_config") as error:
        read(LLAMA, table)
    assert message in str(error.value)
