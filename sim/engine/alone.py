"""One stream alone on one GPU under a fixed power target: kernel follows kernel, so nothing is left to schedule.

Every running set is a single kernel; it holds the SMs that it wants and keeps its pace from start to end. The run is
then a sum over the stream, and is taken as one: the records are those of :class:`sim.engine.driver.Engine`, byte for
byte (a test runs both on any such program).
"""

from __future__ import annotations

import math

import numpy as np

from hardware.laws.terms import wanted_sms
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder


def runs_alone(graph: KernelGraph, model: FluidModel) -> bool:
    """True when ``graph`` is one stream whose kernels wait for nothing but each other."""
    sms = float(model.gpu.sms)
    return (
        len(graph.queue_ops) == graph.gpus == 1
        and graph.issue_ps is None
        and not graph.predecessor_count
        and all(not c.lead_s and wanted_sms(c.terms, sms) <= sms for c in graph.classes)
    )


def run_alone(graph: KernelGraph, model: FluidModel, limit_w: float) -> tuple[Recorder, float]:
    """Records of the run and the joules of its GPU."""
    gpu = model.gpu
    op = np.asarray(graph.queue_ops[0], dtype=np.int64)
    used, first, of_op = np.unique(np.asarray(graph.op_class)[op], return_index=True, return_inverse=True)
    states = {}
    for position in np.sort(first).tolist():  # as they come: states are numbered so
        cls = graph.op_class[int(op[position])]
        wanted = wanted_sms(graph.classes[cls].terms, float(gpu.sms))
        states[cls] = model.solve(((cls, wanted, False),), limit_w, gpu.max_clock_hz)
    of_class = [states[cls] for cls in used.tolist()]
    lasts_ps = np.array([max(1, math.ceil(1.0 / state.rates[0] - 1e-6)) for state in of_class])[of_op]
    gap_ps = np.array([round(graph.classes[cls].gap_s * 1e12) for cls in used.tolist()])[of_op]
    power_w = np.array([state.power_w for state in of_class])[of_op]
    state = np.array([state.index for state in of_class])[of_op]
    end_ps = np.cumsum(lasts_ps)
    begin_ps = end_ps - lasts_ps
    energy_j = power_w * (lasts_ps * 1e-12)
    steps = np.append(True, state[1:] != state[:-1])
    records = Recorder(idle_energy_j=[0.0], states=model.states, end_ps=int(end_ps[-1]))
    for column, values in (
        (records.span_op, op),
        (records.span_start_ps, np.minimum(begin_ps + gap_ps, end_ps)),
        (records.span_end_ps, end_ps),
        (records.span_energy_j, energy_j),
        (records.step_gpu, np.zeros(np.count_nonzero(steps), dtype=np.int32)),
        (records.step_time_ps, begin_ps[steps]),
        (records.step_state, state[steps]),
    ):
        column.frombytes(values.tobytes())
    return records, float(np.cumsum(energy_j)[-1])
