"""The power limiters in time: what moves the power target X while the work runs.

A fast limiter holds instantaneous power (the core keeps every running set at or below X <= fast limit). Two
slower ones lower X: a middle one that watches a running mean over some tens of milliseconds, and a slow one
over about a second. Time constants and limits come from the profile (fitted on transient.jsonl).
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simpy.events import Event

from hardware.clock import ClockLimits

if TYPE_CHECKING:
    from sim.engine.driver import Engine

TARGET_STEP_W = 2.0


@dataclass(slots=True)
class _Loop:
    """One integrating controller: watches a mean of power and moves its own target."""

    limit_w: float
    mean_time_s: float
    gain_per_s: float
    top_w: float
    mean_w: float
    target_w: float

    def step(self, power_w: float, elapsed_s: float) -> None:
        self.mean_w += (power_w - self.mean_w) * (1.0 - math.exp(-elapsed_s / self.mean_time_s))
        self.target_w += (self.limit_w - self.mean_w) * self.gain_per_s * elapsed_s
        self.target_w = min(max(self.target_w, 0.0), self.top_w)


@dataclass(slots=True)
class Limiter:
    """The limiters of all GPUs; keeps its state from one repetition to the next."""

    limits: ClockLimits
    gpus: int
    loops: list[tuple[_Loop, _Loop]] = field(init=False)

    def __post_init__(self) -> None:
        limits, top = self.limits, self.limits.fast_limit_w
        self.loops = [
            (
                _Loop(limits.middle_limit_w, limits.middle_time_s, limits.middle_gain_per_s, top, 0.0, top),
                _Loop(limits.slow_limit_w, limits.slow_time_s, limits.slow_gain_per_s, top, 0.0, top),
            )
            for _ in range(self.gpus)
        ]

    def targets_w(self) -> list[float]:
        """X of each GPU, on its grid."""
        return [
            math.floor(min(loop.target_w for loop in loops) / TARGET_STEP_W) * TARGET_STEP_W
            if math.isfinite(self.limits.fast_limit_w)
            else math.inf
            for loops in self.loops
        ]

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        """Tick until the last kernel has ended; a tick never extends the run."""
        from sim.engine.driver import Tick

        core, tick_s = engine.core, self.limits.tick_s
        before = [0.0] * self.gpus
        while not engine.done:
            yield Tick(engine.env, round(tick_s * 1e12))
            for gpu, loops in zip(core.gpus, self.loops, strict=True):
                energy_j = core.energy_until_now(gpu.index, engine.env.now)
                for loop in loops:
                    loop.step((energy_j - before[gpu.index]) / tick_s, tick_s)
                before[gpu.index] = energy_j
            for gpu, target_w in zip(core.gpus, self.targets_w(), strict=True):
                core.change_limit(gpu.index, target_w, gpu.clock_cap_hz)
