"""A generated image or video in the steady state: its decoder runs at a clock of its own.

Denoising at the power limit lasts for seconds and more, and its clock is where the limiters leave it. The decoder
behind it draws another power: within some 60 ms the limiters let its clock go (docs/video.md, "Which clock"), to the
one at which it alone would settle.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from simpy.events import Event

from sim.engine.core import Core
from sim.engine.driver import Engine, Tick
from sim.engine.running import HeldClock, bounds
from sim.errors import FoldError
from sim.run.plan import PieceSequence
from sim.run.steady import mean_w
from sim.shortcuts.pieces import Repeated, RepeatedPiece, play
from workloads.diffusion import DECODE

Clocks = tuple[HeldClock, ...]  # of each GPU of a layout


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoClocks:
    """Clocks up to the end of the denoising steps at ``change_ps``, and behind it; ``steps_w``: each GPU's mean power
    up to there."""

    steps: Clocks
    decoder: Clocks
    change_ps: int
    steps_w: tuple[float, ...]

    @classmethod
    def of(cls, layout: PieceSequence, steps: Sequence[HeldClock], decoder: Sequence[HeldClock]) -> VideoClocks:
        """Of the GPUs of a ``layout``: the change is where its last piece before the decoder ends.

        Raises :class:`FoldError` where GPUs do not end that piece together.
        """
        before, behind = _cut(layout)
        parts = play(before or behind, tuple(steps))
        if before:
            if not parts[-1].played.level:
                raise FoldError("GPUs end the denoising steps at different times")
            change_ps, power_w = sum(part.repeat * part.played.end_ps for part in parts), mean_w(parts)
        else:
            change_ps = _end_of_steps_ps(layout, parts[0])
            gpus = range(len(steps))
            power_w = [parts[0].played.energy_until_j(gpu, change_ps) / (change_ps * 1e-12) for gpu in gpus]
        return cls(steps=tuple(steps), decoder=tuple(decoder), change_ps=change_ps, steps_w=tuple(power_w))

    def on(self, places: Sequence[int]) -> VideoClocks:
        """The same for a layout whose GPUs are equal to those in ``places`` of this one."""
        return VideoClocks(
            steps=tuple(self.steps[place] for place in places),
            decoder=tuple(self.decoder[place] for place in places),
            change_ps=self.change_ps,
            steps_w=tuple(self.steps_w[place] for place in places),
        )

    def play(self, layout: PieceSequence) -> list[RepeatedPiece]:
        """The parts of the run; a layout of one piece runs as events, with a change of clocks in time."""
        before, behind = _cut(layout)
        if before:
            return [*play(before, self.steps), *play(behind, self.decoder)]
        (step,) = behind
        core = Core(step.piece.graph, [step.piece.model] * len(self.steps), list(self.steps))
        played = step.piece.ended(Engine(core, self).run())
        return [RepeatedPiece(number=step.number, piece=step.piece, played=played, repeat=1)]

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        """The change of clocks; see :class:`sim.engine.driver.Governor`."""
        yield Tick(engine.env, self.change_ps)
        for gpu, clock in enumerate(self.decoder):
            engine.core.change_limit(gpu, *bounds(clock, clock.clock_hz))


def _cut(layout: PieceSequence) -> tuple[tuple[Repeated, ...], tuple[Repeated, ...]]:
    """The pieces before the decoder's first; none where a whole run is one piece."""
    parts = groupby(layout.sequence, key=lambda step: layout.phases[step.number][-1] == DECODE)
    found = {behind: tuple(steps) for behind, steps in parts}
    return found.get(False, ()), found.get(True, ())


def _end_of_steps_ps(layout: PieceSequence, part: RepeatedPiece) -> int:
    """When the last kernel before the decoder ends, in a whole run."""
    records, graph = part.played.records, part.piece.graph
    before = np.array([phase != DECODE for phase in layout.phases[part.number]])
    ops, ends_ps = (np.frombuffer(column, dtype=np.int64) for column in (records.span_op, records.span_end_ps))
    return int(ends_ps[before[np.asarray(graph.op_segment)[ops]]].max())
