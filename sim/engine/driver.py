"""The SimPy driver: environment, processes and the order of events within an instant."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from typing import Any, Protocol

from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event, EventPriority

from sim.engine.core import Core
from sim.engine.record import Recorder
from sim.engine.resources import LinkPort, SmPool, Stream
from sim.engine.state import Flow
from sim.engine.time import WholeTime

# SimPy orders events of one instant by priority. Completions come at NORMAL, then everything that follows
# from them (streams moving on) at NORMAL too, then governors, then one settle.
GOVERNOR, SETTLE = EventPriority(NORMAL + 1), EventPriority(NORMAL + 2)


class Due(Event):
    """An armed moment of some flows. Void ones stay in SimPy's queue and are ignored when they surface."""

    def __init__(self, env: WholeTime, flows: list[Flow], delay: int, callback: Callable[[Any], None]) -> None:
        # What simpy.events.Timeout does in its constructor; private fields are touched only here.
        self.env = env
        self.callbacks = [callback]
        self._ok = True
        self._value = None
        self.flows = flows
        env.schedule(self, NORMAL, delay)


class Tick(Event):
    """A governor's pause: wakes after everything else of its instant, before the settle."""

    def __init__(self, env: WholeTime, delay: int) -> None:
        self.env = env
        self.callbacks: list[Callable[[Any], None]] = []
        self._ok = True
        self._value = None
        env.schedule(self, GOVERNOR, delay)


class Governor(Protocol):
    """A power or clock controller: a process beside the streams."""

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        """The SimPy process; it must end when ``engine.done`` is true."""


class Engine:
    """Runs a :class:`Core` on SimPy until its last kernel has ended."""

    def __init__(self, core: Core, governor: Governor | None = None) -> None:
        self.core = core
        self.env = WholeTime()
        graph = core.graph
        self.pools = [SmPool(self.env, int(gpu.free)) for gpu in core.gpus]
        self.ports = [LinkPort(self.env, gpu.model.gpu.link_bytes_per_s) for gpu in core.gpus]
        self.blocked = dict(graph.predecessor_count)
        self.streams = [Stream(self, queue) for queue in range(len(graph.queue_ops))]
        self._governor = governor
        self._settle_pending = False
        self._last_ps = 0

    @property
    def done(self) -> bool:
        """True once every kernel has ended."""
        return self.core.left == 0

    def run(self) -> Recorder:
        """Run to the last completion; errors of the core come through as they are."""
        env = self.env
        for stream in self.streams:
            env.process(stream.serve())
        if self._governor is not None:
            env.process(self._governor.process(self))
        self.core.start(self)
        collecting = gc.isenabled()
        gc.disable()  # nothing the loop makes is cyclic; collecting would cost 7 %
        try:
            step = env.step
            while self.core.left:
                step()
        except EmptySchedule:
            self.core.settle(self._last_ps)  # names what is stuck
        finally:
            if collecting:
                gc.enable()
        return self.core.finish(self._last_ps)

    # -- what the core asks for ---------------------------------------------------------------------------

    def arm(self, flows: list[Flow], due_ps: int) -> None:
        """Have ``core.due(flows)`` called at ``due_ps``."""
        Due(self.env, flows, due_ps - self.env.now, self._on_due)

    def finished(self, op: int) -> None:
        """Wake the stream of ``op`` and whoever waits for it."""
        _core, graph = self.core, self.core.graph
        self._last_ps = self.env.now
        self.pools[graph.op_gpu[op]].leave(op)
        if graph.op_collective[op] >= 0:
            self.ports[graph.op_gpu[op]].users.discard(graph.op_collective[op])
        for successor in graph.successors.get(op, ()):
            left = self.blocked[successor] - 1
            self.blocked[successor] = left
            if not left:
                stream = self.streams[graph.op_queue[successor]]
                if stream.waiting_for == successor and stream.ready is not None:
                    stream.ready.succeed()
                    stream.ready = None

    def want_settle(self) -> None:
        """Settle once, after everything else of this instant."""
        if not self._settle_pending:
            self._settle_pending = True
            event = Event(self.env)
            event._ok, event._value = True, None
            event.callbacks = [self._on_settle]
            self.env.schedule(event, SETTLE)

    def _on_due(self, event: Due) -> None:
        self.core.due(event.flows, self.env.now)

    def _on_settle(self, _: Event) -> None:
        self._settle_pending = False
        self.core.settle(self.env.now)
