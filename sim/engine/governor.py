"""The power limiters in time: what moves the power target X while the work runs.

A fast limiter holds instantaneous power (the core keeps every running set at or below X <= fast limit). A middle
one acts once a mean over some tens of milliseconds has passed its limit, and then drives power itself to the
limit. A slow one watches a plain mean over about a second: while that is above the cap the middle limit drops by a
fifth, then stays slightly reduced for a recovery time, so that the power of a long load oscillates around the cap
with a period of about a second. All figures come from the profile.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from simpy.events import Event

from hardware.clock import ClockLimits
from sim.engine.running import Target

if TYPE_CHECKING:
    from sim.engine.driver import Engine

TARGET_STEP_W = 2.0


class Loop:
    """The two slower limiters of one GPU."""

    __slots__ = (
        "_at", "_share", "_ticks", "_twice_w", "_view_w", "level", "limits", "mean_w", "over_ticks", "recovering_s",
        "target_w", "window_sum_w",
    )  # fmt: skip

    def __init__(self, limits: ClockLimits) -> None:
        self.mean_w: float | None = None  # None before the first run
        self.target_w = limits.fast_limit_w
        self.level = 1.0  # factor of the slow limiter on the middle limit
        self.recovering_s = 0.0
        self.window_sum_w = 0.0
        self.over_ticks = 0  # until no tick above the slow limit is left in the window
        self._see(limits)
        # The window is stored twice in a row, so that from the oldest tick on it is one contiguous slice.
        self._at, self._ticks = 0, 0
        self._twice_w = array("d", [0.0])
        self._view_w = np.frombuffer(self._twice_w)

    def _see(self, limits: ClockLimits) -> None:
        self.limits = limits
        self._share = 1.0 - math.exp(-limits.tick_s / limits.middle_time_s)

    @property
    def seen_w(self) -> NDArray[np.float64]:
        """The ticks of the window, the oldest first."""
        return self._view_w[self._at : self._at + self._ticks]

    def begin(self, idle_w: float) -> None:
        """Initialise the limiters before the first run as after a long idle time."""
        if self.mean_w is None:
            self.mean_w = idle_w
            ticks = max(1, round(self.limits.slow_time_s / self.limits.tick_s))
            self._at, self._ticks = 0, ticks
            self._twice_w = array("d", [idle_w]) * (2 * ticks)
            self._view_w = np.frombuffer(self._twice_w)
            self.window_sum_w = idle_w * ticks
            self.note(idle_w, 1)

    def note(self, power_w: float, ticks: int) -> None:
        """Count ``ticks`` at ``power_w`` in ``over_ticks``."""
        self.over_ticks = self._ticks if power_w > self.limits.slow_limit_w else max(0, self.over_ticks - ticks)

    def limit(self, limits: ClockLimits) -> None:
        """Replace the limits."""
        self._see(limits)
        self.over_ticks = self._ticks if any(seen > limits.slow_limit_w for seen in self.seen_w) else 0
        self.target_w = min(self.target_w, limits.fast_limit_w)

    def step(self, power_w: float) -> None:
        """One tick at ``power_w``, the mean since the last one."""
        limits, at = self.limits, self._at
        assert self.mean_w is not None
        self.mean_w += (power_w - self.mean_w) * self._share
        self.window_sum_w += power_w - self._twice_w[at]
        self._twice_w[at] = self._twice_w[at + self._ticks] = power_w
        self._at = (at + 1) % self._ticks
        if power_w > limits.slow_limit_w:
            self.over_ticks = self._ticks
        elif self.over_ticks:
            self.over_ticks -= 1
        level = self._level()
        if level != self.level:  # the target is scaled too: power follows within a tick
            self.target_w *= level / self.level
            self.level = level
            return
        limit_w = limits.middle_limit_w * level
        if self.target_w < limits.fast_limit_w or self.mean_w > limit_w:
            self.target_w += (limit_w - power_w) * limits.middle_gain_per_s * limits.tick_s
            self.target_w = min(max(self.target_w, 0.0), limits.fast_limit_w)

    @property
    def grid_w(self) -> float:
        """The power target on its grid."""
        if self.limits.fast_limit_w == math.inf:
            return math.inf
        return math.floor(self.target_w / TARGET_STEP_W) * TARGET_STEP_W

    @property
    def is_resting(self) -> bool:
        """True when no limiter lowers the clock."""
        return self.target_w >= self.limits.fast_limit_w and self.level == 1.0 and self.recovering_s <= 0.0

    def is_steady(self, power_w: float) -> bool:
        """True when no length of time at ``power_w`` changes a limiter: none is active, and all limits are above it."""
        limits = self.limits
        assert self.mean_w is not None
        return (
            power_w <= limits.slow_limit_w
            and self.is_resting
            and max(power_w, self.mean_w) <= limits.middle_limit_w
            and (not self.over_ticks or self._window_stays(power_w))
        )

    def _window_stays(self, power_w: float) -> bool:
        """True when no window that begins in what has been seen and goes on at ``power_w`` passes the slow limit."""
        over_w = self.seen_w[::-1] - power_w  # the latest ticks first
        sums_w = np.add.accumulate(over_w, out=over_w)
        return float(sums_w[sums_w.argmax()]) <= (self.limits.slow_limit_w - power_w) * self._ticks

    def rest(self, power_w: float, ticks: int) -> None:
        """Apply ``ticks`` ticks at ``power_w`` at once, none of which changes a limiter."""
        assert self.mean_w is not None
        self.mean_w += (power_w - self.mean_w) * -math.expm1(-ticks * self.limits.tick_s / self.limits.middle_time_s)
        at, whole, view_w = self._at, self._ticks, self._view_w
        end = at + min(ticks, whole)  # of the overwritten ticks, counted from the oldest one,
        if ticks < whole:
            self.window_sum_w += ticks * power_w - math.fsum(self._twice_w[at:end])
        else:
            self.window_sum_w = whole * power_w
        view_w[at:end] = power_w
        view_w[at + whole : end + whole] = power_w  # and of the same ticks in the other copy
        view_w[: max(0, end - whole)] = power_w
        self._at = end % whole
        self.note(power_w, ticks)

    def _level(self) -> float:
        limits = self.limits
        if self.window_sum_w / self._ticks > limits.slow_limit_w:
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
    loops: list[Loop] = field(init=False)

    def __post_init__(self) -> None:
        self.loops = [Loop(self.limits) for _ in range(self.gpus)]

    def targets_w(self) -> list[float]:
        """X of each GPU, on its grid."""
        return [loop.grid_w for loop in self.loops]

    def targets(self) -> Sequence[Target]:
        """X of each GPU, as a target of the engine."""
        return self.targets_w()

    @property
    def tick_ps(self) -> int:
        """Time between two samples of the power."""
        return round(self.limits.tick_s * 1e12)

    def begin(self, idle_w: float) -> None:
        """Before a run: limiters without history start from idle GPUs."""
        for loop in self.loops:
            loop.begin(idle_w)

    def step(self, energy_j: Sequence[float]) -> list[float]:
        """One tick, after which the GPUs used ``energy_j`` since the last one; returns the new power target of each."""
        if not math.isinf(self.limits.fast_limit_w):
            for joules, loop in zip(energy_j, self.loops, strict=True):
                loop.step(joules / self.limits.tick_s)
        return self.targets_w()

    def end(self, since_j: Sequence[float], since_ps: int, length_ps: int) -> None:
        """After a run: its last, unfinished tick is dropped."""

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        """Tick until the last kernel has ended; a tick never extends the run."""
        from sim.engine.driver import Tick

        core = engine.core
        before = [0.0] * self.gpus
        self.begin(core.gpus[0].model.gpu.idle_w(core.gpus[0].clock_cap_hz))
        if math.isinf(self.limits.fast_limit_w):
            return
        while not engine.done:
            yield Tick(engine.env, self.tick_ps)
            now = [core.energy_until_now(gpu.index, engine.env.now) for gpu in core.gpus]
            targets = self.step([after - earlier for after, earlier in zip(now, before, strict=True)])
            before = now
            for gpu, target_w in zip(core.gpus, targets, strict=True):
                core.change_limit(gpu.index, target_w, gpu.clock_cap_hz)
