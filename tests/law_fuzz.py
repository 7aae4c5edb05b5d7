"""Random runs held to laws that nobody has to believe the simulator for. Run by hand with

    python -m tests.law_fuzz --cases 2000 --seed 1

Configurations of Llama-, Qwen3- and Mixtral-like models with sizes at random, on the catalog's GPUs, under caps,
clocks, layouts and precisions. What is right is counted from the configuration and the GPU's own file alone: bytes of
weights and of the cache, the least FLOPs and bytes, hence the least time; a mean power between idle and the cap; energy
as power by time and as the sum of its parts; memory of a rank; more work never cheaper; the printed table as the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardware.errors import HardwareError
from sim import simulate
from sim.errors import SimError
from sim.result.report import summary, summary_text
from tests.config_kit import Config, count, kv_bytes
from workloads.errors import WorkloadError

_GPUS = Path(__file__).parents[1] / "hardware" / "data" / "gpus"
GPUS = (
    "h100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "a100-sxm-80gb", "b200-sxm-180gb", "h20-sxm-96gb",
    "mi300x-192gb", "l40s-48gb", "h100-pcie-80gb", "v100-sxm2-32gb",
)  # fmt: skip
# Bytes of a weight, with its scales, and of an element of the cache; what is multiplied.
PRECISIONS: tuple[tuple[dict[str, Any], float, float, str], ...] = (
    ({}, 2.0, 2.0, "bf16"),
    ({"dtype": "fp16"}, 2.0, 2.0, "fp16"),
    ({"kv_dtype": "fp8_e4m3"}, 2.0, 1.0, "bf16"),
    ({"weight_dtype": "int4_g128"}, 0.516, 2.0, "bf16"),
    ({"dtype": "fp8_e4m3"}, 1.0, 2.0, "fp8_e4m3"),
)
MORE_WORK_MAY_SAVE = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A scenario, and what is known of it: its configuration, bytes of a weight and of a cached element."""

    fields: dict[str, Any]
    config: Config
    weight: float
    cached: float
    multiplied: str

    @property
    def layers(self) -> int:
        """Layers that run."""
        return int(self.fields["layers"])

    @property
    def part(self) -> Config:
        """The configuration of the layers that run."""
        return self.config | {"num_hidden_layers": self.layers}


def gpu_file(gpu: str) -> dict[str, Any]:
    """A GPU's file as it stands."""
    return tomllib.loads((_GPUS / f"{gpu}.toml").read_text(encoding="utf-8"))


def config_of(rng: random.Random) -> Config:
    """Sizes at random, as such models have them."""
    kind = rng.choice(("llama", "llama", "qwen3", "mixtral"))
    size = rng.choice((64, 128, 128))
    kv_heads = rng.choice((2, 4, 8))
    heads = kv_heads * rng.choice((1, 2, 4, 8))
    width = size * heads if kind != "qwen3" else 128 * rng.randrange(8, 65, 8)
    config: Config = {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": rng.choice((8, 24, 40)),
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size,
        "intermediate_size": 128 * rng.randrange(8, 161, 8), "vocab_size": 128 * rng.choice((250, 400, 1000)),
        "tie_word_embeddings": rng.choice((True, False)), "max_position_embeddings": 131072,
    }  # fmt: skip
    if kind == "mixtral":
        config |= {"num_local_experts": rng.choice((8, 16)), "num_experts_per_tok": 2, "tie_word_embeddings": False}
    return config


