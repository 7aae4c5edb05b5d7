"""Resources that decide once an instant, after all requests and releases of that instant.

SimPy calls a resource's ``_do_put`` as soon as a request is made: the first of several simultaneous requests would win
because its process was created first. A resource here answers SimPy's call (``_trigger_put``) by asking for
an arbitration: one event at the present instant with a lower priority (:data:`ARBITRATE`) than requests, releases and
governors have, or, where a driver's loop holds the :class:`Rounds`, a call once no such event of the instant is left.
Then SimPy's own loop offers every waiting request to ``_do_put``, in the order of the queue. Releases (``_do_get``) are
applied at once: their order has no effect.

Releases, and transfers that end while no process waits for them, are not scheduled as events; a process that yields
one continues at once, as with any event that SimPy has processed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappush
from operator import attrgetter
from typing import Any

from simpy.core import Environment
from simpy.events import NORMAL, PENDING, EventPriority

from sim.engine.simpy_base import BaseResource, Event, Get, Put

# SimPy orders events of one instant by priority: completions, requests and releases at NORMAL, then governors, then
# arbitration (whose grants are NORMAL again).
GOVERNOR, ARBITRATE = EventPriority(NORMAL + 1), EventPriority(NORMAL + 2)


def prepare(resource: BaseResource[Any, Any], env: Environment, capacity: float) -> None:
    """What SimPy's constructor of a resource does, but that it also binds the class's requests to the instance once
    more: a cycle that only the collector frees, and most of the time that it takes."""
    resource._env, resource._capacity = env, capacity
    resource.put_queue, resource.get_queue = resource.PutQueue(), resource.GetQueue()


class Moment(Event):
    """An event scheduled when it is made: now or after ``delay``, with a priority among events of its instant."""

    def __init__(
        self, env: Environment, callbacks: list[Callable[[Any], None]], priority: EventPriority, delay: int | float = 0
    ) -> None:
        # What simpy.events.Timeout does in its constructor; SimPy's private fields are written only here.
        self.env = env
        self.callbacks = callbacks
        self._ok = True
        self._value = None
        heappush(env._queue, (env._now + delay, priority, next(env._eid), self))  # what env.schedule does


class Ask(Put["Arbitrated"]):
    """A request: as simpy.resources.base.Put, but its grant does not trigger releases, of which none ever waits."""

    def __init__(self, resource: Arbitrated) -> None:
        self.env = env = resource._env
        self.callbacks = []
        self._value = PENDING
        self.resource = resource
        self.proc = env._active_proc
        resource.put_queue.append(self)
        resource._trigger_put(None)


class Give(Get["Arbitrated"]):
    """A release: applied at once, so that it is never queued and has succeeded when it is made."""

    callbacks: Any

    def __init__(self, resource: Arbitrated) -> None:
        self.env = resource._env
        self.callbacks = self._value = None  # what SimPy sets once an event is processed
        self._ok = True
        self.resource = resource
        resource._do_get(self)


def fire(event: Event) -> None:
    """Let ``event`` succeed, through SimPy's schedule if a process waits for it."""
    if event.callbacks:
        event.succeed()
    else:
        event._ok, event._value, event.callbacks = True, None, None  # type: ignore[assignment]  # likewise


class Rounds:
    """The arbitrations of an environment: one an instant for all resources that share it.

    Each is an event, unless the loop of a driver holds them: ``driven``.
    """

    def __init__(self, env: Environment, *, driven: bool = False) -> None:
        self.env = env
        self.driven = driven
        self.asked: list[Arbitrated] = []  # resources with something to decide at the end of this instant
        self.tails: dict[int | float, Moment] = {}  # starts of last rounds of tiles, of all pools

    def ask(self, resource: Arbitrated) -> None:
        """Have ``resource.arbitrate()`` called once at the end of this instant."""
        if not resource.asked:
            resource.asked = True
            self.asked.append(resource)
            if not self.driven and len(self.asked) == 1:
                Moment(self.env, [self.hold], ARBITRATE)

    def hold(self, _: Event | None = None) -> None:
        """Let the resources decide."""
        asked, self.asked = self.asked, []
        if len(asked) > 1:
            asked.sort(key=_by_place)
        for resource in asked:
            resource.arbitrate()  # requests made meanwhile wait for the next arbitration
            resource.asked = False


class Arbitrated(BaseResource[Any, Any]):
    """A resource that offers waiting requests to ``_do_put`` once an instant; ``place`` orders it among others."""

    def __init__(self, env: Environment, capacity: float, rounds: Rounds | None = None, place: int = 0) -> None:
        prepare(self, env, capacity)
        self.rounds = rounds or Rounds(env)
        self.place = place
        self.asked = False

    def _trigger_put(self, _: Any) -> None:
        self.rounds.ask(self)

    def arbitrate(self) -> None:
        """Offer the waiting requests to ``_do_put`` in turn, until it refuses one."""
        offer(self, None)


class Moving(Arbitrated):
    """A resource through which bytes move, ``paced`` by kernels of the engine or by itself."""

    def __init__(self, env: Environment, capacity: float, rounds: Rounds | None = None, *, paced: bool = False) -> None:
        super().__init__(env, capacity, rounds)
        self.paced = paced

    def _trigger_put(self, _: Any) -> None:
        if not self.paced:
            self.rounds.ask(self)

    def come_again(self, ends: Sequence[float]) -> None:
        """Schedule the next arbitration at the first of ``ends``, which count from now."""
        first = min(ends, default=math.inf)
        if first < math.inf:
            Moment(self._env, [self._again], NORMAL, first)

    def _again(self, _: Moment) -> None:
        self.rounds.ask(self)


offer = BaseResource._trigger_put  # SimPy's loop over the waiting requests


_by_place = attrgetter("place")
