"""Running sets of one GPU at many clocks at once: what :meth:`RunningSet.at` gives at each, to a few last bits.

The laws are the same functions, of arrays; numpy's powers differ from Python's in the last bit of one in twenty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.laws.streaming import slowdown_at, unlimited_at, waiting_slowdown_at
from hardware.laws.terms import Pace, dynamic_power_w
from sim.engine.fluid import FluidModel, Running
from sim.engine.resources.bandwidth import share
from sim.engine.resources.hbm import HbmShares, shares_behind_others
from sim.engine.resources.link_port import LinkShares
from sim.engine.running import PS_PER_S, Member, SetFacts
from sim.shortcuts.clocks import ClockCurves

Floats = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Fields of :class:`KernelTerms`, one row a member: what its power follows from."""

    core_energy_j: Floats
    hbm_energy_j: Floats
    link_energy_j: Floats
    sm_power_w: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStates:
    """States of sets at some clocks: one row a member, one column a clock; power is before any limiter acts.

    ``dynamic_w`` is what a member adds to idle power where its rounds are evenly filled, on the mean chip.
    """

    rate: Floats  # 1/ps
    dynamic_w: Floats
    hbm_bytes_per_s: Floats
    link_bytes_per_s: Floats
    clock_hz: Floats
    idle_w: Floats


class SetsAtClocks:
    """The solver of ``sets`` at many clocks; raises :class:`ValueError` for sets whose kernels wait for other GPUs."""

    def __init__(self, model: FluidModel, sets: Sequence[Running]) -> None:
        hbm, link = model.rules
        if type(hbm) is not HbmShares or type(link) is not LinkShares:
            raise ValueError("memory and port are shared by other rules")
        if any(waiting for running in sets for _, _, waiting, _ in running):
            raise ValueError("kernels that wait for other GPUs have no rate of their own")
        self.gpu, self.hbm, self.link = model.gpu, hbm, link
        self.facts = [model.running_set(running).facts if running else None for running in sets]
        self.first = np.cumsum([0, *(len(running) for running in sets)])  # row of each set's first member
        rows = [one for facts in self.facts if facts for one in zip(*facts[:6], strict=True)]
        self._members: list[Member] = [row[0] for row in rows]
        self.share = _column([row[1] for row in rows])
        self._moving, self._weight = _column([row[2] for row in rows]), _column([row[3] for row in rows])
        self._own = _column([m.sms for m in self._members])
        self._gap = _column([m.cls.gap_s for m in self._members])
        terms = [m.terms for m in self._members]
        self._hbm_bytes = _column([t.hbm_bytes for t in terms])
        self._link_bytes = _column([t.link_bytes for t in terms])
        self._energy: Any = Columns(
            core_energy_j=_column([t.core_energy_j for t in terms]),
            hbm_energy_j=_column([t.hbm_energy_j for t in terms]),
            link_energy_j=_column([t.link_energy_j for t in terms]),
            sm_power_w=_column([t.sm_power_w for t in terms]),
        )
        top_hz = [min(t.top_clock_hz, self.gpu.max_clock_hz) for t in terms]
        scales = {hz: self.gpu.voltage_scale(hz) for hz in set(top_hz)}
        self._top_hz, self._top_scale = _column(top_hz), _column([scales[hz] for hz in top_hz])
        self._paces = _Paces(self._members)
        sizes = sorted({len(facts.members) for facts in self.facts if facts} - {1})
        self._groups = [
            _Beside(self, [n for n, facts in enumerate(self.facts) if facts and len(facts.members) == size])
            for size in sizes
        ]

    def at(self, curves: ClockCurves) -> SetStates:
        """All sets at the clocks of ``curves``."""
        clock_hz = curves.clock_hz
        work_s = self._paces.seconds_at(clock_hz)
        lasts_s = work_s + self._gap
        busy = work_s / lasts_s
        moving_s = self._moving / clock_hz
        lasts_s = np.where(moving_s > work_s, moving_s + self._gap, lasts_s)
        rate = 1.0 / lasts_s / PS_PER_S
        for group in self._groups:
            group.wait(rate, clock_hz)
        hbm, link = self._hbm_bytes * rate * PS_PER_S, self._link_bytes * rate * PS_PER_S
        for group in self._groups:
            group.slow(rate, hbm, link)
        own = self._top_hz < clock_hz
        dynamic_w = dynamic_power_w(
            self._energy,
            sms=self._own * busy,
            gpu_sms=self.gpu.sms,
            progress_per_s=rate * PS_PER_S,
            voltage_scale=np.where(own, self._top_scale, curves.voltage_scale),
            clock_fraction=np.where(own, self._top_hz / self.gpu.reference_clock_hz, curves.clock_fraction),
        )
        return SetStates(
            rate=rate,
            dynamic_w=dynamic_w,
            hbm_bytes_per_s=hbm,
            link_bytes_per_s=link,
            clock_hz=clock_hz,
            idle_w=curves.idle_w,
        )


