"""One deployment of a plan at rising loads: what it serves, and the highest load that keeps the targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sim.explore.plan.question import Question
from sim.explore.plan.steady import (
    MOST_LOAD,
    ReplicaLoad,
    SteadyReplica,
    decoding_alone,
    decoding_and_prompts,
    prompts_alone,
)
from sim.serving.price import StepPrices

# The share of the targets that is aimed at.
AIM = 0.97
STEP_TOKENS = (2048, 8192)
# Sequences at once that are tried, before the last two are halved in on.
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
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
