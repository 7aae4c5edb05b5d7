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
    """The rule: max-min fair, equal shares for all that need no less."""

    bytes_per_s: float

    def asked(self, demands: Sequence[float], _weights: Sequence[float], _few: Sequence[bool]) -> Sequence[float]:
        """Each transfer requests all that it could use."""
        return demands

    def divide(self, asked: Sequence[float], _weights: Sequence[float]) -> Sequence[float]:
        """Bytes/s of each transfer; the number of its blocks does not count."""
        return share(asked, [1.0] * len(asked), self.bytes_per_s)


class LinkPort(Bandwidth[LinkShares]):
    """One GPU's port."""
