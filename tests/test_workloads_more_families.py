"""More families that are data: weights and cache of further public models (abridged in ``more_families.json``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.family_configs import QWEN3_NEXT
from tests.test_workloads_families import kernels, read
from workloads import Layout, Options, WorkloadError, build_program
from workloads.memory import MemoryLoad, memory_need
from workloads.params import facts
from workloads.work import AttentionWork, ElementwiseWork, GemmWork

MORE = json.loads((Path(__file__).parent / "more_families.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MORE)
def test_weights_and_cache_are_the_published_ones(name: str) -> None:
    found = facts(read(MORE[name]["config"]))
    assert found["parameters"] / 1e9 == pytest.approx(MORE[name]["billions"], rel=0.01)
    assert found["kv_bytes_per_token"] == MORE[name]["kv"]


@pytest.mark.parametrize("name", MORE)
def test_two_ranks_do_the_work_of_one(name: str) -> None:
    model = read(MORE[name]["config"])

    def flops(tp: int) -> float:
        found = kernels(model, "prefill", seq_len=2048, tp=tp, batch=2)
        return sum(one.flops for run in found.values() for one in run if not isinstance(one.work, ElementwiseWork))

    # latents and low ranks of queries are every rank's own
    assert 0.45 * flops(1) <= flops(2) <= 0.62 * flops(1)


@pytest.mark.parametrize("name", MORE)
def test_a_key_that_nobody_has_read_is_refused(name: str) -> None:
    config = MORE[name]["config"]
    with pytest.raises(WorkloadError, match="kernel_of_tomorrow"):
        read(config | {"kernel_of_tomorrow": 3})
    for part in ("text_config", "llm_config", "thinker_config"):
        if part in config:
            with pytest.raises(WorkloadError, match="kernel_of_tomorrow"):
                read(config | {part: config[part] | {"kernel_of_tomorrow": 3}})


@pytest.mark.parametrize(
    ("name", "part"), [("dbrx", "attn_config"), ("llama-3.2-11b-vision", "vision_config"), ("dbrx", "ffn_config")]
)
def test_a_key_inside_a_table_that_nobody_has_read_is_refused(name: str, part: str) -> None:
    config = MORE[name]["config"]
    with pytest.raises(WorkloadError, match=f"{part}: key 'window_of_tomorrow' = 7 is not understood"):
        read(config | {part: config[part] | {"window_of_tomorrow": 7}})
    with pytest.raises(WorkloadError, match=f"{part} = 7: give a table"):
        read(config | {part: 7})


def test_a_model_type_inside_that_is_no_text_is_one_line() -> None:
    config = MORE["aya-vision-8b"]["config"]
    with pytest.raises(WorkloadError, match=r"text_config: model_type = \[1, 2\]: give a text"):
        read(config | {"text_config": config["text_config"] | {"model_type": [1, 2]}})


def test_endings_that_change_nothing_need_no_family() -> None:
    """Dropout and numbers of special tokens, under any name; a key of another ending is still refused."""
    config = MORE["exaone-3.5-7.8b"]["config"]
    assert read(config | {"some_new_dropout": 0.1, "thinking_token_id": 7}) == read(config)
    with pytest.raises(WorkloadError, match="dropout_of_experts"):
        read(config | {"dropout_of_experts": 0.1})


def test_code_of_the_model_s_own_may_name_its_backbone_freely() -> None:
    """``AutoModel`` names the layers without a head: any class beside the one that is priced, and none elsewhere."""
    config = MORE["exaone-3.5-7.8b"]["config"]
    head = {"AutoModelForCausalLM": "modeling_x.ExaoneForCausalLM"}
    assert read(config | {"auto_map": head | {"AutoModel": "modeling_x.Backbone"}}) == read(config)
    with pytest.raises(WorkloadError, match="auto_map"):
        read(config | {"auto_map": head | {"AutoModel": "modeling_y.Backbone"}})


def test_falcon_h1_mixes_beside_its_attention() -> None:
    """Both halves of a layer read one norm, keep a cache and a state, and meet in a sum."""
    model = read(MORE["falcon-h1-7b"]["config"])
    program = build_program(model, Layout(), phase="prefill", batch=1, seq_len=512, options=Options(lm_head=False))
    (layer,) = program.ranks[0].phases[0].segments
    names = [one.name for one in layer.kernels]
    assert names.index("out_gemm") < names.index("qkv_gemm") < names.index("add_both")
    widths = {one.name: one.work.n for one in layer.kernels if isinstance(one.work, GemmWork)}
    assert widths["qkv_gemm"] == (12 + 2 * 2) * 128
    assert widths["in_gemm"] == 2 * 3072 + 2 * 256 + 24
    need = memory_need(model, Layout(), MemoryLoad(batch=1, context=1000, layers=44, lm_head=True))
    assert need.kv_bytes == 44 * 1000 * 2 * 2 * 128 * 2 + 44 * 24 * 128 * 256 * 4


def test_llama_vision_attends_to_its_image_in_every_fifth_layer() -> None:
    model = read(MORE["llama-3.2-11b-vision"]["config"])
    assert model.encoder is not None
    assert (model.encoder.max_positions, model.encoder.layers) == (4 * 1601, 40)
    decode = build_program(model, Layout(), phase="decode", batch=1, seq_len=300, options=Options(lm_head=False))
    runs = [(segment.repeat, one.work) for segment in decode.ranks[0].phases[0].segments for one in segment.kernels
            if isinstance(one.work, AttentionWork)]  # fmt: skip
    assert sum(repeat for repeat, work in runs if work.kv_len == 6404) == 8
    assert sum(repeat for repeat, work in runs if work.kv_len == 300) == 32


def test_step3_reads_which_layers_have_experts_from_a_text() -> None:
    config = MORE["step3"]["config"]
    model = read(config)
    groups = model.layer_groups(range(61))
    assert sum(len(run) for _, block, run in groups if "experts" in [one.name for one in block.nodes]) == 56
    fewer = config | {"text_config": config["text_config"] | {"moe_layers_enum": "4, 5,6"}}
    assert facts(read(fewer))["parameters"] < 0.2 * facts(model)["parameters"]


def test_a_list_may_leave_out_one_product_of_a_linear_attention() -> None:
    """Qwen3-Next FP8 keeps the product of steps and decays in 16 bit, and stores the others of the mixer in 8."""
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    whole = facts(read(QWEN3_NEXT | {"quantization_config": blocks}))["weight_bytes"]
    names = [f"model.layers.{i}.linear_attn.{part}" for i in range(48) if (i + 1) % 4
             for part in ("in_proj_ba", "conv1d", "norm")]  # fmt: skip
    kept = facts(read(QWEN3_NEXT | {"quantization_config": blocks | {"modules_to_not_convert": names}}))["weight_bytes"]
    assert kept - whole == pytest.approx(36 * 2048 * 2 * 32, rel=0.001)  # 2 x 32 rows of 36 layers
    names = [name.replace("in_proj_ba", "in_proj_qkvz") for name in names if name.endswith("in_proj_ba")]
    wide = facts(read(QWEN3_NEXT | {"quantization_config": blocks | {"modules_to_not_convert": names}}))["weight_bytes"]
    assert wide - whole == pytest.approx(36 * 2048 * (2 * 4096 + 2 * 2048), rel=0.001)
