"""The search of a plan: every way to cut the GPUs into replicas, each at the highest load that keeps the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, product, takewhile
from typing import Any

import workloads
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from sim.errors import ScenarioError, SimError
from sim.explore.plan.question import Deployment, Question
from sim.explore.plan.site import Site
from sim.explore.workers import Pool, WorkerDied
from sim.result.served import standing_served
from sim.scenario.machine import machine_of
from sim.serving.clock import clocks_mhz
from sim.serving.memory import kv_blocks
from sim.serving.price import StepPrices
from sim.serving.spec import ServeSpec

REFUSALS = (SimError, workloads.WorkloadError, HardwareError)
# GPUs of a replica that are tried, and tokens of a step at most.
GROUPS = (1, 2, 4, 8, 16)
# So many ways are looked at in about the time that workers take to start.
FEW_WAYS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """GPUs of one replica and how they are set up: fields of a server."""

    question: Question
    fields: dict[str, Any]

    def run(self) -> tuple[list[Deployment], str]:
        """Its deployments, or why there are none."""
        try:
            return _deployments(self.question, self.fields)
        except REFUSALS as error:
            return [], str(error)


def plan(
    question: Question, *, pool: Pool | None = None, say: Callable[[str], None] = lambda _: None
) -> list[Deployment]:
    """Deployments of all ``question.gpus`` GPUs that keep the targets, the best for its objective first.

    Every way to cut the GPUs (tensor and expert parallel degrees, precision, clock where joules count) runs at the
    highest load that keeps the targets, in the steady state (:mod:`sim.explore.plan.steady`). ``say`` hears of ways
    that cannot; :class:`SimError` where none can.
    """
    asked = [question.model_copy(update={"gpus": count}) for count in _counts(question)]
    tasks = [[_Way(question=one, fields=fields)] for one in asked for fields in _ways(one)]
    found: list[Deployment] = []
    why: list[str] = []
    for (way,), results in zip(tasks, _mapped(tasks, pool), strict=True):
        for deployments, reason in results:
            found += deployments
            if not deployments:
                why.append(reason)
                say(f"{_named(way.fields)}: {reason}")
    where = f"{question.model} on {question.gpus} x {question.gpu}"
    if not found:
        raise SimError(f"no deployment of {where}: {why[0]}")
    if (load := question.rate_per_s) is not None:
        most = max(found, key=lambda candidate: candidate.load_per_s)
        found = [candidate for candidate in found if candidate.load_per_s >= load]
        if not found:
            raise SimError(
                f"rate_per_s = {load:g}: no deployment of {where} carries it within the targets: {most.load_per_s:.3g} "
                f"is the most ({most.label}): give more gpus"
            )
    return sorted(found, key=lambda candidate: (candidate.rank, candidate.label))


def _counts(question: Question) -> list[int]:
    """How many GPUs to try: all, or, where a load is to be carried on few, doubled numbers and all."""
    if question.rate_per_s is None:
        return [question.gpus]
    doubled = takewhile(lambda count: count < question.gpus, (1 << power for power in count()))
    return [*doubled, question.gpus]


def _mapped(tasks: Sequence[list[_Way]], pool: Pool | None) -> Iterable[list[tuple[list[Deployment], str]]]:
    """In order, on the workers of ``pool``, or right here: where they are few, or a worker died."""
    if pool is None or pool.jobs == 1 or len(tasks) <= FEW_WAYS:
        return map(_search, tasks)
    numbered = [[(number, way) for way in task] for number, task in enumerate(tasks)]
    done: dict[int, tuple[list[Deployment], str]] = {}
    with suppress(WorkerDied):
        for batch in pool.map(_search_numbered, numbered):
            done.update(batch)
    return [[done[number]] if number in done else _search(task) for number, task in enumerate(tasks)]


def _search(ways: Sequence[_Way]) -> list[tuple[list[Deployment], str]]:
    return [way.run() for way in ways]


def _search_numbered(ways: Sequence[tuple[int, _Way]]) -> list[tuple[int, tuple[list[Deployment], str]]]:
    """What a worker does."""
    return [(number, way.run()) for number, way in ways]


def _named(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in fields.items())


def _ways(question: Question) -> list[dict[str, Any]]:
    """Degrees, precisions and clocks; clocks below the highest only where joules are what counts."""
    model = workloads.load_model(question.model)
    gpu = load_gpu(question.gpu)
    clocks = [None, *clocks_mhz(gpu)[:-1]] if question.objective != "throughput" else [None]
    caps = question.power_caps_w or (None,)
    groups: list[dict[str, Any]] = []
    for size in (size for size in GROUPS if size <= question.gpus and question.gpus % size == 0):
        groups.append({"tp": size})
        if getattr(model, "experts", 0) and size > 1:
            groups.append({"ep": size, "ep_mode": "all_to_all"})
            groups.append({"tp": size, "ep": size, "ep_mode": "all_reduce"})
    return [
        group
        | ({"dtype": dtype} if dtype != "bf16" else {})
        | ({"sm_clock_mhz": clock} if clock else {})
        | ({"power_cap_w": cap_w} if cap_w else {})
        for group, dtype, clock, cap_w in product(groups, question.dtypes, clocks, caps)
    ]


def _deployments(question: Question, fields: dict[str, Any]) -> tuple[list[Deployment], str]:
    own = {
        name: getattr(question, name)
        for name in ("model", "gpu", "profile", "power_cap_w", "host_ms")
        if getattr(question, name) not in (None, 0.0)
    }
    base = own | fields
    spec = ServeSpec.of(**base)
    group = spec.group()
    target = machine_of(group)
    room = kv_blocks(spec, group, target) * spec.block_tokens
    _check_positions(question)
    site = Site(
        question=question,
        base=base,
        prices=StepPrices(scenario=group, machine=target, sampling=spec.sampling, attention=spec.attention),
        fitting=room // (question.input_len + question.output_len),
        replicas=question.gpus // group.world,
        cap_w=target.limits.slow_limit_w,
    )
    if site.fitting < 1:
        raise ScenarioError(f"one request needs more KV cache than the {room:,} tokens that a replica holds")
    standing = standing_served(target, group, asks=("the load of a plan",))
    found = []
    for mode in question.modes:
        if mode == "disaggregated" and site.replicas < 2:
            continue
        best = site.together() if mode == "aggregated" else site.apart()
        if best is not None:
            found.append(
                Deployment(question=question, mode=mode, status=standing.status, reasons=standing.reasons, **best)
            )
    site.prices.table.save()
    return found, "no load keeps the targets"


def _check_positions(question: Question) -> None:
    model = workloads.load_model(question.model)
    workloads.check_reach(model, question.input_len + question.output_len - 1)
