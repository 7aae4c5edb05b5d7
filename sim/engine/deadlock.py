"""The error message of a deadlocked run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim.engine.graph import KernelGraph
from sim.engine.state import Gpu


def deadlock_message(graph: KernelGraph, arrived: Mapping[int, Sequence[int]], gpus: Sequence[Gpu], left: int) -> str:
    """Which collective waits, who arrived and who is missing: ``arrived`` are GPUs of those that have not met."""
    queues = [(gpu.index, resource.put_queue) for gpu in gpus for resource in (*gpu.pools, gpu.copy_engine)]
    waiting = [(index, entry) for index, queue in queues for entry in queue]
    for collective, present in sorted(arrived.items()):
        missing = sorted({graph.op_gpu[op] for op in graph.collective_members[collective]} - set(present))
        op = graph.collective_members[collective][0]
        name = graph.classes[graph.op_class[op]].name
        queued = sorted(index for index, entry in waiting if graph.op_collective[entry.op] == collective)
        where = f"; GPUs {queued} wait for SMs" if queued else ""
        return (
            f"deadlock with {left} kernels left: collective {collective} ({name}) has GPUs "
            f"{sorted(present)}, misses {missing}{where}"
        )
    stuck = [entry.op for _, entry in waiting]
    if stuck:
        return f"deadlock with {left} kernels left: kernel {stuck[0]} waits for SMs nobody returns"
    return f"deadlock with {left} kernels left: every one waits for another (cyclic dependencies)"
