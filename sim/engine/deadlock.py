"""The words for a run in which nothing can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.engine.graph import KernelGraph
from sim.engine.state import Flow, Gpu


def deadlock_message(graph: KernelGraph, flows: Mapping[int, Flow], gpus: Sequence[Gpu], left: int) -> str:
    """Which collective waits, who arrived and who is missing."""
    queues = [(gpu.index, resource.put_queue) for gpu in gpus for resource in (*gpu.pools, gpu.copy_engine)]
    waiting = [(index, entry) for index, queue in queues for entry in queue]
    for collective, flow in sorted(flows.items()):
        if flow.missing:
            arrived = sorted(e.gpu.index for e in flow.entries)
            missing = sorted({graph.op_gpu[o] for o in graph.collective_members[collective]} - set(arrived))
            op = graph.collective_members[collective][0]
            name = graph.classes[graph.op_class[op]].name
            queued = sorted(index for index, entry in waiting if entry.progress is flow)
            where = f"; GPUs {queued} wait for SMs" if queued else ""
            return (
                f"deadlock with {left} kernels left: collective {collective} ({name}) has GPUs "
                f"{arrived}, misses {missing}{where}"
            )
    stuck = [entry.op for _, entry in waiting]
    if stuck:
        return f"deadlock with {left} kernels left: kernel {stuck[0]} waits for SMs nobody returns"
    return f"deadlock with {left} kernels left: every one waits for another (cyclic dependencies)"
