"""Kernels that run together on one GPU at a given clock: their rates, their power, how they share its memory.

What does not depend on the clock is computed once (:class:`RunningSet`); the solver asks for several clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hardware.laws.streaming import unlimited, waiting_slowdown
from hardware.laws.terms import KernelTerms, Pace, dynamic_power_w, wanted_sms
from sim.engine.graph import KernelClass
from sim.engine.resources.hbm import HbmShares
from sim.engine.resources.link_port import LinkShares

PS_PER_S = 1e12


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
    chip_power_factor: float = 1.0  # power above idle over what the laws say: chips differ
    idle_w: Callable[[float], float]
    voltage_scale: Callable[[float], float]


class HeldClock(NamedTuple):
    """The clock at which the slow limiters hold a GPU in the steady state, whatever runs, below the fast limit's power.

    Measured: docs/laws.md, "One clock in the steady state".
    """

    clock_hz: float
    power_w: float


Target = float | HeldClock  # limit on instantaneous power (W), or the clock of the steady state


def bounds(target: Target, max_clock_hz: float) -> tuple[float, float]:
    """The power limit (W) and the highest clock (Hz) that ``target`` stands for."""
    match target:
        case HeldClock():
            return target.power_w, target.clock_hz
        case _:
            return target, max_clock_hz


class Rules(NamedTuple):
    """How a GPU's memory and its port share their bandwidth."""

    hbm: HbmShares
    link: LinkShares


