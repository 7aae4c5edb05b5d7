"""Bandwidth that transfers share: what the memory and the link ports of a GPU have in common.

A transfer is a SimPy put that stays in the queue while its bytes move and fires when all have. By itself the resource
moves them: at every change it divides its bandwidth anew. In the engine a kernel paces its transfers, because its
arithmetic and its other transfers hold them up too: its request stands in the queue of all that its bytes cross until
it ends, and the core asks the same rule for shares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from simpy.core import Environment

from sim.engine.resources.arbitration import Ask, Give, Moving, Rounds, fire, offer

# A transfer with at most this share left has ended (floating-point rounding).
DONE = 1e-9


class Shares(Protocol):
    """A sharing rule with its capacity (bytes per unit of time)."""

    @property
    def bytes_per_s(self) -> float:
        """The capacity."""

    def asked(self, demands: Sequence[float], weights: Sequence[float], few: Sequence[bool], /) -> Sequence[float]:
        """The rates that transfers with ``demands`` request beside each other; ``few``: of kernels with few blocks."""

    def divide(self, asked: Sequence[float], weights: Sequence[float], /) -> Sequence[float]:
        """Bytes per unit of time of each: ``asked`` itself where nobody gets less."""


class Transfer(Ask):
    """Bytes in transfer: fires when all have moved."""

    def __init__(self, resource: Bandwidth[Any], size: float, demand: float, weight: float, few: bool) -> None:
        self.left = self.size = size
        self.demand, self.weight, self.few = demand, weight, few
        self.rate = 0.0
        self.since = resource._env.now
        super().__init__(resource)

    def moved(self, now: int | float) -> bool:
        """Advance the transfer to ``now``; True when no byte is left."""
        self.left -= self.rate * (now - self.since)
        self.since = now
        return self.left <= DONE * self.size


class Stop(Give):
    """The cancellation of a transfer."""

    def __init__(self, resource: Bandwidth[Any], transfer: Transfer) -> None:
        self.transfer = transfer
        super().__init__(resource)


Rule = TypeVar("Rule", bound=Shares)


class Bandwidth(Moving, Generic[Rule]):
    """Bandwidth under a rule; ``paced`` by kernels of the engine, or by itself."""

    def __init__(self, env: Environment, shares: Rule, *, paced: bool = False, rounds: Rounds | None = None) -> None:
        super().__init__(env, shares.bytes_per_s, rounds, paced=paced)
        self.shares = shares

    def move(self, size: float, *, demand: float = math.inf, weight: float = 1.0, few: bool = False) -> Transfer:
        """Move ``size`` bytes, at most ``demand`` per unit of time; yield the answer to wait until they have moved."""
        return Transfer(self, size, min(demand, self.shares.bytes_per_s), weight, few)

    def stop(self, transfer: Transfer) -> Stop:
        """Cancel a transfer; its ``left`` keeps the bytes that have not moved."""
        return Stop(self, transfer)

    def _do_put(self, event: Transfer) -> bool:
        """Advance a transfer, and fire it when all its bytes have moved."""
        if event.moved(self._env.now):
            fire(event)
        return True

    def _do_get(self, event: Stop) -> bool:
        """Take a transfer out of the queue."""
        event.transfer.moved(self._env.now)
        if event.transfer in self.put_queue:
            self.put_queue.remove(event.transfer)
        self._trigger_put(event)
        return True

    def arbitrate(self) -> None:
        """Advance all transfers, divide the bandwidth among those left, and schedule the end of the first one."""
        offer(self, None)
        moving = self.put_queue
        if moving:
            weights = [transfer.weight for transfer in moving]
            asked = self.shares.asked(
                [transfer.demand for transfer in moving], weights, [transfer.few for transfer in moving]
            )
            granted = self.shares.divide(asked, weights)
            for transfer, rate in zip(moving, granted, strict=True):
                transfer.rate = rate
            self.come_again([transfer.left / transfer.rate for transfer in moving if transfer.rate])


def share(demands: Sequence[float], weights: Sequence[float], capacity: float) -> Sequence[float]:
    """Weighted max-min fair shares of ``capacity``, no one above its demand (progressive filling).

    They are ``demands`` itself where these fit in.

    >>> share([10.0, 1.0, 10.0], [1.0, 1.0, 2.0], 13.0)
    [4.0, 1.0, 8.0]
    """
    if math.fsum(demands) <= capacity:
        return demands
    granted = list(demands)
    open_ = [i for i, demand in enumerate(demands) if demand > 0.0]
    left = capacity
    while open_:
        level = left / math.fsum([weights[i] for i in open_])
        capped = [i for i in open_ if demands[i] <= level * weights[i]]
        if not capped:
            for i in open_:
                granted[i] = level * weights[i]
            break
        left -= math.fsum([demands[i] for i in capped])
        open_ = [i for i in open_ if i not in capped]
    return granted
