"""Orders of events kept of a plan's first engine run, and what its work would draw at other clocks by them.

A walk through an order (:mod:`sim.shortcuts.retiming`) at many clocks costs about as much as a run of the engine at one.
It takes the place of looks in the middle of a search; those that prove its answer are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.engine.driver import Engine
from sim.engine.record import Recorder
from sim.engine.running import HeldClock
from sim.shortcuts.clocks import ClockCurves
from sim.shortcuts.pieces import Piece, Repeated
from sim.shortcuts.retiming.order import NotingCore, order_of
from sim.shortcuts.retiming.record import Record
from sim.shortcuts.retiming.walk import walk

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Orders are taken down of pieces of at most so many kernels.
MOST_KERNELS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """Stretches of work of one running set each: how often each comes, lengths (ps) and power (W) over the clock."""

    count: Floats
    lasts_ps: Floats
    power_w: Floats

    def part(self, columns: slice) -> Stretches:
        """The same at some of the clocks."""
        return Stretches(count=self.count, lasts_ps=self.lasts_ps[:, columns], power_w=self.power_w[:, columns])


@dataclass(slots=True)
class OrderBook:
    """The orders of the pieces of a sequence on one GPU that overlap, each taken down of its first run."""

    sequence: Sequence[Repeated]
    _noted: dict[int, tuple[HeldClock, NotingCore, Recorder]] = field(default_factory=dict)
    _records: dict[int, Record | None] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether no run has been noted."""
        return not (self._noted or self._records)

    def note(self, held: HeldClock) -> None:
        """Run the pieces at a clock, unless they have been run, and take down their orders."""
        for piece in self._scheduled():
            if not piece.played and not piece.whole and piece.graph.kernels <= MOST_KERNELS:
                core = NotingCore(piece.graph, [piece.model], [held])
                records = Engine(core).run()
                piece.keep((held,), piece.ended(records))
                self._noted[id(piece)] = held, core, records

    def walked(self, curves: ClockCurves) -> tuple[Stretches, Flags] | None:
        """The work's stretches at the clocks of ``curves`` below any limit, one a row, and where the orders hold.

        None where a piece that overlaps has no order.
        """
        found = []
        held = np.ones(len(curves.clock_hz), dtype=bool)
        for piece in self._scheduled():
            record = self._record(piece)
            if record is None:
                return None
            target = record.order.target
            limit_w = target.power_w if isinstance(target, HeldClock) else np.inf
            by_clock = walk(record.solved(curves, limit_w, known=True))
            held &= by_clock.held
            count = float(sum(step.repeat for step in self.sequence if step.piece is piece))
            found.append((count, by_clock))
        return (
            Stretches(
                count=np.concatenate([np.full(len(one.lasts_ps), count) for count, one in found]),
                lasts_ps=np.concatenate([one.lasts_ps for _, one in found]),
                power_w=np.concatenate([one.power_w for _, one in found]),
            ),
            held,
        )

    def _scheduled(self) -> Iterator[Piece]:
        pieces = {id(step.piece): step.piece for step in self.sequence if step.piece.serial is None}
        return iter(pieces.values())

    def _record(self, piece: Piece) -> Record | None:
        noted = self._noted.pop(id(piece), None)
        if noted is not None:
            held, core, records = noted
            try:
                self._records[id(piece)] = Record(order_of(core, held, records))
            except ValueError:  # NoOrder, or sets that have no rates of their own
                self._records[id(piece)] = None
        return self._records.get(id(piece))
