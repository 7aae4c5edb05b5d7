"""Runs of what no measurement judges: each is right, refused in one line, or marked. Run by hand with

    python -m tests.feature_fuzz --cases 2000 --seed 1

Servers with pipelines, speculation, tiers of KV caches, a budget of power, DeepEP's exchanges, adapters, images and
clocks of prompts; runs on dragonflies, SM partitions and MIG slices, with speculation, exchanges, spread caches,
adapters, experts in halves under a cap and VAE decoders (:mod:`tests.feature_cases`). A status must say ``unchecked``
(or ``uncalibrated``), sums of joules equal the whole, powers lie between idle and the cap, and a token, a sequence, a
step more is not cheaper.
"""

from __future__ import annotations

import argparse
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
from tests.feature_cases import RUNS, SERVERS, Fields
from workloads.errors import WorkloadError

# Of joules or seconds that one more may save: at all, and where experts or a product switch tiles: of 65 products that
# were measured with a row more (records/h200-sxm-141gb/edges) one got 10 % quicker.
SLACK, TILES_SLACK = 0.005, 0.03
UNJUDGED = ("unchecked", "uncalibrated")


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
    cap_w = fields.get("power_cap_w", gpu.tdp_w)
    if max(data["power_w_per_gpu"]) > 1.002 * cap_w and "cannot be held" not in run.standing.words():
        yield f"{max(data['power_w_per_gpu']):.1f} W under a limit of {cap_w} W, not said"
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