def case_of(rng: random.Random, folder: Path) -> Case:
    """A scenario at random, its configuration written to ``folder``."""
    config, gpu = config_of(rng), rng.choice(GPUS)
    path = folder / f"{rng.randrange(10**12)}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    more, weight, cached, multiplied = rng.choice(PRECISIONS[:1] * 3 + PRECISIONS)
    phase = rng.choice(("prefill", "prefill", "decode", "decode", "generate"))
    fields = {
        "model": str(path), "gpu": gpu, "phase": phase, "layers": rng.choice((2, 4, 8)), "ignore_memory": True,
        "batch": rng.choice((1, 1, 2, 3, 7, 8, 16, 33, 64)), **more,
        "seq_len": round(math.exp(rng.uniform(math.log(64), math.log(8192)))),
    }  # fmt: skip
    if phase == "prefill":
        fields["batch"] = min(fields["batch"], 8)
    if phase == "generate":
        fields["output_len"] = rng.choice((2, 3, 17, 64))
    if rng.random() < 0.3:
        fields["tp"] = rng.choice((2, 4, 8))
    if rng.random() < 0.3:
        fields["power_cap_w"] = round(float(gpu_file(gpu)["tdp_w"]["value"]) * rng.uniform(0.4, 1.0))
    if rng.random() < 0.2:
        fields["sm_clock_mhz"] = rng.choice((900, 1200, 1410))
    if rng.random() < 0.2:
        fields["launch"] = "eager"
    if rng.random() < 0.15:
        fields["stack"] = rng.choice(("vllm", "unfused-torch", "paged-kv"))
    if rng.random() < 0.1:
        fields["regime"] = "cold"
    if rng.random() < 0.1:
        fields["uncapped"] = True
    return Case(fields=fields, config=config, weight=weight, cached=cached, multiplied=multiplied)


def work(case: Case) -> tuple[float, float, float]:
    """The least FLOPs and HBM bytes of all GPUs, and the most FLOPs, by the configuration's sizes."""
    config, part, fields = case.config, case.part, case.fields
    width, vocab = config["hidden_size"], config["vocab_size"]
    ends = width * vocab * (1 if config["tie_word_embeddings"] else 2)
    inside = count(part) - ends
    experts, top = config.get("num_local_experts"), config.get("num_experts_per_tok")
    expert = 3 * width * config["intermediate_size"]
    active = inside - (case.layers * (experts - top) * expert if experts else 0)
    attended = 4.0 * case.layers * config["num_attention_heads"] * config["head_dim"]
    batch, length, answer = fields["batch"], fields["seq_len"], fields.get("output_len") or 0
    cache = (kv_bytes(part, False) or 0) / 2.0 * case.cached * batch
    head = 2.0 * batch * width * vocab

    def step(context: float) -> tuple[float, float, float]:
        flops = 2.0 * active * batch + attended * batch * context + head
        read = (inside if not experts else active) * case.weight + 2.0 * width * vocab + cache * context
        return flops, read, flops + attended * batch * 2.0

    least, most, read = 0.0, 0.0, 0.0
    if fields["phase"] != "decode":
        tokens = batch * length
        products = 2.0 * active * tokens
        whole = attended * batch * length * length
        least += products + whole / 2.0 + head
        most += products + whole + head * length
        read += (inside if not experts else active) * case.weight + 2.0 * width * vocab
    steps = 1 if fields["phase"] == "decode" else max(answer - 1, 0)
    for number in range(steps):
        one, bytes_read, more = step(length + number)
        least, most, read = least + one, most + more, read + bytes_read
    return least, read, most


def faults(case: Case) -> Iterator[str]:
    """What is wrong with a run: nothing where it is refused in one line."""
    try:
        run = simulate(**case.fields)
    except (SimError, WorkloadError, HardwareError) as error:
        if "\n" in str(error) or not 10 < len(str(error)) <= 300:
            yield f"not one short line: {str(error)[:400]}"
        return
    data, gpu = summary(run), gpu_file(case.fields["gpu"])
    world, latency_s, energy_j = run.gpus, data["latency_s"], data["energy_j"]
    yield from _bounds(case, data, gpu, world)
    yield from _power(case, run.standing.words(), data, gpu)
    for name in ("energy_j_by_class", "energy_j_by_phase"):
        if not math.isclose(sum(data[name].values()), energy_j, rel_tol=1e-9):
            yield f"{name} sums to {sum(data[name].values())}, not {energy_j}"
    watts = sum(data["power_w_per_gpu"])
    if not math.isclose(watts * latency_s, energy_j, rel_tol=1e-6) or not math.isclose(
        sum(data["energy_j_per_gpu"]), energy_j, rel_tol=1e-9
    ):
        yield f"{watts} W for {latency_s} s are not {energy_j} J"
    if not math.isclose(data["tokens_per_s"] * latency_s, data["tokens"], rel_tol=1e-9):
        yield "tokens a second by seconds are not the tokens"
    if data["exposed_communication_s"] > latency_s * (1 + 1e-9) or (world == 1 and data["exposed_communication_s"]):
        yield f"{data['exposed_communication_s']} s of communication in {latency_s} s on {world} GPUs"
    yield from _memory(case, data)
    yield from _text(summary_text(run), data)
    yield from _more(case, latency_s, energy_j)


