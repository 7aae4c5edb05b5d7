"""One stream a GPU under fixed power targets: kernel follows kernel, so that nothing needs a schedule.

Every running set is a single kernel; it holds the SMs that it wants and keeps its pace from start to end. GPUs meet
in collectives only: those that come first spin, all leave at once, at the pace of the slowest. Between two meetings
a GPU's time is a sum, and is taken as one. Spans, power steps and joules are those of
:class:`sim.engine.driver.Engine`: a test runs any such program on both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.laws.terms import wanted_sms
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import GpuState
from sim.errors import LivelockError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def is_serial(graph: KernelGraph, model: FluidModel) -> bool:
    """True when each GPU has one stream, whose kernels wait for nothing but each other and their collectives."""
    sms = float(model.gpu.sms)
    return (
        graph.queue_gpu == tuple(range(graph.gpus))
        and graph.issue_ps is None
        and not graph.predecessor_count
        and all(not c.lead_s and wanted_sms(c.terms, sms) <= sms for c in graph.classes)
    )


def run_serial(graph: KernelGraph, model: FluidModel, limits_w: Sequence[float]) -> Recorder | None:
    """Records of a serial run; None when GPUs wait for each other for ever."""
    single = _Single(graph, model, limits_w)
    gpu, cls = np.asarray(graph.op_gpu), np.asarray(graph.op_class)  # kernels are numbered GPU by GPU, in order
    members = np.array([*map(len, graph.collective_members), 1])
    meets = members[np.asarray(graph.op_collective)] > 1
    lasts_ps, power_w, state = single.columns(gpu, cls)
    lasts_ps[meets] = 0
    sum_ps = np.cumsum(lasts_ps)
    until_ps = sum_ps - (sum_ps - lasts_ps)[np.searchsorted(gpu, np.arange(graph.gpus))][gpu]

    at = np.flatnonzero(meets)
    met = _meet(graph, single, at.tolist(), until_ps[at].tolist())
    if met is None:
        return None
    delay_ps, whose = np.append(met.end_ps - until_ps[at], 0), np.append(gpu[at], -1)
    last = np.cumsum(meets) - 1  # the meeting that a kernel is or follows; the one appended where there is none
    end_ps = until_ps + np.where(whose[last] == gpu, delay_ps[last], 0)
    begin_ps = end_ps - lasts_ps
    begin_ps[at], lasts_ps[at], state[at], power_w[at] = met.begin_ps, met.end_ps - met.begin_ps, met.state, met.power_w
    energy_j = power_w * (lasts_ps * 1e-12)
    come_ps = begin_ps.copy()
    come_ps[at] = met.come_ps
    early = np.flatnonzero(come_ps < begin_ps)
    _, spin_w, spin_state = single.columns(gpu[early], cls[early], waits=True)
    energy_j[early] += spin_w * ((begin_ps - come_ps)[early] * 1e-12)

    over_ps = int(end_ps.max())
    done_ps = end_ps[np.searchsorted(gpu, np.arange(graph.gpus), side="right") - 1]
    idle = np.flatnonzero(done_ps < over_ps)
    idle_state = [single.idle(one) for one in idle.tolist()]
    idle_j = np.zeros(graph.gpus)
    idle_j[idle] = np.array([s.power_w for s in idle_state]) * ((over_ps - done_ps[idle]) * 1e-12)
    steps = (
        np.concatenate([gpu, gpu[early], idle]),
        np.concatenate([begin_ps, come_ps[early], done_ps[idle]]),
        np.concatenate([state, spin_state, np.array([s.index for s in idle_state], dtype=np.int64)]),
    )
    gap_ps = np.array([round(c.gap_s * 1e12) for c in graph.classes])[cls]
    spans = (np.arange(len(gpu)), np.minimum(come_ps + gap_ps, end_ps), end_ps, energy_j)
    records = _recorded(spans, steps, model.states)
    records.idle_energy_j, records.end_ps = idle_j.tolist(), over_ps
    records.energy_j = (np.bincount(gpu, energy_j, graph.gpus) + idle_j).tolist()
    return records


class _Single:
    """Kernels by themselves on a GPU, each under its power target."""

    def __init__(self, graph: KernelGraph, model: FluidModel, limits_w: Sequence[float]) -> None:
        self.model, self.limits_w = model, limits_w
        self.wanted = [wanted_sms(c.terms, float(model.gpu.sms)) for c in graph.classes]
        self._meetings: dict[object, tuple[int, list[GpuState]]] = {}

    def state(self, gpu: int, cls: int, *, waits: bool = False, pace: float | None = None) -> GpuState:
        """The state of one kernel; it may spin, or be held to ``pace``."""
        caps = None if pace is None else (pace,)
        running = ((cls, self.wanted[cls], waits),)
        return self.model.solve(running, self.limits_w[gpu], self.model.gpu.max_clock_hz, caps)

    def idle(self, gpu: int) -> GpuState:
        """Nothing runs."""
        return self.model.solve((), self.limits_w[gpu], self.model.gpu.max_clock_hz)

    def columns(self, gpu: Ints, cls: Ints, *, waits: bool = False) -> tuple[Ints, Floats, Ints]:
        """How long each kernel lasts (0 of one that spins), the watts of its GPU, and the state's number."""
        used, of = np.unique(gpu * len(self.wanted) + cls, return_inverse=True)
        states = [self.state(*divmod(one, len(self.wanted)), waits=waits) for one in used.tolist()]
        lasts = np.array([0 if waits else _lasts_ps(state.rates[0]) for state in states], dtype=np.int64)
        power_w, number = np.array([state.power_w for state in states]), [state.index for state in states]
        return lasts[of], power_w[of], np.array(number, dtype=np.int64)[of]

    def meeting(self, members: tuple[tuple[int, int], ...]) -> tuple[int, list[GpuState]]:
        """Picoseconds of a collective of these (GPU, class) once all are there, and the state of each.

        The common pace is found as :meth:`sim.engine.core.Core.settle` finds it.
        """
        found = self._meetings.get(members)
        if found is None:
            states = [self.state(gpu, cls) for gpu, cls in members]
            for _ in range(8 * len(members)):
                pace = min(state.rates[0] for state in states)
                if max(state.rates[0] for state in states) <= pace * (1.0 + 1e-9):
                    break
                states = [self.state(gpu, cls, pace=pace) for gpu, cls in members]
            else:
                raise LivelockError(f"the collective of (GPU, kernel class) {members} finds no common pace")
            found = self._meetings[members] = _lasts_ps(pace), states
        return found


