"""A host that launches steps with prompts, and some drafts, piece by piece, ahead of GPUs that may wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from sim.serving.host import HostTime
from sim.serving.inflight import PlannedStep
from sim.serving.price import StepPrices


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchedAhead:
    """When ``host`` had launched the last step of its GPUs, and when that step began."""

    host: HostTime
    launched_s: float = 0.0
    ran_s: float = 0.0

    def behind_s(self, step: PlannedStep, prices: StepPrices, target_w: float, begin_s: float) -> float:
        """How long, in sum, the GPUs wait for it in a step that could begin at ``begin_s``.

        It starts on it once it has launched the step before, and that one runs; the GPUs are done no sooner than it is.
        """
        launch_s = max(self.launched_s, self.ran_s) if self.host.plans_ahead else begin_s
        self.launched_s, self.ran_s = min(launch_s, begin_s), begin_s
        pace = self.host.pace
        launching_s = 0.0 if pace is None else prices.launching_s(pace, step.batch)
        if not launching_s:
            return 0.0
        self.launched_s += launching_s
        return max(0.0, self.launched_s - begin_s - prices.whole(step.batch, target_w).time_s)
