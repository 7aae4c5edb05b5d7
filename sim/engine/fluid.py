"""Clock, rates and power of the kernels that run together on one GPU, independent of driver and time.

A running set is a tuple of ``(class, SMs, waiting, fill)``; its solution depends on nothing else but the power
target, so it is memoised as one immutable :class:`GpuState`. ``fill``: tiles in the present round of a kernel over the
mean of its rounds; its power is proportional to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from hardware.laws.terms import Floats, KernelTerms, pace, part, time_s, wanted_sms
from hardware.power import highest_clock
from hardware.scheduling import scheduling
from sim.engine.graph import KernelClass
from sim.engine.resources.grid import Grid
from sim.engine.running import GpuModel, GpuState, Member, Rules, RunningSet, rules_of

# States of one GPU type remembered over all runs of a process; beyond it they are solved again.
MAX_STATES = 200_000
_COSTS: dict[tuple[KernelTerms, float, bool], int] = {}
Running = tuple[tuple[int, float, bool, float], ...]
Caps = tuple[float, ...] | None
States = dict[tuple[float, float, Caps], GpuState]  # of one running set, by power limit, highest clock and caps


@dataclass(slots=True)
class Shared:
    """The states of all running sets, by the costs of their members and the first that each shares a kernel with, and
    the number of these states."""

    states: dict[tuple[Running, tuple[int, ...]], States] = field(default_factory=dict)
    count: int = 0


@lru_cache(maxsize=32)
def _shared_by(_gpu: GpuModel, _rules: Rules) -> Shared:
    return Shared()


@dataclass(slots=True)
class Known:
    """What a model knows of one running set: its states, which all models of the process share, and how to solve it."""

    running: Running
    states: States
    sets: dict[Caps, RunningSet] = field(default_factory=dict)


@dataclass(slots=True)
class FluidModel:
    """Solver and memo for one GPU type under one kernel class table."""

    gpu: GpuModel
    classes: tuple[KernelClass, ...]
    states: list[GpuState]
    other_rules: Rules | None = None  # of sharing memory and port, where they are not the GPU's own
    _memo: dict[tuple[float, float], dict[Running, GpuState]] = field(default_factory=dict)  # by target
    _capped: dict[tuple[object, ...], GpuState] = field(default_factory=dict)
    _costs: dict[int, int] = field(default_factory=dict)
    _known: dict[Running, Known] = field(default_factory=dict)
    _members: dict[tuple[int, float, bool], Member] = field(default_factory=dict)
    _grids: dict[int, Grid] = field(default_factory=dict)
    _thin: dict[tuple[int, float, int], float] = field(default_factory=dict)
    _curves: dict[float, tuple[float, float]] = field(default_factory=dict)
    rules: Rules = field(init=False)
    _shared: Shared = field(init=False)

    def __post_init__(self) -> None:
        self.rules = self.other_rules or rules_of(self.gpu)
        self._shared = _shared_by(self.gpu, self.rules)

    def under(self, rules: Rules) -> FluidModel:
        """The same GPU, records and kernels, with memory and port shared by other rules."""
        return self if rules == self.rules else FluidModel(self.gpu, self.classes, self.states, rules)

    def grid(self, class_id: int) -> Grid:
        """The grid of a kernel class, by which a pool grants SMs."""
        found = self._grids.get(class_id)
        if found is None:
            cls = self.classes[class_id]
            terms, facts = cls.terms, scheduling()
            found = self._grids[class_id] = Grid(
                sms=wanted_sms(terms, float(self.gpu.sms)),
                tiles=terms.blocks,
                sms_per_block=terms.sms_per_block,
                cluster=terms.cluster,
                whole=terms.quantised and not cls.collective,
                own_tiles=facts.own_tiles if terms.quantised and not cls.collective else 0,
                short=terms.shrink == "fluid",
                collective=cls.collective,
                cluster_sms=facts.cluster_sms,
            )
        return found

    def thin(self, class_id: int, clock_hz: float, rounds: int) -> float:
        """The share of the time of one of a kernel's ``rounds`` that its arithmetic takes at a clock."""
        found = self._thin.get((class_id, clock_hz, rounds))
        if found is None:
            terms = self.classes[class_id].terms
            whole_s = time_s(terms, sms=self.grid(class_id).sms, sm_clock_hz=clock_hz) - terms.floor_s
            found = min(1.0, terms.cycles_per_block / clock_hz / (whole_s / rounds))
            self._thin[class_id, clock_hz, rounds] = found
        return found

    def thin_at(self, class_id: int, clock_hz: Floats, rounds: int) -> Floats:
        """The same at many clocks in one go."""
        terms = self.classes[class_id].terms
        whole_s = pace(terms, self.grid(class_id).sms).seconds_at(clock_hz) - terms.floor_s
        return np.minimum(1.0, terms.cycles_per_block / clock_hz / (whole_s / rounds))

    def solve(self, running: Running, limit_w: float, clock_cap_hz: float, caps: Caps = None) -> GpuState:
        """State of ``running`` at the highest clock whose power is at most ``limit_w``.

        ``caps`` bounds each kernel's rate (1/ps): a collective goes at its slowest member's pace.
        """
        memo: dict[Any, GpuState] = self.solved(limit_w, clock_cap_hz)
        key: object = running
        if caps is not None:
            memo, key = self._capped, (running, limit_w, clock_cap_hz, caps)
        state = memo.get(key)
        if state is None:
            known = self._known.get(running) or self._know(running)
            state = memo[key] = self._found(known, limit_w, clock_cap_hz, caps).numbered(len(self.states))
            self.states.append(state)
        return state

    def solved(self, limit_w: float, clock_cap_hz: float) -> dict[Running, GpuState]:
        """The states of what :meth:`solve` has been asked for under a power limit and a clock."""
        return self._memo.setdefault((limit_w, clock_cap_hz), {})

    def throttled(self, running: Running, limit_w: float) -> GpuState | None:
        """The state of ``running`` at the fast limit, where it has been looked for."""
        known = self._known.get(running)
        return None if known is None else known.states.get((limit_w, self.gpu.max_clock_hz, None))

    def running_set(self, running: Running) -> RunningSet:
        """What of ``running`` no clock changes."""
        known = self._known.get(running) or self._know(running)
        return known.sets.get(None) or self._set_of(known, None)

    def _know(self, running: Running) -> Known:
        costed = tuple([(self.cost(c), hold, waiting, fill) for c, hold, waiting, fill in running])
        # Parts of a kernel do not queue behind each other; kernels of equal costs do.
        classes = [c for c, *_ in running]
        kernels = tuple([classes.index(c) for c in classes])
        known = self._known[running] = Known(running, self._shared.states.setdefault((costed, kernels), {}))
        return known

    def _found(self, known: Known, limit_w: float, clock_cap_hz: float, caps: Caps) -> GpuState:
        """The state, shared by all models of this process."""
        key = (limit_w, clock_cap_hz, caps)
        state = known.states.get(key)
        if state is None:
            shared = self._shared
            if shared.count > MAX_STATES:
                shared.states.clear()  # a running set that a model knows keeps its states
                shared.count = 0
            shared.count += 1
            state = known.states[key] = self._highest(known, limit_w, clock_cap_hz, caps)
        return state

    def cost(self, class_id: int) -> int:
        """A number that classes of equal terms and gap share in all models of this process."""
        cost = self._costs.get(class_id)
        if cost is None:
            cls = self.classes[class_id]
            cost = _COSTS.setdefault((cls.terms, cls.gap_s, cls.collective), len(_COSTS))
            self._costs[class_id] = cost
        return cost

    def _highest(self, known: Known, limit_w: float, clock_cap_hz: float, caps: Caps) -> GpuState:
        gpu = self.gpu
        running = known.sets.get(caps) or self._set_of(known, caps)
        top = running.at_end(clock_cap_hz)
        if top.power_w <= limit_w or not known.running:
            return top
        if clock_cap_hz < gpu.max_clock_hz:  # over the limit at both clocks: the result is the same
            found = self._found(known, limit_w, gpu.max_clock_hz, caps)
            if found.clock_hz <= clock_cap_hz:
                return found
        seen = {clock_cap_hz: top}

        def power_w(clock_hz: float) -> float:
            state = seen.get(clock_hz)
            if state is None:
                state = seen[clock_hz] = running.at_end(clock_hz)
            return state.power_w

        return seen[highest_clock(power_w, limit_w, gpu.min_clock_hz, clock_cap_hz, gpu.clock_step_hz)]

    def _set_of(self, known: Known, caps: Caps) -> RunningSet:
        members = [self.member(class_id, hold, waiting) for class_id, hold, waiting, _ in known.running]
        fills = [fill for *_, fill in known.running]
        found = known.sets[caps] = RunningSet(self.gpu, members, fills, caps, self.rules, self._curves)
        return found

    def member(self, class_id: int, hold: float, waiting: bool) -> Member:
        """A kernel, or those of its blocks that hold ``hold`` SMs.

        A whole kernel is priced on the SMs of its law. Tiles of a quantised kernel belong to their block, so that
        fewer blocks do only their own share.
        """
        found = self._members.get((class_id, hold, waiting))
        if found is None:
            cls = self.classes[class_id]
            terms, sms = cls.terms, hold
            if not cls.collective and terms.quantised:
                whole = wanted_sms(terms, float(self.gpu.sms))
                sms = min(hold, whole)
                terms = part(terms, hold / whole) if hold < whole else terms
            found = self._members[class_id, hold, waiting] = Member(
                cls=cls, terms=terms, sms=sms, hold=hold, waiting=waiting, pace=pace(terms, sms)
            )
        return found
