"""SimPy's environment over whole units of time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop
from itertools import count
from typing import Protocol

from sim.engine.simpy_base import Environment


class Unfinished(Protocol):
    """Something that is done once nothing is left of it."""

    left: int


class WholeTime(Environment):
    """Time counts whole units (picoseconds in the engine, nanoseconds in replays), so that sums of it are exact.

    >>> WholeTime(5).now
    5
    """

    _now: int

    def __init__(self, initial_time: int = 0) -> None:
        # What SimPy's constructor does, but that it also binds the class's events to the instance once more: a cycle,
        # and half of the time that it takes.
        self._now = initial_time
        self._queue = []
        self._eid = count()
        self._active_proc = None

    @property
    def now(self) -> int:
        """The present time."""
        return self._now

    def run_out(self, work: Unfinished, close: Callable[[], None]) -> bool:
        """Process events until nothing is left of ``work``; False where events run out before.

        SimPy's ``step`` in a loop, without a call an event. ``close`` is called whenever all events of an instant are
        processed; it may schedule further ones.
        """
        queue, now = self._queue, self._now
        while work.left:
            if not queue or queue[0][0] != now:
                close()
                if not queue:
                    return False
            now, _, _, event = heappop(queue)  # type: ignore[assignment]  # whole units
            self._now = now
            callbacks = event.callbacks
            event.callbacks = None  # type: ignore[assignment]  # what SimPy sets once an event is processed
            for callback in callbacks:
                callback(event)
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value
        return True
