"""One deployment of a plan at rising loads: what it serves, and the highest load that keeps the targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.explore.plan.question import Question
from sim.explore.plan.stages import StagedPrices
from sim.explore.plan.steady import (
    MOST_LOAD,
    ReplicaLoad,
    SteadyReplica,
    decoding_alone,
    decoding_and_prompts,
    prompts_alone,
)

# The share of the targets that is aimed at.
AIM = 0.97
STEP_TOKENS = (2048, 8192)
# Sequences at once that are tried, before the last two are halved in on.
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """The most that a replica of ``gpus`` carries that does one part alone: prompts, or ``sequences`` that decode."""

    gpus: int
    prompts_per_s: float
    prompts_w: float
    sequences: int
    decoding: SteadyReplica
    binds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Replicas of one kind: ``fitting`` sequences' caches at most, each GPU's mean power held at ``cap_w``.

    Where prompts have replicas of their own, ``prompts`` are the prices of a step of these.
    """

    question: Question
    base: dict[str, Any]
    prices: StagedPrices
    prompts: StagedPrices
    fitting: int
    cap_w: float

    @property
    def replicas(self) -> int:
        """How many there are where all are of one kind."""
        return self.question.gpus // self.prices.world

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

    def _load(self, step_tokens: int, prices: StagedPrices) -> ReplicaLoad:
        return ReplicaLoad(
            input_len=self.question.input_len,
            output_len=self.question.output_len,
            step_tokens=step_tokens,
            cap_w=self.cap_w,
            host_s=self.question.host_ms * 1e-3,
            replicas=max(1, self.question.gpus // prices.world),
        )

    def together(self) -> dict[str, Any] | None:
        """Prompts in the replicas that decode: the best of the steps' sizes."""
        found: list[dict[str, Any]] = []
        for step_tokens in STEP_TOKENS:
            load = self._load(step_tokens, self.prices)

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

    def _decode(self, sequences: int) -> SteadyReplica:
        return decoding_alone(self.prices, self._load(max(STEP_TOKENS), self.prices), sequences)

    def _prompts(self, load_per_s: float) -> SteadyReplica | None:
        return prompts_alone(self.prompts, self._load(max(STEP_TOKENS), self.prompts), load_per_s)

    def half(self) -> Half | None:
        """A replica of this kind for either part alone; None where it keeps the targets in one of them or none."""
        most, most_prompts = self._highest(self._decode, self._most), _highest_load(self._prompts, self.question)
        first = None if most_prompts is None else self._prompts(most_prompts)
        if most is None or most_prompts is None or first is None:
            return None
        return Half(
            gpus=self.prices.world,
            prompts_per_s=most_prompts,
            prompts_w=first.power_w,
            sequences=most[0],
            decoding=most[1],
            binds=most[2],
        )

    @property
    def alone_s(self) -> tuple[float, float]:
        """TTFT and TPOT of one request that no other disturbs."""
        first = self._prompts(1e-9)
        return math.inf if first is None else first.ttft_s, self._decode(1).tpot_s

    def apart(self, half: Half) -> dict[str, Any] | None:
        """Some replicas for prompts, the others to decode: the numbers that carry the highest load."""
        asked, sizes = self.question, (self.prompts.world, self.prices.world)
        sequences, steady, binds = half.sequences, half.decoding, half.binds
        capacities = [
            (min(front * half.prompts_per_s, back * steady.load_per_s), -front, back)
            for front, back in shares(asked.gpus, *sizes)
        ]
        if not capacities:
            return None
        load_per_s, number, others = max(capacities)
        prefill = -number
        if load_per_s < others * steady.load_per_s * (1 - 1e-9):
            binds = "prompts (TTFT)" if asked.slo_ttft_s is not None else "prompts (compute)"
            sequences = _fewest(self._decode, load_per_s / others, sequences)
            steady = self._decode(sequences)
        first = self._prompts(load_per_s / prefill)
        assert first is not None
        power_w = (prefill * sizes[0] * first.power_w + others * sizes[1] * steady.power_w) / asked.gpus
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


def shares(gpus: int, prompt_gpus: int, decode_gpus: int) -> list[tuple[int, int]]:
    """Numbers of replicas for prompts and to decode, of so many GPUs each, that use all ``gpus``.

    >>> shares(16, 4, 8), shares(8, 8, 2)
    ([(2, 1)], [])
    """
    fronts = range(1, (gpus - 1) // prompt_gpus + 1)
    rests = ((front, gpus - front * prompt_gpus) for front in fronts)
    return [(front, rest // decode_gpus) for front, rest in rests if rest and rest % decode_gpus == 0]


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
