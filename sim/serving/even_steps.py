"""Steps in a row whose cost grows evenly from the first to the last: their sums in closed form."""

from __future__ import annotations

from dataclasses import dataclass, field

from sim.serving.cost import Cost


@dataclass(slots=True, kw_only=True, eq=False)
class EvenSteps:
    """``count`` steps from ``first`` to ``last``, with ``host_s`` before each.

    >>> row = EvenSteps(count=3, first=Cost(1.0, 5.0), last=Cost(2.0, 9.0), host_s=0.5)
    >>> row.after_s(3), row.energy_j(3), row.done_after(2.5)
    (6.0, 21.0, 2)
    """

    count: int
    first: Cost
    last: Cost
    host_s: float
    slope_s: float = field(init=False)  # more with each step
    slope_j: float = field(init=False)

    def __post_init__(self) -> None:
        between = max(self.count - 1, 1)
        self.slope_s = (self.last.time_s - self.first.time_s) / between
        self.slope_j = (self.last.energy_j - self.first.energy_j) / between

    def after_s(self, count: int) -> float:
        """When so many of them are done."""
        return count * (self.host_s + self.first.time_s) + self.slope_s * count * (count - 1) / 2

    def energy_j(self, count: int) -> float:
        """Joules of so many of them."""
        return count * self.first.energy_j + self.slope_j * count * (count - 1) / 2

    def done_after(self, seconds: float) -> int:
        """How many are done with the one that runs after ``seconds``."""
        low, high = 1, self.count
        while low < high:
            mid = (low + high) // 2
            low, high = (low, mid) if self.after_s(mid) >= seconds else (mid + 1, high)
        return low
