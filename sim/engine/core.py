"""Rates, clock, power and energy of a run: what couples the kernels that run at the same time.

Who gets which SMs, copy engines and shares of bandwidth is decided by the resources (:mod:`sim.engine.resources`). The
driver (:mod:`sim.engine.driver`) calls :meth:`Core.submit` when a kernel is the next of its stream, SimPy calls
:meth:`Core.begin` when its request is granted, and the driver :meth:`Core.due` when the first of the kernels that run
on a GPU ends, and :meth:`Core.update` once at the end of every instant in which a GPU became ``dirty``. Time is an
integer number of picoseconds; the work left of a kernel is a fraction of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from sim.engine.between import Between
from sim.engine.deadlock import deadlock_message
from sim.engine.fluid import FluidModel, Running
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.resources.grid import Grid
from sim.engine.resources.sm_pool import Return, nothing
from sim.engine.running import GpuState, Rules, Target
from sim.engine.state import Driver, Entry, Flow, Gpu
from sim.engine.ties import common_paces, tied_together
from sim.errors import DeadlockError, LivelockError

# More updates than this in one instant means that time stands still.
UPDATES_PER_INSTANT = 64


class Core:
    """One run over ``graph``; see the module docstring for the protocol."""

    def __init__(
        self,
        graph: KernelGraph,
        models: list[FluidModel],
        targets: Sequence[Target],
        pool_sms: list[float] | None = None,
    ) -> None:
        sms = pool_sms or [float(model.gpu.sms) for model in models]
        self.graph = graph
        self.gpus = [Gpu(i, models[i], targets[i], sms[i]) for i in range(graph.gpus)]
        self.recorder = Recorder(idle_energy_j=[0.0] * graph.gpus, states=models[0].states)
        self.left = graph.kernels
        self.inflight = 0  # kernels whose end is scheduled
        self.scheduled = 0  # launches that the driver has scheduled (host issue times)
        self.driver: Driver | None = None
        self.between: Between | None = None  # the network between nodes, which the driver brings
        self._partition = graph.queue_partition
        self.dirty: set[int] = set()  # GPUs to update at the end of this instant
        self._flows: dict[int, Flow] = {}  # collectives of which a rank has arrived
        self.lead_ps = [round(c.lead_s * 1e12) for c in graph.classes]
        self._gap_ps = [round(c.gap_s * 1e12) for c in graph.classes]
        self._moves = [(c.terms.hbm_bytes > 0.0) + 2 * (c.terms.link_bytes > 0.0) for c in graph.classes]
        self._grids: list[Grid] = [models[0].grid(class_id) for class_id in range(len(graph.classes))]
        self._priorities = [c.priority for c in graph.classes]
        self._everyone = list(range(graph.gpus))
        self._alike = False
        self._updated_ps = -1
        self._updates = 0

    def start(self, driver: Driver) -> None:
        """Attach the driver, which has set the resources of the GPUs, and set every GPU to idle power."""
        self.driver = driver
        spans = self.recorder
        self._note = (
            spans.span_op.append, spans.span_start_ps.append, spans.span_end_ps.append, spans.span_energy_j.append
        )  # fmt: skip
        self._note_step = spans.step_gpu.append, spans.step_time_ps.append, spans.step_state.append
        self._pools = [pool for gpu in self.gpus for pool in gpu.pools]
        self._lone = self.gpus[0] if len(self.gpus) == 1 and self.between is None else None
        for gpu in self.gpus:
            gpu.env, gpu.begin = driver.env, self.begin
            memory, port = gpu.hbm.put_queue, gpu.port.put_queue
            gpu.crossed = ((), (memory,), (port,), (memory, port))
            gpu.model = gpu.model.under(Rules(hbm=gpu.hbm.shares, link=gpu.port.shares))
            gpu.aim(gpu.limit_w, gpu.clock_cap_hz)
            self.touch(gpu.index)
        self._alike = self._all_alike()

    def stop(self) -> None:
        """After the run: let go of the driver."""
        self.driver = None
        for gpu in self.gpus:
            gpu.begin = nothing

    def submit(self, op: int, now_ps: int) -> None:
        """The kernel is at the head of its queue and its predecessors are done: it asks for SMs or a copy engine."""
        graph = self.graph
        collective = graph.op_collective[op]
        if collective < 0:
            flow = Flow(-1, 1)
        elif collective in self._flows:
            flow = self._flows[collective]
        else:
            flow = self._flows[collective] = Flow(collective, len(graph.collective_members[collective]))
        class_id = graph.op_class[op]
        gpu = self.gpus[graph.op_gpu[op]]
        grid = self._grids[class_id]
        place = self._partition[graph.op_queue[op]] if self._partition else 0
        pool = gpu.pools[place] if grid.sms else gpu.copy_engine
        Entry(op, class_id, gpu, flow, grid, (self._priorities[class_id], now_ps, op), grid.sms, pool)

    def begin(self, entry: Entry) -> None:
        """The kernel's request is granted: it runs, or waits on its SMs for other ranks."""
        gpu, flow = entry.gpu, entry.flow
        now_ps = gpu.env._now
        if gpu.integrated_ps != now_ps:
            self._integrate(gpu, now_ps)
        entry.start_ps = now_ps
        gpu.running.append(entry)
        flow.entries.append(entry)
        flow.missing -= 1
        flow.updated_ps = now_ps
        entry.crossed = crossed = gpu.crossed[self._moves[entry.class_id]]
        for queue in crossed:
            queue.append(entry)
        self.dirty.add(gpu.index)
        if flow.collective >= 0 and not flow.missing:
            for member in flow.entries:
                self.dirty.add(member.gpu.index)
            if self.between is not None:
                self.between.enter(flow, entry.class_id)

    def change_limit(self, gpu_index: int, limit_w: float, clock_cap_hz: float) -> None:
        """Set another power limit (W) and clock cap (Hz) of one GPU; governors call it."""
        gpu = self.gpus[gpu_index]
        if gpu.limit_w != limit_w or gpu.clock_cap_hz != clock_cap_hz:
            gpu.aim(limit_w, clock_cap_hz)
            self._alike = self._all_alike()
            self.touch(gpu_index)

    def due(self, gpus: list[Gpu], now_ps: int) -> None:
        """The first end of a kernel on ``gpus``; GPUs whose first end has been rescheduled since are ignored."""
        ended = []
        for gpu in gpus:
            if gpu.due_ps == now_ps:
                gpu.due_ps = 0
                for entry in gpu.running:
                    flow = entry.flow
                    if flow.due_ps == now_ps:
                        flow.due_ps = -1
                        ended.append(flow)
        if not ended:
            return
        note_op, note_start, note_end, note_energy = self._note
        driver, dirty, gap_ps = self.driver, self.dirty, self._gap_ps
        assert driver is not None
        self.inflight -= len(ended)
        for flow in ended:
            if flow.collective >= 0:
                del self._flows[flow.collective]
                if self.between is not None:
                    self.between.leave(flow)
            for entry in flow.entries:
                gpu = entry.gpu
                if gpu.integrated_ps != now_ps:
                    self._integrate(gpu, now_ps)
                gpu.running.remove(entry)
                for queue in entry.crossed:
                    queue.remove(entry)
                Return(entry.resource, entry)
                dirty.add(gpu.index)
                split = entry.split
                if split is not None:
                    last = split.ended(entry)
                    split.energy_j += entry.energy_j
                    split.start_ps = entry.start_ps if split.start_ps < 0 else min(split.start_ps, entry.start_ps)
                    if not last:
                        continue
                    entry.energy_j, entry.start_ps = split.energy_j, split.start_ps
                start_ps = entry.start_ps + gap_ps[entry.class_id]
                op = entry.op
                note_op(op)
                note_start(start_ps if start_ps < now_ps else now_ps)
                note_end(now_ps)
                note_energy(entry.energy_j)
                self.left -= 1
                driver.finished(op)
            flow.entries.clear()  # no reference cycle stays behind: the engine runs with the collector off

    def touch(self, gpu_index: int) -> None:
        """Something changed on a GPU: update at the end of this instant."""
        self.dirty.add(gpu_index)

    def update(self, now_ps: int) -> None:
        """Resolve everything that changed in this instant: clocks, rates, power."""
        if now_ps == self._updated_ps:
            self._updates += 1
            if self._updates > UPDATES_PER_INSTANT:
                raise LivelockError(f"time stands still at {now_ps} ps after {self._updates} updates")
        else:
            self._updated_ps, self._updates = now_ps, 0
        dirty, pools = self.dirty, self._pools
        if self._lone is not None:
            dirty.clear()
            self._go_on(self._lone, self._state_of(self._lone, now_ps), None, now_ps)
        else:
            if self.between is not None:
                dirty.update(self.between.tied())
            group = self._everyone if len(dirty) == len(self.gpus) else sorted(tied_together(self.gpus, dirty))
            dirty.clear()
            self._solve(group, now_ps)
            if group is not self._everyone:
                pools = [pool for index in group for pool in self.gpus[index].pools]
        for pool in pools:
            if pool.put_queue:
                pool.arm_tails(now_ps)
        if not self.inflight and not self.scheduled and self.left:
            arrived = {number: [e.gpu.index for e in f.entries] for number, f in self._flows.items() if f.missing}
            raise DeadlockError(deadlock_message(self.graph, arrived, self.gpus, self.left))

    def finish(self, now_ps: int) -> Recorder:
        """Integrate up to the last completion; returns the records."""
        for gpu in self.gpus:
            self._integrate(gpu, now_ps)
        self.recorder.end_ps, self.recorder.energy_j = now_ps, [gpu.energy_j for gpu in self.gpus]
        return self.recorder

    def energy_until_now(self, gpu_index: int, now_ps: int) -> float:
        """Joules of one GPU from the start of the run to now."""
        gpu = self.gpus[gpu_index]
        self._integrate(gpu, now_ps)
        return gpu.energy_j

    # -- parts --------------------------------------------------------------------------------------------

    def _solve(self, group: list[int], now_ps: int) -> None:
        gpus, between = self.gpus, self.between
        solved = [(gpus[index], self._state_of(gpus[index], now_ps)) for index in group]
        if between is not None and between.meets:
            met = {e.flow for gpu, _ in solved for e in gpu.running if e.flow.collective >= 0 and not e.flow.missing}
            paces = common_paces(solved, met, between)
        else:
            paces = {} if len(solved) == 1 else _paces(solved, self._alike)
        for gpu, state in solved:
            self._go_on(gpu, state, paces, now_ps)
        if between is not None:
            between.record(now_ps)

    def _state_of(self, gpu: Gpu, now_ps: int) -> GpuState:
        """The state of what runs on a GPU from now on."""
        if gpu.integrated_ps != now_ps:
            self._integrate(gpu, now_ps)
        running = gpu.running
        count = len(running)
        if count == 1:
            e = running[0]
            key: Running = ((e.class_id, e.sms, e.flow.missing > 0, e.fill),)
        else:
            if count > 2 or (count and running[0].class_id >= running[1].class_id):
                running.sort(key=_canonical)
            key = tuple([(e.class_id, e.sms, e.flow.missing > 0, e.fill) for e in running])
        return gpu.known.get(key) or gpu.model.solve(key, gpu.limit_w, gpu.clock_cap_hz)

    def _go_on(self, gpu: Gpu, state: GpuState, paces: dict[Flow, float] | None, now_ps: int) -> None:
        """Set the rates of what runs on a GPU from now on, and have the first of it end in time."""
        if gpu.state is not state:
            gpu.state = state
            note_gpu, note_time, note_state = self._note_step
            note_gpu(gpu.index)
            note_time(now_ps)
            note_state(state.index)
        first_ps = 0
        for entry, rate in zip(gpu.running, state.rates):  # noqa: B905 - as many; the keyword costs time here
            flow = entry.flow
            if paces and flow in paces:
                rate = paces[flow]
            due_ps, before = flow.due_ps, flow.rate
            if before != rate or due_ps < 0:
                if flow.missing:
                    continue
                left = flow.left
                if before:
                    left -= before * (now_ps - flow.updated_ps)
                    flow.left = left = left if left > 0.0 else 0.0
                else:
                    self.inflight += 1
                flow.updated_ps = now_ps
                flow.rate = rate
                flow.due_ps = due_ps = now_ps + (math.ceil(left / rate - 1e-6) or 1)
            if not first_ps or due_ps < first_ps:
                first_ps = due_ps
        if first_ps != gpu.due_ps:
            gpu.due_ps = first_ps
            if first_ps:
                assert self.driver is not None
                self.driver.arm(gpu, first_ps)

    def _all_alike(self) -> bool:
        """Whether equal kernels run equally on all GPUs: one model and one power target."""
        first, bounds = self.gpus[0].model, {(gpu.limit_w, gpu.clock_cap_hz) for gpu in self.gpus}
        return len(bounds) == 1 and all(gpu.model is first for gpu in self.gpus)

    def _integrate(self, gpu: Gpu, now_ps: int) -> None:
        """Add the joules up to now: the running set is that of the last solve, in the order of its state."""
        elapsed = now_ps - gpu.integrated_ps
        if elapsed:
            seconds = elapsed * 1e-12
            state, running = gpu.state, gpu.running
            assert state is not None
            gpu.integrated_ps = now_ps
            gpu.energy_j += state.power_w * seconds
            for entry, power_w in zip(running, state.kernel_power_w):  # noqa: B905 - as above
                entry.energy_j += power_w * seconds
            if not running:
                self.recorder.idle_energy_j[gpu.index] += state.power_w * seconds


def _paces(solved: list[tuple[Gpu, GpuState]], alike: bool) -> dict[Flow, float]:
    """Rates of collectives where they differ from each member's own; ``alike``: all GPUs run equal kernels at equal
    rates.

    Then a single collective has one rate; two may couple different groups of GPUs.
    """
    first = solved[0][1]
    for _, state in solved:
        alike = alike and state is first
    if alike and sum([e.flow.collective >= 0 and not e.flow.missing for e in solved[0][0].running]) < 2:
        return {}
    met: dict[Flow, float] = {}
    even = True
    for gpu, state in solved:
        for entry, rate in zip(gpu.running, state.rates, strict=True):
            flow = entry.flow
            if flow.collective >= 0 and not flow.missing and met.setdefault(flow, rate) != rate:
                even = False
    return {} if even else common_paces(solved, set(met))


_canonical = attrgetter("class_id", "sms", "op")  # the order in which what runs is solved
