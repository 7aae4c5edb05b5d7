"""The power limiters: what holds the clock below its maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLimits:
    """Three limits on power at a power cap, and how fast the slower two act.

    ``fast_limit_w`` bounds instantaneous power; a mean over ``middle_time_s`` is held at ``middle_limit_w``,
    a mean over ``slow_time_s`` at ``slow_limit_w``. Gains move the target, in W per W and s.
    Source: duty.jsonl (fast), transient.jsonl (others); see docs/fidelity.md.
    """

    cap_w: float
    fast_limit_w: float
    middle_limit_w: float
    slow_limit_w: float
    middle_time_s: float
    slow_time_s: float
    middle_gain_per_s: float
    slow_gain_per_s: float
    tick_s: float

    def under(self, cap_w: float) -> ClockLimits:
        """The limits under another cap: ratios kept (unmeasured below 700 W). ``inf`` takes them all away."""
        ratio = cap_w / self.cap_w
        if math.isinf(ratio):
            return replace(self, cap_w=math.inf, fast_limit_w=math.inf, middle_limit_w=math.inf, slow_limit_w=math.inf)
        return replace(
            self,
            cap_w=cap_w,
            fast_limit_w=self.fast_limit_w * ratio,
            middle_limit_w=self.middle_limit_w * ratio,
            slow_limit_w=self.slow_limit_w * ratio,
        )
