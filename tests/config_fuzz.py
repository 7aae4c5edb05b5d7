"""Mutated Hugging Face configurations: each is read right, refused in one line, or marked. Run by hand with

    python -m tests.config_fuzz --cases 2000 --seed 1

Right means: weights within 1 % and KV bytes equal to a count made from the file alone (tests.config_kit), with the
defaults that transformers fills in. A case that is none of the three is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator

from tests.config_kit import PUBLISHED, Config, count, kv_bytes, outside
from tests.family_configs import PUBLISHED as FAMILIES
from tests.family_count import FILLED, weights_and_cache
from workloads import Layout, Options, WorkloadError, beyond, build_program, check_reach
from workloads.huggingface import parse_config
from workloads.model import ModelSpec
from workloads.params import facts

# Keys that stand for other work than the family's usual layer, with values seen in public files.
WORK: dict[str, list[object]] = {
    "sliding_window": [128, 1024], "attn_logit_softcapping": [50.0], "final_logit_softcapping": [30.0],
    "query_pre_attn_scalar": [256], "index_topk": [2048], "index_n_heads": [64], "index_head_dim": [128],
    "num_local_experts": [16], "num_experts": [64], "n_routed_experts": [64], "moe_intermediate_size": [512],
    "shared_expert_intermediate_size": [512], "n_shared_experts": [3], "first_k_dense_replace": [2],
    "mlp_only_layers": [[0, 1]], "decoder_sparse_step": [2], "moe_layer_freq": [2], "interleave_moe_layer_step": [2],
    "layer_types": [["linear_attention"], "full_attention"], "full_attention_interval": [4],
    "linear_num_value_heads": [32], "linear_conv_kernel_dim": [4], "attn_output_gate": [True],
    "partial_rotary_factor": [0.5], "parallel_attn": [True], "new_decoder_architecture": [True], "multi_query": [True],
    "alibi": [True], "use_parallel_residual": [True], "kv_lora_rank": [256], "q_lora_rank": [768],
    "num_kv_shared_layers": [10], "cross_attention_layers": [[3, 8]], "vision_config": [{"hidden_size": 1280}],
    "text_config": [{"model_type": "llama"}], "audio_config": [{}], "hybrid_override_pattern": ["M*"],
    "attn_layer_period": [8], "expert_layer_period": [2], "mamba_d_state": [16], "state_size": [128],
    "intermediate_size_mlp": [16384], "hidden_act": ["gelu_pytorch_tanh", "relu2", 3, ["silu"]],
    "hidden_activation": ["gelu"], "is_encoder_decoder": [True], "add_cross_attention": [True], "is_decoder": [True],
    "chunk_size_feed_forward": [64], "pruned_heads": [{"0": [1]}], "use_qk_norm": [True], "clip_qkv": [8.0],
    "attention_chunk_size": [128], "attention_k_eq_v": [True], "use_bidirectional_attention": [True],
    "attention_multiplier": [0.0078], "use_sliding_window": ["yes"], "swiglu_limit": [7.0], "attention_sinks": [True],
    "rope_parameters": [{"partial_rotary_factor": 0.25}, 3], "tie_word_embeddings": ["true", 1], "head_dim": [[64]],
    "architectures": [["Gemma2ForCausalLM"], ["LlamaForSequenceClassification"], ["LlamaModel"], "x", [3]],
    "auto_map": [{"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}], "torch_dtype": ["float8_e4m3fn", 16],
    "dtype": ["int4"], "kv_cache_scheme": [{"num_bits": 5}, "odd"], "quantization": [{"bits": 4}],
    "position_embedding_type": ["relative_key_query"], "ffn_layernorm": [True], "post_norm": [True],
    "model_type": ["gemma3n_text", "llama4_text", "glm4_moe", "Llama", "", None, 7, ["llama"]],
}  # fmt: skip
# What a family itself may say, so that the key alone does not condemn it: the count decides.
OWN = {
    "mistral": {"sliding_window", "head_dim"}, "phi3": {"sliding_window"}, "mixtral": {"sliding_window",
    "num_local_experts"}, "qwen2": {"sliding_window"}, "qwen3": {"sliding_window"}, "granite": {"attention_multiplier"},
    "qwen2_moe": {"sliding_window", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size",
                  "decoder_sparse_step", "mlp_only_layers"},
    "qwen3_moe": {"sliding_window", "num_experts", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers",
                  "use_qk_norm"},
    "deepseek_v2": {"n_routed_experts", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
                    "kv_lora_rank", "q_lora_rank", "head_dim"},
    "bert": {"hidden_act"}, "gpt2": set(), "opt": set(), "llama": set(),
}  # fmt: skip
OWN["kimi_k2"] = OWN["deepseek_v2"]
HARMLESS = {
    "temperature": 0.6, "id2label": {"0": "x"}, "bos_token_id": [1, 2], "use_cache": False, "max_length": 20,
    "attention_dropout": 0.5, "transformers_version": "5.0", "initializer_range": 1.0, "unknown_null": None,
}  # fmt: skip
# Formats that are not read, and some that are: the table, bytes of a weight with its scale, bytes of a cached element.
UNREAD = ["quark", "torchao", "hqq", "aqlm", "eetq", "int3", 8, None, "", ["awq"], "gguf", "compressed-tensors"]
_ACT = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
READ: list[tuple[Config, float, float]] = [
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, 1.0, 2.0),
    ({"quant_method": "fbgemm_fp8"}, 1.0, 2.0),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.52, 2.0),
    ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 1.094, 2.0),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, 0.531, 2.0),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 0.5625, 2.0),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0, 2.0),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, 0.5625, 1.0),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "group_size": None}, 1.0, 2.0),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
      "kv_cache_scheme": {"num_bits": 8, "type": "float"},
      "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"},
                                    "input_activations": _ACT}}}, 1.0, 1.0),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
      "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int",
                                                                      "strategy": "group", "group_size": 128}}}},
     0.516, 2.0),
]  # fmt: skip
# Fields whose value decides what is stored, with values that no format has.
SPOILT = {"fmt": "e2", "weight_block_size": [0, 1], "bits": 1, "group_size": -3, "zero_point": "yes",
          "load_in_4bit": "yes", "quant_algo": "FP2", "kv_cache_quant_algo": "odd", "kv_cache_scheme": {"num_bits": 3},
          "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 9}}}, "format": "odd",
          "bnb_4bit_quant_type": "nf5", "ignore": [7], "modules_to_not_convert": "no_such_module"}  # fmt: skip
GARBAGE: list[object] = [
    "", "4096", [], [1], {}, {"a": 1}, True, -1, 0, 1.5, 10**9, 10**15, float("nan"), 1e400, "x" * 400,
]  # fmt: skip
CHANGES = ("size", "size", "drop", "work", "work", "unknown", "harmless", "garbage", "format", "family")
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "vocab_size", "head_dim", "num_experts", "num_local_experts", "moe_intermediate_size", "n_embd", "n_layer",
         "n_head", "n_inner", "ffn_dim", "kv_lora_rank", "q_lora_rank", "n_routed_experts", "n_shared_experts",
         "first_k_dense_replace", "shared_expert_intermediate_size", "tie_word_embeddings")  # fmt: skip
SMALL = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "n_layer",
         "n_head", "num_local_experts", "n_routed_experts", "n_shared_experts", "first_k_dense_replace")  # fmt: skip
TOKENS = (1, 512, 513, 1024, 1025, 2048, 4096, 4097, 8192, 200_000)


def mutate(rng: random.Random) -> tuple[Config, bool]:
    """A configuration, and whether nothing but a refusal is right."""
    config = dict(rng.choice(list(PUBLISHED.values()))[0])
    kind, refused = config["model_type"], False
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        match rng.choice(
            ("size", "size", "drop", "work", "work", "unknown", "harmless", "garbage", "format", "family")
        ):
            case "size":
                key = rng.choice([name for name in SIZES if name in config])
                small = key in ("num_hidden_layers", "n_layer", "n_shared_experts", "first_k_dense_replace")
                config[key] = rng.choice((1, 2, 3, 24, 40) if small else (8, 16, 24, 64, 96, 1024, 3072, 4096))
                if key == "tie_word_embeddings":
                    config[key] = rng.choice((True, False, None))
            case "drop":
                config.pop(rng.choice(list(config)))
            case "work":
                key = rng.choice(list(WORK))
                config[key] = rng.choice(WORK[key])
                refused |= key not in OWN[kind]
            case "unknown":
                config[f"{rng.choice(('use', 'attn', 'x'))}_{rng.randrange(10**6)}"] = rng.choice((True, 1, "a", [1]))
                refused = True
            case "harmless":
                key = rng.choice(list(HARMLESS))
                config[key] = HARMLESS[key]
            case "garbage":
                config[rng.choice(list(config))] = rng.choice(GARBAGE)
            case "format":
                config["quantization_config"], spoilt = _format(rng)
                refused |= spoilt
            case _:
                config["model_type"] = rng.choice(sorted(OWN))
    if refused:  # unless a later change took it back
        foreign = [
            key
            for key, values in WORK.items()
            if key not in OWN[kind] and any(one is config.get(key) for one in values if one is not None)
        ]
        named = any(key.rsplit("_", 1)[-1].isdigit() for key in config)
        told = config.get("quantization_config")
        spoilt = told is not None and all(told != table for table, _, _ in READ)
        refused = bool(foreign) or named or spoilt
    return config, refused


def _format(rng: random.Random) -> tuple[Config, bool]:
    """A table of quantisation, and whether nothing but a refusal is right."""
    if rng.random() < 0.3:
        return {"quant_method": rng.choice(UNREAD), "bits": rng.choice((4, 8))}, True
    table, _, _ = rng.choice(READ)
    spoilt = [name for name in SPOILT if name in table]
    if rng.random() < 0.6 or not spoilt:
        return table, False
    key = rng.choice(spoilt)
    return table | {key: SPOILT[key]}, True


def judge(config: Config, refused: bool, tokens: int) -> tuple[str, str]:
    """What became of a configuration (right, refused, marked, or WRONG), and why it is wrong."""
    try:
        text = json.dumps(config)
        model = parse_config(text, where="config.json")
    except WorkloadError as error:
        text = str(error)
        return ("refused", "") if len(text) < 290 and "\n" not in text else ("WRONG", f"message {text}")
    if refused:
        return "WRONG", "accepted"
    found, right = facts(model), count(config)
    if abs(int(str(found["parameters"])) / right - 1) > 0.01:
        return "WRONG", f"{found['parameters']} parameters, not {right}"
    told = config.get("quantization_config")
    element = 4.0 if found["not_quantised"] == "fp32" else 2.0
    weight, cached = next(((w, c) for table, w, c in READ if table == told), (element, element))
    whole = kv_bytes(config, False)
    if found["kv_bytes_per_token"] != (None if whole is None else whole / 2.0 * cached):
        return "WRONG", f"{found['kv_bytes_per_token']} KV bytes, not {whole} / 2 x {cached}"
    rest = outside(config)
    bytes_right = element * rest + weight * (right - rest)
    if not 0.985 < found["weight_bytes"] / bytes_right < (1.015 if _wide(config) else 20.0):
        return "WRONG", f"{found['weight_bytes']} bytes of weights, not {bytes_right}"
    return _run(model, config, tokens)


def _wide(config: Config) -> bool:
    """Whether no matrix is so narrow that scales of a few elements weigh."""
    sizes = [config[name] for name in SIZES if type(config.get(name)) is int and name not in SMALL]
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    size = config.get("head_dim")
    return all(one >= 1024 for one in sizes) and (size if type(size) is int and size else 128) * heads >= 1024


def _run(model: ModelSpec, config: Config, tokens: int) -> tuple[str, str]:
    """One layer over ``tokens``: within what the file says, or refused, or marked."""
    most = config.get("n_positions") or config.get("max_position_embeddings")
    window = config.get("sliding_window", 4096 if config["model_type"] in ("mistral", "qwen2", "qwen2_moe") else None)
    try:
        if not model.experts:  # whose routing takes seconds to draw
            build_program(model, Layout(), phase="prefill", batch=1, seq_len=tokens, options=Options(layers=1))
        check_reach(model, tokens)
    except WorkloadError:
        return "refused", ""
    if any(one != window for one in model.windows):
        return "WRONG", f"windows of {set(model.windows)}, not {window}"
    if model.windows and tokens > max(model.windows):
        return "marked", ""  # the run is of a kind of its own, which was not measured
    if most and tokens > most and not beyond(model, tokens):
        return "WRONG", f"{tokens} tokens are more than {most}"
    return ("marked" if beyond(model, tokens) else "right"), ""


def run(cases: int, seed: int) -> Iterator[tuple[str, str, Config]]:
    """Verdict, reason and configuration of each case."""
    rng = random.Random(seed)
    for _ in range(cases):
        config, refused = mutate(rng)
        yield *judge(config, refused, rng.choice(TOKENS)), config


# Keys that mean other layers in each of the families that are data, or that are not keys of theirs.
FOREIGN: dict[str, object] = {
    "kv_lora_rank": 256, "linear_num_value_heads": 32, "cross_attention_layers": [3], "alibi": True,
    "vision_config": {"hidden_size": 1280}, "text_config": {"model_type": "llama"}, "index_topk": 2048,
    "audio_config": {}, "num_kv_shared_layers": 10, "hybrid_override_pattern": "M*", "is_decoder": True,
    "add_cross_attention": True, "chunk_size_feed_forward": 64, "position_embedding_type": "relative_key_query",
    "architectures": ["GptNeoXForCausalLM"], "torch_dtype": "float8_e4m3fn", "clip_qkv": 8.0, "ffn_layernorm": True,
}  # fmt: skip
FAMILY_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim",
    "vocab_size", "num_local_experts", "n_routed_experts", "num_experts", "moe_intermediate_size", "n_shared_experts",
    "first_k_dense_replace", "num_experts_per_tok",
)  # fmt: skip


def mutate_family(rng: random.Random) -> tuple[Config, bool]:
    """A configuration of a family that is data, and whether nothing but a refusal is right."""
    known = [config for config, _, _ in FAMILIES.values() if config["model_type"] in FILLED]
    config, refused = dict(rng.choice(known)), False
    for _ in range(rng.choice((1, 1, 2, 3))):
        match rng.choice(("size", "size", "drop", "foreign", "unknown", "harmless", "garbage")):
            case "size":
                key = rng.choice([name for name in FAMILY_SIZES if name in config])
                small = key in ("num_hidden_layers", "n_shared_experts", "first_k_dense_replace", "num_experts_per_tok")
                config[key] = rng.choice((1, 2, 3, 16) if small else (8, 16, 32, 64, 96, 1024, 3072, 4096))
            case "drop":
                config.pop(rng.choice(list(config)))
            case "foreign":
                key = rng.choice(list(FOREIGN))
                config[key] = FOREIGN[key]
            case "unknown":
                config[f"x_{rng.randrange(10**6)}"] = rng.choice((True, 1, "a", [1]))
            case "harmless":
                key = rng.choice(list(HARMLESS))
                config[key] = HARMLESS[key]
            case _:
                config[rng.choice(list(config))] = rng.choice(GARBAGE)
    refused = any(config.get(key) is value for key, value in FOREIGN.items())
    refused |= any(key.startswith("x_") for key in config)
    return config, refused


def judge_family(config: Config, refused: bool) -> tuple[str, str]:
    """As :func:`judge`, against the count of ``tests.family_count``."""
    try:
        model = parse_config(json.dumps(config), where="config.json")
    except WorkloadError as error:
        text = str(error)
        return ("refused", "") if len(text) < 290 and "\n" not in text else ("WRONG", f"message {text}")
    if refused:
        return "WRONG", "accepted"
    found, (weights, cache) = facts(model), weights_and_cache(config)
    if abs(int(found["parameters"]) / weights - 1) > 0.01:
        return "WRONG", f"{found['parameters']} parameters, not {weights}"
    if found["kv_bytes_per_token"] != cache * (2 if found["kv_cache"] == "fp32" else 1):
        return "WRONG", f"{found['kv_bytes_per_token']} KV bytes, not {cache}"
    return "right", ""


def run_families(cases: int, seed: int) -> Iterator[tuple[str, str, Config]]:
    """Verdict, reason and configuration of each case of the families that are data."""
    rng = random.Random(seed)
    for _ in range(cases):
        config, refused = mutate_family(rng)
        yield *judge_family(config, refused), config


def main() -> int:
    """Print how many cases ended how, and every wrong one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    verdicts: Counter[str] = Counter()
    both = (*run(arguments.cases, arguments.seed), *run_families(arguments.cases, arguments.seed))
    for verdict, why, config in both:
        verdicts[verdict] += 1
        if verdict == "WRONG":
            print(f"{why}: {json.dumps(config)[:600]}")
    print(", ".join(f"{name} {number}" for name, number in sorted(verdicts.items())))
    return 1 if verdicts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
