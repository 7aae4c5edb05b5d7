"""What the ports of the network between nodes carried: of runs in full detail, where every group of ranks is there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hardware.network import Port
from sim.engine.between import ports_of
from sim.result.run import Run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortUse:
    """One port: bytes/s that hold from each time on."""

    port: Port
    time_ps: NDArray[np.int64]
    bytes_per_s: NDArray[np.float64]

    def bytes_until(self, end_ps: int) -> float:
        """Bytes that it carried."""
        return float((np.diff(np.append(self.time_ps, end_ps)) * 1e-12 * self.bytes_per_s).sum())


def port_use(run: Run) -> list[PortUse]:
    """Every port that ``run`` used, the one with the most bytes first; none of a run that is not in full detail."""
    if run.outcome.detail != "full" or not run.records.crossing:
        return []
    records, classes = run.records, run.graph.classes
    place = {port: number for number, port in enumerate(ports_of(classes))}
    use = np.zeros((len(place), len(records.crossing)))
    for moment, crossing in enumerate(records.crossing):
        for class_id, stream_bytes_per_s in crossing:
            transit = classes[class_id].transit
            assert transit is not None
            for port, count in transit.streams.crossing:
                use[place[port], moment] += count * stream_bytes_per_s
    time_ps = np.array(records.crossing_time_ps, dtype=np.int64)
    found = [PortUse(port=port, time_ps=time_ps, bytes_per_s=use[number]) for port, number in place.items()]
    return sorted(found, key=lambda one: -one.bytes_until(records.end_ps))
