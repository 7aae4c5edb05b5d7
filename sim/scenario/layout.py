"""The layout that a scenario asks for, with its defaults filled in."""

from __future__ import annotations

import workloads
from sim.scenario.spec import Scenario


def layout_of(scenario: Scenario) -> workloads.Layout:
    """The layout of ``scenario``; the workload layer checks it against the model.

    >>> layout_of(Scenario.of(model="llama3-8b", pp=4, batch=6)).micro_batches
    3
    """
    return workloads.Layout(
        tp=scenario.tp,
        ep=scenario.ep,
        ep_mode=scenario.ep_mode,
        sequence_parallel=scenario.sequence_parallel,
        cp=scenario.cp,
        cp_mode=scenario.cp_mode,
        dcp=scenario.dcp,
        pp=scenario.pp,
        dp=scenario.dp * (2 if scenario.guidance == "parallel" else 1),
        micro_batches=scenario.micro_batches or _micro_batches(scenario),
        pp_schedule=scenario.pp_schedule,
        ep_kernels=None if scenario.ep_kernels is None else workloads.EpKernels(scenario.ep_kernels),
        dispatch_dtype=None if scenario.dispatch_dtype is None else workloads.DType(scenario.dispatch_dtype),
    )


def _micro_batches(scenario: Scenario) -> int:
    """As many parts as divide a replica's batch, at most one a stage."""
    sequences = max(1, scenario.batch // scenario.dp)
    return max(parts for parts in range(1, scenario.pp + 1) if sequences % parts == 0)
