"""A host that launches steps with prompts, and some drafts, piece by piece, ahead of GPUs that may wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from sim.serving.host import HostTime
from sim.serving.inflight import PlannedStep
from sim.serving.price import StepPrices


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchedAhead:
    """When ``host`` is done with the last step that it launched piece by piece, and when the last step of all began.

    ``ready_s``: when it is done with the step at hand and turns to what the one before has yielded; 0: long since.
    """

    host: HostTime
    launched_s: float = 0.0
    ran_s: float = 0.0
    ready_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether it launched longer than until the last step began, so that the next one may wait for it."""
        return self.launched_s > self.ran_s

    def behind_s(self, step: PlannedStep, prices: StepPrices, target_w: float, begin_s: float) -> float:
        """How long, in sum, the GPUs wait for it in a step that could begin at ``begin_s``.

        It starts on it once it is done with the step before, and that one runs. Before its first launch it prepares a
        step's inputs, after the last one it launches the sampling; the GPUs are done no sooner.
        """
        was_busy = self.is_busy
        host_s = max(self.launched_s, self.ran_s) if self.host.plans_ahead else begin_s
        self.launched_s, self.ran_s, self.ready_s = min(host_s, begin_s), begin_s, 0.0
        pace = self.host.pace
        if pace is None:
            return 0.0
        launching_s = prices.launching_s(pace, step.batch)
        if not launching_s:  # a graph: its inputs are prepared beside the step before, unless that kept the host
            self.ready_s = host_s + pace.prepare_s + pace.sample_s if was_busy else 0.0
            return max(0.0, host_s + pace.prepare_s - begin_s) if was_busy else 0.0
        first_s = host_s + (pace.prepare_s if step.pieces else 0.0)
        self.launched_s = self.ready_s = first_s + launching_s + (pace.sample_s if step.pieces else 0.0)
        gpus_s = prices.whole(step.batch, target_w).time_s
        return max(0.0, first_s - begin_s, self.launched_s - begin_s - gpus_s)
