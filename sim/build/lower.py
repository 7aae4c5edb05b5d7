"""From rank programs to the kernel graph: repeat segments, match the ranks of collectives, add dependencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import numpy as np

from inputs.changed import changed
from inputs.same import Same
from sim.engine.graph import KernelClass, KernelGraph
from sim.errors import ScenarioError
from workloads.kernels import host_seconds
from workloads.program import Kernel, Program, RankProgram, Segment
from workloads.work import CollectiveWork

Classify = Callable[[Kernel], KernelClass]
Place = Literal["alone", "crossed", "beside", "joins"]
# A group that meets in collectives: (rank, which of its groups this is); without folding the second is 0.
Group = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Columns:
    """Columns of one rank program, with indices relative to its first kernel."""

    kernel_class: list[int]
    stream: list[int]
    segment: list[int]
    launches: list[int]  # of each kernel; 0 where a host kernel stands for the launches of its segment
    host_s: list[float]  # host time beside launches of the program's kernels
    collectives: list[tuple[list[int], tuple[int, ...]]]  # positions, in order, of the collectives of each group
    edges: list[tuple[int, int]]


@dataclass(slots=True)
class _Tables:
    """Class and segment tables that all programs of a graph share."""

    classify: Classify
    hosted: bool  # whether a host launches each kernel
    classes: list[KernelClass] = field(default_factory=list)
    class_of: dict[object, int] = field(default_factory=dict)
    like: dict[object, list[int]] = field(default_factory=dict)  # classes that may be equal, by some of their sizes
    segments: list[tuple[str, str, int]] = field(default_factory=list)
    segment_of: dict[tuple[int, int, Segment], int] = field(default_factory=dict)
    asynchronous: set[int] = field(default_factory=set)

    def kernel(self, kernel: Kernel, place: Place) -> int:
        """The class of ``kernel`` in a segment of one stream, or in its place among several."""
        # The stream and the dependencies of a kernel do not change its cost.
        key = (kernel.name, kernel.work, kernel.flops, kernel.bytes_moved, kernel.priority, kernel.chained, place)
        index = self.class_of.get(key)
        if index is None:
            priced = self.classify(kernel)
            if place == "crossed":
                priced = changed(priced, terms=priced.beside or priced.terms, beside=None)
            elif place != "alone":
                priced = _beside(priced, joins=place == "joins")
            index = self.class_of[key] = self._index(priced)
        return index

    def _index(self, priced: KernelClass) -> int:
        """Kernels that cost and read the same share a class, and with it the engine's memo of running sets."""
        terms = priced.terms
        like = self.like.setdefault((priced.name, terms.floor_s, terms.hbm_bytes, terms.cycles_per_block), [])
        for index in like:
            known = self.classes[index]
            if known is priced or (known == priced and repr(known.describe) == repr(priced.describe)):
                return index
        like.append(len(self.classes))
        self.classes.append(priced)
        return like[-1]

    def segment(self, phase_index: int, segment_index: int, phase: str, segment: Segment) -> int:
        key = (phase_index, segment_index, changed(segment, kernels=()))
        first = self.segment_of.get(key)
        if first is None:
            first = self.segment_of[key] = len(self.segments)
            numbers = range(segment.first, segment.first + segment.repeat)
            self.segments.extend((phase, segment.name, number) for number in numbers)
            if segment.asynchronous:
                self.asynchronous.update(range(first, first + segment.repeat))
        return first


