"""Blocks of kernels of recorded durations: their tiles, their requests for SMs, and when they end."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from simpy.events import NORMAL

from sim.engine.course import Opening, course, exits_of, rounds_alone
from sim.engine.resources.arbitration import Arbitrated, Moment
from sim.engine.resources.grid import Grid
from sim.engine.resources.sm_pool import Blocks
from sim.engine.resources.tiles import Dealing, Split
from sim.engine.time import WholeTime


class Dealt(Split):
    """Tiles of a kernel of recorded duration, in rounds of equal time.

    Where the number of measured rounds is not known, the time of a round is such that the kernel lasts ``dur_ps`` on
    the SMs that it holds at present.
    """

    __slots__ = ("dur_ps", "exit_ps", "grid", "known", "openings", "round_ps", "since_ps", "started")

    def __init__(self, grid: Grid, dur_ps: int, since_ps: int, usual_rounds: float) -> None:
        own, rounds = grid.own_tiles, max(1, -(-grid.tiles // int(grid.sms)))
        fetched = max(0.0, grid.tiles - own * grid.sms)
        super().__init__(Dealing(rounds, own, fetched))
        self.grid, self.dur_ps, self.since_ps = grid, dur_ps, since_ps
        self.known = usual_rounds > 0.0
        self.round_ps = dur_ps / usual_rounds if self.known else 0.0
        self.openings: list[Opening] = []
        self.started: list[RecordedBlocks] = []
        self.exit_ps = math.inf  # when the first blocks end

    def join(self, part: Blocks, now_ps: int) -> None:
        """Blocks start: from now on they process their share of the tiles."""
        assert isinstance(part, RecordedBlocks)
        slots = int(part.sms)
        if not self.own and now_ps >= self.exit_ps:
            part.end_ps = now_ps  # no tile is left to fetch
            return
        self.openings.append((now_ps, slots))
        self.started.append(part)
        if slots == self.grid.sms:
            self.round_ps = self.round_ps or self.dur_ps / self.rounds
            part.end_ps = now_ps + round(self.rounds * self.round_ps)
            part.busy = self.grid.tiles - (self.rounds - 1) * slots
            return
        if not self.known:
            self.round_ps = self._round_ps()
        found = course(self.grid, self.openings, self.round_ps)
        self.exit_ps = min(exit_ps for exit_ps, _ in exits_of(self.openings, found.stints, self.round_ps))
        for one, (end_ps, busy) in zip(self.started, found.stints, strict=True):
            one.end_ps, one.busy = round(end_ps), busy

    @property
    def last_ps(self) -> int:
        """When the kernel ends with the blocks that have started."""
        return max(one.end_ps for one in self.started) if self.known else self.since_ps + self.dur_ps

    def _round_ps(self) -> float:
        """The time of a round at which the kernel ends as recorded, to a thousandth of it."""
        dur_ps, openings = self.dur_ps, self.openings
        if len(openings) == 1:
            return dur_ps / rounds_alone(self.grid, openings[0][1])
        most, end_ps = max(1, -(-self.grid.tiles // openings[0][1])), self.since_ps + dur_ps
        step_ps = max(1, dur_ps // (1000 * most))
        if abs(course(self.grid, openings, self.round_ps).end_ps - end_ps) < step_ps:
            return self.round_ps  # these blocks start as in the last estimate
        times_ps = range(dur_ps // (most + self.own), dur_ps + step_ps, step_ps)
        at = bisect_left(times_ps, True, key=lambda round_ps: course(self.grid, openings, round_ps).end_ps >= end_ps)
        return float(times_ps[min(at, len(times_ps) - 1)])

    def ended(self, _: Blocks) -> bool:
        """Take in blocks that have ended; True of the last ones."""
        self.parts -= 1
        return not self.parts


class RecordedBlocks(Blocks):
    """A kernel's request for SMs, or that of its blocks which start late; ``key`` ends with the kernel's number."""

    def __init__(self, granted: Granted, pool: Arbitrated, grid: Grid, key: tuple[int, int], sms: float, *,
                 at_once: bool) -> None:  # fmt: skip
        self.when_granted, self.op, self.at_once = granted, key[1], at_once
        self.end_ps, self.busy, self.done = -1, 0, False
        super().__init__(pool, grid, key, sms)
        self.callbacks.append(granted)

    def late(self, wanted: float) -> RecordedBlocks:
        """The blocks that start when more SMs are free."""
        key = (int(self.key[0]), self.op)
        return RecordedBlocks(self.when_granted, self.resource, self.grid, key, wanted, at_once=False)

    def withdraw(self) -> None:
        """The kernel has ended: withdraw the requests of its blocks."""
        queue = self.resource.put_queue
        for late in [one for one in queue if one.split is self.split]:
            queue.remove(late)


class Later(Moment):
    """An event of a kernel after ``delay``: its counter is cleared, or it ends as recorded."""

    def __init__(self, env: WholeTime, then: Callable[[Any], None], op: int, delay: int) -> None:
        self.op = op
        super().__init__(env, [then], NORMAL, delay)


class Left(Moment):
    """Blocks end, or, where they ``keep`` some SMs, begin their last round."""

    def __init__(
        self, env: WholeTime, then: Callable[[Any], None], blocks: RecordedBlocks, moment_ps: int, keep: int = 0
    ) -> None:
        self.blocks, self.keep = blocks, keep
        self.end_ps = blocks.end_ps
        super().__init__(env, [then], NORMAL, max(0, moment_ps - env.now))


Granted = Callable[[RecordedBlocks], None]