class _Paces:
    """Times of members alone, each different one once; one call of the law for all that it treats alike."""

    def __init__(self, members: Sequence[Member]) -> None:
        number: dict[int, int] = {}
        paces: list[Pace] = []
        places = []
        for member in members:
            known = number.get(id(member.pace))
            if known is None:
                known = number[id(member.pace)] = len(paces)
                paces.append(member.pace)
            places.append(known)
        alike: dict[tuple[bool, float, bool], list[int]] = {}
        for place, pace in enumerate(paces):
            some = bool(pace.cycles or pace.l2_cycles or pace.transfer_s or pace.launch_s)
            alike.setdefault((pace.taking_turns, pace.sharpness, some), []).append(place)
        order = [place for together in alike.values() for place in together]
        where = {place: at for at, place in enumerate(order)}
        self._places: Places = np.array([where[place] for place in places], dtype=np.intp)
        self._together = [
            _together([paces[place] for place in together], turns, sharpness)
            for (turns, sharpness, _), together in alike.items()
        ]

    def seconds_at(self, clock_hz: Floats) -> Floats:
        """Of every member at every clock."""
        seconds = [pace.seconds_at(clock_hz) for pace in self._together]
        return (seconds[0] if len(seconds) == 1 else np.concatenate(seconds))[self._places]


def _together(paces: Sequence[Pace], turns: bool, sharpness: float) -> Pace:
    """Several as one whose fields are columns."""
    names = ("cycles", "l2_cycles", "transfer_s", "launch_s", "moving_cycles", "floor_s", "scale", "top_clock_hz")
    columns: dict[str, Any] = {name: _column([getattr(pace, name) for pace in paces]) for name in names}
    return Pace(taking_turns=turns, sharpness=sharpness, **columns)


class _Beside:
    """Sets of one size over 1: how their kernels slow each other down."""

    def __init__(self, of: SetsAtClocks, sets: Sequence[int]) -> None:
        # Not ``of`` itself, which holds this one: a cycle, that only the collector would free.
        self._capacity, self._link_capacity = of.hbm.bytes_per_s * of.hbm.mixed_share, of.link.bytes_per_s
        facts = [one for number in sets if (one := of.facts[number])]
        first = of.first[list(sets)]
        size = len(facts[0].members)
        self._rows: Places = np.array([first + place for place in range(size)])  # member by set
        self._few = [np.array([one.few[place] for one in facts]) for place in range(size)]
        self._weights = [[one.weights[place] for place in range(size)] for one in facts]
        self._weight = of._weight[self._rows]
        self._waits = _Waits(of, facts, self._rows) if any(one.beside for one in facts) else None

    def wait(self, rate: Floats, clock_hz: Floats) -> None:
        """Lower the rates of kernels whose loads queue behind those of the others."""
        if self._waits is not None:
            self._waits.lower(rate, clock_hz)

    def slow(self, rate: Floats, hbm: Floats, link: Floats) -> None:
        """Lower the rates of kernels that get less of the memory or the port than they could use."""
        rows, weights, capacity = self._rows, self._weight, self._capacity
        own, sent = hbm[rows], link[rows]
        asked = own
        for place, few in enumerate(self._few):
            if few.any():
                others = [at for at in range(len(rows)) if at != place]
                behind = shares_behind_others(
                    own[place], weights[place], _sum([own[at] for at in others]),
                    _sum([weights[at] for at in others]), capacity,
                )  # fmt: skip
                asked = asked.copy() if asked is own else asked
                asked[place] = np.where(few[:, None] & (own[place] > 0.0), behind, own[place])
        granted = self._divided(asked, capacity, self._weights)
        link_granted = self._divided(sent, self._link_capacity, None)
        if granted is own and link_granted is sent:
            return
        slow = np.minimum(_kept(granted, own), _kept(link_granted, sent))
        for each in (rate, hbm, link):
            each[rows] *= slow

    def _divided(self, asked: Floats, capacity: float, weights: list[list[float]] | None) -> Floats:
        """What each gets; the rule itself divides where all ask for more than there is."""
        over = np.argwhere(_sum(list(asked)) > capacity)
        granted = asked
        for place, column in over.tolist():
            granted = granted.copy() if granted is asked else granted
            wanted = asked[:, place, column].tolist()
            granted[:, place, column] = share(wanted, weights[place] if weights else [1.0] * len(wanted), capacity)
        return granted