def lower(
    program: Program,
    classify: Classify,
    *,
    issue_s: float | None = None,
    groups: Mapping[tuple[int, ...], Group] | None = None,
) -> KernelGraph:
    """The kernel graph of ``program``; ``classify`` prices one kernel.

    ``issue_s`` is the host's time per launch in eager mode (kernel i of a rank cannot start before
    ``(i + 1) * issue_s``, and later by the time of the host that stands before it), None for graph launches.
    ``groups`` maps groups of ranks to simulated GPUs when the programs are those of representatives
    (:mod:`sim.shortcuts.fold`).
    """
    tables = _Tables(classify, hosted=issue_s is not None)
    laid: dict[Same[RankProgram], _Columns] = {}
    programs = [Same(rank_program) for rank_program in program.ranks]
    for one in programs:
        if one not in laid:
            laid[one] = _lay_out(one.held, tables)
    columns = [laid[one] for one in programs]
    offsets = [0, *accumulate(len(c.kernel_class) for c in columns)]

    op_collective = [-1] * offsets[-1]
    members = _tie_collectives(columns, offsets, op_collective, groups)
    queue_gpu: list[int] = []
    queue_stream: list[int] = []
    queue_ops: list[Sequence[int]] = []
    op_class: list[int] = []
    op_gpu: list[int] = []
    op_queue: list[int] = []
    op_segment: list[int] = []
    successors: dict[int, list[int]] = {}
    predecessors: dict[int, int] = {}
    for rank, (column, offset) in enumerate(zip(columns, offsets, strict=False)):
        size = len(column.kernel_class)
        op_class += column.kernel_class
        op_gpu += [rank] * size
        op_segment += column.segment
        streams = sorted(set(column.stream))
        queue = {stream: len(queue_gpu) + number for number, stream in enumerate(streams)}
        op_queue += [queue[stream] for stream in column.stream]
        for stream in streams:
            queue_gpu.append(rank)
            queue_stream.append(stream)
            if len(streams) == 1:
                queue_ops.append(range(offset, offset + size))
            else:
                queue_ops.append([offset + i for i, own in enumerate(column.stream) if own == stream])
        for before, after in column.edges:
            successors.setdefault(before + offset, []).append(after + offset)
            predecessors[after + offset] = predecessors.get(after + offset, 0) + 1
    issue_ps = None
    if issue_s is not None:
        issue_ps = [moment for column in columns for moment in _issued_ps(column, issue_s)]
    return KernelGraph(
        gpus=len(columns),
        classes=tuple(tables.classes),
        op_class=op_class,
        op_gpu=op_gpu,
        op_queue=op_queue,
        op_segment=op_segment,
        op_collective=op_collective,
        queue_gpu=tuple(queue_gpu),
        queue_stream=tuple(queue_stream),
        queue_ops=tuple(queue_ops),
        successors={op: tuple(after) for op, after in successors.items()},
        predecessor_count=predecessors,
        collective_members=members,
        segments=tuple(tables.segments),
        asynchronous_segments=frozenset(tables.asynchronous),
        issue_ps=issue_ps,
    )


def _issued_ps(column: _Columns, issue_s: float) -> list[int]:
    """Launch time of each kernel of a rank by one host, which does its other work in program order."""
    host_s = np.array(column.host_s)
    begun_s = np.cumsum(host_s) - host_s
    moments: list[int] = np.rint((np.cumsum(column.launches) * issue_s + begun_s) * 1e12).astype(np.int64).tolist()
    return moments


def _beside(kernel: KernelClass, *, joins: bool) -> KernelClass:
    """``kernel`` where other streams may take its SMs while it is not ready for them, or those that it leaves free.

    In a graph, one that ``joins`` another stream starts later than after a kernel of its own.
    """
    terms = kernel.beside or kernel.terms
    if kernel.clearing_s:
        terms = changed(terms, floor_s=terms.floor_s - kernel.clearing_s / terms.scale)
    gap_s = max(kernel.gap_s, kernel.joining_gap_s) if joins else kernel.gap_s
    return changed(kernel, lead_s=kernel.clearing_s or kernel.lead_s, terms=terms, gap_s=gap_s, beside=None)


def _places(kernels: Sequence[Kernel], lone: Place) -> list[Place]:
    """Of each kernel of a segment, whether it runs beside other streams and waits for one.

    ``lone``: of those of one stream, ``crossed`` where transfers of other segments come and go beside them.
    """
    lane = [kernel.stream for kernel in kernels]
    if len(set(lane)) == 1:
        return [lone] * len(lane)
    heads = {lane.index(stream) for stream in set(lane)}  # they wait for all streams of the segment before
    return [
        "joins" if at in heads or any(lane[before] != lane[at] for before in kernel.after) else "beside"
        for at, kernel in enumerate(kernels)
    ]


