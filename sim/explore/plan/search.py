"""The search of a plan: every way to cut the GPUs into replicas, each at the highest load that keeps the targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import workloads
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from sim.errors import ScenarioError, SimError
from sim.explore.plan.question import Deployment, Question
from sim.explore.plan.steady import (
    MOST_LOAD,
    ReplicaLoad,
    SteadyReplica,
    decoding_alone,
    decoding_and_prompts,
    prompts_alone,
)
from sim.explore.workers import Pool, WorkerDied
from sim.result.status import standing_served
from sim.scenario.machine import machine_of
from sim.serving.clock import clocks_mhz
from sim.serving.memory import kv_blocks
from sim.serving.price import StepPrices
from sim.serving.spec import ServeSpec

REFUSALS = (SimError, workloads.WorkloadError, HardwareError)
# GPUs of a replica that are tried, and tokens of a step at most.
GROUPS = (1, 2, 4, 8, 16)
STEP_TOKENS = (2048, 8192)
# Sequences at once that are tried, before the last two are halved in on.
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# So many ways are looked at in about the time that workers take to start.
FEW_WAYS = 6
# The share of the targets that is aimed at.
AIM = 0.97


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
    tasks = [[_Way(question=question, fields=fields)] for fields in _ways(question)]
    found: list[Deployment] = []
    why: list[str] = []
    for (way,), results in zip(tasks, _mapped(tasks, pool), strict=True):
        for deployments, reason in results:
            found += deployments
            if not deployments:
                why.append(reason)
                say(f"{_named(way.fields)}: {reason}")
    if not found:
        raise SimError(f"no deployment of {question.model} on {question.gpus} x {question.gpu}: {why[0]}")
    return sorted(found, key=lambda candidate: (candidate.rank, candidate.label))


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
    groups: list[dict[str, Any]] = []
    for size in (size for size in GROUPS if size <= question.gpus and question.gpus % size == 0):
        groups.append({"tp": size})
        if getattr(model, "experts", 0) and size > 1:
            groups.append({"ep": size, "ep_mode": "all_to_all"})
            groups.append({"tp": size, "ep": size, "ep_mode": "all_reduce"})
    return [
        group | ({"dtype": dtype} if dtype != "bf16" else {}) | ({"sm_clock_mhz": clock} if clock else {})
        for group in groups
        for dtype in question.dtypes
        for clock in clocks
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
    site = _Site(
        question=question,
        base=base,
        prices=StepPrices(scenario=group, machine=target, sampling=spec.sampling, attention=spec.attention),
        fitting=room // (question.input_len + question.output_len),
        replicas=question.gpus // group.world,
        cap_w=target.limits.slow_limit_w,
    )
    if site.fitting < 1:
        raise ScenarioError(f"one request needs more KV cache than the {room:,} tokens that a replica holds")
    standing = standing_served(target, group)
    found = []
    for mode in question.modes:
        if mode == "disaggregated" and site.replicas < 2:
            continue
        best = site.together() if mode == "aggregated" else site.apart()
        if best is not None:
            found.append(
                Deployment(question=question, mode=mode, status=standing.status, reasons=standing.reasons, **best)
            )
    return found, "no load keeps the targets"


def _check_positions(question: Question) -> None:
    model = workloads.load_model(question.model)
    workloads.check_reach(model, question.input_len + question.output_len - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Replicas of one kind: ``fitting`` sequences' caches at most, each GPU's mean power held at ``cap_w``."""

    question: Question
    base: dict[str, Any]
    prices: StepPrices
    fitting: int
    replicas: int
    cap_w: float

    @property
    def _most(self) -> int:
        return min(self.fitting, self.question.max_num_seqs)

    def _fields(self, sequences: int, load_per_s: float, **more: Any) -> dict[str, Any]:
        """A server for the load: seats for what a Poisson load adds to the mean now and then."""
        asked = self.question
        seats = min(self._most, math.ceil(sequences + 3.0 * math.sqrt(sequences)))
        return {
            **self.base,
            "max_num_seqs": seats,
            "rate_per_s": load_per_s,
            "input_tokens": asked.input_len,
            "output_tokens": asked.output_len,
            **{name: getattr(asked, name) for name in ("slo_ttft_s", "slo_tpot_s") if getattr(asked, name) is not None},
            **more,
        }

    def _load(self, step_tokens: int) -> ReplicaLoad:
        return ReplicaLoad(
            input_len=self.question.input_len,
            output_len=self.question.output_len,
            step_tokens=step_tokens,
            cap_w=self.cap_w,
            host_s=self.question.host_ms * 1e-3,
            replicas=self.replicas,
        )

    def together(self) -> dict[str, Any] | None:
        """Prompts in the replicas that decode: the best of the steps' sizes."""
        found: list[dict[str, Any]] = []
        for step_tokens in STEP_TOKENS:
            load = self._load(step_tokens)

            def at(sequences: int, load: ReplicaLoad = load) -> SteadyReplica | None:
                return decoding_and_prompts(self.prices, load, sequences)

            most = self._highest(at, min(self._most, step_tokens - 1))
            if most is None:
                continue
            sequences, steady, binds = most
            load_per_s = steady.load_per_s * self.replicas
            more = {"replicas": self.replicas, "max_num_batched_tokens": step_tokens}
            found.append(
                {
                    "spec": self._fields(sequences, load_per_s, **more),
                    "sequences": sequences,
                    "load_per_s": load_per_s,
                    "ttft_s": steady.ttft_s,
                    "tpot_s": steady.tpot_s,
                    "tpot_within_s": steady.tpot_within_s,
                    "power_w_per_gpu": steady.power_w,
                    "binds": binds,
                }
            )
        return max(found, key=lambda row: float(row["load_per_s"]), default=None)

    def apart(self) -> dict[str, Any] | None:
        """Some replicas for prompts, the others to decode: the numbers that carry the highest load."""
        asked, load = self.question, self._load(max(STEP_TOKENS))

        def decode(sequences: int) -> SteadyReplica:
            return decoding_alone(self.prices, load, sequences)

        def prompts(load_per_s: float) -> SteadyReplica | None:
            return prompts_alone(self.prices, load, load_per_s)

        most = self._highest(decode, self._most)
        most_prompts = _highest_load(prompts, asked)
        if most is None or most_prompts is None:
            return None
        sequences, steady, binds = most
        capacities = [
            (min(number * most_prompts, (self.replicas - number) * steady.load_per_s), -number)
            for number in range(1, self.replicas)
        ]
        load_per_s, number = max(capacities)
        prefill, others = -number, self.replicas + number
        if load_per_s < others * steady.load_per_s * (1 - 1e-9):
            binds = "prompts (TTFT)" if asked.slo_ttft_s is not None else "prompts (compute)"
            sequences = _fewest(decode, load_per_s / others, sequences)
            steady = decode(sequences)
        first = prompts(load_per_s / prefill)
        assert first is not None
        power_w = (prefill * first.power_w + others * steady.power_w) / self.replicas
        return {
            "spec": self._fields(sequences, load_per_s, replicas=others, prefill_replicas=prefill),
            "sequences": sequences,
            "load_per_s": load_per_s,
            "ttft_s": first.ttft_s,
            "tpot_s": steady.tpot_s,
            "tpot_within_s": steady.tpot_within_s,
            "power_w_per_gpu": power_w,
            "binds": binds,
        }

    def _highest(self, at: Callable[[int], SteadyReplica | None], most: int) -> tuple[int, SteadyReplica, str] | None:
        """The most sequences, up to ``most``, at which the targets are kept, and what the next ones would break."""
        low, best, binds = 0, None, "KV cache" if most == self.fitting else "max_num_seqs"
        high = most + 1
        for sequences in (*(n for n in SEQUENCES if n < most), most):
            steady = at(sequences)
            broken = _broken(steady, self.question)
            if broken or steady is None:
                high, binds = sequences, broken
                break
            low, best = sequences, steady
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            steady = at(middle)
            broken = _broken(steady, self.question)
            if broken or steady is None:
                high, binds = middle, broken
            else:
                low, best = middle, steady
        return None if best is None else (low, best, binds)


