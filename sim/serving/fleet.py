"""One power budget over all replicas: watts go to those that have work for them, prompts or decoding.

From time to time every replica is asked what its GPUs drew at most, and whether a limiter held them back. One that was
not held back keeps what it drew and some room; what is left is divided evenly among those that were (max-min), and what
nobody has use for among all.
The caps together never exceed the budget.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from sim.errors import ScenarioError
from sim.serving.power import ReplicaGovernor, Seen
from sim.serving.replica import Replica

FleetPolicy = Literal["shift", "even"]
# A GPU's cap is no lower than this share of its TDP (an H100 takes 200 to 700 W). The policy's own choices, from no
# measurement: a replica was held back if it was for the second share of the time, and one that was not keeps what it
# drew and this much more.
LEAST_SHARE, HELD_SHARE, ROOM = 0.3, 0.05, 1.05


def divided(budget_w: float, gpus: Sequence[int], wanted_w: Sequence[float], most_w: float) -> list[float]:
    """Caps of a GPU of each replica: none gets more than it wants while others want, and the last watts are for all.

    >>> divided(2000.0, [2, 2], [300.0, 700.0], 700.0)
    [300.0, 700.0]
    >>> divided(2000.0, [2, 2], [650.0, 700.0], 700.0), divided(2000.0, [2, 2], [200.0, 300.0], 700.0)
    ([500.0, 500.0], [450.0, 550.0])
    """
    caps = [0.0] * len(gpus)
    for bounds in (wanted_w, [most_w] * len(gpus)):
        left_w = budget_w - sum(count * cap for count, cap in zip(gpus, caps, strict=True))
        order = sorted(range(len(gpus)), key=lambda i: bounds[i] - caps[i])
        open_ = sum(gpus)
        for i in order:
            more_w = min(bounds[i] - caps[i], left_w / open_)
            caps[i] += more_w
            left_w -= gpus[i] * more_w
            open_ -= gpus[i]
    return caps


@dataclass(kw_only=True, slots=True, eq=False)
class FleetBudget:
    """Sets the caps of ``replicas`` (of one in stages those of each), ``even`` ones once or anew every ``look_s``.
    ``looks`` are what it saw: the mean watts of all GPUs and the caps that it set then.
    """

    env: simpy.Environment
    replicas: Sequence[Replica]
    budget_w: float
    policy: FleetPolicy
    look_s: float
    most_w: float
    looks: list[tuple[float, float, tuple[float, ...]]] = field(default_factory=list)
    _seen: list[Seen] = field(default_factory=list)
    _caps_w: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Even caps, before the first request comes."""
        gpus = sum(self._gpus)
        if self.budget_w < gpus * self.least_w:
            raise ScenarioError(
                f"fleet_power_w = {self.budget_w:g}: {gpus} GPUs take at least {gpus * self.least_w:g} W, "
                f"{self.least_w:g} each"
            )
        self._ask()
        self._set([min(self.most_w, self.budget_w / gpus)] * len(self._gpus))

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Look, and look again."""
        while True:
            yield self.env.timeout(self.look_s)
            for replica in self.replicas:
                replica.show()
            drawn_j = sum(count * seen.drawn_j for count, seen in zip(self._gpus, self._seen, strict=True))
            self.looks.append((self.env.now, drawn_j / self.look_s, tuple(self._caps_w)))
            if self.policy == "shift":
                wanted_w = [self._wanted_w(seen) for seen in self._seen]
                self._set(divided(self.budget_w, self._gpus, wanted_w, self.most_w))
            self._ask()

    @property
    def least_w(self) -> float:
        """The lowest cap of a GPU."""
        return LEAST_SHARE * self.most_w

    @property
    def _gpus(self) -> list[int]:
        return [governor.gpus for _, governor in self._governed]

    @property
    def _governed(self) -> list[tuple[Replica, ReplicaGovernor]]:
        """GPUs under one cap, and whose they are: a replica's, of one in stages those of each."""
        return [(replica, governor) for replica in self.replicas for governor in replica.governors]

    def _ask(self) -> None:
        self._seen = [Seen() for _ in self._governed]
        for (_, governor), seen in zip(self._governed, self._seen, strict=True):
            governor.seen = seen

    def _wanted_w(self, seen: Seen) -> float:
        held = seen.held_s > HELD_SHARE * self.look_s
        return self.most_w if held else min(self.most_w, max(self.least_w, ROOM * seen.peak_w))

    def _set(self, caps_w: list[float]) -> None:
        before = self._caps_w or [0.0] * len(caps_w)
        for (replica, governor), cap_w, before_w in zip(self._governed, caps_w, before, strict=True):
            if cap_w != before_w:
                governor.limit(governor.machine.limits.under(cap_w))
                replica.wake()  # what was found steady may not be any more
        self._caps_w = caps_w
