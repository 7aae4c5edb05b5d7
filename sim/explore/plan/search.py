"""The search of a plan: every way to cut the GPUs into replicas, each at the highest load that keeps the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, permutations, product, takewhile
from typing import Any

import workloads
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from sim.errors import ScenarioError, SimError
from sim.explore.plan.question import Deployment, Question
from sim.explore.plan.site import Half, Site, shares
from sim.explore.plan.stages import prices_of
from sim.explore.workers import Pool, WorkerDied
from sim.result.served import standing_served
from sim.scenario.machine import machine_of
from sim.serving.clock import clocks_mhz
from sim.serving.memory import kv_blocks
from sim.serving.spec import ServeSpec

REFUSALS = (SimError, workloads.WorkloadError, HardwareError)
# GPUs of a replica that are tried, and tokens of a step at most.
GROUPS = (1, 2, 4, 8, 16)
_DEGREES = ("tp", "ep", "ep_mode", "dcp")
# Pipeline stages that are tried inside a replica.
STAGES = (2, 4)
# So many ways are looked at in about the time that workers take to start.
FEW_WAYS = 6
# Pairs of unequal degrees, for prompts and to decode, that are looked at closely: the most promising ones.
PAIRS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Deployments of one way, or why there are none; and what its replicas carry where they do one part alone."""

    deployments: list[Deployment] = field(default_factory=list)
    reason: str = "no load keeps the targets"
    half: Half | None = None
    alone_s: tuple[float, float] | None = None  # TTFT and TPOT of a lone request, where no load keeps the targets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """GPUs of one replica and how they are set up: fields of a server."""

    question: Question
    fields: dict[str, Any]

    def run(self) -> _Found:
        """What comes of it."""
        try:
            return _deployments(self.question, self.fields)
        except REFUSALS as error:
            return _Found(reason=str(error))


def plan(
    question: Question, *, pool: Pool | None = None, say: Callable[[str], None] = lambda _: None
) -> list[Deployment]:
    """Deployments of all ``question.gpus`` GPUs that keep the targets, the best for its objective first.

    Every way to cut the GPUs (tensor and expert parallel degrees, precision, clock where joules count) runs at the
    highest load that keeps the targets, in the steady state (:mod:`sim.explore.plan.steady`); of those with prompts on
    replicas of another degree, the most promising ones. ``say`` hears of ways that cannot; :class:`SimError` where none
    can.
    """
    asked = [question.model_copy(update={"gpus": count}) for count in _counts(question)]
    tasks = [[_Way(question=one, fields=fields)] for one in asked for fields in _ways(one)]
    found: list[Deployment] = []
    why: list[str] = []
    halves: list[tuple[_Way, Half]] = []
    alone: list[tuple[float, float]] = []
    for (way,), results in zip(tasks, _mapped(tasks, pool), strict=True):
        for one in results:
            found += one.deployments
            if one.half is not None:
                halves.append((way, one.half))
            if one.alone_s is not None:
                alone.append(one.alone_s)
            if not one.deployments:
                why.append(one.reason)
                say(f"{_named(way.fields)}: {one.reason}")
    for number in asked:
        for pair in _pairs(number, [(way.fields, half) for way, half in halves if way.question is number]):
            found += pair.run().deployments
    where = f"{question.model} on {question.gpus} x {question.gpu}"
    if not found:
        raise SimError(f"no deployment of {where}: {_least(question, alone) if alone else why[0]}")
    if (load := question.rate_per_s) is not None:
        most = max(found, key=lambda candidate: candidate.load_per_s)
        found = [candidate for candidate in found if candidate.load_per_s >= load]
        if not found:
            raise SimError(
                f"rate_per_s = {load:g}: no deployment of {where} carries it within the targets: {most.load_per_s:.3g} "
                f"is the most ({most.label}): give more gpus"
            )
    return sorted(found, key=lambda candidate: (candidate.rank, candidate.label))


def _least(question: Question, alone: Sequence[tuple[float, float]]) -> str:
    """Which targets a lone request misses however GPUs are cut, and what it takes.

    >>> asked = Question.of(model="llama3-8b", slo_ttft_s=0.001)
    >>> _least(asked, [(0.03, 0.006), (0.02, 0.008)])
    'no load keeps the targets: a request alone takes a TTFT of 20 ms at least: give more slo_ttft_s, or another gpu'
    """
    targets = {"TTFT": question.slo_ttft_s, "TPOT": question.slo_tpot_s}
    asked = {name: slo_s for name, slo_s in targets.items() if slo_s is not None}
    least_s = dict(zip(targets, map(min, zip(*alone, strict=True)), strict=True))
    missed = [name for name, slo_s in asked.items() if least_s[name] > slo_s] or list(asked)
    takes = " and ".join(f"a {name} of {1e3 * least_s[name]:.3g} ms" for name in missed)
    fields = " and ".join(f"slo_{name.lower()}_s" for name in missed)
    return f"no load keeps the targets: a request alone takes {takes} at least: give more {fields}, or another gpu"