def rules_of(gpu: GpuModel) -> Rules:
    """The rules of a GPU with its own memory and port."""
    hbm = HbmShares(bytes_per_s=gpu.hbm_bytes_per_s, mixed_share=gpu.mixed_hbm_share)
    return Rules(hbm=hbm, link=LinkShares(bytes_per_s=gpu.link_bytes_per_s))


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
        """The same state as number ``index`` of a run: itself, where it has no number yet."""
        if self.index < 0:
            self.index = index
            return self
        return GpuState(
            index, self.clock_hz, self.power_w, self.kernel_power_w, self.rates, self.sms_busy, self.hbm_bytes_per_s,
            self.link_bytes_per_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A kernel of a running set: ``terms`` of the blocks that run, the ``sms`` that price them, those they ``hold``."""

    cls: KernelClass
    terms: KernelTerms
    sms: float
    hold: float
    waiting: bool
    pace: Pace


class RunningSet:
    """Members on one GPU, each with its fill; ``caps`` bounds each one's rate (1/ps).

    ``curves`` holds idle power (W) and voltage scale at clocks that other sets of the GPU have been asked for.
    """

    def __init__(
        self,
        gpu: GpuModel,
        members: Sequence[Member],
        fills: Sequence[float],
        caps: tuple[float, ...] | None,
        rules: Rules,
        curves: dict[float, tuple[float, float]] | None = None,
    ) -> None:
        self._curves = {} if curves is None else curves
        self._ends: dict[float, GpuState] = {}
        if any(m.terms.few_sms_saving for m in members):
            members = _among_empty(members, float(gpu.sms))
        self._gpu, self._members, self._caps, self._rules = gpu, members, caps, rules
        held = math.fsum([m.hold for m in members])
        self._sms_busy = min(held, float(gpu.sms))
        self._few = [m.cls.collective for m in members]
        kinds = [id(m.cls) for m in members]  # parts of one kernel have its class
        self._kernels = [kinds.index(kind) for kind in kinds]
        # Where loads queue behind those of other kernels: whether those of each are ahead of another's.
        late = [kernel for kernel, m in zip(self._kernels, members, strict=True) if m.terms.load_wait]
        beside = late and any(self._kernels)
        self._ahead = [any(other != kernel for other in late) for kernel in self._kernels] if beside else []
        computes = any(m.cls.terms.cycles_per_block and not m.cls.collective for m in members)
        # What the loops of a clock read of each member.
        self._works, self._draws, self._weights = [], [], []
        for m, fill in zip(members, fills, strict=True):
            terms, hold = m.terms, m.hold
            # Cycles in which a collective's blocks move its data beside compute, in turns where they hold few SMs.
            moving = 0.0
            if computes and hold and m.cls.collective:
                moving = terms.moving_cycles * terms.beside_slowdown * wanted_sms(terms, float(gpu.sms)) / hold
            self._works.append((m.waiting, m.pace.seconds, m.cls.gap_s, moving))
            share = hold / held if held else 1.0 / len(members)  # of idle power
            self._draws.append((m.waiting, terms, m.sms, fill * gpu.chip_power_factor, share))
            self._weights.append(max(hold, 1e-9) * m.cls.terms.hbm_weight_per_sm)
        self._hbm_bytes = [m.terms.hbm_bytes for m in members]
        self._link_bytes = [m.terms.link_bytes for m in members]

    def at_end(self, clock_hz: float) -> GpuState:
        """As :meth:`at`, remembered at both ends of the clock range, for which every power limit asks."""
        gpu = self._gpu
        if gpu.min_clock_hz < clock_hz < gpu.max_clock_hz:
            return self.at(clock_hz)
        state = self._ends.get(clock_hz)
        if state is None:
            state = self._ends[clock_hz] = self.at(clock_hz)
        return state

    def at(self, clock_hz: float) -> GpuState:
        """The state at an SM clock, whatever its power."""
        gpu = self._gpu
        pace: list[float] = []  # completions a picosecond
        busy_share: list[float] = []  # share of its occupancy that a kernel works (the rest is its gap)
        for waiting, seconds, gap_s, moving in self._works:
            if waiting:
                pace.append(0.0)
                busy_share.append(0.0)
                continue
            work_s = seconds(clock_hz)
            lasts_s = work_s + gap_s
            busy_share.append(work_s / lasts_s)
            if moving and (moving_s := moving / clock_hz) > work_s:
                lasts_s = moving_s + gap_s
            pace.append(1.0 / lasts_s / PS_PER_S)
        if self._ahead:
            self._wait(pace, clock_hz)
        hbm = [size * rate * PS_PER_S for size, rate in zip(self._hbm_bytes, pace)]  # noqa: B905 - as many; faster
        link = [size * rate * PS_PER_S for size, rate in zip(self._link_bytes, pace)]  # noqa: B905 - as above
        if len(pace) > 1 or self._caps:
            for i, slow in enumerate(self._slowed(pace, hbm, link)):
                if slow < 1.0:
                    pace[i] *= slow
                    hbm[i] *= slow
                    link[i] *= slow
        known = self._curves.get(clock_hz)
        if known is None:
            known = self._curves[clock_hz] = gpu.idle_w(clock_hz), gpu.voltage_scale(clock_hz)
        (idle_w, own_voltage), own_fraction = known, clock_hz / gpu.reference_clock_hz
        powers: list[float] = []
        for (waiting, terms, sms, factor, share), rate, busy in zip(self._draws, pace, busy_share):  # noqa: B905 - as above
            if waiting:
                dynamic_w = terms.waiting_power_w
            else:
                voltage, fraction = own_voltage, own_fraction
                if (top_hz := terms.top_clock_hz) < clock_hz:
                    voltage, fraction = gpu.voltage_scale(top_hz), top_hz / gpu.reference_clock_hz
                dynamic_w = dynamic_power_w(
                    terms,
                    sms=sms * busy,
                    gpu_sms=gpu.sms,
                    progress_per_s=rate * PS_PER_S,
                    voltage_scale=voltage,
                    clock_fraction=fraction,
                )
            powers.append(dynamic_w * factor + idle_w * share)
        power_w = math.fsum(powers) if powers else idle_w
        busy_sms, hbm_bytes_per_s, link_bytes_per_s = self._sms_busy, math.fsum(hbm), math.fsum(link)
        return GpuState(-1, clock_hz, power_w, tuple(powers), tuple(pace), busy_sms, hbm_bytes_per_s, link_bytes_per_s)

    def _wait(self, pace: list[float], clock_hz: float) -> None:
        """Lower the rates of compute-bound kernels whose loads queue in the memory behind the others'."""
        # The way through L2 and crossbar follows the clock, as the arithmetic does: queues grow against both.
        scale = clock_hz / self._gpu.reference_clock_hz
        loads = []
        for m, rate, ahead in zip(self._members, pace, self._ahead):  # noqa: B905 - as many; the keyword costs time here
            flow = m.terms.hbm_bytes * rate * PS_PER_S if ahead else 0.0
            if flow and not m.cls.collective:
                flow = unlimited(flow, m.pace.scale * m.pace.transfer_s * rate * PS_PER_S, m.hold)
            loads.append(scale * flow)
        waits = self._rules.hbm.waits(loads, self._kernels)
        for i, (member, wait) in enumerate(zip(self._members, waits)):  # noqa: B905 - as above
            if member.terms.load_wait and pace[i]:
                computing = min(1.0, member.pace.cycles / clock_hz * pace[i] * PS_PER_S)
                pace[i] /= waiting_slowdown(member.terms.load_wait * computing, wait)

    def _slowed(self, pace: list[float], hbm: list[float], link: list[float]) -> Sequence[float]:
        """How much of its own pace each kernel keeps beside the others (none: all keep theirs)."""
        rules, weights = self._rules, self._weights
        asked = rules.hbm.asked(hbm, weights, self._few)
        wanted, kept = link, None
        if self._caps:
            kept = [min(1.0, cap / rate) if rate else 1.0 for cap, rate in zip(self._caps, pace, strict=True)]
            asked = [min(want, own * back) for want, own, back in zip(asked, hbm, kept, strict=True)]
            wanted = [want * back for want, back in zip(link, kept, strict=True)]
        granted, link_granted = rules.hbm.divide(asked, weights), rules.link.divide(wanted, weights)
        if granted is hbm and link_granted is link:
            return ()  # nobody gets less than it asks for
        shares = []
        for got, own, link_got, link_own in zip(granted, hbm, link_granted, link):  # noqa: B905 - as above
            share, link_share = got / own if own else 1.0, link_got / link_own if link_own else 1.0
            shares.append(share if share < link_share else link_share)
        return shares if kept is None else [min(back, share) for back, share in zip(kept, shares, strict=True)]


def _among_empty(members: Sequence[Member], gpu_sms: float) -> list[Member]:
    """Kernels of partitions: their arithmetic takes less power where SMs that they would use stand empty."""
    wanted = min(gpu_sms, math.fsum([m.terms.blocks * m.terms.sms_per_block for m in members]))
    empty = max(0.0, 1.0 - math.fsum([m.hold for m in members]) / wanted)
    return [
        replace(m, terms=replace(m.terms, core_energy_j=m.terms.core_energy_j * (1.0 - m.terms.few_sms_saving * empty)))
        for m in members
    ]
