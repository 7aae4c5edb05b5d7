"""One GPU's port to the others (NVLink, PCIe) as a SimPy resource: transfers share it max-min fairly.

Shares are divided once an instant (:mod:`sim.engine.resources.bandwidth`).

>>> from simpy import Environment
>>> env = Environment()
>>> port = LinkPort(env, LinkShares(bytes_per_s=10.0))
>>> def collective(name, size, demand):
...     yield port.move(size, demand=demand)
...     print(f"{env.now:.1f} {name}")
>>> for one in (collective("slow one", 20, demand=2.0), collective("fast one", 40, demand=10.0)):
...     process = env.process(one)
>>> env.run()
5.0 fast one
10.0 slow one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.engine.resources.bandwidth import Bandwidth, share


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShares:
    """The rule: everybody gets as much as anybody, unless it asks for less."""

    bytes_per_s: float

    def asked(self, demands: Sequence[float], _weights: Sequence[float], _few: Sequence[bool]) -> list[float]:
        """What each asks for: all that it could use."""
        return list(demands)

    def divide(self, asked: Sequence[float], _weights: Sequence[float]) -> list[float]:
        """Bytes/s of each transfer, whatever blocks it comes from."""
        return share(asked, [1.0] * len(asked), self.bytes_per_s)


class LinkPort(Bandwidth[LinkShares]):
    """One GPU's port."""
