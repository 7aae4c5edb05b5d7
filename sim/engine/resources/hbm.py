"""The memory of one GPU as a SimPy resource: transfers share its bandwidth by the SMs that ask for them.

A share is in proportion to the SMs that a kernel holds times the bytes in flight of each. The few blocks of a
collective queue behind all bytes in flight of the others, so that they wait before the bandwidth is used up. Shares are
divided once an instant (:mod:`sim.engine.resources.bandwidth`).

>>> from simpy import Environment
>>> env = Environment()
>>> hbm = Hbm(env, HbmShares(bytes_per_s=8.0))
>>> def kernel(name, size, sms):
...     yield hbm.move(size, weight=sms)
...     print(f"{env.now:.1f} {name} has moved {size} bytes")
>>> for one in (kernel("wide copy", 60, sms=96), kernel("narrow copy", 40, sms=32)):
...     process = env.process(one)
>>> env.run()
10.0 wide copy has moved 60 bytes
12.5 narrow copy has moved 40 bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hardware.laws.streaming import slowdown
from sim.engine.resources.bandwidth import Bandwidth, share


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmShares:
    """The rule: weighted max-min fair, of ``mixed_share`` of the rate once several kernels share it."""

    bytes_per_s: float
    mixed_share: float = 1.0

    def divide(self, asked: Sequence[float], weights: Sequence[float]) -> Sequence[float]:
        """Bytes/s that each of several kernels gets of its demand."""
        return share(asked, weights, self.bytes_per_s * self.mixed_share)

    def asked(self, demands: Sequence[float], weights: Sequence[float], few: Sequence[bool]) -> Sequence[float]:
        """What each asks for once few blocks have queued behind the others."""
        if True not in few or len(few) == 1:
            return demands
        found, capacity = list(demands), self.bytes_per_s * self.mixed_share
        for i, one in enumerate(few):
            if one and (demand := demands[i]) > 0.0:
                others, other_weights = list(demands), list(weights)
                del others[i], other_weights[i]
                found[i] = share_behind_others(demand, weights[i], others, other_weights, capacity)
        return found

    def waits(self, loads: Sequence[float], kernels: Sequence[int]) -> list[float]:
        """Latency of each kernel's loads behind those of the others, over that in an idle memory.

        ``loads``: bytes/s that each would move through a memory without limit; ``kernels``: the kernel of each, since
        blocks that got their SMs late are a load of their own. A kernel's own loads are in its own law.

        >>> product, copy = 0.2e12, 96 * 80e9
        >>> [round(wait, 2) for wait in HbmShares(bytes_per_s=3e12).waits([product, copy], [0, 1])]
        [2.65, 1.0]
        >>> HbmShares(bytes_per_s=3e12).waits([product, product], [0, 0])
        [1.0, 1.0]
        """
        if len(kernels) == 2 and kernels[0] != kernels[1]:
            behind = [loads[1], loads[0]]
        else:
            pairs = list(zip(loads, kernels, strict=True))
            behind = [math.fsum([load for load, other in pairs if other != one]) for _, one in pairs]
        return [slowdown(load / self.bytes_per_s) if load else 1.0 for load in behind]


class Hbm(Bandwidth[HbmShares]):
    """One GPU's memory."""


def share_behind_others(
    demand: float, weight: float, others: Sequence[float], other_weights: Sequence[float], cap: float
) -> float:
    """HBM bytes/s of a kernel with few blocks when others fill the memory: its requests queue behind theirs.

    Their level is what the others leave, at least their share by weight; demand and level join as squares of times,
    so that the wait grows with the load and not at once when the last byte a second is asked for.

    >>> round(share_behind_others(3.0, 1.0, [4.0], [1.0], 8.0), 3), share_behind_others(3.0, 1.0, [], [], 8.0)
    (2.4, 3.0)
    """
    if not others or demand <= 0.0:
        return demand
    level = max(cap - math.fsum(others), cap * weight / (weight + math.fsum(other_weights)))
    return demand / math.hypot(1.0, demand / level)
