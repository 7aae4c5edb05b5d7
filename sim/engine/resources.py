"""SM pools, streams and link ports as SimPy resources.

The pools do not share by themselves: requests queue here, and the core grants them all together at the end
of an instant (:meth:`sim.engine.core.Core.settle`), because who gets which SMs must not depend on the order
in which simultaneous requests happen to be created.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from simpy.events import Event, Timeout
from simpy.resources.base import BaseResource, Get, Put

from sim.engine.time import WholeTime

if TYPE_CHECKING:
    from sim.engine.driver import Engine


class Occupancy(Event):
    """A kernel's stay on its GPU: asked for when it reaches the head of its stream, fires when it has ended."""

    __slots__ = ("op",)

    def __init__(self, env: WholeTime, op: int) -> None:
        super().__init__(env)
        self.op = op


class _Granted(BaseResource[Put[Any], Get[Any]]):
    """A resource that the core shares out: nothing is put or got event by event."""

    def _do_put(self, event: Any) -> bool:
        raise AssertionError(f"{event}: the core grants {type(self).__name__}")

    _do_get = _do_put


class SmPool(_Granted):
    """The SMs of one GPU: a priority pool with partial, block-level grants."""

    def __init__(self, env: WholeTime, capacity: int) -> None:
        super().__init__(env, capacity)
        self.env = env
        self.users: dict[int, Occupancy] = {}

    def occupy(self, op: int) -> Occupancy:
        """Ask for the SMs of ``op``; yield the answer to wait until the kernel has ended."""
        stay = Occupancy(self.env, op)
        self.users[op] = stay
        return stay

    def leave(self, op: int) -> None:
        """The kernel has ended: its SMs are back in the pool and its stream goes on."""
        self.users.pop(op).succeed()


class LinkPort(_Granted):
    """One GPU's NVLink port: collectives attach while they run, and share it max-min fairly."""

    def __init__(self, env: WholeTime, capacity: float) -> None:
        super().__init__(env, capacity)
        self.users: set[int] = set()


class Stream(_Granted):
    """One in-order queue of one GPU: capacity one, served by :meth:`serve` as a process."""

    def __init__(self, engine: Engine, queue: int) -> None:
        super().__init__(engine.env, 1)
        self.engine = engine
        self.queue = queue
        self.ready: Event | None = None
        self.waiting_for = -1

    def serve(self) -> Generator[Event, Any, None]:
        """Run this queue's kernels one after another: host issue, predecessors, SMs, end."""
        engine = self.engine
        env, core, graph = engine.env, engine.core, engine.core.graph
        pool = engine.pools[graph.queue_gpu[self.queue]]
        port, collective = engine.ports[graph.queue_gpu[self.queue]], graph.op_collective
        issue, blocked, submit = graph.issue_ps, engine.blocked, core.submit
        for op in graph.queue_ops[self.queue]:
            if issue is not None and issue[op] > env.now:
                core.scheduled += 1
                yield Timeout(env, issue[op] - env.now)
                core.scheduled -= 1
            if blocked.get(op):
                self.ready = Event(env)
                self.waiting_for = op
                yield self.ready
            lead_ps = core.lead_ps[graph.op_class[op]]
            if lead_ps:
                core.scheduled += 1
                yield Timeout(env, lead_ps)
                core.scheduled -= 1
            if collective[op] >= 0:
                port.users.add(collective[op])
            submit(op, env.now)
            yield pool.occupy(op)
