"""A stream as a SimPy resource: kernels that a host launches, started in order, one at a time.

A launch is of one kernel or, of a graph, of many at once. The front end of the GPU requests turns: a turn fires with
the next kernel once that is launched and the one before it has ended. A stream that holds ``capacity`` kernels makes
the host wait.

>>> from simpy import Environment
>>> env = Environment()
>>> stream = Stream(env)
>>> def host():
...     yield stream.launch(["product", "all-reduce"])
...     yield env.timeout(9)
...     yield stream.launch(["copy"])
>>> def front_end():
...     for _ in range(3):
...         kernel = yield stream.turn()
...         print(env.now, kernel)
...         yield env.timeout(2)
...         stream.end()
>>> processes = env.process(host()), env.process(front_end())
>>> env.run()
0 product
2 all-reduce
9 copy
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from simpy.core import Environment
from simpy.events import PENDING

from sim.engine.resources.arbitration import prepare
from sim.engine.simpy_base import BaseResource, Get, Put


class Launch(Put["Stream"]):
    """Kernels that the host launches: fires when they are in the stream."""

    def __init__(self, stream: Stream, kernels: Sequence[Any]) -> None:
        self.kernels = kernels
        super().__init__(stream)


class Turn(Get["Stream"]):
    """Fires with the next kernel when its turn has come; one that knows who takes it calls ``taker`` instead."""

    def __init__(self, stream: Stream, taker: Callable[[Any], None] | None = None) -> None:
        self._value = PENDING
        self.taker = taker
        # What simpy.resources.base.Get does, but that the stream itself lets waiting launches in.
        self.env = env = stream._env
        self.callbacks = []
        self.resource = stream
        self.proc = env._active_proc
        stream.get_queue.append(self)
        if not stream.busy:
            stream._trigger_get(None)


class Stream(BaseResource[Launch, Turn]):
    """Launched kernels in order; see the module docstring. Requests are served at once, in the order of the calls."""

    def __init__(self, env: Environment, capacity: float = math.inf) -> None:
        prepare(self, env, capacity)
        self.waiting: deque[Any] = deque()  # kernels launched that have not had their turn
        self.busy = False

    def launch(self, kernels: Sequence[Any]) -> Launch:
        """Put kernels at the end of the stream."""
        return Launch(self, kernels)

    def turn(self) -> Turn:
        """Ask for the next kernel."""
        return Turn(self)

    def turns(self, taker: Callable[[Any], None]) -> Turn:
        """One request for all kernels: it stays in the queue, and ``taker`` is called with each in order."""
        return Turn(self, taker)

    def end(self) -> None:
        """The running kernel has ended."""
        self.busy = False
        if self.waiting:
            self._trigger_get(None)

    def _do_put(self, event: Launch) -> bool:
        """Take launched kernels in, if there is room; a launch beyond the capacity only when no kernel waits."""
        if self.waiting and len(self.waiting) + len(event.kernels) > self.capacity:
            return False
        self.waiting.extend(event.kernels)
        event.succeed()
        return True

    def _do_get(self, event: Turn) -> bool:
        """Start the next kernel, unless one still runs or none is launched."""
        if self.busy or not self.waiting:
            return False
        self.busy = True
        kernel = self.waiting.popleft()
        if event.taker is None:
            event.succeed(kernel)
        else:
            event.taker(kernel)
        if self.put_queue:
            self._trigger_put(None)
        return True

    def _trigger_get(self, _: Any) -> None:
        """SimPy's loop over the waiting turns; one that has not fired asks for further kernels and keeps its place."""
        queue = self.get_queue
        while queue and self.waiting and not self.busy and self._do_get(queue[0]):
            if queue[0]._value is not PENDING:
                del queue[0]
