"""The SM clock while serving: the lowest that keeps the objective, looked for before each step.

One even clock burns less than a mix of high and low ones, so the choice rests on the steps of the last seconds: the
lowest clock at which they would have kept the pace. Two things raise it at once: a running sequence whose mean time
per output token has fallen behind, and prompts whose first token is due.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from hardware.gpu import GpuSpec
from sim.serving.host import HostTime
from sim.serving.inflight import PlannedStep, Sequence
from sim.serving.price import StepPrices
from sim.serving.scheduler import Scheduler

# Locked clocks that are tried, as shares of the highest.
CLOCK_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# The share of the objectives that is aimed at, the memory of steps, and the steps in which a delay is made up.
AIM = 0.95
MEMORY_S = 2.0
CATCH_UP_STEPS = 32


def clocks_mhz(gpu: GpuSpec) -> list[float]:
    """Clocks to try on ``gpu``, rising, on its grid."""
    step_hz = gpu.clock_step_hz
    return [round(share * gpu.max_clock_hz / step_hz) * step_hz / 1e6 for share in CLOCK_SHARES]


@dataclass(kw_only=True, slots=True, eq=False)
class SloClock:
    """The lowest of ``rungs`` (prices at rising clocks) that keeps mean times per output token within ``tpot_s``.

    Steps with prompts run at the lowest one that still brings first tokens within ``ttft_s``; without such an
    objective, or with requests left waiting, at the highest. A clock falls ``hold_s`` after its last change at the
    earliest. Sequences that no clock could bring home in time are not waited for.
    """

    rungs: tuple[StepPrices, ...]
    tpot_s: float
    ttft_s: float | None
    hold_s: float
    host: HostTime
    at: int = field(init=False)
    _changed_s: float = -math.inf
    _steps: float = 0.0  # of the last seconds, at which sequences were running,
    _spent_s: list[float] = field(default_factory=list)  # and what they would have taken at each rung
    _latest_s: list[float] = field(default_factory=list)  # the same of the step at hand
    _due: list[tuple[float, int, Sequence]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = len(self.rungs) - 1

    def joined(self, sequence: Sequence, first_token_s: float, step: int) -> None:
        """``sequence`` yields a token a step from now on. Kept by when its token after step 0 would be due."""
        zero_s = first_token_s + (sequence.generated - 1 - step) * self.tpot_s
        heapq.heappush(self._due, (zero_s, sequence.request.number, sequence))

    def choose(self, step: PlannedStep, scheduler: Scheduler, target_w: float, now_s: float) -> StepPrices:
        """Prices at the clock that ``step`` runs at."""
        host_s = self.host.seconds(step.sequences)
        seconds = [host_s + prices.whole(step.batch, target_w).time_s for prices in self.rungs]
        budget_s = min(self._until_first_token_s(step, scheduler, now_s), self._catch_up_s(scheduler, now_s))
        mean_s = [time_s / self._steps for time_s in self._spent_s] if self._steps else seconds
        wanted = max(_lowest(seconds, budget_s), _lowest(mean_s, AIM * self.tpot_s))
        if wanted > self.at or (wanted < self.at and now_s >= self._changed_s + self.hold_s):
            self.at, self._changed_s = wanted, now_s
        self._latest_s = seconds if step.batch.decoding else []
        return self.rungs[self.at]

    def ran(self, steps: int) -> None:
        """``steps`` like the one last chosen for have been run."""
        if not self._latest_s:
            return
        left = math.exp(-steps * self._latest_s[self.at] / MEMORY_S)
        self._steps = self._steps * left + steps
        spent_s = self._spent_s or [0.0] * len(self.rungs)
        self._spent_s = [old * left + steps * new for old, new in zip(spent_s, self._latest_s, strict=True)]

    def _until_first_token_s(self, step: PlannedStep, scheduler: Scheduler, now_s: float) -> float:
        """What the prompts in ``step`` leave it; nothing where others wait, or had their first token before."""
        if not step.pieces:
            return math.inf
        if self.ttft_s is None or scheduler.waiting or any(s.generated for s, _ in step.pieces):
            return 0.0
        due_s = AIM * self.ttft_s - now_s
        return min((s.request.arrival_s + due_s) * tokens / (s.target - s.computed) for s, tokens in step.pieces)

    def _catch_up_s(self, scheduler: Scheduler, now_s: float) -> float:
        """How long a step may take for the sequence that is furthest behind, of those that can still catch up."""
        while self._due:
            zero_s, number, sequence = self._due[0]
            lead_s = zero_s + scheduler.step * self.tpot_s - now_s
            if scheduler.running.get(number) is sequence and lead_s > -CATCH_UP_STEPS * self.tpot_s:
                return math.inf if lead_s >= 0 else AIM * self.tpot_s + lead_s / CATCH_UP_STEPS
            heapq.heappop(self._due)
        return math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseClock:
    """One clock while a step holds prompts, another while none does; its prices at either."""

    prefill: StepPrices
    decode: StepPrices

    @property
    def rungs(self) -> tuple[StepPrices, ...]:
        """Prices at both clocks."""
        return (self.prefill, self.decode)

    def joined(self, sequence: Sequence, first_token_s: float, step: int) -> None:
        """Nobody's pace counts."""

    def choose(self, step: PlannedStep, scheduler: Scheduler, target_w: float, now_s: float) -> StepPrices:  # noqa: ARG002
        """Prices at the clock that ``step`` runs at."""
        return self.prefill if step.pieces else self.decode

    def ran(self, steps: int) -> None:
        """Nor do steps."""


def _lowest(seconds: list[float], budget_s: float) -> int:
    """The first rung that takes no longer than ``budget_s``, or the last one.

    >>> _lowest([0.03, 0.02, 0.01], 0.025), _lowest([0.03, 0.02, 0.01], 0.001)
    (1, 2)
    """
    return next((rung for rung, took_s in enumerate(seconds) if took_s <= budget_s), len(seconds) - 1)