def _lay_out(program: RankProgram, tables: _Tables) -> _Columns:
    classes: list[int] = []
    streams: list[int] = []
    segments: list[int] = []
    launches: list[int] = []
    host_s: list[float] = []
    edges: list[tuple[int, int]] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    start = 0
    last_of: dict[int, int] = {}  # stream -> its last kernel so far
    marks: dict[str, list[int]] = {}
    transfers = any(segment.asynchronous for phase in program.phases for segment in phase.segments)
    lone: Place = "crossed" if transfers else "alone"
    for phase_index, phase in enumerate(program.phases):
        for segment_index, segment in enumerate(phase.segments):
            kernels, repeat = segment.kernels, segment.repeat
            size = len(kernels)
            first = tables.segment(phase_index, segment_index, phase.name, segment)
            lane = [k.stream for k in kernels]
            places = _places(kernels, lone)
            classes += [tables.kernel(k, p) for k, p in zip(kernels, places, strict=True)] * repeat
            streams += lane * repeat
            segments += [number for number in range(first, first + repeat) for _ in kernels]
            if tables.hosted:
                times_s = [host_seconds(kernel) for kernel in kernels]
                launches += [0 if any(times_s) else 1] * (size * repeat)
                host_s += times_s * repeat
            in_segment: dict[tuple[int, ...], list[int]] = {}
            for position, kernel in enumerate(kernels):
                if isinstance(kernel.work, CollectiveWork):
                    in_segment.setdefault(kernel.work.ranks, []).append(position)
            for ranks, positions in in_segment.items():
                bases = range(start, start + size * repeat, size)
                groups.setdefault(ranks, []).extend([base + position for base in bases for position in positions])
            inner = [(p, i) for i, k in enumerate(kernels) for p in k.after]
            used = sorted(set(lane))
            joins = not segment.asynchronous and (len(used) > 1 or any(s not in used for s in last_of))
            heads = [start + lane.index(s) for s in used]
            try:
                edges.extend((tail, head) for name in segment.waits for tail in marks[name] for head in heads)
            except KeyError as unknown:
                raise ScenarioError(
                    f"segment '{segment.name}' waits for {unknown}, which no earlier one marks"
                ) from None
            for repetition in range(repeat):
                base = start + repetition * size
                joined = joins and not (segment.rolls and repetition)
                if joined:
                    for stream in used:
                        head = base + lane.index(stream)
                        edges.extend((tail, head) for other, tail in last_of.items() if other != stream)
                edges.extend((base + p, base + i) for p, i in inner if p >= 0 or repetition)
                if (joined or repetition == repeat - 1) and not segment.asynchronous:
                    last_of = {s: base + size - 1 - lane[::-1].index(s) for s in used}
            start += size * repeat
            if segment.mark is not None:
                marks[segment.mark] = [start - 1 - lane[::-1].index(s) for s in used]
    return _Columns(
        kernel_class=classes,
        stream=streams,
        segment=segments,
        launches=launches,
        host_s=host_s,
        collectives=[(sorted(positions), ranks) for ranks, positions in groups.items()],
        edges=edges,
    )


def _tie_collectives(
    columns: list[_Columns],
    offsets: list[int],
    op_collective: list[int],
    groups: Mapping[tuple[int, ...], Group] | None,
) -> list[tuple[int, ...]]:
    """Give the i-th collective of each group the same id on all its ranks; returns the members by id."""
    members: list[tuple[int, ...]] = []
    by_group: dict[Group, dict[int, list[int]]] = {}
    for rank, (column, offset) in enumerate(zip(columns, offsets, strict=False)):
        for positions, ranks in column.collectives:
            group = tuple((member, 0) for member in ranks) if groups is None else groups[ranks]
            if all(member != rank for member, _ in group):
                raise ScenarioError(f"rank {rank} runs a collective of ranks {ranks}, to which it does not belong")
            by_group.setdefault(group, {})[rank] = [offset + position for position in positions]
    for group, parts in sorted(by_group.items()):
        ranks = tuple(member for member, _ in group)
        counts = {rank: len(parts[rank]) if rank in parts else 0 for rank in ranks}
        if len(set(counts.values())) != 1:
            raise ScenarioError(f"ranks {ranks} run different numbers of collectives of their group: {counts}")
        for number, met in enumerate(zip(*[parts[rank] for rank in ranks], strict=True), len(members)):
            members.append(met)
            for op in met:
                op_collective[op] = number
    return members