def _broken(steady: SteadyReplica | None, question: Question) -> str:
    """Which target a load breaks; nothing where all are kept."""
    if steady is None or (question.slo_ttft_s is None and steady.busy > MOST_LOAD and steady.ttft_s > 0.0):
        return "prompts (compute)"
    if question.slo_tpot_s is not None and steady.tpot_within_s > AIM * question.slo_tpot_s:
        return "TPOT"
    if question.slo_ttft_s is not None and steady.ttft_s > AIM * question.slo_ttft_s:
        return "TTFT"
    return ""


def _highest_load(prompts: Callable[[float], SteadyReplica | None], question: Question) -> float | None:
    """The highest load of a replica for prompts (requests a second) that keeps the target."""
    probe = prompts(1e-9)
    if probe is None or _broken(probe, question):
        return None
    low, high = 0.0, MOST_LOAD / probe.ttft_s
    for _ in range(12):
        middle = (low + high) / 2
        steady = prompts(middle)
        low, high = (low, middle) if steady is None or _broken(steady, question) else (middle, high)
    return low or None


def _fewest(decode: Callable[[int], SteadyReplica], load_per_s: float, most: int) -> int:
    """The fewest sequences of a decoding replica that carry ``load_per_s``."""
    low, high = 0, most
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (low, middle) if decode(middle).load_per_s >= load_per_s else (middle, high)
    return high
