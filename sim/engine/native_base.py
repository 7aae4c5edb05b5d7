"""What stands in for the classes of :mod:`sim.engine.simpy_base` in a compiled engine: SimPy's, as classes of C.

SimPy's own are classes of Python: their fields are found by name in a dictionary, and so would be those of all
compiled classes that extend them. These do the same in the same order, and SimPy's processes, conditions and
timeouts take them for its own, since they ask for fields and not for types. Fields have SimPy's names.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from heapq import heappush
from itertools import count
from typing import Any, ClassVar, Generic, TypeVar

import simpy
from simpy.core import Environment
from simpy.events import NORMAL, PENDING, Condition

ResourceType = TypeVar("ResourceType")
PutType = TypeVar("PutType")
GetType = TypeVar("GetType")


class NativeEvent:
    """As :class:`simpy.events.Event`."""

    env: Any
    callbacks: Any
    _ok: bool
    _value: Any
    _defused: bool

    def __init__(self, env: Any) -> None:
        self.env = env
        self.callbacks = []
        self._value = PENDING

    @property
    def triggered(self) -> bool:
        """Whether it has a value."""
        return self._value is not PENDING

    @property
    def processed(self) -> bool:
        """Whether its callbacks have been called."""
        return self.callbacks is None

    @property
    def ok(self) -> bool:
        """Whether it has succeeded."""
        return self._ok

    @property
    def value(self) -> Any:
        """Its value, once it has one."""
        if self._value is PENDING:
            raise AttributeError(f"value of {self} is not yet available")
        return self._value

    def succeed(self, value: Any = None) -> Any:
        """Give it a value, and schedule its callbacks at the present time."""
        if self._value is not PENDING:
            raise RuntimeError(f"{self} has already been triggered")
        self._ok = True
        self._value = value
        self.env.schedule(self)
        return self

    def __and__(self, other: Any) -> Any:
        """Both."""
        return Condition(self.env, Condition.all_events, [self, other])  # type: ignore[list-item]

    def __or__(self, other: Any) -> Any:
        """One of the two."""
        return Condition(self.env, Condition.any_events, [self, other])  # type: ignore[list-item]


class NativePut(NativeEvent, Generic[ResourceType]):
    """As :class:`simpy.resources.base.Put`."""

    resource: Any
    proc: Any

    def __init__(self, resource: Any) -> None:
        super().__init__(resource._env)
        self.resource = resource
        self.proc = self.env.active_process
        resource.put_queue.append(self)
        self.callbacks.append(resource._trigger_get)
        resource._trigger_put(None)


class NativeGet(NativeEvent, Generic[ResourceType]):
    """As :class:`simpy.resources.base.Get`."""

    resource: Any
    proc: Any

    def __init__(self, resource: Any) -> None:
        super().__init__(resource._env)
        self.resource = resource
        self.proc = self.env.active_process
        resource.get_queue.append(self)
        self.callbacks.append(resource._trigger_put)
        resource._trigger_get(None)


class NativeBaseResource(Generic[PutType, GetType]):
    """As :class:`simpy.resources.base.BaseResource`."""

    PutQueue: ClassVar[Any] = list
    GetQueue: ClassVar[Any] = list
    _env: Any
    _capacity: Any
    put_queue: Any
    get_queue: Any

    def __init__(self, env: Any, capacity: float) -> None:
        self._env = env
        self._capacity = capacity
        self.put_queue = self.PutQueue()
        self.get_queue = self.GetQueue()

    @property
    def capacity(self) -> Any:
        """Most that it holds."""
        return self._capacity

    def _do_put(self, event: Any) -> bool:
        raise NotImplementedError(self)

    def _trigger_put(self, _: Any) -> None:
        place = 0
        while place < len(self.put_queue):
            event = self.put_queue[place]
            proceed = self._do_put(event)
            if not event.triggered:
                place += 1
            elif self.put_queue.pop(place) is not event:
                raise RuntimeError("Put queue invariant violated")
            if not proceed:
                break

    def _do_get(self, event: Any) -> bool:
        raise NotImplementedError(self)

    def _trigger_get(self, _: Any) -> None:
        place = 0
        while place < len(self.get_queue):
            event = self.get_queue[place]
            proceed = self._do_get(event)
            if not event.triggered:
                place += 1
            elif self.get_queue.pop(place) is not event:
                raise RuntimeError("Get queue invariant violated")
            if not proceed:
                break


class NativeEnvironment:
    """As :class:`simpy.core.Environment`, whose loop it borrows; time is an integer."""

    _now: int
    _queue: Any
    _eid: Any
    _active_proc: Any

    def __init__(self, initial_time: int = 0) -> None:
        self._now = initial_time
        self._queue = []
        self._eid = count()
        self._active_proc = None

    @property
    def now(self) -> int:
        """The present time."""
        return self._now

    @property
    def active_process(self) -> Any:
        """The process that runs at present."""
        return self._active_proc

    def schedule(self, event: Any, priority: int = NORMAL, delay: int = 0) -> None:
        """Put an event into the queue."""
        heappush(self._queue, (self._now + delay, priority, next(self._eid), event))

    def peek(self) -> float:
        """The time of the next event."""
        return Environment.peek(self)  # type: ignore[arg-type]

    def step(self) -> None:
        """Process the next event."""
        Environment.step(self)  # type: ignore[arg-type]

    def run(self, until: Any = None) -> Any:
        """Process events until ``until``."""
        return Environment.run(self, until)  # type: ignore[arg-type]

    def process(self, generator: Generator[Any, Any, Any]) -> Any:
        """Start a process."""
        return simpy.Process(self, generator)  # type: ignore[arg-type]

    def timeout(self, delay: int = 0, value: Any = None) -> Any:
        """An event after ``delay``."""
        return simpy.Timeout(self, delay, value)  # type: ignore[arg-type]

    def event(self) -> Any:
        """An event that someone else triggers."""
        return simpy.Event(self)  # type: ignore[arg-type]

    def all_of(self, events: Iterable[Any]) -> Any:
        """All of several events."""
        return simpy.AllOf(self, events)  # type: ignore[arg-type]

    def any_of(self, events: Iterable[Any]) -> Any:
        """One of several events."""
        return simpy.AnyOf(self, events)  # type: ignore[arg-type]