def _lasts_ps(rate: float) -> int:
    return max(1, math.ceil(1.0 / rate - 1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Met:
    """Each GPU's parts of collectives: when it comes, when all are there, when they leave; state and watts between."""

    come_ps: Ints
    begin_ps: Ints
    end_ps: Ints
    state: Ints
    power_w: Floats


def _meet(graph: KernelGraph, single: _Single, ops: list[int], until_ps: list[int]) -> _Met | None:
    """Let the GPUs run from meeting to meeting; ``until_ps`` is what each does by itself up to its part ``ops``."""
    owner, cls = [graph.op_gpu[op] for op in ops], [graph.op_class[op] for op in ops]
    collective = [graph.op_collective[op] for op in ops]
    party: dict[int, list[int]] = {}
    parts: list[list[int]] = [[] for _ in range(graph.gpus)]
    for i, (gpu, met) in enumerate(zip(owner, collective, strict=True)):
        party.setdefault(met, []).append(i)
        parts[gpu].append(i)
    ahead, missing = [iter(mine) for mine in parts], {met: len(all_) for met, all_ in party.items()}
    come, begin, end, states = [0] * len(ops), [0] * len(ops), [0] * len(ops), [0] * len(ops)
    power_w, delay, left = [0.0] * len(ops), [0] * graph.gpus, len(ops)
    moving = list(range(graph.gpus))
    while moving:
        gpu = moving.pop()
        part = next(ahead[gpu], None)
        if part is None:
            continue
        come[part] = until_ps[part] + delay[gpu]
        missing[collective[part]] -= 1
        if not missing[collective[part]]:
            all_ = party[collective[part]]
            lasts, together = single.meeting(tuple([(owner[i], cls[i]) for i in all_]))
            ready = max([come[i] for i in all_])
            for i, state in zip(all_, together, strict=True):
                begin[i], end[i], states[i], power_w[i] = ready, ready + lasts, state.index, state.power_w
                delay[owner[i]] = end[i] - until_ps[i]
                moving.append(owner[i])
            left -= len(all_)
    if left:
        return None
    return _Met(
        come_ps=np.array(come, dtype=np.int64),
        begin_ps=np.array(begin, dtype=np.int64),
        end_ps=np.array(end, dtype=np.int64),
        state=np.array(states, dtype=np.int64),
        power_w=np.array(power_w),
    )


def _recorded(
    spans: tuple[Ints, Ints, Ints, Floats], steps: tuple[Ints, Ints, Ints], states: list[GpuState]
) -> Recorder:
    """Spans by their ends, power steps by time; a GPU that goes on as it was takes no step."""
    records = Recorder(states=states)
    by_end = np.argsort(spans[2], kind="stable")
    gpu, time_ps, state = steps
    order = np.lexsort((time_ps, gpu))
    new = np.append(True, (state[order][1:] != state[order][:-1]) | (gpu[order][1:] != gpu[order][:-1]))
    order = order[new]
    order = order[np.argsort(time_ps[order], kind="stable")]
    for column, values in (
        (records.span_op, spans[0][by_end]),
        (records.span_start_ps, spans[1][by_end]),
        (records.span_end_ps, spans[2][by_end]),
        (records.span_energy_j, spans[3][by_end]),
        (records.step_gpu, gpu[order].astype(np.int32)),
        (records.step_time_ps, time_ps[order]),
        (records.step_state, state[order]),
    ):
        column.frombytes(values.tobytes())
    return records
