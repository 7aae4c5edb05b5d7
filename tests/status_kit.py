"""Scenarios at random, and what was measured of them: a statement of sim.result.status's envelope of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hardware.errors import HardwareError
from sim.errors import SimError
from sim.run.runner import simulate
from workloads.errors import WorkloadError

# Written down from the rows themselves (records/*/validation and the first H100 measurements), not from the data file.
# (phase, family, dtype, launch, layout): models; batch; tokens of one sequence; tokens of all.
Box = tuple[frozenset[str], tuple[int, int], tuple[int, int], tuple[int, int]]
LLAMAS = frozenset({"llama3-8b", "llama3-70b"})
BETWEEN = LLAMAS | {"qwen3-32b"}  # its widths lie between the two llamas'; qwen3-8b's feed-forward is narrower
SMALL, LARGE, EXPERTS = frozenset({"llama3-8b"}), frozenset({"llama3-70b"}), frozenset({"qwen3-30b-a3b"})
ONE, TP2, TP4 = {}, {"tp": 2}, {"tp": 4}
H100: list[tuple[str, str, str, dict[str, Any], Box]] = [
    ("prefill", "bf16", "graph", ONE, (LLAMAS, (1, 8), (512, 8192), (512, 16384))),
    ("prefill", "bf16", "graph", TP2, (LARGE, (1, 8), (512, 4096), (512, 8192))),
    ("prefill", "bf16", "graph", TP4, (LLAMAS, (1, 2), (512, 3072), (512, 6144))),
    ("prefill", "bf16", "graph", TP2 | {"sequence_parallel": True}, (LARGE, (1, 3), (2048, 4096), (4096, 8192))),
    ("prefill", "bf16", "graph", TP4 | {"sequence_parallel": True}, (LARGE, (1, 2), (2048, 2048), (2048, 4096))),
    ("prefill", "bf16", "graph", {"cp": 2}, (SMALL, (1, 1), (8192, 8192), (8192, 8192))),
    ("prefill", "bf16", "graph", {"cp": 4}, (SMALL, (1, 1), (8192, 8192), (8192, 8192))),
    ("prefill", "bf16", "eager", ONE, (SMALL, (1, 1), (256, 2048), (256, 2048))),
    ("prefill", "fp8_e4m3", "graph", ONE, (SMALL, (1, 2), (1024, 4096), (1024, 4096))),
    ("decode", "bf16", "graph", ONE, (LLAMAS, (1, 128), (512, 4096), (512, 262144))),
    ("decode", "bf16", "graph", TP2, (LLAMAS, (1, 128), (1500, 8192), (2048, 262144))),
    ("decode", "bf16", "graph", TP4, (LLAMAS, (1, 64), (1024, 2048), (2048, 65536))),
    ("decode", "bf16", "eager", ONE, (SMALL, (4, 32), (1000, 2048), (4000, 65536))),
    ("decode", "fp8_e4m3", "graph", ONE, (SMALL, (12, 128), (1024, 3000), (32768, 131072))),
    ("generate", "bf16", "graph", ONE, (SMALL, (4, 4), (512, 512), (2304, 2304))),
    ("generate", "bf16", "graph", TP2, (SMALL, (4, 4), (512, 512), (2304, 2304))),
    ("prefill", "bf16", "graph", ONE, (EXPERTS, (1, 2), (1024, 4096), (1024, 8192))),
    ("decode", "bf16", "graph", ONE, (EXPERTS, (1, 128), (1500, 2048), (2048, 262144))),
]  # fmt: skip
# What makes a scenario something else than all measured rows, whatever its sizes; only the card's own values remain.
PLAIN: dict[str, Any] = {
    "regime": "steady", "stack": "reference-torch", "power_cap_w": None, "sm_clock_mhz": None, "uncapped": False,
    "tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "sequence_parallel": False, "all_reduce": "library", "images": 0,
    "overlap": "chunks", "pp_schedule": "gpipe", "expert_skew": 0.0, "chip_power_factor": None,
}  # fmt: skip

FUZZED: dict[str, tuple[Any, ...]] = {
    "gpu": ("h100", "h100", "h100", "h200", "a100-sxm-80gb", "a100-pcie-40gb", "b200", "l40s", "h10", "a100",
            "h100-pcie"),
    "model": (
        "llama3-8b", "llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt2",
        "bert-large", "nemotron-h-8b", "deepseek-v3", "llama-1b", "qwen2", "llama3-7", "opt-1.3b", "vit-large",
    ),
    "phase": ("prefill", "prefill", "decode", "decode", "generate", "train"),
    "batch": (1, 2, 3, 4, 8, 12, 16, 64, 200), "seq_len": (128, 512, 1024, 1500, 2048, 4096, 8192),
    "launch": ("graph", "graph", "eager"), "layers": (1, 2, 4),
}  # fmt: skip
SOMETIMES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bf16", "fp16", "fp8_e4m3", "fp32"),
    "stack": ("reference-torch", "unfused-torch", "eager-torch", "paged-kv"),
    "power_cap_w": (50, 300, 500, 699, 700, 701, 5000), "sm_clock_mhz": (210, 990, 1410, 1980, 2500),
    "uncapped": (True,), "tp": (2, 4, 8), "cp": (2, 4), "pp": (2,), "dp": (2,), "sequence_parallel": (True,),
    "regime": ("cold",), "all_reduce": ("one_shot",), "expert_skew": (0.5, 2.0), "chip_power_factor": (1.0, 1.05),
    "chip_temperature_c": (20, 62, 90), "ignore_memory": (True,), "weight_dtype": ("bf16", "int4_g128", "fp8_e4m3"),
    "kv_dtype": ("bf16", "fp8_e4m3"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of one scenario: its status, or None where it was refused; ``fault`` says what is wrong with that."""

    fields: dict[str, Any]
    status: str | None
    fault: str | None


