"""The SimPy driver: environment, resources, processes and the order of events within an instant."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Protocol

from simpy.events import NORMAL, Event, Timeout

from inputs.collector import collector_paused
from sim.engine.between import Between, ports_of
from sim.engine.core import Core
from sim.engine.record import Recorder
from sim.engine.resources.arbitration import GOVERNOR, Moment, Rounds
from sim.engine.resources.copy_engine import CopyEngine
from sim.engine.resources.hbm import Hbm
from sim.engine.resources.link_port import LinkPort
from sim.engine.resources.network import Network
from sim.engine.resources.sm_pool import SmPool, nothing
from sim.engine.resources.stream import Stream
from sim.engine.state import Driver, Gpu
from sim.engine.time import WholeTime


class Tick(Moment):
    """A governor's timeout: it fires after the requests and releases of its instant and before their arbitration."""

    def __init__(self, env: WholeTime, delay: int) -> None:
        super().__init__(env, [], GOVERNOR, delay)


class Governor(Protocol):
    """A power or clock controller: a process beside the streams."""

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        """The SimPy process; it must end when ``engine.done`` is true."""


class Engine(Driver):
    """Runs a :class:`Core` on SimPy until its last kernel has ended.

    Until :meth:`run`, the resources of a GPU (``core.gpus[i].pools`` and the others) may be replaced by others.
    """

    def __init__(self, core: Core, governor: Governor | None = None) -> None:
        self.core = core
        self.env = WholeTime()
        self.rounds = Rounds(self.env, driven=True)
        for place, gpu in enumerate(core.gpus):
            sizes = core.graph.partition_sms or (gpu.sms,)
            gpu.pools = [SmPool(self.env, sms, self.rounds, place) for sms in sizes]
            gpu.copy_engine = CopyEngine(self.env, rounds=self.rounds, place=place)
            gpu.hbm = Hbm(self.env, gpu.model.rules.hbm, paced=True)
            gpu.port = LinkPort(self.env, gpu.model.rules.link, paced=True)
        ports = ports_of(core.graph.classes)
        if ports:
            network = Network(self.env, ports, paced=True, rounds=self.rounds)
            core.between = Between(network, core.graph.classes, core.recorder)
        self._queue_of, self._successors = core.graph.op_queue, core.graph.successors
        self._leads_ps, self._op_class, self._submit = core.lead_ps, core.graph.op_class, core.submit
        self.blocked = dict(core.graph.predecessor_count)
        self.streams = [Stream(self.env) for _ in core.graph.queue_ops]
        self._ready: set[int] = set()  # next of their streams, with predecessors that still run
        self._leads: dict[int, list[int]] = {}  # kernels that request their resource at the same time later
        self._dues: dict[int, list[Gpu]] = {}  # GPUs on which a kernel is the first to end, by its time
        self._governor = governor
        self._last_ps = 0

    @property
    def done(self) -> bool:
        """True once every kernel has ended."""
        return self.core.left == 0

    def run(self) -> Recorder:
        """Run to the last completion; errors of the core come through as they are."""
        env, core = self.env, self.core
        for gpu in core.gpus:
            for pool in gpu.pools:
                pool.on_change = partial(core.touch, gpu.index)
        core.start(self)
        for stream, kernels in zip(self.streams, core.graph.queue_ops, strict=True):
            self._launch(stream, kernels)
            stream.turns(self._turn)
        if self._governor is not None:
            env.process(self._governor.process(self))
        try:
            with collector_paused():  # nothing the loop makes is cyclic; collecting would cost 7 %
                if not env.run_out(core, self._close):
                    core.update(self._last_ps)  # raises the deadlock error
            records = core.finish(self._last_ps)
            records.events = next(env._eid)
            return records
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Cut what refers to each other: then all is freed with the engine, without the collector."""
        for *_, event in self.env._queue:  # a process and what it waits for know each other
            event.callbacks = None  # type: ignore[assignment]  # as SimPy has it once an event is processed
        self.env._queue.clear()
        for stream in self.streams:
            stream.get_queue.clear()
        for gpu in self.core.gpus:
            for pool in gpu.pools:
                pool.on_change = nothing
        self.core.stop()

    # -- processes ----------------------------------------------------------------------------------------

    def _launch(self, stream: Stream, kernels: Sequence[int]) -> None:
        """Have the host launch a stream's kernels: all at once, as a graph does, or one by one."""
        issue_ps = self.core.graph.issue_ps
        if issue_ps is None:
            stream.launch(kernels)
        else:
            self.env.process(self._host(stream, kernels, issue_ps))

    def _host(self, stream: Stream, kernels: Sequence[int], issue: Sequence[int]) -> Generator[Event, Any, None]:
        """Launch a stream's kernels when the host comes to each."""
        env, core = self.env, self.core
        for moment, together in groupby(kernels, key=issue.__getitem__):
            if moment > env.now:
                core.scheduled += 1
                yield Timeout(env, moment - env.now)
                core.scheduled -= 1
            yield stream.launch(list(together))

    def _turn(self, op: int) -> None:
        """A kernel is the next of its stream: it waits for predecessors and its lead, then requests its resource."""
        if self.blocked.get(op):
            self._ready.add(op)
        elif lead := self._leads_ps[self._op_class[op]]:
            self._hold(op, lead)
        else:
            self._submit(op, self.env._now)

    def _hold(self, op: int, lead_ps: int) -> None:
        """Let a kernel request its resource ``lead_ps`` from now."""
        env = self.env
        due_ps = env._now + lead_ps
        if due_ps in self._leads:
            self._leads[due_ps].append(op)
        else:
            self._leads[due_ps] = [op]
            Moment(env, [self._on_lead], NORMAL, lead_ps)
        self.core.scheduled += 1

    def _close(self) -> None:
        """At the end of an instant: arbitration, whose grants are events again, then the update of rates and power."""
        env, rounds = self.env, self.rounds
        while rounds.asked:
            rounds.hold()
            if env._queue and env._queue[0][0] == env._now:
                return
        if self.core.dirty:
            self.core.update(env._now)

    # -- what the core asks for ---------------------------------------------------------------------------

    def arm(self, gpu: Gpu, due_ps: int) -> None:
        """Have ``core.due`` called with the GPU, and with others of the same time, at ``due_ps``."""
        if due_ps in self._dues:
            self._dues[due_ps].append(gpu)
        else:
            self._dues[due_ps] = [gpu]
            env = self.env
            Moment(env, [self._on_due], NORMAL, due_ps - env._now)

    def finished(self, op: int) -> None:
        """Release the stream of ``op`` and the kernels that depend on it."""
        self._last_ps = self.env._now
        self.streams[self._queue_of[op]].end()
        if op in self._successors:
            blocked, ready = self.blocked, self._ready
            for successor in self._successors[op]:
                left = blocked[successor] - 1
                blocked[successor] = left
                if not left and successor in ready:
                    ready.remove(successor)
                    self._turn(successor)

    def _on_due(self, _: Event) -> None:
        now_ps = self.env._now
        self.core.due(self._dues.pop(now_ps), now_ps)

    def _on_lead(self, _: Event) -> None:
        core, now_ps = self.core, self.env._now
        for op in self._leads.pop(now_ps):
            core.scheduled -= 1
            core.submit(op, now_ps)
