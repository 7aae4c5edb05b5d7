"""Replicas by load: how many are wanted, and how they come and go.

The rule is that of Kubernetes' HorizontalPodAutoscaler (its documentation, section "Algorithm details"): replicas in
proportion to the ratio of load to target, no change within a tenth of it, looked at every 15 s, and never fewer than
any look of the last 300 s wanted. What it scales on is what serving engines export.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

import simpy

from sim.serving.records import Log
from sim.serving.replica import Replica

Measure = Literal["requests", "kv", "busy"]
TOLERANCE = 0.1


def wanted_replicas(loads: Sequence[float], target: float) -> int:
    """Replicas that bring the mean of ``loads`` (one a replica, as shares of what it takes) to ``target``.

    >>> wanted_replicas([0.9, 0.9], 0.7), wanted_replicas([0.75, 0.75], 0.7), wanted_replicas([0.2, 0.2], 0.7)
    (3, 2, 1)
    """
    ratio = sum(loads) / len(loads) / target
    return len(loads) if abs(ratio - 1.0) <= TOLERANCE else math.ceil(ratio * len(loads))


@dataclass(kw_only=True, slots=True, eq=False)
class Autoscaler:
    """Switches ``replicas`` on and off, between ``least`` and all of them. ``ready`` hears of each that serves.

    One that starts draws idle power for ``start_up_s`` before it serves; one that goes finishes what it has, and
    draws nothing once it is off.
    """

    env: simpy.Environment
    replicas: Sequence[Replica]
    measure: Measure
    target: float
    least: int
    start_up_s: float
    look_s: float
    calm_s: float
    ready: Callable[[], None]
    log: Log
    _starting: set[int] = field(default_factory=set)
    _wanted: deque[tuple[float, int]] = field(default_factory=deque)
    _busy_s: dict[int, float] = field(default_factory=dict)

    def begin(self) -> None:
        """The least number of replicas is up when the first request comes."""
        for replica in self.replicas[self.least :]:
            replica.serving = replica.powered = False

    def run(self) -> Generator[simpy.Event, Any, None]:
        """Look, and look again."""
        while True:
            yield self.env.timeout(self.look_s)
            self._look()

    def _look(self) -> None:
        living = [replica for replica in self.replicas if replica.alive]
        up = [replica for replica in living if replica.serving or replica.number in self._starting]
        loads = [self._load(replica) for replica in living if replica.powered]
        spread = [sum(loads) / len(up)] * len(up) if up else []  # those that start will take their part
        wanted = wanted_replicas(spread, self.target) if up else self.least
        wanted = min(max(wanted, self.least), len(living))
        self._wanted.append((self.env.now, wanted))
        while self._wanted[0][0] < self.env.now - self.calm_s:
            self._wanted.popleft()
        wanted = min(max(most for _, most in self._wanted), len(living))
        for _ in range(wanted - len(up)):
            self._add(living)
        spare = sorted((r for r in up if r.serving), key=lambda r: (r.outstanding_tokens, -r.number))
        for replica in spare[: max(0, min(len(up) - wanted, len(spare) - 1))]:
            replica.retire()

    def _add(self, living: Sequence[Replica]) -> None:
        """One more: one that is still finishing its last requests, or else one that is off."""
        idle = [r for r in living if not r.serving and r.number not in self._starting]
        replica = max(idle, key=lambda r: (r.powered, -r.number))
        if replica.powered:
            replica.unretire()
            self.ready()
        else:
            self.log.starts += 1
            self._starting.add(replica.number)
            replica.power_on()
            self.env.process(self._start(replica))

    def _start(self, replica: Replica) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(self.start_up_s)
        self._starting.discard(replica.number)
        if replica.alive:
            replica.serving = True
            self.ready()

    def _load(self, replica: Replica) -> float:
        """How much of what it takes a replica has to do."""
        scheduler = replica.scheduler
        match self.measure:
            case "requests":
                return (scheduler.waiting + scheduler.seated) / scheduler.limits.max_num_seqs
            case "kv":
                return scheduler.pool.used / scheduler.pool.blocks
            case "busy":
                before = self._busy_s.get(replica.number, 0.0)
                self._busy_s[replica.number] = replica.busy_s
                return (replica.busy_s - before) / self.look_s
        assert_never(self.measure)
