"""Tokens that a step has yielded and that the engine tells once it has launched the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from sim.serving.records import Log, Served


@dataclass(slots=True, kw_only=True, eq=False)
class Untold:
    """Of one replica whose engine plans, launches and tells in one process, as vLLM's core does with one GPU.

    That keeps two steps in flight and launches the next one before it looks at what the one before has yielded
    (``EngineCore.step_with_batch_queue`` of vLLM 0.24): requests see their tokens so much later, while the GPU goes on.
    """

    env: simpy.Environment
    log: Log
    first: list[Served] = field(default_factory=list)
    done: list[Served] = field(default_factory=list)
    gap: int = -1  # of the log, whose last step's tokens are not told yet; -1: nobody waited for them
    _late_s: float = 0.0  # how late the step before the last one was told

    def ran(self, first_s: float, slope_s: float, steps: int, count: int) -> None:
        """So many steps of so many decoding sequences: what lay between their tokens."""
        late_s, self._late_s, self.gap = self._late_s, 0.0, -1
        if not count:
            return
        if late_s and steps > 1:
            self.log.gaps.append((first_s - late_s, 0.0, 1, count))
            first_s, steps, late_s = first_s + slope_s, steps - 1, 0.0
        self.gap = len(self.log.gaps)
        self.log.gaps.append((first_s - late_s, slope_s, steps, count))

    def tell(self, late_s: float, done: Callable[[], None]) -> None:
        """The host is ready to tell after ``late_s``; ``done`` is called for each request that has all its tokens."""
        first, finished, gap = self.first, self.done, self.gap
        self.first, self.done, self.gap = [], [], -1
        if late_s:
            self._late_s = late_s
            for record in first:
                record.first_token_s += late_s
            for record in finished:
                record.done_s += late_s
            for record in first:
                if record.done_s >= 0.0:  # handed on, and done elsewhere before its first token was told
                    record.done_s = max(record.done_s, record.first_token_s)
            if gap >= 0:
                self._lengthen(gap, late_s)
        for _ in finished:
            if late_s:
                self.env.timeout(late_s).callbacks.append(lambda _: done())
            else:
                done()

    def _lengthen(self, gap: int, late_s: float) -> None:
        """The last of the times that this entry of the log stands for."""
        first_s, slope_s, steps, count = self.log.gaps[gap]
        if steps == 1:
            self.log.gaps[gap] = first_s + late_s, 0.0, 1, count
            return
        self.log.gaps[gap] = first_s, slope_s, steps - 1, count
        self.log.gaps.append((first_s + slope_s * (steps - 1) + late_s, 0.0, 1, count))
