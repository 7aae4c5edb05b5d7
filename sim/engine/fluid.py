"""Clock, rates and power of the kernels that run together on one GPU, independent of driver and time.

A running set is a tuple of ``(class, SMs, waiting, fill)``; its solution depends on nothing else but the power
target, so it is memoised as one immutable :class:`GpuState`. ``fill``: tiles in the present round of a kernel over the
mean of its rounds; its power is proportional to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from hardware.laws.terms import KernelTerms, pace, part, time_s, wanted_sms
from hardware.power import highest_clock
from hardware.scheduling import scheduling
from sim.engine.graph import KernelClass
from sim.engine.resources.grid import Grid
from sim.engine.running import GpuModel, GpuState, Member, Rules, RunningSet, rules_of

# States of one GPU type remembered over all runs of a process; beyond it they are solved again.
MAX_STATES = 200_000
_COSTS: dict[tuple[KernelTerms, float, bool], int] = {}
Running = tuple[tuple[int, float, bool, float], ...]
_NUMBERS: dict[Running, int] = {}  # by costs
_NEXT = count()


@lru_cache(maxsize=32)
def _states_of(_gpu: GpuModel, _rules: Rules) -> dict[tuple[object, ...], GpuState]:
    return {}


@dataclass(slots=True)
class FluidModel:
    """Solver and memo for one GPU type under one kernel class table."""

    gpu: GpuModel
    classes: tuple[KernelClass, ...]
    states: list[GpuState]
    other_rules: Rules | None = None  # of sharing memory and port, where they are not the GPU's own
    _memo: dict[tuple[object, ...], GpuState] = field(default_factory=dict)
    _ends: dict[tuple[object, ...], GpuState] = field(default_factory=dict)
    _costs: dict[int, int] = field(default_factory=dict)
    _sets: dict[tuple[Running, tuple[float, ...] | None], RunningSet] = field(default_factory=dict)
    _numbers: dict[Running, int] = field(default_factory=dict)
    _members: dict[tuple[int, float, bool], Member] = field(default_factory=dict)
    _grids: dict[int, Grid] = field(default_factory=dict)
    _thin: dict[tuple[int, float, int], float] = field(default_factory=dict)
    _curves: dict[float, tuple[float, float]] = field(default_factory=dict)
    rules: Rules = field(init=False)
    _known: dict[tuple[object, ...], GpuState] = field(init=False)

    def __post_init__(self) -> None:
        self.rules = self.other_rules or rules_of(self.gpu)
        self._known = _states_of(self.gpu, self.rules)

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

    def solve(
        self, running: Running, limit_w: float, clock_cap_hz: float, caps: tuple[float, ...] | None = None
    ) -> GpuState:
        """State of ``running`` at the highest clock whose power is at most ``limit_w``.

        ``caps`` bounds each kernel's rate (1/ps): a collective goes at its slowest member's pace.
        """
        key = (running, limit_w, clock_cap_hz, caps)
        state = self._memo.get(key)
        if state is None:
            state = self._memo[key] = self._found(*key).numbered(len(self.states))
            self.states.append(state)
        return state

    def _found(self, running: Running, limit_w: float, clock_cap_hz: float, caps: tuple[float, ...] | None) -> GpuState:
        """The state, shared by all models of this process."""
        known, number = self._known, self._numbers.get(running)
        if number is None:
            number = self._numbers[running] = self._number(running)
        everywhere = (number, limit_w, clock_cap_hz, caps)
        state = known.get(everywhere)
        if state is None:
            if len(known) > MAX_STATES:
                known.clear()
            state = known[everywhere] = self._highest(running, limit_w, clock_cap_hz, caps)
        return state

    def _number(self, running: Running) -> int:
        """A number that equal running sets share in all models of this process."""
        if len(_NUMBERS) > MAX_STATES:
            _NUMBERS.clear()  # those given before stay theirs
        costed = tuple([(self.cost(c), hold, waiting, fill) for c, hold, waiting, fill in running])
        number = _NUMBERS.get(costed)
        if number is None:
            number = _NUMBERS[costed] = next(_NEXT)
        return number

    def cost(self, class_id: int) -> int:
        """A number that classes of equal terms and gap share in all models of this process."""
        cost = self._costs.get(class_id)
        if cost is None:
            cls = self.classes[class_id]
            cost = _COSTS.setdefault((cls.terms, cls.gap_s, cls.collective), len(_COSTS))
            self._costs[class_id] = cost
        return cost

    def _highest(
        self, running: Running, limit_w: float, clock_cap_hz: float, caps: tuple[float, ...] | None
    ) -> GpuState:
        gpu = self.gpu
        top = self._at(running, clock_cap_hz, caps)
        if top.power_w <= limit_w or not running:
            return top
        if clock_cap_hz < gpu.max_clock_hz:  # over the limit at both clocks: the result is the same
            found = self._found(running, limit_w, gpu.max_clock_hz, caps)
            if found.clock_hz <= clock_cap_hz:
                return found
        seen = {clock_cap_hz: top}

        def power_w(clock_hz: float) -> float:
            if clock_hz not in seen:
                seen[clock_hz] = self._at(running, clock_hz, caps)
            return seen[clock_hz].power_w

        return seen[highest_clock(power_w, limit_w, gpu.min_clock_hz, clock_cap_hz, gpu.clock_step_hz)]

    def _at(self, running: Running, clock_hz: float, caps: tuple[float, ...] | None) -> GpuState:
        """The state at a clock; at both ends of the clock range remembered, since every power limit asks for them."""
        if self.gpu.min_clock_hz < clock_hz < self.gpu.max_clock_hz:
            return self._set_of(running, caps).at(clock_hz)
        state = self._ends.get((running, clock_hz, caps))
        if state is None:
            state = self._ends[running, clock_hz, caps] = self._set_of(running, caps).at(clock_hz)
        return state

    def _set_of(self, running: Running, caps: tuple[float, ...] | None) -> RunningSet:
        found = self._sets.get((running, caps))
        if found is None:
            members = [self.member(class_id, hold, waiting) for class_id, hold, waiting, _ in running]
            found = self._sets[running, caps] = RunningSet(
                self.gpu, members, [fill for *_, fill in running], caps, self.rules, self._curves
            )
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
