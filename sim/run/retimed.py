"""The order of events of one engine run of a plan, and what its work would draw at other clocks by it.

A walk through an order (:mod:`sim.shortcuts.retiming`) at many clocks costs as much as about two runs of the engine
at one, the order taken down included. It says where searches under further caps end; the looks that prove it are the
engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.engine.driver import Engine
from sim.engine.noting import NotingCore
from sim.engine.record import Recorder
from sim.engine.running import HeldClock
from sim.shortcuts.clocks import ClockCurves
from sim.shortcuts.pieces import Piece, Repeated
from sim.shortcuts.retiming.order import order_of
from sim.shortcuts.retiming.record import OrderRecord
from sim.shortcuts.retiming.walk import walk

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.intp]

# The order is taken down of pieces of at most so many kernels.
MOST_KERNELS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOverClocks:
    """Stretches of work, one a row: how often each comes, its lengths (ps) and its power (W) over the clock."""

    count: Floats
    lasts_ps: Floats
    power_w: Floats

    def at(self, columns: Places) -> WorkOverClocks:
        """The same at some of the clocks."""
        return WorkOverClocks(count=self.count, lasts_ps=self.lasts_ps[:, columns], power_w=self.power_w[:, columns])


@dataclass(frozen=True, slots=True, kw_only=True)
class Retimed:
    """The work that overlaps, at some clocks: between two instants each row, ``held`` where no order of events changed.

    Elsewhere the instants of the run come at the times that its own causes say: an estimate.
    """

    stretches: WorkOverClocks
    held: Flags


@dataclass(slots=True)
class OrderBook:
    """The orders of the pieces of ``sequence`` on one GPU that overlap, each that of the first run it is shown."""

    sequence: Sequence[Repeated]
    _noted: dict[int, tuple[HeldClock, NotingCore, Recorder]] = field(default_factory=dict)  # by identity of the piece

    @property
    def complete(self) -> bool:
        """Whether there is an order of every piece."""
        return all(id(piece) in self._noted for piece in self._overlapped())

    def note(self, held: HeldClock) -> None:
        """Run the pieces whose orders are missing at a clock, and take these down."""
        for piece in self._overlapped():
            small = not piece.whole and piece.graph.kernels <= MOST_KERNELS
            if small and id(piece) not in self._noted and not piece.known((held,)):
                core = NotingCore(piece.graph, [piece.model], [held])
                records = Engine(core).run()
                piece.keep((held,), piece.ended(records))
                self._noted[id(piece)] = held, core, records

    def retimed(self, curves: ClockCurves) -> Retimed | None:
        """The work that overlaps at the clocks of ``curves``, its fast limit that of the noted runs; None without."""
        walks = []
        for piece in self._overlapped():
            record = self._record(piece)
            if record is None:
                return None
            target = record.order.target
            by_clock = walk(record.solved(curves, target.power_w, known=True))
            count = float(sum(step.repeat for step in self.sequence if step.piece is piece))
            walks.append((np.full(len(by_clock.lasts_ps), count), by_clock))
        stretches = WorkOverClocks(
            count=np.concatenate([count for count, _ in walks]),
            lasts_ps=np.concatenate([one.lasts_ps for _, one in walks]),
            power_w=np.concatenate([one.power_w for _, one in walks]),
        )
        return Retimed(stretches=stretches, held=np.logical_and.reduce([one.held for _, one in walks]))

    def _overlapped(self) -> Sequence[Piece]:
        return list({id(step.piece): step.piece for step in self.sequence if step.piece.serial is None}.values())

    def _record(self, piece: Piece) -> OrderRecord | None:
        noted = self._noted.get(id(piece))
        if noted is None:
            return None
        held, core, records = noted
        try:
            return OrderRecord(order_of(core, held, records))
        except ValueError:  # an order that cannot be followed, or kernels without a rate of their own
            return None
