"""The power limiters: what holds the clock below its maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLimits:
    """Three limits on power at a power cap, and how the slower two act in time.

    ``fast_limit_w`` bounds instantaneous power. Once a mean with time constant ``middle_time_s`` has passed
    ``middle_limit_w``, power itself is driven there: the target moves by ``middle_gain_per_s`` W per W and s.
    While the mean of the last ``slow_time_s`` is above ``slow_limit_w``, the middle limit falls to ``dip_ratio``
    of itself; then it stands at ``recovery_ratio`` for ``recovery_s``. Work repeated for long averages
    ``slow_limit_w``. Source: duty.jsonl (fast), transient.jsonl (others), gemm.jsonl (slow limit);
    ``hardware.calibrate.fit_limits`` says how.

    >>> limits = ClockLimits(
    ...     cap_w=700.0, fast_limit_w=1020.0, middle_limit_w=724.0, slow_limit_w=699.0, middle_time_s=0.03,
    ...     slow_time_s=0.9, middle_gain_per_s=30.0, dip_ratio=0.82, recovery_ratio=0.95, recovery_s=0.2, tick_s=0.005,
    ... )
    >>> round(limits.under(350.0).middle_limit_w)
    362
    """

    cap_w: float
    fast_limit_w: float
    middle_limit_w: float
    slow_limit_w: float
    middle_time_s: float
    slow_time_s: float
    middle_gain_per_s: float
    dip_ratio: float
    recovery_ratio: float
    recovery_s: float
    tick_s: float

    def under(self, cap_w: float) -> ClockLimits:
        """The limits under another cap: ratios kept (unmeasured below 700 W). ``inf`` takes them all away."""
        if math.isinf(cap_w):
            return replace(self, cap_w=math.inf, fast_limit_w=math.inf, middle_limit_w=math.inf, slow_limit_w=math.inf)
        ratio = cap_w / self.cap_w
        return replace(
            self,
            cap_w=cap_w,
            fast_limit_w=self.fast_limit_w * ratio,
            middle_limit_w=self.middle_limit_w * ratio,
            slow_limit_w=self.slow_limit_w * ratio,
        )
