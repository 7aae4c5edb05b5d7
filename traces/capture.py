"""What was captured of a real run (or of a simulated one): plain columns, times in integer nanoseconds.

Every table is struct-of-arrays; -1 stands for "not recorded". Times count from ``Capture.origin_ns``, which
is common to all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from traces.records import Floats, Ints

NONE = -1  # an integer that the trace does not record


class Category(IntEnum):
    """What a row of :class:`GpuWork` is."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2


class _Ends:
    """Room for the ends of rows once they are known: no column, since they follow from others."""

    __slots__ = ("_end_ns",)
    _end_ns: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuWork(_Ends):
    """Everything that ran on a GPU stream, ordered by rank, then start.

    ``name`` indexes ``Capture.names``; ``launch`` a row of ``Capture.calls``; ``collective`` one of
    ``Capture.collectives``. ``graph`` is the launching call where one call launched more than one row (a CUDA
    or HIP graph). ``family`` indexes ``names``: the class that a simulated trace states itself. ``matrix`` indexes
    ``Capture.matrices``: the product that the host's operator asked for.
    ``stated`` indexes ``Capture.stated``: what a simulated kernel says of its work.
    ``energy_j`` is NaN where the trace has none.
    """

    name: Ints
    category: Ints
    rank: Ints
    stream: Ints
    start_ns: Ints
    dur_ns: Ints
    correlation: Ints
    launch: Ints
    graph: Ints
    collective: Ints
    moved_bytes: Ints
    blocks: Ints
    threads: Ints
    family: Ints
    matrix: Ints
    stated: Ints
    energy_j: Floats

    @property
    def end_ns(self) -> Ints:
        """End of each row, worked out once: readers ask row by row."""
        try:
            return self._end_ns
        except AttributeError:
            ends = self.start_ns + self.dur_ns
            ends.flags.writeable = False
            object.__setattr__(self, "_end_ns", ends)
            return ends

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostCalls:
    """Runtime and driver calls of host threads (launches, event records, waits), by rank, then start."""

    name: Ints
    rank: Ints
    thread: Ints
    start_ns: Ints
    dur_ns: Ints
    correlation: Ints

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """Recorded waits of a stream for an event of another (``cuda_sync``), and blocking host waits.

    ``source_stream`` is the stream that is waited for, ``record_correlation`` the correlation of the
    ``cudaEventRecord`` that made the event, ``correlation`` that of the waiting call. ``stream`` -1: the host.
    """

    kind: Ints
    rank: Ints
    stream: Ints
    source_stream: Ints
    record_correlation: Ints
    correlation: Ints
    start_ns: Ints
    dur_ns: Ints

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Annotations:
    """Named regions: profiler steps, layers, phases; ``on_gpu`` tells a GPU lane from a host thread."""

    name: Ints
    rank: Ints
    lane: Ints
    on_gpu: Ints
    start_ns: Ints
    dur_ns: Ints

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveArgs:
    """What the profiler wrote about a collective's message; empty or -1 where it wrote nothing."""

    operation: str = ""
    group: str = ""
    group_size: int = NONE
    ranks: str = ""
    dtype: str = ""
    elements_in: int = NONE
    elements_out: int = NONE
    sequence: int = NONE


def distinct(values: Ints) -> list[int]:
    """The values of a column that hardly changes, in order, at the price of one comparison a row.

    >>> distinct(np.array([2, 2, 2, 0, 0, 2]))
    [0, 2]
    """
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    return sorted({*values[:1].tolist(), *values[changes].tolist()})


# Family and sizes of a simulated kernel, by name.
Stated = tuple[tuple[str, int | float | str | tuple[tuple[float, ...], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """An ``m x k`` by ``k x n`` product, as the shapes of a host operator record it."""

    m: int
    k: int
    n: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """A counter of one rank's GPU as a simulated trace holds it: values that hold from their time on."""

    name: str
    rank: int
    time_ns: Ints
    value: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that the trace broke: how often, where first, and what was done or is to be done about it."""

    rule: str
    count: int
    first: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Capture:
    """A whole captured run: all ranks on one clock.

    ``depends`` are rows of ``work``, before and after, that the trace itself joins, and ``samples`` the clock and
    joules of each GPU: both are in simulated traces alone.
    """

    names: Sequence[str]
    work: GpuWork
    calls: HostCalls
    waits: Waits
    annotations: Annotations
    collectives: Sequence[CollectiveArgs] = ()
    matrices: Sequence[MatrixProduct] = ()
    stated: Sequence[Stated] = ()
    origin_ns: int = 0
    sources: Sequence[str] = ()
    metadata: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    depends: Ints = field(default_factory=lambda: np.empty((2, 0), dtype=np.int64))
    samples: Sequence[Samples] = ()

    @property
    def ranks(self) -> list[int]:
        """Ranks that ran something on a GPU."""
        return distinct(self.work.rank)

    @property
    def kernels(self) -> Ints:
        """Rows of ``work`` that are kernels (no copies, no memsets)."""
        return np.flatnonzero(self.work.category == Category.KERNEL)

    def keep(self, mask: Any) -> Capture:
        """The same capture with only those rows of ``work`` where ``mask`` holds."""
        kept = {column: getattr(self.work, column)[mask] for column in GpuWork.__slots__}
        place = np.full(len(self.work), NONE, dtype=np.int64)
        rows = np.arange(len(self.work))[mask]
        place[rows] = np.arange(len(rows))
        depends = place[self.depends]
        return replace(self, work=GpuWork(**kept), depends=depends[:, (depends != NONE).all(axis=0)])
