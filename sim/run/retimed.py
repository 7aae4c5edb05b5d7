"""Orders of events kept of a search's engine runs, and what the work would draw at other clocks by them.

An engine run costs about as much as a walk through its order at several clocks (:mod:`sim.shortcuts.retiming`), which
takes the place of looks in the middle of a search. The looks that prove its answer are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.engine.driver import Engine
from sim.engine.record import Recorder
from sim.engine.running import HeldClock
from sim.shortcuts.clocks import ClockCurves, clock_of, grid_of
from sim.shortcuts.pieces import Piece, Repeated
from sim.shortcuts.retiming.order import NoOrder, NotingCore, order_of
from sim.shortcuts.retiming.record import Record
from sim.shortcuts.retiming.walk import Walked, walk

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

# Orders are taken down of pieces of at most so many kernels.
MOST_KERNELS = 20_000


@dataclass(slots=True, kw_only=True)
class Looks:
    """How a search, or several, went: runs of the engine, walks, the clocks of those, and how they ended.

    At ``held`` of the clocks the order of events held, at ``exact`` ones time and energy are the engine's; a walk
    ``fell_back`` where its order held at none that the search asked for.
    """

    engine: int = 0
    walks: int = 0
    walked: int = 0
    held: int = 0
    exact: int = 0
    fell_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Powers:
    """Mean power (W) at some steps of the grid, and where the order of events held."""

    steps: Sequence[int]
    power_w: Floats
    held: Flags
    exact: Flags
    walks: Sequence[Walked]

    def seed(self, step: int) -> None:
        """Have the engine's solver know what the walk has solved at a step."""
        for one in self.walks:
            one.seed(self.steps.index(step))


@dataclass(slots=True)
class _Kept:
    """The order of one run of a piece, made when it is first asked for."""

    held: HeldClock
    core: NotingCore | None
    records: Recorder
    record: Record | None = None

    def made(self) -> Record | None:
        """The order, or None where the run's cannot be followed."""
        if self.core is not None:
            try:
                self.record = Record(order_of(self.core, self.held, self.records))
            except (NoOrder, ValueError):
                self.record = None
            self.core = None
        return self.record


@dataclass(slots=True)
class OrderBook:
    """The orders of a sequence on one GPU, kept for all searches of its plan."""

    sequence: Sequence[Repeated]
    _kept: dict[int, list[_Kept]] = field(default_factory=dict)  # by the place of a piece in the sequence

    @property
    def empty(self) -> bool:
        """Whether there is none to walk through."""
        return not self._kept

    def run(self, held: HeldClock) -> None:
        """Run the pieces of the sequence that overlap, unless they have been, and take down their orders."""
        for piece in self._scheduled():
            if (held,) not in piece.played:
                core = NotingCore(piece.graph, [piece.model], [held])
                records = Engine(core).run()
                piece.keep((held,), piece.ended(records))
                self._kept.setdefault(id(piece), []).append(_Kept(held, core, records))

    def _scheduled(self) -> list[Piece]:
        pieces = {id(step.piece): step.piece for step in self.sequence if step.piece.serial is None}
        return [piece for piece in pieces.values() if not piece.whole and piece.graph.kernels <= MOST_KERNELS]

    def powers(self, steps: Sequence[int], limit_w: float) -> Powers | None:
        """Mean power at ``steps`` of the grid under a fast limit, by the nearest orders; None without any."""
        gpu = self.sequence[0].piece.model.gpu
        curves = _some(grid_of(gpu), steps)
        middle_hz = clock_of(gpu, steps[len(steps) // 2])
        length_ps, energy_j = np.zeros(len(steps)), np.zeros(len(steps))
        held, exact = np.ones(len(steps), dtype=bool), np.ones(len(steps), dtype=bool)
        walks: dict[int, Walked] = {}
        for step in self.sequence:
            piece = step.piece
            if piece.serial is not None:
                targets = [(HeldClock(clock_hz, limit_w),) for clock_hz in curves.clock_hz.tolist()]
                ran = [piece.at_clocks(target) or piece.play(target) for target in targets]
                length_ps += step.repeat * np.array([one.end_ps for one in ran])
                energy_j += step.repeat * np.array([one.energy_j[0] for one in ran])
                continue
            if id(piece) not in walks:
                record = self._nearest(piece, middle_hz)
                if record is None:
                    return None
                walks[id(piece)] = walk(record.solved(curves, limit_w))
                held &= walks[id(piece)].held
                exact &= walks[id(piece)].exact
            walked = walks[id(piece)]
            length_ps += step.repeat * walked.length_ps
            energy_j += step.repeat * walked.energy_j
        power_w = energy_j / (length_ps * 1e-12)
        return Powers(steps=steps, power_w=power_w, held=held, exact=held & exact, walks=list(walks.values()))

    def _nearest(self, piece: Piece, clock_hz: float) -> Record | None:
        kept = self._kept.get(id(piece), ())
        return min(kept, key=lambda one: abs(one.held.clock_hz - clock_hz)).made() if kept else None


def _some(curves: ClockCurves, steps: Sequence[int]) -> ClockCurves:
    places = list(steps)
    return ClockCurves(
        clock_hz=curves.clock_hz[places],
        clock_fraction=curves.clock_fraction[places],
        idle_w=curves.idle_w[places],
        voltage_scale=curves.voltage_scale[places],
    )
