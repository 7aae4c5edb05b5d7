"""SMs of a GPU split into named partitions (CUDA green contexts, MPS shares): who runs where.

A partition is an SM pool of its own, and a stream belongs to one: its kernels ask for at most that partition's SMs,
whatever stands idle beside it. Memory, links, clock and power stay those of the whole GPU; a MIG slice has memory
of its own and is a GPU (:mod:`hardware.mig`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hardware.gpu import GpuSpec
from hardware.laws.gemm_grid import on_partition
from hardware.laws.streaming import collective_on_few_sms, on_few_sms
from hardware.laws.terms import waves
from hardware.scheduling import scheduling
from sim.engine.graph import KernelClass, KernelGraph
from sim.errors import ScenarioError


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitions:
    """Partitions by name with their SMs, and the partition of some streams; others: the first to the first, and so on.

    >>> from hardware.catalog import load_gpu
    >>> two = Partitions(sms=(("compute", 116), ("comm", 16)), streams=(), gpu=load_gpu("h100"))
    >>> [two.of_stream(stream) for stream in range(4)]
    [0, 1, 1, 1]
    """

    sms: tuple[tuple[str, int], ...]
    streams: tuple[tuple[int, str], ...]
    gpu: GpuSpec

    def __post_init__(self) -> None:
        """Refuse partitions that the GPU does not have the SMs for."""
        total = sum(sms for _, sms in self.sms)
        if total > self.gpu.sms:
            text = ", ".join(f"{name} = {sms}" for name, sms in self.sms)
            raise ScenarioError(f"sm_partitions = {text}: {total} SMs in all, the GPU has {self.gpu.sms}: give less")

    def of_stream(self, stream: int) -> int:
        """The place of a stream's partition in ``sms``."""
        chosen = dict(self.streams).get(stream)
        names = [name for name, _ in self.sms]
        return min(stream, len(names) - 1) if chosen is None else names.index(chosen)


def partitioned(graph: KernelGraph, partitions: Partitions) -> KernelGraph:
    """The same kernels, each asking for SMs of its stream's partition only."""
    of_queue = tuple(partitions.of_stream(stream) for stream in graph.queue_stream)
    streams = [
        {stream for stream, of in zip(graph.queue_stream, of_queue, strict=True) if of == place}
        for place in range(len(partitions.sms))
    ]
    classes: list[KernelClass] = []
    known: dict[tuple[int, int], int] = {}

    def class_of(kernel_class: int, place: int) -> int:
        index = known.get((kernel_class, place))
        if index is None:
            name, sms = partitions.sms[place]
            cls = graph.classes[kernel_class]
            # A product's grid is made for the whole GPU: its other blocks come late and keep their own tiles, as beside
            # a collective. On 128 of 132 SMs a product of 768 tiles takes 7 rounds, not 6 (records/*/partitions).
            terms = cls.terms
            if cls.beside is not None and terms.blocks <= scheduling().own_tiles * partitions.gpu.sms:
                terms = cls.beside  # with more tiles than are a block's own, which ones they are matters little
            if cls.collective:
                terms = collective_on_few_sms(terms, float(sms)) if sms < partitions.gpu.sms else terms
            elif not terms.quantised:
                terms = replace(terms, sms_cap=min(terms.sms_cap, float(sms)))
            if not cls.collective and sms < partitions.gpu.sms:
                held = min(terms.blocks * terms.sms_per_block, float(sms))
                terms = on_few_sms(terms, held, partitions.gpu)
                if terms.quantised and len(streams[place]) == 1:
                    terms = on_partition(terms, sms, partitions.gpu.sms)
                elif terms.quantised:  # its blocks come in more rounds, the kernel is launched once
                    more = waves(terms, held) / waves(terms, float(partitions.gpu.sms))
                    terms = replace(terms, floor_s=terms.floor_s / more)
            index = known[kernel_class, place] = len(classes)
            describe = {**cls.describe, "sm_partition": f"{name} ({sms} SMs)"}
            classes.append(replace(cls, terms=terms, beside=None, describe=describe))
        return index

    op_class = [class_of(cls, of_queue[queue]) for cls, queue in zip(graph.op_class, graph.op_queue, strict=True)]
    return replace(
        graph,
        classes=tuple(classes),
        op_class=op_class,
        queue_partition=of_queue,
        partition_sms=tuple(float(sms) for _, sms in partitions.sms),
    )


def pairs(value: object) -> object:
    """Pairs from a table or from text like ``compute=116,comm=16``; anything else is left for the field to refuse.

    >>> pairs("compute=116, comm=16"), pairs({"compute": 116})
    ((('compute', '116'), ('comm', '16')), (('compute', 116),))
    """
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",")]
        return tuple((key.strip(), after.strip()) for key, _, after in parts)
    return value


def check_names(partitions: Sequence[tuple[str, int]] | None, streams: Sequence[tuple[int, str]] | None) -> None:
    """Refuse names that are there twice, or not at all."""
    names = [name for name, _ in partitions or ()]
    if len(set(names)) < len(names):
        raise ValueError(f"sm_partitions = {', '.join(names)}: give each partition a name of its own")
    numbers = [stream for stream, _ in streams or ()]
    if len(set(numbers)) < len(numbers):
        text = ", ".join(f"{stream}={name}" for stream, name in streams or ())
        raise ValueError(f"sm_partition = {text}: give each stream one partition")
    for stream, name in streams or ():
        if name not in names:
            known = f"one of {', '.join(names)}" if names else "sm_partitions too"
            raise ValueError(f"sm_partition = {stream}={name}: give {known}")