def _counts(question: Question) -> list[int]:
    """How many GPUs to try: all, or, where a load is to be carried on few, doubled numbers and all."""
    if question.rate_per_s is None:
        return [question.gpus]
    doubled = takewhile(lambda count: count < question.gpus, (1 << power for power in count()))
    return [*doubled, question.gpus]


def _pairs(question: Question, halves: Sequence[tuple[dict[str, Any], Half]]) -> list[_Way]:
    """Ways with unequal degrees whose parts, each at its highest load, promise most; all else about them is equal."""
    promising: list[tuple[float, _Way]] = []
    for (first, prompts), (fields, decoding) in permutations(halves, 2):
        same = {name: value for name, value in fields.items() if name not in _DEGREES}
        modes = {one["ep_mode"] for one in (first, fields) if "ep_mode" in one}
        if same != {name: value for name, value in first.items() if name not in _DEGREES} or len(modes) > 1:
            continue
        degrees = {name: (first.get(name, 1), fields.get(name, 1)) for name in ("tp", "ep")}
        own = {f"prefill_{name}": one for name, (one, other) in degrees.items() if one != other}
        way = _Way(question=question, fields=fields | own | ({"ep_mode": modes.pop()} if modes else {}))
        steady = decoding.decoding
        for front, back in shares(question.gpus, prompts.gpus, decoding.gpus):
            load_per_s = min(front * prompts.prompts_per_s, back * steady.load_per_s)
            power_w = front * prompts.gpus * prompts.prompts_w + back * decoding.gpus * steady.power_w
            price = (question.price_per_gpu_hour or 0.0) * question.gpus
            price += (question.price_per_kwh or 0.0) * power_w / 1e3
            cost = {"throughput": 1.0, "energy": power_w, "cost": price}[question.objective] / load_per_s
            promising.append((cost, way))
    best: list[_Way] = []
    for _, way in sorted(promising, key=lambda one: one[0]):
        if way not in best:
            best.append(way)
    return best[:PAIRS]


def _mapped(tasks: Sequence[list[_Way]], pool: Pool | None) -> Iterable[list[_Found]]:
    """In order, on the workers of ``pool``, or right here: where they are few, or a worker died."""
    if pool is None or pool.jobs == 1 or len(tasks) <= FEW_WAYS:
        return map(_search, tasks)
    numbered = [[(number, way) for way in task] for number, task in enumerate(tasks)]
    done: dict[int, _Found] = {}
    with suppress(WorkerDied):
        for batch in pool.map(_search_numbered, numbered):
            done.update(batch)
    return [[done[number]] if number in done else _search(task) for number, task in enumerate(tasks)]


def _search(ways: Sequence[_Way]) -> list[_Found]:
    return [way.run() for way in ways]


def _search_numbered(ways: Sequence[tuple[int, _Way]]) -> list[tuple[int, _Found]]:
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
        if (copies := workloads.cache_copies(model, size)) > 1:
            groups.append({"tp": size, "dcp": copies})
        groups += [{"tp": size // pp, "pp": pp, "pp_batches": "even"} for pp in STAGES if size % pp == 0]
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


def _deployments(question: Question, fields: dict[str, Any]) -> _Found:
    own = {
        name: getattr(question, name)
        for name in ("model", "gpu", "profile", "power_cap_w", "host_ms")
        if getattr(question, name) not in (None, 0.0)
    }
    unequal = {"prefill_tp", "prefill_ep"} & fields.keys()
    base = own | fields
    spec = ServeSpec.of(**base, **({"prefill_replicas": 1} if unequal else {}))
    group, front = spec.group(), spec.group(prefill=True)
    target = machine_of(group)
    room = kv_blocks(spec, group, target) * spec.own_block_tokens(group)
    kv_blocks(spec, front, target)  # refused where weights alone are too much
    _check_positions(question)

    own_prices = prices_of(spec, group)
    site = Site(
        question=question,
        base=base,
        prices=own_prices,
        prompts=prices_of(spec, front) if unequal or spec.dcp > 1 else own_prices,
        fitting=room // (question.input_len + question.output_len),
        cap_w=target.limits.slow_limit_w,
    )
    if site.fitting < 1:
        raise ScenarioError(f"one request needs more KV cache than the {room:,} tokens that a replica holds")
    standing = standing_served(target, group, asks=("the load of a plan",))
    # A stage that only decodes is left out: vLLM's scheduler keeps what comes one by one in one batch.
    half = site.half() if "disaggregated" in question.modes and spec.pp == 1 else None
    ways = {
        "aggregated": None if unequal or "aggregated" not in question.modes else site.together(),
        "disaggregated": None if half is None else site.apart(half),
    }
    found = [
        Deployment(question=question, mode=mode, status=standing.status, reasons=standing.reasons, **best)
        for mode in question.modes
        if (best := ways[mode]) is not None
    ]
    for one in (site.prices, site.prompts):
        one.table.save()
    return _Found(deployments=found, half=half, alone_s=None if found else site.alone_s)


def _check_positions(question: Question) -> None:
    model = workloads.load_model(question.model)
    workloads.check_reach(model, question.input_len + question.output_len - 1)
