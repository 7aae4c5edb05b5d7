"""The copy engines of one GPU as a SimPy resource: copies that need no SM, at most ``capacity`` at a time.

Copies are served in the order of their priority and of the time at which they were asked for, once an instant
(:mod:`sim.engine.resources.arbitration`). Ports and memory, which they share too, have resources of their own.

>>> from simpy import Environment
>>> env = Environment()
>>> engines = CopyEngine(env, capacity=2)
>>> def copy(name):
...     request = engines.request()
...     yield request
...     yield env.timeout(3)
...     print(env.now, name)
...     yield engines.release(request)
>>> for name in "abc":
...     process = env.process(copy(name))
>>> env.run()
3 a
3 b
6 c
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from simpy.core import Environment

from sim.engine.resources.arbitration import Arbitrated, Rounds
from sim.engine.resources.grid import Grid
from sim.engine.resources.sm_pool import Blocks, Return
from sim.engine.resources.waiting import Waiting

NO_SMS = Grid(sms=0.0)


class CopyEngine(Arbitrated):
    """Copy engines, each of which does one copy at a time."""

    PutQueue: ClassVar[Any] = Waiting

    def __init__(
        self, env: Environment, capacity: float = math.inf, rounds: Rounds | None = None, place: int = 0
    ) -> None:
        super().__init__(env, capacity, rounds, place)
        self.users: list[Blocks] = []

    def request(self, *, priority: float = 0) -> Blocks:
        """Ask for an engine."""
        return Blocks(self, NO_SMS, (priority, self._env.now), 0.0)

    def release(self, copy: Blocks) -> Return:
        """The copy has ended."""
        return Return(self, copy)

    def _do_put(self, event: Blocks) -> bool:
        """Give the copy an engine, if one is idle."""
        if len(self.users) >= self.capacity:
            return False
        self.users.append(event)
        event.succeed()
        return True

    def _do_get(self, event: Return) -> bool:
        """The engine is idle again."""
        self.users.remove(event.blocks)
        self._trigger_put(event)
        return True

    def _trigger_put(self, _: Any) -> None:
        if self.put_queue:
            self.rounds.ask(self)
