"""Servers and runs of what no measurement judges, drawn at random for the fuzz over features."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.family_configs import QWEN3_VL_8B

Fields = dict[str, Any]


GPUS = (
    "h100-sxm-80gb",
    "h100-sxm-80gb",
    "h200-sxm-141gb",
    "a100-sxm-80gb",
    "b200-sxm-180gb",
    "l40s-48gb",
    "h20-sxm-96gb",
)


def _some(rng: random.Random, **choices: tuple[Any, ...]) -> Fields:
    return {name: rng.choice(values) for name, values in choices.items()}


def _speculation(rng: random.Random) -> Fields:
    kind = rng.choice(("ngram", "eagle", "draft_model", "mtp"))
    fields = {"speculation": kind, "draft_tokens": rng.choice((1, 2, 3, 5)), "acceptance": (rng.uniform(0.0, 1.0),)}
    return fields | ({"draft_model": rng.choice(("llama3-8b", "llama-1b"))} if kind == "draft_model" else {})


def _served(rng: random.Random) -> Fields:
    """A small server: requests at even times, of one length each."""
    return _some(
        rng, gpu=GPUS, model=("llama3-8b", "llama3-8b", "qwen3-8b", "qwen2-1.5b"), requests=(4, 8, 16),
        rate_per_s=(2.0, 10.0, 40.0), input_tokens=(64, 300, 1500), output_tokens=(2, 9, 33),
        max_num_seqs=(256, 256, 4),
    ) | {"arrivals": "constant"}  # fmt: skip


def server_pipeline(rng: random.Random, _: Path) -> Fields:
    """``serve --pp``."""
    return _served(rng) | _some(rng, pp=(2, 4), tp=(1, 1, 2), pp_batches=("natural", "even"), replicas=(1, 1, 2))


def server_context(rng: random.Random, _: Path) -> Fields:
    """``serve --cp`` and ``--dcp``: prompts and caches that ranks share, whatever else the server does."""
    own = _some(rng, cp=(2, 2, 4), cp_mode=("all_gather", "all_gather", "ulysses"), tp=(1, 1, 2))
    if rng.random() < 0.3:  # ranks that would hold the same KV heads
        own = {"model": "qwen2-1.5b", "tp": 4, "dcp": 2}
    other: Fields = rng.choice(
        (
            {},
            {},
            {"pp": 2},
            {"prefill_replicas": 1},
            {"speculation": "eagle", "acceptance": (0.6,)},
            {"attention": "per_sequence"},
            {"launch": "eager"},
            {"kv_blocks": 200, "preemption": rng.choice(("swap", "recompute"))},
        )
    )
    return _served(rng) | own | other


def server_speculation(rng: random.Random, _: Path) -> Fields:
    """Drafted tokens in a server."""
    return _served(rng) | _speculation(rng)


def server_tiers(rng: random.Random, folder: Path) -> Fields:
    """Requests that begin alike, and tiers that keep beginnings."""
    path = folder / f"{rng.randrange(10**12)}.jsonl"
    lines = []
    for number in range(rng.choice((6, 12))):
        who = rng.randrange(3)
        hashes = [100 * who + block for block in range(1 + number // 3)]
        lines.append({"timestamp": 400 * number, "input_length": 512 * len(hashes) + 40, "output_length": 4,
                      "hash_ids": hashes})  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = _some(rng, gpu=GPUS[:4], model=("llama3-8b", "qwen3-8b"), kv_blocks=(160, 400), replicas=(1, 2))
    tiers = rng.sample(("kv_host_gb", "kv_disk_gb", "kv_remote_gb"), rng.choice((1, 2, 3)))
    return fields | {"trace": str(path)} | {name: rng.choice((0.2, 1.0, 20.0)) for name in tiers}


def server_fleet(rng: random.Random, _: Path) -> Fields:
    """A budget of watts over replicas."""
    replicas = rng.choice((2, 3))
    own = {"replicas": replicas, "fleet_power_w": replicas * rng.choice((250.0, 350.0, 500.0))}
    return _served(rng) | own | _some(rng, fleet_policy=("shift", "even"), fleet_look_s=(0.2, 1.0))


def server_exchange(rng: random.Random, _: Path) -> Fields:
    """Experts on ranks of their own that meet by DeepEP's kernels, in a server."""
    own = {"model": "qwen3-30b-a3b", "ep_mode": "all_to_all", "requests": 3, "output_tokens": 3}
    return _served(rng) | own | _some(rng, ep=(4, 8), ep_kernels=("low_latency", "normal"))


