"""The network between nodes as SimPy resources: ports of NICs and switches, and transfers that cross several of them.

A transfer (:class:`Crossing`) has streams of equal rate, so many on each port. It stands in the queue of every port
that it crosses, and each port computes the rate per stream at which its bandwidth is used up; streams of the port with
the lowest rate get that rate, those of the others share the rest (max-min). Shares are divided once an instant.

>>> from simpy import Environment
>>> env = Environment()
>>> up, down = (Port(name=name, tier="leaf", bytes_per_s=10.0) for name in ("leaf0 to spine0", "spine0 to leaf1"))
>>> network = Network(env, [up, down])
>>> def job(name, size, ports):
...     yield network.move(size, [(port, 1.0) for port in ports])
...     print(f"{env.now:.1f} {name}")
>>> for one in (job("both", 40, [up, down]), job("first", 20, [up])):
...     process = env.process(one)
>>> env.run()
4.0 first
6.0 both
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from simpy.core import Environment

from hardware.network import Port
from sim.engine.resources.arbitration import Ask, Give, Moving, Rounds, fire, offer
from sim.engine.resources.bandwidth import DONE
from sim.engine.simpy_base import BaseResource

Streams = Sequence[tuple[Port, float]]


class Crossing(Ask):
    """A transfer over several ports: fires when each of its streams has moved ``size`` bytes.

    One whose rate the engine sets ends with its kernel.
    """

    def __init__(self, network: Network, size: float, streams: Streams, demand: float) -> None:
        self.left = self.size = size
        self.streams = [(network.port(port), count) for port, count in streams]
        self.demand = demand
        self.rate = 0.0
        self.decided = False  # while shares are divided
        self.since = network._env.now
        for port, _ in self.streams:
            port.put_queue.append(self)
        super().__init__(network)

    def moved(self, now: int | float) -> bool:
        """Advance the transfer to ``now``; True when no byte is left."""
        self.left -= self.rate * (now - self.since)
        self.since = now
        return self.left <= DONE * self.size

    def go(self, rate: float) -> None:
        """Set the ``rate``, which all ports subtract."""
        self.rate, self.decided = rate, True
        for port, count in self.streams:
            port.decide(count, rate)

    def leave(self) -> None:
        """Take the transfer out of the queues of its ports."""
        for port, _ in self.streams:
            port._do_get(self)


class End(Give):
    """A transfer has ended, or is cancelled; its ``left`` keeps the bytes that have not moved."""

    def __init__(self, network: Network, crossing: Crossing) -> None:
        self.crossing = crossing
        super().__init__(network)


class NetworkPort(BaseResource[Any, Any]):
    """One port: the transfers that cross it stand in its queue, and it decides the rates of those that it holds up.

    While shares are divided it keeps the bandwidth left by decided streams, and the number of undecided ones.
    """

    def __init__(self, env: Environment, port: Port) -> None:
        super().__init__(env, port.bytes_per_s)
        self.port = port
        self.left, self.open_, self.rate = port.bytes_per_s, 0.0, 0.0

    def begin(self) -> None:
        """Begin to divide: nothing is decided."""
        self.left, self.open_ = self.port.bytes_per_s, 0.0

    @property
    def level(self) -> float:
        """The rate per stream at which the undecided ones use up the bandwidth left."""
        return max(self.left, 0.0) / self.open_ if self.open_ > DONE else math.inf

    def decide(self, count: float, rate: float) -> None:
        """A number of the undecided streams get ``rate``."""
        self.left -= count * rate
        self.open_ -= count

    def fill(self, rate: float) -> None:
        """This port is full once its undecided streams get ``rate``: offer them to ``_do_put``."""
        self.rate = rate
        offer(self, None)

    def _do_put(self, event: Crossing) -> bool:
        """Give an undecided transfer the rate of this port; it stays in the queue."""
        if not event.decided:
            event.go(self.rate)
        return True

    def _do_get(self, event: Crossing) -> bool:
        """Take a transfer out of the queue."""
        self.put_queue.remove(event)
        return True


class Network(Moving):
    """The ports of a run, ``paced`` by kernels of the engine or by itself."""

    def __init__(
        self, env: Environment, ports: Iterable[Port], *, paced: bool = False, rounds: Rounds | None = None
    ) -> None:
        super().__init__(env, math.inf, rounds, paced=paced)
        self.ports = {port: NetworkPort(env, port) for port in ports}

    def port(self, port: Port) -> NetworkPort:
        """The resource of a port, made when it is first used."""
        return self.ports.get(port) or self.ports.setdefault(port, NetworkPort(self._env, port))

    def move(self, size: float, streams: Streams, *, demand: float = math.inf) -> Crossing:
        """Move ``size`` bytes on each stream, at most ``demand`` per unit of time; yield the answer to wait."""
        return Crossing(self, size, streams, demand)

    def end(self, crossing: Crossing) -> End:
        """A transfer has ended, or is cancelled."""
        return End(self, crossing)

    def divide(self) -> None:
        """Give every transfer its max-min rate (progressive filling)."""
        for port in self.ports.values():
            port.begin()
        open_: list[Crossing] = list(self.put_queue)
        for one in open_:
            one.decided = False
            for port, count in one.streams:
                port.open_ += count
        while open_:
            ports = dict.fromkeys(port for one in open_ for port, _ in one.streams)
            level = min(port.level for port in ports)
            for one in (modest := [one for one in open_ if one.demand <= level]):
                one.go(one.demand)
            for port in [] if modest else [port for port in ports if port.level <= level]:
                port.fill(level)
            open_ = [one for one in open_ if not one.decided]

    def _do_put(self, event: Crossing) -> bool:
        """Advance a transfer, and fire it when all its bytes have moved."""
        if event.moved(self._env.now):
            event.leave()
            fire(event)
        return True

    def _do_get(self, event: End) -> bool:
        """Take a transfer out of the queues."""
        crossing = event.crossing
        if not self.paced:
            crossing.moved(self._env.now)
        if crossing in self.put_queue:
            self.put_queue.remove(crossing)
            crossing.leave()
        self._trigger_put(event)
        return True

    def arbitrate(self) -> None:
        """Advance all transfers, divide the bandwidth among those left, and schedule the end of the first one."""
        super().arbitrate()
        self.divide()
        self.come_again([one.left / one.rate for one in self.put_queue if one.rate])
