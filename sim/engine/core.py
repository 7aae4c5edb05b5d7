"""The state of a run and its rules, without a driver: SM grants, rates, energy, collectives, deadlock.

A driver (SimPy in :mod:`sim.engine.driver`, a plain heap in the tests) calls :meth:`Core.submit` when a
kernel's turn has come, :meth:`Core.settle` once at the end of every instant in which something changed, and
:meth:`Core.due` when an armed moment arrives. The core answers through three callbacks. Time is an integer
number of picoseconds; work left is a fraction of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hardware.laws.terms import wanted_sms
from sim.engine.fluid import FluidModel
from sim.engine.grants import deadlock_message, displace, first_sms, last_round, more_sms, share_out, split_off
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import GpuState, Target
from sim.engine.state import Driver, Entry, Flow, Gpu
from sim.engine.ties import common_paces, tied_together
from sim.errors import DeadlockError, LivelockError

# More settles than this in one instant means that time stands still.
SETTLES_PER_INSTANT = 64


class Core:
    """Rules of one run over ``graph``; see the module docstring for the protocol."""

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
        self.inflight = 0  # armed flows: what can still move without outside help
        self.scheduled = 0  # launches a driver will still deliver by itself (host issue times)
        self.driver: Driver | None = None
        self._dirty: set[int] = set()
        self._flows: dict[int, Flow] = {}  # collectives that have begun to gather
        self._wanted = [wanted_sms(c.terms, float(models[0].gpu.sms)) for c in graph.classes]
        self.lead_ps = [round(c.lead_s * 1e12) for c in graph.classes]
        self._gap_ps = [round(c.gap_s * 1e12) for c in graph.classes]
        self._settled_ps = -1
        self._settles = 0

    def start(self, driver: Driver) -> None:
        """Attach the driver and put every GPU on its idle power."""
        self.driver = driver
        self._finished = driver.finished
        for index in range(len(self.gpus)):
            self._touch(index)

    def submit(self, op: int, now_ps: int) -> None:
        """The kernel is at the head of its queue and its predecessors are done: it asks for SMs."""
        graph = self.graph
        collective = graph.op_collective[op]
        if collective < 0:
            flow = Flow(-1, 1)
        else:
            known = self._flows.get(collective)
            if known is None:
                known = self._flows[collective] = Flow(collective, len(graph.collective_members[collective]))
            flow = known
        class_id = graph.op_class[op]
        gpu = self.gpus[graph.op_gpu[op]]
        entry = Entry(op, class_id, gpu, flow, self._wanted[class_id], now_ps)
        entry.key = (graph.classes[class_id].priority, now_ps, op)
        gpu.waiting.append(entry)
        self._touch(gpu.index)

    def change_limit(self, gpu_index: int, limit_w: float, clock_cap_hz: float) -> None:
        """A governor moves the power target or the clock cap of one GPU."""
        gpu = self.gpus[gpu_index]
        if gpu.limit_w != limit_w or gpu.clock_cap_hz != clock_cap_hz:
            gpu.limit_w = limit_w
            gpu.clock_cap_hz = clock_cap_hz
            self._touch(gpu_index)

    def due(self, flows: list[Flow], now_ps: int) -> None:
        """An armed moment has come: flows end, or their tails let idle SMs go. Void arms are ignored."""
        for flow in flows:
            if flow.due_ps == now_ps:
                self._complete(flow, now_ps)
            elif flow.release_due_ps == now_ps:
                flow.release_due_ps = -1
                for entry in flow.entries:
                    self._release_tail(entry)
                    self._touch(entry.gpu.index)

    def settle(self, now_ps: int) -> None:
        """Resolve everything that changed in this instant: grants, clocks, rates, power."""
        if now_ps == self._settled_ps:
            self._settles += 1
            if self._settles > SETTLES_PER_INSTANT:
                raise LivelockError(f"time stands still at {now_ps} ps after {self._settles} settles")
        else:
            self._settled_ps, self._settles = now_ps, 0
        for index in sorted(self._dirty):
            gpu = self.gpus[index]
            if gpu.waiting or gpu.free > 0.0:
                self._grant(gpu, now_ps)
        group = sorted(tied_together(self.gpus, self._dirty))
        self._dirty.clear()
        self._solve(group, now_ps)
        for index in group:
            if self.gpus[index].waiting:
                self._arm_tails(self.gpus[index], now_ps)
        if not self.inflight and not self.scheduled and self.left:
            raise DeadlockError(deadlock_message(self.graph, self._flows, self.gpus, self.left))

    def finish(self, now_ps: int) -> Recorder:
        """Integrate up to the last completion and hand over the records."""
        for gpu in self.gpus:
            self._integrate(gpu, now_ps)
        self.recorder.end_ps, self.recorder.energy_j = now_ps, [gpu.energy_j for gpu in self.gpus]
        return self.recorder

    # -- parts --------------------------------------------------------------------------------------------

    def _touch(self, gpu_index: int) -> None:
        if not self._dirty:  # a dirty GPU means that a settle is on its way
            assert self.driver is not None
            self.driver.want_settle()
        self._dirty.add(gpu_index)

    def _grant(self, gpu: Gpu, now_ps: int) -> None:
        """Hand free SMs to waiting kernels by (priority, ready time, kernel); then let running ones grow."""
        waiting = gpu.waiting
        if len(waiting) == 1 and waiting[0].wanted <= gpu.free and not gpu.scattered:
            entry = waiting.pop()
            self._give(entry, entry.wanted, now_ps)
        elif waiting:
            for entry in [entry for entry in waiting if not entry.wanted]:
                waiting.remove(entry)  # copy engines need no SM and wait for none
                self._begin(entry, now_ps)
            if len(waiting) > 1:
                waiting.sort(key=_by_key)
            self._grow([one for one in gpu.running if one.flow.collective >= 0 and one.held < one.wanted])
            for entry in list(waiting):
                terms = self.graph.classes[entry.class_id].terms
                if entry.wanted > gpu.free:
                    self._integrate(gpu, now_ps)
                    displace(gpu, entry, entry.wanted, self.graph.classes)
                give = first_sms(entry, terms)
                if give <= 0.0:
                    break  # first come, first served within the GPU: nobody overtakes
                waiting.remove(entry)
                if give < entry.wanted and entry.flow.collective < 0 and terms.quantised:
                    whole = self._wanted[entry.class_id]
                    waiting.append(split_off(entry, terms, give, whole, gpu.clock_cap_hz))
                self._give(entry, give, now_ps)
        if gpu.free > 0.0:
            self._grow([one for one in gpu.running if one.held < one.wanted])

    def _give(self, entry: Entry, sms: float, now_ps: int) -> None:
        entry.gpu.free -= sms
        entry.held = sms
        self._begin(entry, now_ps)

    def _grow(self, entries: list[Entry]) -> None:
        """Blocks that have waited for SMs, of kernels that run, get those that are free."""
        for entry in sorted(entries, key=_by_key) if len(entries) > 1 else entries:
            grow = more_sms(entry, self.graph.classes[entry.class_id].terms)
            if grow > 0.0 and entry.held == entry.sms:
                entry.gpu.free -= grow
                entry.held += grow
                entry.sms = entry.held

    def _begin(self, entry: Entry, now_ps: int) -> None:
        flow = entry.flow
        self._integrate(entry.gpu, now_ps)
        entry.sms = entry.held
        entry.start_ps = now_ps
        entry.gpu.running.append(entry)
        if flow.collective < 0 and self.graph.classes[entry.class_id].terms.cluster > 1:
            entry.gpu.scattered = entry.gpu.free
        if entry.split is not None:
            entry.split.begun.append(entry)
            share_out(entry.split, self.graph.classes[entry.class_id].terms, now_ps)
        flow.entries.append(entry)
        flow.missing -= 1
        flow.updated_ps = now_ps
        if flow.collective >= 0 and not flow.missing:
            for member in flow.entries:
                self._dirty.add(member.gpu.index)

    def _arm_tails(self, gpu: Gpu, now_ps: int) -> None:
        """Somebody waits for SMs: running kernels let go of those that their last round does not need."""
        for entry in gpu.running:
            flow, terms = entry.flow, self.graph.classes[entry.class_id].terms
            if flow.collective >= 0 or not terms.quantised or flow.rate == 0.0 or entry.held < entry.sms:
                continue
            last, needed = last_round(entry, terms, self._wanted[entry.class_id])
            if needed >= entry.held:
                continue
            left = flow.left - flow.rate * (now_ps - flow.updated_ps) - last
            due = now_ps + max(1, math.ceil(left / flow.rate))
            if due < flow.due_ps and due != flow.release_due_ps:
                flow.release_due_ps = due
                assert self.driver is not None
                self.driver.arm([flow], due)

    def _release_tail(self, entry: Entry) -> None:
        terms = self.graph.classes[entry.class_id].terms
        _, needed = last_round(entry, terms, self._wanted[entry.class_id])
        entry.gpu.free += entry.held - needed
        entry.held = needed

    def _solve(self, group: list[int], now_ps: int) -> None:
        gpus = self.gpus
        solved: list[tuple[Gpu, GpuState]] = []
        tied: set[Flow] = set()
        for index in group:
            gpu = gpus[index]
            running = gpu.running
            if len(running) > 1:
                running.sort(key=_canonical)
            key = tuple([(e.class_id, e.sms, e.flow.missing > 0, e.fill) for e in running])
            state = gpu.model.solve(key, gpu.limit_w, gpu.clock_cap_hz)
            solved.append((gpu, state))
            for entry in running:
                if entry.flow.collective >= 0 and not entry.flow.missing:
                    tied.add(entry.flow)
        paces = common_paces(solved, tied) if tied and len(solved) > 1 else {}
        driver = self.driver
        assert driver is not None
        arms: dict[int, list[Flow]] = {}
        for gpu, state in solved:
            if gpu.state is not state:
                self._integrate(gpu, now_ps)
                gpu.state = state
                recorder = self.recorder
                recorder.step_gpu.append(gpu.index)
                recorder.step_time_ps.append(now_ps)
                recorder.step_state.append(state.index)
            for entry, power_w, rate in zip(gpu.running, state.kernel_power_w, state.rates, strict=True):
                entry.power_w = power_w
                flow = entry.flow
                if paces and flow in paces:
                    rate = paces[flow]
                if (flow.rate != rate or flow.due_ps < 0) and not flow.missing:
                    if flow.rate:
                        flow.left = max(0.0, flow.left - flow.rate * (now_ps - flow.updated_ps))
                    else:
                        self.inflight += 1
                    flow.updated_ps = now_ps
                    flow.rate = rate
                    due = now_ps + max(1, math.ceil(flow.left / rate - 1e-6))
                    if due != flow.due_ps:
                        flow.due_ps = due
                        if due in arms:
                            arms[due].append(flow)
                        else:
                            arms[due] = [flow]
        for due, flows in arms.items():
            driver.arm(flows, due)

    def _integrate(self, gpu: Gpu, now_ps: int) -> None:
        elapsed = now_ps - gpu.integrated_ps
        if elapsed:
            seconds = elapsed * 1e-12
            assert gpu.state is not None
            for entry in gpu.running:
                entry.energy_j += entry.power_w * seconds
            if not gpu.running:
                self.recorder.idle_energy_j[gpu.index] += gpu.state.power_w * seconds
            gpu.energy_j += gpu.state.power_w * seconds
            gpu.integrated_ps = now_ps

    def energy_until_now(self, gpu_index: int, now_ps: int) -> float:
        """Joules of one GPU from the start of the run to now."""
        gpu = self.gpus[gpu_index]
        self._integrate(gpu, now_ps)
        return gpu.energy_j

    def _complete(self, flow: Flow, now_ps: int) -> None:
        self.inflight -= 1
        flow.due_ps = -1
        recorder, finished = self.recorder, self._finished
        if flow.collective >= 0:
            del self._flows[flow.collective]
        for entry in flow.entries:
            gpu = entry.gpu
            if gpu.integrated_ps != now_ps:
                self._integrate(gpu, now_ps)
            gpu.running.remove(entry)
            gpu.free += entry.held
            gpu.scattered = 0.0
            if entry.split is not None and not entry.split.ended(entry):
                self._touch(gpu.index)
                continue
            start_ps = entry.start_ps + self._gap_ps[entry.class_id]
            recorder.span_op.append(entry.op)
            recorder.span_start_ps.append(start_ps if start_ps < now_ps else now_ps)
            recorder.span_end_ps.append(now_ps)
            recorder.span_energy_j.append(entry.energy_j)
            self._touch(gpu.index)
            finished(entry.op)
            self.left -= 1
        flow.entries.clear()  # no reference cycle stays behind: the engine runs with the collector off


def _by_key(entry: Entry) -> tuple[int, int, int]:
    return entry.key


def _canonical(entry: Entry) -> tuple[int, float, int]:
    return (entry.class_id, entry.sms, entry.op)