def server_adapters(rng: random.Random, _: Path) -> Fields:
    """Low-rank adapters, whatever else the server does."""
    own = _some(rng, lora_adapters=(1, 3, 8), max_loras=(1, 2, 8), max_lora_rank=(8, 16, 64, 256), tp=(1, 1, 2),
                lora_targets=("all", "q_proj,v_proj", "o_proj,down_proj"), lora_share=(0.0, 0.5, 1.0))  # fmt: skip
    if own["lora_targets"] == "all":
        own.pop("lora_targets")
    other: Fields = rng.choice(
        (
            {},
            {},
            {"prefill_replicas": 1},
            {"speculation": "eagle", "acceptance": (0.6,)},
            {"replicas": 2},
            {"attention": "per_sequence"},
            {"model": "qwen3-30b-a3b"},
        )
    )
    return _served(rng) | own | other


def server_adapters_split(rng: random.Random, _: Path) -> Fields:
    """Low-rank adapters on stages, on ranks that share prompts, and on experts."""
    own = _some(rng, lora_adapters=(1, 3, 8), max_loras=(1, 2), max_lora_rank=(8, 16, 64), tp=(1, 1, 2))
    other: Fields = rng.choice(
        (
            {"pp": 2},
            {"cp": 2},
            {"cp": 2, "cp_mode": "ulysses"},
            {"model": "qwen3-30b-a3b", "lora_targets": "o_proj,experts", "gpu": "h200-sxm-141gb"},
        )
    )
    return _served(rng) | own | other


def server_images(rng: random.Random, folder: Path) -> Fields:
    """Images of one size or of any."""
    path = folder / "config.json"
    path.write_text(json.dumps(QWEN3_VL_8B))
    width, height = rng.choice(((1, 1), (256, 257), (640, 480), (1500, 900), (4000, 300)))
    own = {"model": rng.choice((str(path), str(path), "llava-1.5-7b")), "images": rng.choice((1, 1, 2, 4))}
    own |= {"image_width": width, "image_height": height}
    other: Fields = rng.choice(({}, {}, {"prefill_replicas": 1}, {"max_num_batched_tokens": 600}, {"replicas": 2},
                                {"lora_adapters": 2}))  # fmt: skip
    return _served(rng) | own | other


def server_clocks(rng: random.Random, _: Path) -> Fields:
    """Clocks and caps of prompts alone."""
    own = _some(rng, prefill_sm_clock_mhz=(600.0, 1005.0, 1201.0, 1410.0, 1980.0, 5000.0), prefill_replicas=(0, 0, 1),
                sm_clock_mhz=(None, 900.0, 1400.0), prefill_power_cap_w=(None, 250.0, 400.0))  # fmt: skip
    return _served(rng) | {name: value for name, value in own.items() if value is not None}


def _run(rng: random.Random) -> Fields:
    return {"layers": rng.choice((1, 2, 4)), "ignore_memory": True} | _some(
        rng, gpu=GPUS, model=("llama3-8b", "llama3-70b", "qwen3-8b"), phase=("prefill", "decode"), batch=(1, 4, 16),
        seq_len=(128, 700, 2048),
    )  # fmt: skip


def run_dragonfly(rng: random.Random, _: Path) -> Fields:
    """Groups of switches."""
    layout = rng.choice(({"tp": 8, "dp": 4, "batch": 8}, {"tp": 8, "pp": 4, "layers": 4, "batch": 8}, {"tp": 16}))
    chosen = {"network": "slingshot-dragonfly", "model": "llama3-70b", "gpu": rng.choice(GPUS[:4])}
    return _run(rng) | layout | chosen | _some(rng, placement=("packed", "spread"))


def run_partitions(rng: random.Random, _: Path) -> Fields:
    """SMs of each stream."""
    sms = rng.choice((8, 16, 32))
    own = {"sm_partitions": (("compute", 100), ("comm", sms)), "sm_partition": ((0, "compute"), (1, "comm"))}
    return _run(rng) | own | _some(rng, tp=(2, 4), gpu=GPUS[:3], overlap_chunks=(1, 2))


def run_slice(rng: random.Random, _: Path) -> Fields:
    """MIG slices."""
    gpu = rng.choice(
        ("h100:1g.10gb", "h100:2g.20gb", "h100:3g.40gb", "h200:1g.18gb", "a100-sxm-80gb:3g.40gb", "h100:9g")
    )
    dp = rng.choice((1, 1, 2, 5))
    return _run(rng) | {"gpu": gpu, "model": "llama3-8b", "dp": dp, "batch": dp * rng.choice((1, 4))}


