"""A timeline as Chakra execution traces: what each rank ran, after what, for how long, and what it communicates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from sim.build.cost import flops_of
from sim.engine.graph import KernelClass
from sim.output.files import write_atomically
from sim.result.exposure import S_PER_PS
from sim.result.timeline import Timeline
from traces.errors import TraceError
from traces.write.chakra import Collective, Node, NodeKind, NodeType, Value, node_of, write_chakra
from workloads.kernel_names import CollectiveOp

MEASURED = ("energy_j", "duration_ns")  # attributes of each node
PREFIX = "wattline"
GROUPS = "comm_groups.json"
COLLECTIVES = {
    CollectiveOp.ALL_REDUCE: Collective.ALL_REDUCE,
    CollectiveOp.ALL_GATHER: Collective.ALL_GATHER,
    CollectiveOp.BROADCAST: Collective.BROADCAST,
    CollectiveOp.ALL_TO_ALL: Collective.ALL_TO_ALL,
    CollectiveOp.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
}


def write_execution_traces(run: Timeline, folder: Path) -> Path:
    """Write ``wattline.RANK.et`` for every rank, and the groups that communicate, into ``folder``.

    ASTRA-sim takes ``--workload-configuration=FOLDER/wattline --comm-group-configuration=FOLDER/comm_groups.json``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(f"cannot write execution traces into '{folder}': {error.strerror or error}") from None
    groups = _groups(run)
    about: dict[str, Value] = {
        "generator": "wattline",
        "gpu": run.machine.gpu.id,
        "scenario": json.dumps(run.scenario.model_dump(mode="json", exclude_none=True)),
    }
    for rank in range(run.graph.gpus):
        write_chakra(_nodes(run, rank, groups), folder / f"{PREFIX}.{rank}.et", about=about | {"rank": rank})
    named = {str(number): list(ranks) for ranks, number in groups.items() if number}
    write_atomically(folder / GROUPS, json.dumps(named).encode())
    return folder


def _groups(run: Timeline) -> dict[tuple[int, ...], int]:
    """A number for each set of ranks that meets in collectives; 0, which readers take for all ranks, is all."""
    sets = sorted({tuple(sorted(_ranks(cls))) for cls in run.graph.classes if cls.collective})
    everyone = tuple(range(run.graph.gpus))
    return {everyone: 0} | {ranks: number for number, ranks in enumerate((s for s in sets if s != everyone), start=1)}


def _ranks(cls: KernelClass) -> tuple[int, ...]:
    ranks = cls.describe["ranks"]
    assert isinstance(ranks, Sequence)
    return tuple(ranks)


def _nodes(run: Timeline, rank: int, groups: dict[tuple[int, ...], int]) -> Iterator[Node]:
    graph, records = run.graph, run.records
    op, start, end = (
        np.frombuffer(column, dtype=np.int64)
        for column in (records.span_op, records.span_start_ps, records.span_end_ps)
    )
    mine = np.flatnonzero(np.asarray(graph.op_gpu)[op] == rank)
    mine = mine[np.argsort(op[mine], kind="stable")]  # in program order
    op, start, end = op[mine], start[mine], end[mine]
    classes, queues = np.asarray(graph.op_class)[op], np.asarray(graph.op_queue)[op]
    # The pause before a kernel is part of it: readers start a node as soon as those before it have ended.
    gaps_s = np.array([cls.gap_s for cls in graph.classes])[classes]
    begin_us = np.maximum(0.0, np.round((start * S_PER_PS - gaps_s) * 1e6)).astype(np.int64)
    end_us = np.round(end * S_PER_PS * 1e6).astype(np.int64)
    alike, kind_of = np.unique(classes * len(graph.queue_stream) + queues, return_inverse=True)
    kinds = [
        list(_kinds(graph.classes[one // len(graph.queue_stream)], graph.queue_stream[one % len(graph.queue_stream)],
                    rank, groups))
        for one in alike.tolist()
    ]  # fmt: skip
    columns = zip(
        op.tolist(),
        kind_of.tolist(),
        begin_us.tolist(),
        (end_us - begin_us).tolist(),
        np.round((end - start) / 1e3).astype(np.int64).tolist(),
        np.frombuffer(records.span_energy_j, dtype=np.float64)[mine].tolist(),
        strict=True,
    )
    before = _predecessors(run, rank)
    ids: dict[int, tuple[int, ...]] = {}
    nothing: list[int] = []
    count = 0
    for kernel, number, start_us, duration_us, duration_ns, joules in columns:
        made, earlier = kinds[number], before.get(kernel, nothing)
        after = ids[earlier[0]] if len(earlier) == 1 else tuple([node for one in earlier for node in ids[one]])
        ids[kernel] = (count,) if len(made) == 1 else tuple(range(count, count + len(made)))
        for kind in made:
            own = (joules, duration_ns)
            tagged = own if len(kind.own) == len(own) else (*own, graph.op_collective[kernel])
            yield node_of((count, kind, after, start_us, duration_us, tagged))
            count += 1


def _kinds(cls: KernelClass, stream: int, rank: int, groups: dict[tuple[int, ...], int]) -> Iterator[NodeKind]:
    """The kinds of nodes that a kernel becomes; a tag says which sending belongs to which receiving."""
    common: dict[str, Value] = {"is_cpu_op": False, "stream": stream}
    for kind, attributes in _attributes(cls, rank, groups):
        own = MEASURED if kind in (NodeType.COMPUTE, NodeType.COLLECTIVE) else (*MEASURED, "comm_tag")
        yield NodeKind(name=cls.name, type=kind, attributes=common | attributes, own=own)


def _attributes(
    cls: KernelClass, rank: int, groups: dict[tuple[int, ...], int]
) -> Iterator[tuple[NodeType, dict[str, Value]]]:
    """The nodes that a kernel becomes: one, but two for a step round a ring, which sends and receives."""
    if not cls.collective:
        yield NodeType.COMPUTE, {"num_ops": round(flops_of(cls)), "tensor_size": round(cls.terms.hbm_bytes)}
        return
    op, ranks = CollectiveOp(str(cls.describe["op"])), _ranks(cls)
    size = cls.describe["buffer_bytes"]
    assert isinstance(size, int)
    if op in COLLECTIVES:
        attributes: dict[str, Value] = {
            "comm_type": int(COLLECTIVES[op]),
            "comm_size": size // len(ranks) if op is CollectiveOp.ALL_GATHER else size,
        }
        number = groups[tuple(sorted(ranks))]
        yield NodeType.COLLECTIVE, attributes | ({"pg_name": str(number)} if number else {})
        return
    place = ranks.index(rank)
    if op is CollectiveOp.SEND_RECV or place == 0:
        to = ranks[(place + 1) % len(ranks)]
        yield NodeType.SEND, {"comm_src": rank, "comm_dst": to, "comm_size": size}
    if op is CollectiveOp.SEND_RECV or place == 1:
        yield (
            NodeType.RECEIVE,
            {"comm_src": ranks[place - 1], "comm_dst": rank, "comm_size": size},
        )


def _predecessors(run: Timeline, rank: int) -> dict[int, list[int]]:
    """For each kernel of ``rank``, those that it waits for: the one before it on its stream, and other streams'."""
    graph = run.graph
    before: dict[int, list[int]] = {}
    for gpu, queue in zip(graph.queue_gpu, graph.queue_ops, strict=True):
        if gpu == rank:
            for first, second in pairwise(queue):
                before[second] = [first]
    for first, successors in graph.successors.items():
        if graph.op_gpu[first] == rank:
            for second in successors:
                before.setdefault(second, []).append(first)
    return before
