"""What a reader makes of one file, before ranks and clocks are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from traces.capture import CollectiveArgs, MatrixProduct, Stated
from traces.read.events import Reading
from traces.records import Floats, Ints

Block = Sequence[Ints]  # columns of equal length
FAR_NS = 1 << 52  # 52 days: twice that in picoseconds is a number of 64 bits


@dataclass(slots=True)
class Rows:
    """Blocks of columns; times in nanoseconds of the file's own clock.

    ``work``: name, category, device, stream, start, duration, correlation, collective, moved bytes, blocks,
    threads, family, host operator. ``calls``: name, thread, start, duration, correlation. ``waits``: kind, device,
    stream, source stream, record's correlation, correlation, start, duration. ``annotations``: name, process, lane,
    on GPU, start, duration. ``products``: what host operators multiply, by operator; ``own_works``: operators
    (-2, -3, ...) that stand for what simulated kernels state themselves. ``arrows`` of simulated traces: number, half
    (0: leaves, 1: arrives), device, stream, time. ``counts``, with their values: counter (of
    :data:`traces.read.own.COUNTERS`), device, time.
    """

    names: dict[str, int] = field(default_factory=dict)
    collectives: dict[CollectiveArgs, int] = field(default_factory=dict)
    products: dict[int, MatrixProduct] = field(default_factory=dict)
    own_works: dict[Stated, int] = field(default_factory=dict)
    arrows: list[Ints] = field(default_factory=list)
    counts: list[tuple[Ints, Floats]] = field(default_factory=list)
    work: list[Block] = field(default_factory=list)
    energy_j: list[Floats] = field(default_factory=list)
    calls: list[Block] = field(default_factory=list)
    waits: list[Block] = field(default_factory=list)
    annotations: list[Block] = field(default_factory=list)

    def name(self, text: object) -> int:
        """Index of a name."""
        return self.names.setdefault(str(text), len(self.names))

    def own_work(self, stated: Stated, product: MatrixProduct | None) -> int:
        """The operator that stands for ``stated``, and multiplies ``product``."""
        operator = self.own_works.setdefault(stated, -2 - len(self.own_works))
        if product is not None:
            self.products[operator] = product
        return operator


@dataclass(slots=True)
class FileRows:
    """One file: its rows, and what was learnt on the way."""

    rows: Rows
    reading: Reading


def leave_out_far(part: FileRows) -> None:
    """Leave out rows weeks away from the others of their file: no profile is that long, a damaged time is."""
    rows = part.rows
    starts = [block[4] for block in rows.work if len(block[4])]
    if not starts:
        return
    start = np.concatenate(starts)
    middle = int(np.partition(start, len(start) // 2)[len(start) // 2])
    for table, at in ((rows.work, 4), (rows.calls, 2), (rows.waits, 6), (rows.annotations, 4)):
        for number, block in enumerate(table):
            near = (np.abs(block[at] - middle) < FAR_NS) & (block[at + 1] < FAR_NS)
            if near.all():
                continue
            part.reading.note("time-far-from-all-others", part.reading.path.name, int((~near).sum()))
            table[number] = [column[near] for column in block]
            if table is rows.work:
                rows.energy_j[number] = rows.energy_j[number][near]


def packed(columns: list[Ints]) -> list[Ints]:
    """``columns`` of which those of one value take no room."""
    for number, column in enumerate(columns):
        if len(column) and (column == column[0]).all():
            columns[number] = np.broadcast_to(column[:1].copy(), len(column))
    return columns


def column_of(blocks: Sequence[Block], number: int) -> Ints:
    """One column of all ``blocks``."""
    return np.concatenate([block[number] for block in blocks]) if blocks else np.empty(0, dtype=np.int64)


def block_of(rows: Sequence[tuple[int, ...]], width: int) -> Block:
    """Rows one by one as a block of columns."""
    return list(np.array(rows, dtype=np.int64).T if rows else np.empty((width, 0), dtype=np.int64))