def run_speculation(rng: random.Random, _: Path) -> Fields:
    """Drafted tokens."""
    own = _run(rng) | _speculation(rng) | {"phase": rng.choice(("decode", "generate"))}
    return own | ({"output_len": rng.choice((4, 17))} if own["phase"] == "generate" else {})


def run_exchange(rng: random.Random, _: Path) -> Fields:
    """DeepEP's kernels."""
    own = _some(rng, model=("qwen3-30b-a3b", "deepseek-v3"), ep=(4, 8, 16), ep_kernels=("low_latency", "normal"))
    own |= {"ep_mode": "all_to_all", "dispatch_dtype": rng.choice((None, "bf16", "fp8_e4m3"))}
    return _run(rng) | own | {"layers": rng.choice((1, 4)), "gpu": rng.choice(GPUS[:3]), "batch": own["ep"] * 4}


def run_context(rng: random.Random, _: Path) -> Fields:
    """A single step over gathered keys, or over a cache that ranks of a tensor group share out."""
    own = rng.choice(
        (
            {"cp": 2},
            {"cp": 4, "tp": 2},
            {"cp": 3, "model": "qwen3-30b-a3b"},
            {"tp": 16, "dcp": 2},
            {"model": "qwen2-1.5b", "tp": 4, "dcp": 2},
            {"model": "qwen3-30b-a3b", "tp": 8, "dcp": 2},
            {"model": "deepseek-v3", "tp": 8, "dcp": 4},
        )
    )
    gathered = {"cp_mode": "all_gather"} if "cp" in own else {}
    return _run(rng) | gathered | {"model": "llama3-8b"} | own


def run_adapters(rng: random.Random, _: Path) -> Fields:
    """Low-rank adapters in a single step."""
    own = _some(rng, lora_adapters=(1, 2, 4), max_lora_rank=(1, 8, 64, 320), tp=(1, 1, 2), batch=(4, 16))
    other: Fields = rng.choice(
        (
            {},
            {"pp": 2, "layers": 4},
            {"cp": 2, "cp_mode": "all_gather"},
            {"lora_targets": "q_proj,v_proj", "model": "qwen3-8b"},
            {"lora_targets": "o_proj,experts", "model": "qwen3-30b-a3b"},
            {"lora_targets": "q_a_proj,q_b_proj,o_proj", "model": "deepseek-v3"},
        )
    )
    return _run(rng) | own | other


def run_halves(rng: random.Random, _: Path) -> Fields:
    """Experts over nodes, each rank's sequences in two halves, with and without a cap."""
    own = _some(rng, model=("qwen3-30b-a3b", "deepseek-v3"), ep=(8, 16), ep_kernels=(None, "normal", "low_latency"),
                power_cap_w=(None, 300.0, 500.0))  # fmt: skip
    own |= {"ep_mode": "all_to_all", "overlap": "two_batch", "batch": own["ep"] * rng.choice((2, 4))}
    return _run(rng) | {name: value for name, value in own.items() if value is not None} | {"gpu": rng.choice(GPUS[:3])}


def run_video(rng: random.Random, _: Path) -> Fields:
    """Denoising with the decoder behind."""
    size = rng.choice((("wan2.1-1.3b", "320x240x9"), ("wan2.1-1.3b", "480x320x17"), ("flux.1-dev", "256x256"),
                       ("hunyuan-video", "320x240x9")))  # fmt: skip
    own = {
        "phase": "denoise",
        "model": size[0],
        "video": size[1],
        "steps": rng.choice((1, 2, 5)),
        "ignore_memory": True,
    }
    return own | _some(rng, gpu=GPUS, guidance=("none", "sequential", "batch"), batch=(1, 2, 5))


SERVERS: dict[str, Callable[[random.Random, Path], Fields]] = {
    one.__name__: one
    for one in (
        server_pipeline,
        server_context,
        server_adapters_split,
        server_speculation,
        server_tiers,
        server_fleet,
        server_exchange,
        server_adapters,
        server_images,
        server_clocks,
    )
}


RUNS: dict[str, Callable[[random.Random, Path], Fields]] = {
    one.__name__: one
    for one in (
        run_dragonfly,
        run_partitions,
        run_slice,
        run_speculation,
        run_exchange,
        run_context,
        run_adapters,
        run_halves,
        run_video,
    )
}
