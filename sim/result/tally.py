"""Sums over one run of a kernel graph: joules and seconds by GPU, by class of kernel and by segment, and exposure.

What they need of the graph at any clock (:class:`TallyLayout`) is worked out once for all runs of it. Most runs are of
one layer: for so few spans and steps plain loops take a third of numpy's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sim.build.cost import flops_of
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import GpuState
from sim.result.exposure import S_PER_PS, Exposure, SpanKinds, exposure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TallyLayout:
    """A graph as sums over its runs see it, whatever the clock; simulated GPU ``i`` stands for ``multiplicity[i]``."""

    def __init__(self, graph: KernelGraph, multiplicity: Sequence[int]) -> None:
        self.graph, self.multiplicity = graph, multiplicity
        self.times = [multiplicity[gpu] for gpu in graph.op_gpu]  # of each kernel

    @cached_property
    def kinds(self) -> SpanKinds:
        """What exposure needs of its kernels."""
        return SpanKinds(self.graph, self.multiplicity)

    @cached_property
    def _count(self) -> Floats:
        """Kernels of each class over all GPUs."""
        return np.bincount(self.graph.op_class, self.times, len(self.graph.classes)).astype(np.float64)

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of all kernels of all GPUs."""
        return float(self._count @ np.array([flops_of(cls) for cls in self.graph.classes]))

    @cached_property
    def hbm_bytes(self) -> float:
        """Bytes that all kernels of all GPUs move to and from HBM."""
        return float(self._count @ np.array([cls.terms.hbm_bytes for cls in self.graph.classes]))

    @cached_property
    def extrapolated(self) -> frozenset[str]:
        """Names of kernels beyond the rows that their laws were fitted on."""
        return frozenset(cls.name for cls in self.graph.classes if cls.terms.extrapolated)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tally:
    """Sums over one run. Energies and GPU-seconds count each GPU as often as it stands for one."""

    layout: TallyLayout
    records: Recorder

    @cached_property
    def exposure(self) -> Exposure:
        """See :mod:`sim.result.exposure`."""
        return exposure(self.layout.kinds, self.records)

    @cached_property
    def per_gpu(self) -> list[list[float]]:
        """A row a simulated GPU.

        Joules, idle joules, idle seconds, busy seconds, Hz x busy seconds, seconds in which it computes or moves data.
        """
        records = self.records
        states, gpus = records.states, range(self.layout.graph.gpus)
        sums = [[0.0] * 5 for _ in gpus]
        since_ps, held = [0 for _ in gpus], [-1 for _ in gpus]  # each GPU's present state
        steps = zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True)
        for gpu, time_ps, state in chain(steps, ((gpu, records.end_ps, -1) for gpu in gpus)):
            if held[gpu] >= 0:
                _add(sums[gpu], states[held[gpu]], (time_ps - since_ps[gpu]) * S_PER_PS)
            since_ps[gpu], held[gpu] = time_ps, state
        return [[*row, working_s] for row, working_s in zip(sums, self.exposure.working_s, strict=True)]

    @cached_property
    def by_class(self) -> tuple[list[float], list[float]]:
        """Joules and GPU-seconds of each class of kernel."""
        return self._added_up(self.layout.graph.op_class, len(self.layout.graph.classes))

    @cached_property
    def by_segment(self) -> tuple[list[float], list[float]]:
        """Joules and GPU-seconds of each segment."""
        return self._added_up(self.layout.graph.op_segment, len(self.layout.graph.segments))

    def _added_up(self, places: Sequence[int], length: int) -> tuple[list[float], list[float]]:
        records, times_of = self.records, self.layout.times
        energies_j, times_s = [0.0] * length, [0.0] * length
        for op, start_ps, end_ps, energy_j in zip(
            records.span_op, records.span_start_ps, records.span_end_ps, records.span_energy_j, strict=True
        ):
            place, times = places[op], times_of[op]
            energies_j[place] += energy_j * times
            times_s[place] += (end_ps - start_ps) * (times * S_PER_PS)
        return energies_j, times_s

    @cached_property
    def segment_end_ps(self) -> list[int]:
        """When the last kernel of each segment ends; 0 of one without kernels."""
        segment, last = self.layout.graph.op_segment, [0] * len(self.layout.graph.segments)
        for op, end_ps in zip(self.records.span_op, self.records.span_end_ps, strict=True):
            last[segment[op]] = max(last[segment[op]], end_ps)
        return last


def _add(sums: list[float], state: GpuState, held_s: float) -> None:
    """Add to :attr:`Tally.per_gpu` that a GPU was in ``state`` for so long."""
    joules = state.power_w * held_s
    sums[0] += joules
    if state.rates:  # copy engines run without SMs
        sums[3] += held_s
        sums[4] += state.clock_hz * held_s
    else:
        sums[1] += joules
        sums[2] += held_s


def power_steps(records: Recorder) -> tuple[Ints, Ints, Floats]:
    """GPU, state and seconds of every power step, sorted by GPU and time."""
    time_ps: Ints = np.frombuffer(records.step_time_ps, dtype=np.int64)
    gpu: Ints = np.frombuffer(records.step_gpu, dtype=np.int32).astype(np.int64)
    state: Ints = np.frombuffer(records.step_state, dtype=np.int64)
    end_ps = np.empty_like(time_ps)
    if gpu.any():  # the steps of GPU 0 alone are in order of time
        order = np.lexsort((time_ps, gpu))
        time_ps, gpu, state = time_ps[order], gpu[order], state[order]
        end_ps[:-1] = np.where(gpu[1:] == gpu[:-1], time_ps[1:], records.end_ps)
    else:
        end_ps[:-1] = time_ps[1:]
    end_ps[-1:] = records.end_ps
    held_s = (end_ps - time_ps).astype(np.float64) * S_PER_PS
    return gpu, state, held_s
