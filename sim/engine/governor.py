"""The power limiters in time: what moves the power target X while the work runs.

A fast limiter holds instantaneous power (the core keeps every running set at or below X <= fast limit). A middle
one acts once a mean over some tens of milliseconds has passed its limit, and then drives power itself to the
limit. A slow one watches a plain mean over about a second: while that is above the cap the middle limit drops by a
fifth, then stands a little lower for a moment before it is whole again, so that a long load swings around the
cap with a period of about a second. All figures come from the profile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simpy.events import Event

from hardware.clock import ClockLimits

if TYPE_CHECKING:
    from sim.engine.driver import Engine

TARGET_STEP_W = 2.0


class _Loop:
    """The two slower limiters of one GPU."""

    __slots__ = ("level", "limits", "mean_w", "recovering_s", "seen_w", "target_w", "window_sum_w")

    def __init__(self, limits: ClockLimits) -> None:
        self.limits = limits
        self.mean_w: float | None = None  # unknown until the first tick says what came before
        self.target_w = limits.fast_limit_w
        self.level = 1.0  # share of the middle limit that the slow limiter leaves
        self.recovering_s = 0.0
        self.seen_w: deque[float] = deque()
        self.window_sum_w = 0.0

    def begin(self, idle_w: float) -> None:
        """Before its first run the GPU had been idle for longer than any limiter remembers."""
        if self.mean_w is None:
            self.mean_w = idle_w
            ticks = max(1, round(self.limits.slow_time_s / self.limits.tick_s))
            self.seen_w.extend([idle_w] * ticks)
            self.window_sum_w = idle_w * ticks

    def step(self, power_w: float) -> None:
        """One tick at ``power_w``, the mean since the last one."""
        limits = self.limits
        assert self.mean_w is not None
        self.mean_w += (power_w - self.mean_w) * (1.0 - math.exp(-limits.tick_s / limits.middle_time_s))
        self.window_sum_w += power_w - self.seen_w.popleft()
        self.seen_w.append(power_w)
        level = self._level()
        if level != self.level:  # the target is taken along, so that power follows at once
            self.target_w *= level / self.level
            self.level = level
            return
        limit_w = limits.middle_limit_w * level
        if self.target_w < limits.fast_limit_w or self.mean_w > limit_w:
            self.target_w += (limit_w - power_w) * limits.middle_gain_per_s * limits.tick_s
            self.target_w = min(max(self.target_w, 0.0), limits.fast_limit_w)

    def _level(self) -> float:
        limits = self.limits
        if self.window_sum_w / len(self.seen_w) > limits.slow_limit_w:
            self.recovering_s = limits.recovery_s
            return limits.dip_ratio
        if self.recovering_s > 0.0:
            self.recovering_s -= limits.tick_s
            return limits.recovery_ratio
        return 1.0


@dataclass(slots=True)
class Limiter:
    """The limiters of all GPUs; keeps its state from one repetition to the next."""

    limits: ClockLimits
    gpus: int
    loops: list[_Loop] = field(init=False)

    def __post_init__(self) -> None:
        self.loops = [_Loop(self.limits) for _ in range(self.gpus)]

    def targets_w(self) -> list[float]:
        """X of each GPU, on its grid."""
        if math.isinf(self.limits.fast_limit_w):
            return [math.inf] * self.gpus
        return [math.floor(loop.target_w / TARGET_STEP_W) * TARGET_STEP_W for loop in self.loops]

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        """Tick until the last kernel has ended; a tick never extends the run."""
        from sim.engine.driver import Tick

        core, tick_s = engine.core, self.limits.tick_s
        before = [0.0] * self.gpus
        for gpu, loop in zip(core.gpus, self.loops, strict=True):
            loop.begin(gpu.model.gpu.idle_w(gpu.clock_cap_hz))
        if math.isinf(self.limits.fast_limit_w):
            return
        while not engine.done:
            yield Tick(engine.env, round(tick_s * 1e12))
            for gpu, loop in zip(core.gpus, self.loops, strict=True):
                energy_j = core.energy_until_now(gpu.index, engine.env.now)
                loop.step((energy_j - before[gpu.index]) / tick_s)
                before[gpu.index] = energy_j
            for gpu, target_w in zip(core.gpus, self.targets_w(), strict=True):
                core.change_limit(gpu.index, target_w, gpu.clock_cap_hz)
