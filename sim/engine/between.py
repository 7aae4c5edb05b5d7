"""Collectives that cross the network between nodes: which of them share ports, and the rate of each.

A collective that shares no port is not slowed down here: the rate of its links is part of its price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hardware.network import Port
from sim.engine.graph import KernelClass, Transit
from sim.engine.record import Recorder
from sim.engine.resources.network import Crossing, Network
from sim.engine.running import PS_PER_S
from sim.engine.state import Flow

# What rounding may add to the bytes/s of collectives that fill a port and no more.
SLACK = 1e-6


class Between:
    """The collectives that cross the network at the present time, with their classes."""

    def __init__(self, network: Network, classes: tuple[KernelClass, ...], recorder: Recorder) -> None:
        self.network, self.classes, self.recorder = network, classes, recorder
        self.crossing: dict[Flow, tuple[int, Crossing]] = {}
        self.meets = self.met = False  # several share a port now; several did at the last update

    def enter(self, flow: Flow, class_id: int) -> None:
        """All ranks of a collective have arrived: its streams start."""
        transit = self.classes[class_id].transit
        if transit is not None:
            one = self.network.move(transit.stream_bytes, transit.streams.crossing)
            self.crossing[flow] = class_id, one

    def leave(self, flow: Flow) -> None:
        """A collective has ended."""
        known = self.crossing.pop(flow, None)
        if known is not None:
            self.network.end(known[1])

    def tied(self) -> list[int]:
        """GPUs with a collective whose rate may differ from that at the last update."""
        self.met, self.meets = self.meets, len(self.crossing) > 1
        return [e.gpu.index for flow in self.crossing for e in flow.entries] if self.meets or self.met else []

    def share(self, paces: dict[Flow, float]) -> None:
        """Lower the ``paces`` (1/ps) of collectives that get less bandwidth than these need."""
        mine = [(flow, self.crossing[flow][1]) for flow in paces if flow in self.crossing]
        for flow, one in mine:
            one.demand = paces[flow] * PS_PER_S * one.size
        self.network.divide()
        for flow, one in mine:
            if one.rate < one.demand:
                paces[flow] = one.rate / (PS_PER_S * one.size)

    def record(self, now_ps: int) -> None:
        """Record the transfers that run from now on: each class with the bytes/s of a stream."""
        rates = tuple([(cls, flow.rate * PS_PER_S * one.size) for flow, (cls, one) in self.crossing.items()])
        recorder = self.recorder
        if rates != (recorder.crossing[-1] if recorder.crossing else ()):
            recorder.crossing_time_ps.append(now_ps)
            recorder.crossing.append(rates)


def ports_of(classes: Iterable[KernelClass]) -> list[Port]:
    """The ports that ``classes`` use."""
    transits = [c.transit for c in classes if c.transit is not None]
    return list(dict.fromkeys(port for transit in transits for port, _ in transit.streams.crossing))


def overloaded_ports(kinds: Iterable[tuple[object, KernelClass]]) -> list[tuple[Port, list[Transit]]]:
    """Ports that cannot carry all at once; kinds of one key run one after another, at their price or slower."""
    most: defaultdict[Port, dict[object, tuple[float, Transit]]] = defaultdict(dict)
    for key, cls in kinds:
        transit, seconds = cls.transit, cls.terms.scale * cls.terms.floor_s
        for port, count in transit.streams.crossing if transit is not None else ():
            assert transit is not None
            rate = count * transit.stream_bytes / seconds
            known = most[port].get(key)
            if known is None or rate > known[0]:
                most[port][key] = rate, transit
    return [
        (port, [transit for _, transit in users.values()])
        for port, users in most.items()
        if len(users) > 1 and sum(rate for rate, _ in users.values()) > port.bytes_per_s * (1.0 + SLACK)
    ]