class _Waits:
    """Sets of one size in which loads queue behind those of another kernel."""

    def __init__(self, of: SetsAtClocks, facts: Sequence[SetFacts], rows: Places) -> None:
        self._hbm_bytes_per_s, self._reference_hz = of.hbm.bytes_per_s, of.gpu.reference_clock_hz
        chosen = [place for place, one in enumerate(facts) if one.beside]
        rows = rows[:, chosen]
        kernels = np.array([facts[place].kernels for place in chosen]).T  # member by set
        self._rows, self._hbm_bytes = rows, of._hbm_bytes[rows.ravel()]
        self._others = [
            [(at, (kernels[at] != kernels[place]).astype(float)[:, None]) for at in range(len(rows)) if at != place]
            for place in range(len(rows))
        ]
        members = [of._members[row] for row in rows.ravel()]
        flows = np.array([not m.cls.collective and m.terms.hbm_bytes > 0.0 for m in members])
        waits = np.array([m.terms.load_wait > 0.0 for m in members])
        self._unlimited, self._lowered = np.flatnonzero(flows), np.flatnonzero(waits)
        limited = [members[at] for at in self._unlimited]
        self._share = _column([m.pace.scale * m.pace.transfer_s for m in limited])
        self._hold = _column([m.hold for m in limited])
        lowered = [members[at] for at in self._lowered]
        self._wait = _column([m.terms.load_wait for m in lowered])
        self._cycles = _column([m.pace.cycles for m in lowered])

    def lower(self, rate: Floats, clock_hz: Floats) -> None:
        """Set the rates beside the others' loads."""
        rows = self._rows.ravel()
        own = rate[rows]
        flow = self._hbm_bytes * own * PS_PER_S
        some = self._unlimited
        if len(some):
            share_of_time = self._share * own[some] * PS_PER_S
            flow[some] = unlimited_at(flow[some], share_of_time, self._hold)
        loads = (clock_hz / self._reference_hz * flow).reshape(*self._rows.shape, -1)
        behind = np.array([_sum([loads[at] * apart for at, apart in others]) for others in self._others])
        here = self._lowered
        mine = own[here]
        waited = behind.reshape(len(rows), -1)[here] / self._hbm_bytes_per_s
        computing = np.minimum(1.0, self._cycles / clock_hz * mine * PS_PER_S)
        rate[rows[here]] = mine / waiting_slowdown_at(self._wait * computing, slowdown_at(waited))


def _column(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=float).reshape(-1, 1)


def _sum(parts: Sequence[Floats]) -> Floats:
    """The exact sum, rounded once, as :func:`math.fsum` has it."""
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:
        return parts[0] + parts[1]
    flat = zip(*(part.ravel().tolist() for part in parts), strict=True)
    return np.array([math.fsum(one) for one in flat]).reshape(parts[0].shape)


def _kept(granted: Floats, own: Floats) -> Floats:
    """The share that each gets of what it could use."""
    return np.divide(granted, own, out=np.ones_like(own), where=own > 0.0)
