"""Sums over one run of a kernel graph: joules and seconds by GPU, by class of kernel and by segment, and exposure.

What they need of the graph at any clock (:class:`TallyLayout`) is worked out once for all runs of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.record import Recorder
from sim.result.exposure import S_PER_PS, Exposure, SpanKinds, exposure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TallyLayout:
    """A graph as sums over its runs see it, whatever the clock; simulated GPU ``i`` stands for ``multiplicity[i]``."""

    def __init__(self, graph: KernelGraph, multiplicity: Sequence[int]) -> None:
        self.graph = graph
        self.multiplicity: Ints = np.array(multiplicity, dtype=np.int64)
        self.gpu, self.cls, self.segment = (
            np.array(column, dtype=np.int64) for column in (graph.op_gpu, graph.op_class, graph.op_segment)
        )
        self.times: Ints = self.multiplicity[self.gpu]  # of each kernel

    @cached_property
    def kinds(self) -> SpanKinds:
        """What exposure needs of its kernels."""
        return SpanKinds(self.graph, self.multiplicity)

    @cached_property
    def _count(self) -> Floats:
        """Kernels of each class over all GPUs."""
        return np.bincount(self.cls, self.times.astype(np.float64), len(self.graph.classes)).astype(np.float64)

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of all kernels of all GPUs."""
        return float(self._count @ np.array([_flops(cls) for cls in self.graph.classes]))

    @cached_property
    def hbm_bytes(self) -> float:
        """Bytes that all kernels of all GPUs move to and from HBM."""
        return float(self._count @ np.array([cls.terms.hbm_bytes for cls in self.graph.classes]))

    @cached_property
    def extrapolated(self) -> frozenset[str]:
        """Names of kernels beyond the rows that their laws were fitted on."""
        return frozenset(cls.name for cls in self.graph.classes if cls.terms.extrapolated)


def _flops(cls: KernelClass) -> float:
    return float(cast("float", cls.describe.get("flops", 0.0)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Tally:
    """Sums over one run. Energies and GPU-seconds count each GPU as often as it stands for one."""

    layout: TallyLayout
    records: Recorder

    @property
    def _spans(self) -> tuple[Ints, Ints, Ints]:
        """Kernel, start and end (ps) of each span."""
        records = self.records
        op, start, end = (
            np.frombuffer(column, dtype=np.int64)
            for column in (records.span_op, records.span_start_ps, records.span_end_ps)
        )
        return op, start, end

    @cached_property
    def exposure(self) -> Exposure:
        """See :mod:`sim.result.exposure`."""
        return exposure(self.layout.kinds, *self._spans)

    @cached_property
    def per_gpu(self) -> Floats:
        """A row a simulated GPU.

        Joules, idle joules, idle seconds, busy seconds, Hz x busy seconds, seconds in which it computes or moves data.
        """
        gpus = self.layout.graph.gpus
        gpu, state, held_s = power_steps(self.records)
        states = self.records.states
        if len(state) < len(states):  # a run of few steps need not look at all states that others of its piece were in
            states, state = [states[i] for i in state.tolist()], np.arange(len(state))
        power_w = np.array([s.power_w for s in states])[state]
        clock_hz = np.array([s.clock_hz for s in states])[state]
        busy = np.array([bool(s.rates) for s in states])[state]  # copy engines run without SMs
        joules, busy_s = power_w * held_s, held_s * busy
        columns = (joules, joules * ~busy, held_s - busy_s, busy_s, clock_hz * busy_s)
        sums = np.empty((gpus, len(columns) + 1))
        for place, column in enumerate(columns):
            sums[:, place] = np.bincount(gpu, column, gpus)
        sums[:, -1] = self.exposure.working_s
        return sums

    @cached_property
    def by_class(self) -> tuple[list[float], list[float]]:
        """Joules and GPU-seconds of each class of kernel."""
        return self._added_up(self.layout.cls, len(self.layout.graph.classes))

    @cached_property
    def by_segment(self) -> tuple[list[float], list[float]]:
        """Joules and GPU-seconds of each segment."""
        return self._added_up(self.layout.segment, len(self.layout.graph.segments))

    def _added_up(self, places: Ints, length: int) -> tuple[list[float], list[float]]:
        op, start, end = self._spans
        place, times = places[op], self.layout.times[op]
        energy_j = np.bincount(place, np.frombuffer(self.records.span_energy_j, dtype=np.float64) * times, length)
        time_s = np.bincount(place, (end - start) * (times * S_PER_PS), length)
        return energy_j.tolist(), time_s.tolist()

    @cached_property
    def segment_end_ps(self) -> Ints:
        """When the last kernel of each segment ends; 0 of one without kernels."""
        op, _, end = self._spans
        last = np.zeros(len(self.layout.graph.segments), dtype=np.int64)
        np.maximum.at(last, self.layout.segment[op], end)
        return last


def power_steps(records: Recorder) -> tuple[Ints, Ints, Floats]:
    """GPU, state and seconds of every power step, sorted by GPU and time."""
    time_ps: Ints = np.frombuffer(records.step_time_ps, dtype=np.int64)
    gpu: Ints = np.frombuffer(records.step_gpu, dtype=np.int32).astype(np.int64)
    state: Ints = np.frombuffer(records.step_state, dtype=np.int64)
    end_ps = np.empty_like(time_ps)
    if len(records.energy_j) > 1:  # one GPU's steps are in order of time
        order = np.lexsort((time_ps, gpu))
        time_ps, gpu, state = time_ps[order], gpu[order], state[order]
        end_ps[:-1] = np.where(gpu[1:] == gpu[:-1], time_ps[1:], records.end_ps)
    else:
        end_ps[:-1] = time_ps[1:]
    end_ps[-1:] = records.end_ps
    held_s = (end_ps - time_ps).astype(np.float64) * S_PER_PS
    return gpu, state, held_s
