"""Runs of what no measurement judges: each is right, refused in one line, or marked. Run by hand with

    python -m tests.feature_fuzz --cases 2000 --seed 1

Servers with pipelines, speculation, tiers of KV caches, a budget of power, DeepEP's exchanges, adapters, images and
clocks of prompts; runs on dragonflies,
SM partitions and MIG slices, with speculation, exchanges and VAE decoders. A status must say ``unchecked`` (or
``uncalibrated``), sums of joules equal the whole, powers lie between idle and the cap, and a token, a sequence, a step
more is not cheaper.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hardware.errors import HardwareError
from sim import serve, simulate
from sim.errors import SimError
from sim.result.report import summary, summary_text
from sim.result.timeline import Timeline
from tests.family_configs import QWEN3_VL_8B
from workloads.errors import WorkloadError

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
# Of joules or seconds that one more may save: at all, and where experts or a product switch tiles: of 65 products that
# were measured with a row more (records/h200-sxm-141gb/edges) one got 10 % quicker.
SLACK, TILES_SLACK = 0.005, 0.03
UNJUDGED = ("unchecked", "uncalibrated")


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
    return own | _some(rng, gpu=GPUS, guidance=("none", "sequential", "batch"), batch=(1, 2))


SERVERS: dict[str, Callable[[random.Random, Path], Fields]] = {
    one.__name__: one
    for one in (
        server_pipeline,
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
    one.__name__: one for one in (run_dragonfly, run_partitions, run_slice, run_speculation, run_exchange, run_video)
}


def _refused(call: Callable[..., Any], fields: Fields) -> Any:
    """The run, or the refusal as text."""
    try:
        return call(**fields)
    except (SimError, WorkloadError, HardwareError) as error:
        return str(error)


def _status(status: str, reasons: list[str]) -> Iterator[str]:
    if status not in UNJUDGED:
        yield f"{status}, but nothing like it was measured"
    elif status == "unchecked" and not reasons:
        yield "unchecked without a reason"


def _cheaper(what: str, pairs: dict[str, tuple[float, float]], slack: float) -> Iterator[str]:
    for name, (before, after) in pairs.items():
        if after < (1.0 - slack) * before:
            yield f"{what}: {name} {after / before - 1:+.2%}"


def faults_of_server(fields: Fields) -> Iterator[str]:
    """What is wrong with a served run; nothing where it is refused in one line."""
    run = _refused(serve, fields)
    if isinstance(run, str):
        if "\n" in run or not 10 < len(run) <= 300:
            yield f"not one short line: {run[:400]}"
        return
    data, table, parts = run.summary, run.requests, run.energy_j_by_part
    yield from _status(data["status"], data["status_reasons"])
    own = float(table[["prefill_j", "decode_j", "transfer_j"]].sum().sum()) + parts["idle"]
    spans = float(run.stretches["energy_j"].sum()) + sum(one.energy_j for one in run.log.transfers)
    for name, found in (("requests and pauses", own), ("stretches and transfers", spans)):
        if not math.isclose(found, run.energy_j, rel_tol=1e-6):
            yield f"joules of {name} are {found}, not {run.energy_j}"
    if min(parts.values()) < 0.0:
        yield f"joules below zero: {parts}"
    if "pipeline" in data and not math.isclose(
        sum(stage["energy_j"] for stage in data["pipeline"]["stages"]), run.energy_j, rel_tol=1e-6
    ):
        yield f"joules of the stages are not {run.energy_j}"
    orders = table["arrival_s"] <= table["started_s"] + 1e-9, table["started_s"] < table["first_token_s"], (
        table["first_token_s"] <= table["done_s"]
    )  # fmt: skip
    if not all(bool(order.all()) for order in orders):
        yield "a request starts before it comes, or ends before it starts"
    if (table["hit_tokens"] > table["input_tokens"]).any() or data["hit_tokens"] != sum(
        data["hit_tokens_by_tier"].values()
    ):
        yield f"hits {data['hit_tokens_by_tier']} of {data['hit_tokens']}"
    gpu = run.machine.gpu
    drawn = run.stretches["power_w_per_gpu"]
    if float(drawn.min()) < 0.95 * gpu.idle_w * 0.5 or float(drawn.max()) > 1.5 * gpu.tdp_w:
        yield f"{drawn.min():.0f} to {drawn.max():.0f} W a GPU of {gpu.tdp_w} W"
    budget_w = fields.get("fleet_power_w", math.inf)
    if any(sum(caps_w) > budget_w * (1 + 1e-9) for _, _, caps_w in run.log.fleet_looks):
        yield f"caps add up to more than {budget_w} W"
    if "trace" in fields:
        return
    slack = TILES_SLACK if "ep" in fields else SLACK
    lone = fields | {"requests": 1}  # of several, a longer one may share its steps with more others
    alone = serve(**lone)
    for name in ("output_tokens", "input_tokens", "images"):
        if name not in fields:
            continue
        more = _refused(serve, lone | {name: fields[name] + 1})
        if isinstance(more, str):
            yield f"one more of {name} is refused: {more}"
            continue
        work = [sum(one.energy_j_by_part[part] for part in ("prefill", "decode")) for one in (alone, more)]
        ends = [float(one.requests["e2e_s"].mean()) for one in (alone, more)]
        yield from _cheaper(f"one more of {name}", {"joules of work": (work[0], work[1]),
                                                    "end to end": (ends[0], ends[1])}, slack)  # fmt: skip


def _switches_tiles(run: Timeline, more: Timeline) -> bool:
    """Whether a product has fewer tiles or smaller ones in the run with more rows."""
    before, after = ({one.name: one.terms for one in of.outcome.classes()} for of in (run, more))
    return any(
        name.endswith("gemm")
        and ((new := after.get(name, old)).blocks < old.blocks or new.cycles_per_block < old.cycles_per_block)
        for name, old in before.items()
    )


def faults_of_run(fields: Fields) -> Iterator[str]:
    """What is wrong with a simulated run; nothing where it is refused in one line."""
    run = _refused(simulate, fields)
    if isinstance(run, str):
        if "\n" in run or not 10 < len(run) <= 300:
            yield f"not one short line: {run[:400]}"
        return
    data, gpu = summary(run), run.machine.gpu
    yield from _status(data["status"], data["status_reasons"])
    for name in ("energy_j_by_class", "energy_j_by_phase"):
        if not math.isclose(sum(data[name].values()), data["energy_j"], rel_tol=1e-9):
            yield f"{name} sums to {sum(data[name].values())}, not {data['energy_j']}"
    if not math.isclose(sum(data["energy_j_per_gpu"]), data["energy_j"], rel_tol=1e-9):
        yield "the GPUs' joules are not the whole"
    if not math.isclose(sum(data["power_w_per_gpu"]) * data["latency_s"], data["energy_j"], rel_tol=1e-6):
        yield "power by time is not the energy"
    if max(data["power_w_per_gpu"]) > 1.002 * gpu.tdp_w and "cannot be held" not in run.standing.words():
        yield f"{max(data['power_w_per_gpu']):.1f} W under a limit of {gpu.tdp_w} W, not said"
    if data["mfu"] > 1.0 or data["mbu"] > 1.0:
        yield f"MFU {data['mfu']:.3f}, MBU {data['mbu']:.3f}"
    if data["status"] not in summary_text(run):
        yield "the table does not say the status"
    if "video" in fields and "decoder" not in run.standing.words() and gpu.id != "h200-sxm-141gb":
        yield "the decoder's status is not said"
    slack = TILES_SLACK if "ep" in fields else SLACK
    step = {"batch": fields.get("dp", 1) * fields.get("pp", 1)} | (
        {"steps": 1} if "steps" in fields else {"seq_len": 1, "layers": fields.get("pp", 1)}
    )
    for name, one in step.items():
        more = _refused(simulate, fields | {name: fields[name] + one})
        if not isinstance(more, str):
            allowed = TILES_SLACK if _switches_tiles(run, more) else slack
            yield from _cheaper(f"one more of {name}", {"latency": (run.latency_s, more.latency_s),
                                                        "joules": (run.energy_j, more.energy_j)}, allowed)  # fmt: skip


def run(cases: int, seed: int, kinds: list[str] | None = None) -> Iterator[tuple[str, Fields, list[str]]]:
    """Each case and its faults, the kinds in turn."""
    rng = random.Random(seed)
    drawers = [(name, one) for name, one in (SERVERS | RUNS).items() if kinds is None or name in kinds]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases):
            name, drawer = drawers[number % len(drawers)]
            fields = drawer(rng, Path(folder))
            try:
                found = list((faults_of_server if name in SERVERS else faults_of_run)(fields))
            except Exception as error:  # anything but a refusal is a fault, and the other cases still run
                found = [f"{type(error).__name__}: {error}"]
            yield name, fields, found


def main() -> int:
    """Print every fault, and how many there are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("kinds", nargs="*", help="of these kinds alone")
    arguments = parser.parse_args()
    found: Counter[str] = Counter()
    for name, fields, wrong in run(arguments.cases, arguments.seed, arguments.kinds or None):
        found[f"{name}: {'wrong' if wrong else 'right, refused or marked'}"] += 1
        for fault in wrong:
            print(f"{name}: {fault}: {fields}", flush=True)
    print("\n".join(f"{name} {number}" for name, number in sorted(found.items())))
    return 1 if any("wrong" in name for name in found) else 0


if __name__ == "__main__":
    sys.exit(main())