def measured(fields: dict[str, Any]) -> bool:
    """Whether rows of the H100 span a scenario, by the table above."""
    chosen = {**PLAIN, **fields}
    if chosen.get("chip_power_factor") == 1.0:
        chosen["chip_power_factor"] = None
    chosen["power_cap_w"] = None if chosen["power_cap_w"] == 700 else chosen["power_cap_w"]
    chosen["sm_clock_mhz"] = None if chosen["sm_clock_mhz"] == 1980 else chosen["sm_clock_mhz"]
    if not 40 <= chosen.get("chip_temperature_c", 60) <= 85:
        return False
    dtype = chosen.get("dtype", "bf16")
    if chosen.pop("weight_dtype", dtype) != dtype or chosen.pop("kv_dtype", "bf16") != "bf16":
        return False
    for phase, dtype, launch, layout, (models, batch, seq_len, tokens) in H100:
        everything = chosen["batch"] * (chosen["seq_len"] + chosen.get("output_len", 0))
        if (
            (chosen["phase"], chosen.get("dtype", "bf16"), chosen["launch"]) == (phase, dtype, launch)
            and all(chosen[name] == (layout.get(name, value)) for name, value in PLAIN.items())
            and chosen["model"] in (BETWEEN if models == LLAMAS else models)
            and batch[0] <= chosen["batch"] <= batch[1]
            and seq_len[0] <= chosen["seq_len"] <= seq_len[1]
            and tokens[0] <= everything <= tokens[1]
        ):
            return True
    return False


def drawn(rng: random.Random) -> dict[str, Any]:
    """One scenario: every other time one near what was measured, so that both sides of the border are met."""
    fields = {name: rng.choice(values) for name, values in FUZZED.items()}
    if rng.random() < 0.5:
        models = ("llama3-8b", "llama3-8b", "llama3-70b", "qwen3-32b", "qwen3-30b-a3b")
        fields |= {"gpu": "h100", "model": rng.choice(models), "phase": rng.choice(("prefill", "decode"))}
        fields |= {"launch": "graph", "batch": rng.choice((1, 2, 4, 8, 16))}
    for name in rng.sample(sorted(SOMETIMES), rng.choice((0, 0, 1, 1, 2, 3))):
        fields[name] = rng.choice(SOMETIMES[name])
    if fields["phase"] == "generate":
        fields["output_len"] = rng.choice((2, 64))
    return fields


def tried(fields: dict[str, Any]) -> Tried:
    """Run it: refused in one line, or a status that is right."""
    try:
        run = simulate(**fields)
    except (SimError, WorkloadError, HardwareError) as error:
        fault = None if "\n" not in str(error) and 10 < len(str(error)) <= 300 else f"not one short line: {error!r}"
        return Tried(fields=fields, status=None, fault=fault)
    found, fault = run.standing, None
    kernels = any(cls.terms.extrapolated for cls in run.outcome.classes())
    if fields["gpu"] in ("h10", "a100") or fields["model"] in ("qwen2", "llama3-7"):
        fault = f"a beginning of other names ran as {run.machine.gpu.id}, {run.scenario.model}"
    elif found.status == "calibrated" and not (fields["gpu"] == "h100" and measured(fields)):
        fault = "calibrated, but nothing like it was measured"
    elif fields["gpu"] == "h100" and measured(fields) and found.status != "calibrated" and not kernels:
        fault = f"{found.status}, but rows like it were measured: {found.reasons}"
    elif found.status != "calibrated" and not (found.reasons or found.card == found.status):
        fault = f"{found.status} without a reason"
    elif found.status == "forecast" and fields["gpu"] != "h200":
        fault = "forecast on a card that no run was measured on"
    elif fields["phase"] == "train" and found.status not in ("unchecked", "uncalibrated"):
        fault = f"training is {found.status}"
    elif (run.scenario.gpu, run.machine.gpu.id) != (run.machine.gpu.id, found_id(fields["gpu"])):
        fault = f"the scenario says {run.scenario.gpu}, {run.machine.gpu.id} ran"
    elif (
        not set(found.as_json()) >= {"status", "status_reasons", "expected_error"} or found.status not in found.words()
    ):
        fault = "words and JSON differ"
    return Tried(fields=fields, status=found.status, fault=fault)


def found_id(name: str) -> str:
    """The ids of FUZZED's short names."""
    return {
        "h100": "h100-sxm-80gb", "h200": "h200-sxm-141gb", "b200": "b200-sxm-180gb", "l40s": "l40s-48gb",
        "h100-pcie": "h100-pcie-80gb",
    }.get(name, name)  # fmt: skip


def fuzzed(count: int, seed: int) -> list[Tried]:
    """``count`` scenarios of one seed."""
    rng = random.Random(seed)
    return [tried(drawn(rng)) for _ in range(count)]