def _bounds(case: Case, data: dict[str, Any], gpu: dict[str, Any], world: int) -> Iterator[str]:
    """FLOPs and bytes as counted, and no time below what they take at the card's own rates."""
    least, read, most = work(case)
    latency_s = data["latency_s"]
    # Ranks beyond the KV heads make the same keys and values again, of every token once.
    twice = 2.0 * _twice(case) * case.fields["batch"] * (case.fields["seq_len"] + (case.fields.get("output_len") or 0))
    if not 0.99 * least <= data["flops"] <= 1.02 * most + twice:
        yield f"{data['flops']:.4g} FLOPs, counted {least:.4g} to {most:.4g}"
    # What the L2 keeps from pass to pass is not read again.
    kept = gpu["l2_bytes"]["value"] * world * max(1, (case.fields.get("output_len") or 0))
    if data["hbm_bytes"] < 0.97 * read - kept:
        yield f"{data['hbm_bytes']:.4g} HBM bytes, counted {read:.4g}"
    peak = gpu["tensor_flops_per_s"].get(case.multiplied)
    if peak is not None:
        rate = peak["value"] * gpu["max_clock_hz"]["value"] / gpu["reference_clock_hz"]["value"]
        if latency_s < 0.999 * least / rate / world:
            yield f"{latency_s} s is less than {least / rate / world} s for its FLOPs"
        clock_hz = min(max(data["sm_clock_hz_per_gpu"]), gpu["max_clock_hz"]["value"])
        if case.fields["phase"] == "prefill" and data["mfu_at_clock"] > 1.0:
            yield f"MFU {data['mfu_at_clock']:.3f} at {clock_hz / 1e6:.0f} MHz"
        if data["mfu_type"] != case.multiplied or not math.isclose(
            data["mfu"], data["flops"] / (latency_s * world * peak["value"]), rel_tol=1e-9
        ):
            yield "MFU is not FLOPs over what the datasheet allows"
    bandwidth = gpu["hbm_bytes_per_s"]["value"]
    if data["mbu"] > 1.0 or not math.isclose(
        data["mbu"], data["hbm_bytes"] / (latency_s * world * bandwidth), rel_tol=1e-9
    ):
        yield f"MBU {data['mbu']}"


def _power(case: Case, words: str, data: dict[str, Any], gpu: dict[str, Any]) -> Iterator[str]:
    """Between idle and the cap; clocks between the lowest and what was asked for."""
    cap_w = case.fields.get("power_cap_w", gpu["tdp_w"]["value"])
    most_w, least_w = max(data["power_w_per_gpu"]), min(data["power_w_per_gpu"])
    steady = case.fields.get("regime") != "cold" and not case.fields.get("uncapped")
    if steady and most_w > 1.002 * cap_w and "cannot be held" not in words:
        yield f"{most_w:.1f} W under a cap of {cap_w} W, not said"
    if least_w < 0.95 * gpu["idle_w"]["value"]:
        yield f"{least_w:.1f} W is less than idle"
    asked = case.fields.get("sm_clock_mhz", 1e9) * 1e6
    low, high = gpu["min_clock_hz"]["value"], min(asked, gpu["max_clock_hz"]["value"])
    if not all(0.999 * low <= one <= 1.001 * high for one in data["sm_clock_hz_per_gpu"]):
        yield f"clocks {data['sm_clock_hz_per_gpu']} outside {low} to {high}"


def _twice(case: Case) -> float:
    """Weights of keys and values that ranks hold besides their one copy, where there are more ranks than KV heads."""
    heads = case.config["num_key_value_heads"]
    whole = 2.0 * case.layers * case.config["hidden_size"] * heads * case.config["head_dim"]
    return whole * max(0.0, case.fields.get("tp", 1) / heads - 1.0)


