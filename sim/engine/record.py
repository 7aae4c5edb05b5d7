"""Records of a run: columns that the engine appends to and the timeline reads."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from sim.engine.running import GpuState


@dataclass(slots=True)
class Recorder:
    """Spans (one a kernel and rank) and power steps (one a change of a GPU's state)."""

    span_op: array[int] = field(default_factory=lambda: array("q"))
    span_start_ps: array[int] = field(default_factory=lambda: array("q"))
    span_end_ps: array[int] = field(default_factory=lambda: array("q"))
    span_energy_j: array[float] = field(default_factory=lambda: array("d"))
    step_gpu: array[int] = field(default_factory=lambda: array("i"))
    step_time_ps: array[int] = field(default_factory=lambda: array("q"))
    step_state: array[int] = field(default_factory=lambda: array("q"))
    idle_energy_j: list[float] = field(default_factory=list)  # of each GPU, as are all its joules:
    energy_j: list[float] = field(default_factory=list)
    states: list[GpuState] = field(default_factory=list)
    # Collectives that cross nodes, at each change of the set: (class, bytes/s of a stream) of each.
    crossing_time_ps: list[int] = field(default_factory=list)
    crossing: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    end_ps: int = 0
    events: int = 0  # that SimPy scheduled
