"""Power of a GPU as a function of the SM clock: idle power and the voltage curve."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from hardware.laws.terms import KernelTerms, dynamic_power_w, own_clock_hz, time_s

# How close to its power limit a real-valued clock is set, as shares of the limit and of the clock.
POWER_TOLERANCE = 1e-10
CLOCK_TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerCurve:
    """Idle power and (V/V0)^2 over the SM clock.

    ``voltage_scale`` is (f/f0)^upper_exponent above ``knee_hz`` and (f/f0)^lower_exponent,
    continuously at the knee, below it; below ``floor_hz`` the voltage falls no further. Idle power is
    ``static_w`` at any clock, plus ``clocked_w`` that follows clock and voltage, plus ``leakage_w_per_c`` (at
    the reference voltage) for each degree C that the chip is warmer than ``leakage_free_c``; the chip is at
    ``temperature_c``. Source: fitted on duty.jsonl (bursts at true, on-chip clocks) and idle.jsonl.

    >>> curve = PowerCurve(
    ...     reference_clock_hz=2e9, knee_hz=1.6e9, floor_hz=0.8e9, lower_exponent=1.5, upper_exponent=2.0,
    ...     static_w=70.0, clocked_w=50.0, leakage_w_per_c=1.0, leakage_free_c=40.0, temperature_c=60.0)
    >>> curve.idle_w(2e9), curve.at(45.0).idle_w(2e9)
    (140.0, 125.0)
    """

    reference_clock_hz: float
    knee_hz: float
    floor_hz: float
    lower_exponent: float
    upper_exponent: float
    static_w: float
    clocked_w: float
    leakage_w_per_c: float
    leakage_free_c: float
    temperature_c: float

    def at(self, temperature_c: float) -> PowerCurve:
        """The same chip at another temperature (degrees C)."""
        return replace(self, temperature_c=temperature_c)

    def plus(self, static_w: float) -> PowerCurve:
        """The same with ``static_w`` more, at any clock."""
        return replace(self, static_w=self.static_w + static_w)

    def shared_by(self, slices: int) -> PowerCurve:
        """The part of one of ``slices`` equal ones that run at the same clock."""
        return replace(
            self,
            static_w=self.static_w / slices,
            clocked_w=self.clocked_w / slices,
            leakage_w_per_c=self.leakage_w_per_c / slices,
        )

    def voltage_scale(self, clock_hz: float) -> float:
        """(V(f)/V(f0))^2, never falling with the clock."""
        clock_hz = max(clock_hz, self.floor_hz)
        if clock_hz >= self.knee_hz:
            return float((clock_hz / self.reference_clock_hz) ** self.upper_exponent)
        at_knee = (self.knee_hz / self.reference_clock_hz) ** self.upper_exponent
        return float(at_knee * (clock_hz / self.knee_hz) ** self.lower_exponent)

    def idle_w(self, clock_hz: float) -> float:
        """Watts of a GPU with a context and nothing running at ``clock_hz``."""
        clocked_w = self.clocked_w * clock_hz / self.reference_clock_hz
        leaked_w = self.leakage_w_per_c * (self.temperature_c - self.leakage_free_c)
        return self.static_w + self.voltage_scale(clock_hz) * (clocked_w + leaked_w)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One kernel repeated back to back: where the power limit lets it settle."""

    sm_clock_hz: float
    latency_s: float
    power_w: float


def point_at(
    terms: KernelTerms, curve: PowerCurve, *, sms: float, gpu_sms: int, sm_clock_hz: float, gap_s: float = 0.0
) -> OperatingPoint:
    """Latency (gap included) and mean power of ``terms`` repeated at a fixed clock."""
    work_s = time_s(terms, sms=sms, sm_clock_hz=sm_clock_hz)
    latency_s = work_s + gap_s
    clock_hz = own_clock_hz(terms, sm_clock_hz)
    dynamic = dynamic_power_w(
        terms,
        sms=sms * work_s / latency_s,
        gpu_sms=gpu_sms,
        progress_per_s=1.0 / latency_s,
        voltage_scale=curve.voltage_scale(clock_hz),
        clock_fraction=clock_hz / curve.reference_clock_hz,
    )
    return OperatingPoint(sm_clock_hz=sm_clock_hz, latency_s=latency_s, power_w=curve.idle_w(sm_clock_hz) + dynamic)


def highest_clock(
    power_at: Callable[[float], float], limit_w: float, low_hz: float, high_hz: float, step_hz: float = 0.0
) -> float:
    """The highest clock in [low, high] whose power is at most ``limit_w`` (power rises with it); else the lowest.

    Real-valued, or on steps of ``step_hz`` from the lowest. It is one at which ``power_at`` was asked.
    """
    if (top_w := power_at(high_hz)) <= limit_w:
        return high_hz
    if step_hz:
        steps = range(int((high_hz - low_hz) / step_hz) + 1)
        over = bisect_right(steps, limit_w, key=lambda step: power_at(low_hz + step * step_hz))
        return low_hz + max(over - 1, 0) * step_hz
    if (bottom_w := power_at(low_hz)) >= limit_w:
        return low_hz
    # False position between a clock that is within the limit and one that is not; an end that stays while the other
    # moves twice counts for less (Anderson and Bjorck, BIT 13, 1973).
    below_w, above_w = bottom_w - limit_w, top_w - limit_w
    left_w, moved = -below_w, 0
    for attempt in range(64):
        if left_w <= POWER_TOLERANCE * limit_w or high_hz - low_hz <= CLOCK_TOLERANCE * high_hz:
            break
        chord = (low_hz * above_w - high_hz * below_w) / (above_w - below_w)
        clock_hz = chord if attempt < 20 else 0.5 * (low_hz + high_hz)
        over_w = power_at(clock_hz) - limit_w
        if over_w <= 0.0:
            if moved < 0:
                above_w *= _shrink(over_w, below_w)
            low_hz, below_w, left_w, moved = clock_hz, over_w, -over_w, -1
        else:
            if moved > 0:
                below_w *= _shrink(over_w, above_w)
            high_hz, above_w, moved = clock_hz, over_w, 1
    return low_hz


def _shrink(now: float, before: float) -> float:
    """What is left of the weight of the end that stayed, from the values at the end that moved twice."""
    share = 1.0 - now / before
    return share if share > 0.0 else 0.5


def steady_point(
    terms: KernelTerms, curve: PowerCurve, *, gpu_sms: int, limit_w: float, min_clock_hz: float, max_clock_hz: float
) -> OperatingPoint:
    """Where one kernel repeated back to back settles under a limit on mean power."""
    sms = min(terms.blocks * terms.sms_per_block, float(gpu_sms))

    def at(clock_hz: float) -> OperatingPoint:
        return point_at(terms, curve, sms=sms, gpu_sms=gpu_sms, sm_clock_hz=clock_hz)

    return at(highest_clock(lambda f: at(f).power_w, limit_w, min_clock_hz, max_clock_hz))