def _memory(case: Case, data: dict[str, Any]) -> Iterator[str]:
    """A rank holds its share of weights and cache."""
    used, tp = data["memory_bytes_per_gpu"], case.fields.get("tp", 1)
    ends = case.config["hidden_size"] * case.config["vocab_size"] * (1 if case.config["tie_word_embeddings"] else 2)
    router = case.layers * (case.config.get("num_local_experts") or 0) * case.config["hidden_size"]
    inside = count(case.part) - ends - router
    right = ((inside + _twice(case)) * case.weight + ends * 2.0) / tp + router * 2.0
    if not 0.99 < used["weights"] / right < 1.03:
        yield f"{used['weights']:.5g} bytes of weights a GPU, counted {right:.5g}"
    heads = max(1, case.config["num_key_value_heads"] / tp) / case.config["num_key_value_heads"]
    tokens = case.fields["seq_len"] + (case.fields.get("output_len") or 0)
    cache = (kv_bytes(case.part, False) or 0) / 2.0 * case.cached * case.fields["batch"] * heads
    block = 16 * cache  # tables of blocks round up; the token of a step is in it
    if not cache * (tokens - 1) * 0.999 <= used["kv_cache"] <= cache * (tokens + 1) * 1.001 + block:
        yield f"{used['kv_cache']:.5g} bytes of cache a GPU, counted {cache * tokens:.5g}"


_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _text(text: str, data: dict[str, Any]) -> Iterator[str]:
    """The printed table says what the JSON says, to its digits."""
    number, unit = re.search(r"^ +latency +([\d.]+) (\w+)", text, re.M).groups()  # type: ignore[union-attr]
    joules, token_j = re.search(r"energy, all GPUs +([\d.,e+]+) J +\(([\d.e-]+) J", text).groups()  # type: ignore[union-attr]
    power = re.search(r"mean power per GPU +([\d]+)(?: to ([\d]+))? W", text)
    rate = re.search(r"tokens per second +([\d.,]+)", text)
    assert power is not None and rate is not None
    for said, right in (
        (float(number) * _UNITS[unit], data["latency_s"]), (float(joules.replace(",", "")), data["energy_j"]),
        (float(token_j), data["energy_j"] / data["tokens"]),
        (float(rate[1].replace(",", "")), data["tokens"] / data["latency_s"]),
    ):  # fmt: skip
        if not math.isclose(said, right, rel_tol=1e-3):
            yield f"the table says {said}, the JSON {right}"
    if abs(float(power[2] or power[1]) - max(data["power_w_per_gpu"])) > 0.51:
        yield f"the table says {power[0]}, the JSON {data['power_w_per_gpu']}"
    if data["status"] not in text or (share := re.search(r"MFU, MBU +([\d.]+)% of (\w+) FLOP/s", text)) is None:
        return
    if abs(float(share[1]) - 100 * data["mfu"]) > 0.051 or share[2] != data["mfu_type"]:
        yield f"the table says {share[0]}, the JSON {data['mfu']} of {data['mfu_type']}"


def _more(case: Case, latency_s: float, energy_j: float) -> Iterator[str]:
    """A sequence or a token more is not cheaper; tiles of experts may switch."""
    slack = 0.03 if "num_local_experts" in case.config else MORE_WORK_MAY_SAVE
    for name in ("batch", "seq_len"):
        more = simulate(**(case.fields | {name: case.fields[name] + 1}))
        if more.latency_s < (1 - slack) * latency_s or more.energy_j < (1 - slack) * energy_j:
            yield (
                f"one more of {name}: latency {more.latency_s / latency_s - 1:+.2%}, energy "
                f"{more.energy_j / energy_j - 1:+.2%}"
            )


def run(cases: int, seed: int) -> Iterator[tuple[Case, list[str]]]:
    """Each case and its faults."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(cases):
            case = case_of(rng, Path(folder))
            try:
                found = list(faults(case))
            except Exception as error:  # anything but a refusal is a fault, and the other cases still run
                found = [f"{type(error).__name__}: {error}"]
            yield case, found


def main() -> int:
    """Print every fault, and how many there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    found: Counter[str] = Counter()
    for case, wrong in run(arguments.cases, arguments.seed):
        found["wrong" if wrong else "right or refused"] += 1
        for fault in wrong:
            print(f"{fault}: {case.fields | {'model': case.config}}", flush=True)
    print(", ".join(f"{name} {number}" for name, number in sorted(found.items())))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
