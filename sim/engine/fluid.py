"""The arithmetic of sharing one GPU: clock, rates and power of a running set. No driver, no time.

A running set is a tuple of ``(class, SMs, waiting)``; its solution depends on nothing else but the power
target, so it is memoised as one immutable :class:`GpuState`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from hardware.laws.terms import KernelTerms, dynamic_power_w, part, time_s, wanted_sms
from sim.engine.graph import KernelClass

PS_PER_S = 1e12
# How close to its power limit a real-valued clock is set, as shares of the limit and of the clock.
POWER_TOLERANCE = 1e-10
CLOCK_TOLERANCE = 1e-12
# States of one GPU type remembered over all runs of a process; beyond it they are solved again.
MAX_STATES = 200_000
_COSTS: dict[tuple[KernelTerms, float, bool], int] = {}
Running = tuple[tuple[int, float, bool], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """What the engine needs of one GPU: capacities and two curves of the clock.

    ``idle_w`` maps a clock in Hz to watts with nothing running, ``voltage_scale`` to (V/V0)^2. With
    ``clock_step_hz`` zero the clock is real-valued: the mean of the dithering that the hardware does.
    """

    sms: int
    max_clock_hz: float
    min_clock_hz: float
    reference_clock_hz: float
    clock_step_hz: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    mixed_hbm_share: float = 1.0  # of the HBM rate, once several kernels share it
    idle_w: Callable[[float], float]
    voltage_scale: Callable[[float], float]


@dataclass(slots=True, eq=False)
class GpuState:
    """One solved running set. ``rates`` are fractions of a kernel per picosecond, ``index`` its place in ``states``."""

    index: int
    clock_hz: float
    power_w: float
    kernel_power_w: tuple[float, ...]
    rates: tuple[float, ...]
    sms_busy: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float

    def numbered(self, index: int) -> GpuState:
        """The same state as number ``index`` of a run."""
        return GpuState(
            index,
            self.clock_hz,
            self.power_w,
            self.kernel_power_w,
            self.rates,
            self.sms_busy,
            self.hbm_bytes_per_s,
            self.link_bytes_per_s,
        )


def share(demands: Sequence[float], weights: Sequence[float], capacity: float) -> list[float]:
    """Weighted max-min fair shares of ``capacity``, no one above its demand (progressive filling).

    >>> share([10.0, 1.0, 10.0], [1.0, 1.0, 2.0], 13.0)
    [4.0, 1.0, 8.0]
    """
    if math.fsum(demands) <= capacity:
        return list(demands)
    granted = list(demands)
    open_ = [i for i, demand in enumerate(demands) if demand > 0.0]
    left = capacity
    while open_:
        level = left / math.fsum(weights[i] for i in open_)
        capped = [i for i in open_ if demands[i] <= level * weights[i]]
        if not capped:
            for i in open_:
                granted[i] = level * weights[i]
            break
        left -= math.fsum(demands[i] for i in capped)
        open_ = [i for i in open_ if i not in capped]
    return granted


@lru_cache(maxsize=32)
def _states_of(_gpu: GpuModel) -> dict[tuple[object, ...], GpuState]:
    return {}


def _shrink(now: float, before: float) -> float:
    """What is left of the weight of the end that stayed, from the values at the end that moved twice."""
    share = 1.0 - now / before
    return share if share > 0.0 else 0.5


def crowded(demand: float, weight: float, others: Sequence[float], other_weights: Sequence[float], cap: float) -> float:
    """What few blocks get of HBM when others fill it: their requests queue behind all that is in flight.

    Their level is what the others leave, at least their share by weight; demand and level join as squares of times,
    so that the wait grows with the load and not at once when the last byte a second is asked for.

    >>> round(crowded(3.0, 1.0, [4.0], [1.0], 8.0), 3), crowded(3.0, 1.0, [], [], 8.0)
    (2.4, 3.0)
    """
    if not others or demand <= 0.0:
        return demand
    level = max(cap - math.fsum(others), cap * weight / (weight + math.fsum(other_weights)))
    return demand / math.hypot(1.0, demand / level)


@dataclass(slots=True)
class FluidModel:
    """Solver and memo for one GPU type under one kernel class table."""

    gpu: GpuModel
    classes: tuple[KernelClass, ...]
    states: list[GpuState]
    _memo: dict[tuple[object, ...], GpuState] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], GpuState] = field(default_factory=dict)
    _costs: dict[int, int] = field(default_factory=dict)
    _parts: dict[tuple[int, float], tuple[KernelTerms, float]] = field(default_factory=dict)

    def terms_on(self, class_id: int, sms: float) -> tuple[KernelTerms, float]:
        """Terms of a kernel, or of those of its blocks that hold ``sms`` SMs, and the SMs to price them on.

        A whole kernel is priced on the SMs of its law. Tiles of a quantised kernel belong to their block, so that
        fewer blocks do only their own share.
        """
        found = self._parts.get((class_id, sms))
        if found is None:
            terms, cls = self.classes[class_id].terms, self.classes[class_id]
            whole = wanted_sms(terms, float(self.gpu.sms))
            full = min(terms.blocks * terms.sms_per_block, terms.sms_cap, float(self.gpu.sms))
            if cls.collective or not terms.quantised:
                found = terms, sms
            elif sms >= whole:
                found = terms, full
            else:
                found = part(terms, sms / whole), full * sms / whole
            self._parts[class_id, sms] = found
        return found

    def solve(
        self, running: Running, limit_w: float, clock_cap_hz: float, caps: tuple[float, ...] | None = None
    ) -> GpuState:
        """State of ``running`` at the highest clock whose power is at most ``limit_w``.

        ``caps`` bounds each kernel's rate (1/ps): a collective goes at its slowest member's pace.
        """
        key = (running, limit_w, clock_cap_hz, caps)
        state = self._memo.get(key)
        if state is None:
            known = _states_of(self.gpu)
            everywhere = (tuple([(self._cost(c), sms, waits) for c, sms, waits in running]), *key[1:])
            state = known.get(everywhere)
            if state is None:
                if len(known) > MAX_STATES:
                    known.clear()
                state = known[everywhere] = self._highest_clock(running, limit_w, clock_cap_hz, caps)
            state = self._memo[key] = state.numbered(len(self.states))
            self.states.append(state)
        return state

    def _cost(self, class_id: int) -> int:
        """A number that classes of equal terms and gap share in all models of this process."""
        cost = self._costs.get(class_id)
        if cost is None:
            cls = self.classes[class_id]
            cost = _COSTS.setdefault((cls.terms, cls.gap_s, cls.collective), len(_COSTS))
            self._costs[class_id] = cost
        return cost

    def _highest_clock(
        self, running: Running, limit_w: float, clock_cap_hz: float, caps: tuple[float, ...] | None
    ) -> GpuState:
        gpu = self.gpu
        top = self._end(running, clock_cap_hz, caps)
        if top.power_w <= limit_w or not running:
            return top
        low, high = gpu.min_clock_hz, clock_cap_hz
        if gpu.clock_step_hz:
            steps = range(int((high - low) / gpu.clock_step_hz) + 1)
            over = bisect_right(
                steps, limit_w, key=lambda step: self._at(running, low + step * gpu.clock_step_hz, caps).power_w
            )
            return self._at(running, low + max(over - 1, 0) * gpu.clock_step_hz, caps)
        bottom = self._end(running, low, caps)
        if bottom.power_w >= limit_w:
            return bottom
        # False position between a clock that is within the limit and one that is not; an end that stays while the
        # other moves twice counts for less (Anderson and Bjorck, BIT 13, 1973). The clock returned is within.
        below_w, above_w = bottom.power_w - limit_w, top.power_w - limit_w
        within, moved = bottom, 0
        for attempt in range(64):
            if limit_w - within.power_w <= POWER_TOLERANCE * limit_w or high - low <= CLOCK_TOLERANCE * high:
                break
            chord = (low * above_w - high * below_w) / (above_w - below_w)
            state = self._at(running, chord if attempt < 20 else 0.5 * (low + high), caps)
            over_w = state.power_w - limit_w
            if over_w <= 0.0:
                if moved < 0:
                    above_w *= _shrink(over_w, below_w)
                low, below_w, within, moved = state.clock_hz, over_w, state, -1
            else:
                if moved > 0:
                    below_w *= _shrink(over_w, above_w)
                high, above_w, moved = state.clock_hz, over_w, 1
        return within

    def _end(self, running: Running, clock_hz: float, caps: tuple[float, ...] | None) -> GpuState:
        """The state at one end of the clock range, which every power limit asks for."""
        state = self._ends.get((running, clock_hz, caps))
        if state is None:
            state = self._ends[running, clock_hz, caps] = self._at(running, clock_hz, caps)
        return state

    def _at(self, running: Running, clock_hz: float, caps: tuple[float, ...] | None) -> GpuState:
        gpu, classes = self.gpu, self.classes
        voltage = gpu.voltage_scale(clock_hz)
        fraction = clock_hz / gpu.reference_clock_hz
        pace: list[float] = []  # completions a picosecond
        parts = [self.terms_on(c, sms) for c, sms, _ in running]
        computes = any(not classes[c].collective and classes[c].terms.cycles_per_block for c, _, _ in running)
        busy_share: list[float] = []  # share of its occupancy that a kernel works (the rest is its gap)
        for position, (class_id, _, waiting) in enumerate(running):
            cls = classes[class_id]
            if waiting:
                pace.append(0.0)
                busy_share.append(0.0)
                continue
            terms, sms = parts[position]
            work_s = time_s(terms, sms=sms, sm_clock_hz=clock_hz)
            busy_share.append(work_s / (work_s + cls.gap_s))
            if cls.collective and computes:
                work_s = max(work_s, terms.moving_cycles * terms.beside_slowdown / clock_hz)
            pace.append(1.0 / (work_s + cls.gap_s) / PS_PER_S)
        hbm = [terms.hbm_bytes * r * PS_PER_S for (terms, _), r in zip(parts, pace, strict=True)]
        link = [terms.link_bytes * r * PS_PER_S for (terms, _), r in zip(parts, pace, strict=True)]
        most = caps or (math.inf,) * len(running)
        if len(running) > 1 or caps:
            weights = [max(s, 1e-9) * classes[c].terms.hbm_weight_per_sm for c, s, _ in running]
            capacity = gpu.hbm_bytes_per_s * gpu.mixed_hbm_share
            asked = [
                crowded(hbm[i], weights[i], hbm[:i] + hbm[i + 1 :], weights[:i] + weights[i + 1 :], capacity)
                if classes[c].collective
                else hbm[i]
                for i, (c, _, _) in enumerate(running)
            ]
            held_back = [min(1.0, most[i] / rate) if rate else 1.0 for i, rate in enumerate(pace)]
            asked = [min(want, hbm[i] * held_back[i]) for i, want in enumerate(asked)]
            hbm_granted = share(asked, weights, capacity)
            link_asked = [want * held_back[i] for i, want in enumerate(link)]
            link_granted = share(link_asked, [1.0] * len(running), gpu.link_bytes_per_s)
            for i, rate in enumerate(pace):
                slow = min(
                    held_back[i],
                    hbm_granted[i] / hbm[i] if hbm[i] else 1.0,
                    link_granted[i] / link[i] if link[i] else 1.0,
                )
                if slow < 1.0:
                    pace[i] = rate * slow
                    hbm[i] *= slow
                    link[i] *= slow
        idle = gpu.idle_w(clock_hz)
        held = math.fsum(s for _, s, _ in running)
        powers: list[float] = []
        for i, (_, held_sms, waiting) in enumerate(running):
            terms, sms = parts[i]
            if waiting:
                dynamic = terms.waiting_power_w
            else:
                dynamic = dynamic_power_w(
                    terms,
                    sms=sms * busy_share[i],
                    gpu_sms=gpu.sms,
                    progress_per_s=pace[i] * PS_PER_S,
                    voltage_scale=voltage,
                    clock_fraction=fraction,
                )
            powers.append(dynamic + idle * (held_sms / held if held else 1.0 / len(running)))
        return GpuState(
            index=-1,
            clock_hz=clock_hz,
            power_w=math.fsum(powers) if running else idle,
            kernel_power_w=tuple(powers),
            rates=tuple(pace),
            sms_busy=min(held, float(gpu.sms)),
            hbm_bytes_per_s=math.fsum(hbm),
            link_bytes_per_s=math.fsum(link),
        )
