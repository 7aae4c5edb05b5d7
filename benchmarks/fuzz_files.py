"""Further kinds of mutated files: machines, profiles, tables of sweeps, routings, rules, servers, diffusion models."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from benchmarks.fuzz_cases import VALUES, Case, in_bytes, mutated, toml_text
from sim.explore.row import RESULTS, full

SMALL = ["simulate", "--model", "llama3-8b", "--layers", "1", "--seq-len", "64", "--regime", "cold"]


def _shipped(*names: str) -> str:
    package, *rest = names
    path = files(package)
    for name in rest:
        path = path / name
    return path.read_text(encoding="utf-8")


def _cell(value: Any) -> str:
    return str(value)[:60] if not isinstance(value, list | dict) else json.dumps(value)[:60]


def _csv(rows: list[list[Any]], rng: random.Random) -> bytes:
    """A table with a few cells, rows and columns changed."""
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        row = rng.choice(rows)
        if rng.random() < 0.15 and len(rows) > 1:
            rows.remove(row)
        elif rng.random() < 0.1:
            row.append(_cell(rng.choice(VALUES[:25])))
        elif row:
            row[rng.randrange(len(row))] = _cell(rng.choice(VALUES))
    return in_bytes("\n".join(",".join(map(str, row)) for row in rows) + "\n", rng)


def node_case(rng: random.Random) -> Case:
    """Nodes as TOML."""
    name = rng.choice(["hgx-8", "pcie-8", "mesh-4", "nvl72"])
    table = mutated(tomllib.loads(_shipped("hardware", "data", "nodes", f"{name}.toml")), rng)
    command = [*SMALL, "--tp", rng.choice(["2", "8"]), "--dp", "2", "--batch", "2", "--node", "@"]
    return in_bytes(toml_text(table), rng), ".toml", command


def network_case(rng: random.Random) -> Case:
    """Switches between nodes as TOML."""
    name = rng.choice(["ib-ndr-rail", "ib-ndr-fat-tree", "slingshot-dragonfly", "roce-400g-1to7"])
    table = mutated(tomllib.loads(_shipped("hardware", "data", "networks", f"{name}.toml")), rng)
    return in_bytes(toml_text(table), rng), ".toml", [*SMALL, "--tp", "16", "--network", "@"]


def profile_case(rng: random.Random) -> Case:
    """Profiles as ``wattline calibrate`` writes them."""
    table = json.loads(_shipped("hardware", "data", "profiles", "a100-pcie-40gb.json"))
    whole = mutated(table, rng) if rng.random() < 0.7 else {**table, **mutated({"gemm": table["gemm"]}, rng)}
    return in_bytes(json.dumps(whole), rng), ".json", [*SMALL, "--gpu", "a100-pcie-40gb", "--profile", "@"]


def table_case(rng: random.Random) -> Case:
    """Tables as sweeps write them."""
    done = dict.fromkeys(sorted(RESULTS), 1.0) | {"status": "calibrated", "status_reasons": ""}
    found = [
        {"scenario_id": f"id{n}", **full({"model": "llama3-8b", "batch": n, "power_cap_w": 710 - 10 * n}), "error": "",
         **done, "latency_s": 0.1 / n, "energy_j_per_token": 5.0 + n, "ttft_s": 0.1, "feasible": True}
        for n in range(1, 5)
    ]  # fmt: skip
    rows: list[list[Any]] = [list(found[0]), *(["" if v is None else _cell(v) for v in row.values()] for row in found)]
    command = rng.choice(
        [["pareto", "@"], ["best", "@"], ["tornado", "@"], ["pareto", "@", "--objectives", "ttft,gpus"],
         ["best", "@", "--where", "latency_s < 0.05", "--within", "5"], ["best", "@", "--by", "batch"],
         ["tornado", "@", "--objective", "latency"]]
    )  # fmt: skip
    return _csv(rows, rng), rng.choice([".csv", ".csv", ".csv", ".parquet"]), command


def routing_case(rng: random.Random) -> Case:
    """Rows of each expert, as a list or as a table."""
    command = ["simulate", "--model", "qwen3-30b-a3b", "--layers", "1", "--seq-len", "64", "--regime", "cold"]
    command += ["--routing", "@"]
    if rng.random() < 0.5:
        return in_bytes(json.dumps(mutated([float(i % 7) for i in range(128)], rng)), rng), ".json", command
    rows: list[list[Any]] = [["expert", "rows"], *([i, 10 + i % 5] for i in range(128))]
    return _csv(rows, rng), ".csv", command


def rules_case(rng: random.Random) -> Case:
    """Classes of kernels of one's own, beside a trace that stands in the file's own folder."""
    table = mutated({"rule": [{"match": "gemm|nvjet", "class": "gemm"}, {"match": "rms.*norm", "class": "norm"}]}, rng)
    return in_bytes(toml_text(table), rng), ".toml", ["inspect", "TRACE", "--rules", "@"]


def serve_case(rng: random.Random) -> Case:
    """Servers as TOML or JSON."""
    more: list[dict[str, Any]] = [
        {}, {"replicas": 2, "router": "round_robin"}, {"tp": 2}, {"prefill_replicas": 1}, {"pp": 2},
        {"speculation": "ngram", "acceptance": [0.7]}, {"fleet_power_w": 900.0, "replicas": 2}, {"kv_host_gb": 10.0},
        {"autoscale": "requests", "replicas": 3}, {"slo_tpot_s": 0.02, "clock_policy": "slo"},
        {"sm_partition": [["prefill", 64], ["decode", 68]]},
    ]  # fmt: skip
    table = mutated(
        {"model": "llama3-8b", "requests": 3, "rate_per_s": 5.0, "input_tokens": 64, "output_tokens": 3, "seed": 1}
        | rng.choice(more), rng,
    )  # fmt: skip
    json_file = rng.random() < 0.5
    text = json.dumps(table) if json_file else toml_text(table)
    return in_bytes(text, rng), ".json" if json_file else ".toml", ["serve", "@", "--quiet"]


def dit_case(rng: random.Random) -> Case:
    """Diffusion transformers as TOML."""
    name = rng.choice(["wan2.1-1.3b", "flux.1-dev", "hunyuan-video"])
    table = mutated(tomllib.loads(_shipped("workloads", "data", "dit", f"{name}.toml")), rng)
    command = ["dit", "--model", "@", "--cp", "1", "--steps", "1", "--video", "64x64x5", "--ignore-memory"]
    return in_bytes(toml_text(table), rng), ".toml", command


def metric_case(rng: random.Random) -> Case:
    """Metrics of steps, by which steps are reused or proxies ranked."""
    rows: list[list[Any]] = [["step", "l1", "change"], *([i, 0.1 * i, 0.2 + 0.05 * i] for i in range(6))]
    reuse = ["dit", "--model", "wan2.1-1.3b", "--cp", "1", "--steps", "6", "--video", "64x64x5"]
    command = rng.choice(
        [["dit", "select-proxy", "@", "--reference", "change"], [*reuse, "--reuse", "metric:@,l1,0.2"]]
    )
    return _csv(rows, rng), ".csv", command


def config_case(rng: random.Random) -> Case:
    """Hugging Face configurations."""
    table: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 1000,
        "hidden_act": "silu", "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }  # fmt: skip
    more: list[dict[str, Any]] = [
        {}, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}},
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8,
         "num_experts_per_tok": 2},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    ]  # fmt: skip
    text = json.dumps(mutated(table | rng.choice(more), rng))
    return (
        in_bytes(text, rng),
        ".json",
        ["simulate", "--layers", "1", "--seq-len", "64", "--regime", "cold", "--model", "@"],
    )


KINDS: dict[str, Callable[[random.Random], Case]] = {
    "node": node_case, "network": network_case, "profile": profile_case, "table": table_case, "routing": routing_case,
    "rules": rules_case, "serve": serve_case, "dit": dit_case, "metric": metric_case, "config": config_case,
}  # fmt: skip
