"""Equal stretches of work are simulated once and replayed: layers of a model, steps of a generation.

A :class:`Piece` is work that begins and ends *level*: every GPU starts it at one instant with nothing running, and
all end it at one instant. Then only the power targets carry over from earlier work, so that one run stands for all
repetitions under the same targets, to the picosecond. That a piece ends level is checked on every run. When the
limiters act in time, their ticks read a replayed piece's energy from its power steps; a piece within which a target
changes is run again, together with the limiters, from their state at its start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from simpy.events import Event

from sim.engine.core import Core
from sim.engine.driver import Engine, Tick
from sim.engine.fluid import FluidModel
from sim.engine.graph import KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import Target, bounds
from sim.errors import FoldError
from sim.shortcuts.serial import Serial, SerialLayout, is_serial
from sim.shortcuts.serial_clocks import Ran, SerialAtClocks, SerialCurves, steps_of

Limits = tuple[Target, ...]
# Whole runs of more kernels than this are not remembered.
MAX_KEPT_KERNELS = 50_000
# Runs remembered of one piece, by power targets.
MAX_PLAYED = 128


class Limiters(Protocol):
    """Power limiters that act in time: of a cold start, or of work that repeats."""

    @property
    def tick_ps(self) -> int:
        """Time between two samples of the power."""

    def begin(self, idle_w: float, /) -> None:
        """Before a run."""

    def targets(self) -> Sequence[Target]:
        """The power and clock bounds of each GPU."""

    def step(self, energy_j: Sequence[float]) -> Sequence[Target]:
        """One tick, after which the GPUs used ``energy_j`` since the last one; returns the new targets."""

    def end(self, since_j: Sequence[float], since_ps: int, length_ps: int) -> None:
        """After a run of ``length_ps`` that used ``since_j`` in the ``since_ps`` after its last tick."""


@dataclass(slots=True, eq=False)
class Played:
    """One run of a piece: its records and, per GPU, the joules used up to each of its power steps."""

    records: Recorder
    level: bool  # all GPUs end their last kernel at the same instant
    summed_at: Limits | None = None  # its serial programs were summed under these targets; else SimPy ran it
    _steps: list[tuple[list[int], list[float], list[float]]] | None = None

    @property
    def energy_j(self) -> list[float]:
        """Joules of each GPU."""
        return self.records.energy_j

    @property
    def end_ps(self) -> int:
        """When its last kernel ends."""
        return self.records.end_ps

    @property
    def by_events(self) -> bool:
        """True where SimPy ran it."""
        return self.summed_at is None

    def energy_until_j(self, gpu: int, offset_ps: int) -> float:
        """Joules of one GPU from the piece's start to ``offset_ps``."""
        if self._steps is None:
            self._steps = [([], [], []) for _ in self.records.energy_j]
            records = self.records
            for g, time_ps, state in zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True):
                times, powers, energies = self._steps[g]
                before = energies[-1] + powers[-1] * (time_ps - times[-1]) * 1e-12 if times else 0.0
                times.append(time_ps)
                powers.append(records.states[state].power_w)
                energies.append(before)
        times, powers, energies = self._steps[gpu]
        at = bisect_right(times, offset_ps) - 1
        return energies[at] + powers[at] * (offset_ps - times[at]) * 1e-12


@dataclass(slots=True, eq=False)
class Piece:
    """A kernel graph with its solver and its runs, shared by its repetitions and by other scenarios."""

    graph: KernelGraph
    model: FluidModel
    whole: bool = False  # a whole run: only the last one is remembered, none of the largest
    played: dict[Limits, Played] = field(default_factory=dict)
    serial: Serial | None = field(init=False)
    layout: InitVar[Callable[[KernelGraph], SerialLayout]] = SerialLayout  # of a serial graph
    _curves: SerialCurves | None = None
    _at_clocks: SerialAtClocks | None = None  # below the last limit that was asked for

    def __post_init__(self, layout: Callable[[KernelGraph], SerialLayout]) -> None:
        graph, model = self.graph, self.model
        self.serial = Serial(graph, model, layout(graph)) if is_serial(graph, model) else None

    def play(self, limits_w: Limits, *, events: bool = False) -> Played:
        """Its run under fixed power targets (W per GPU); a serial program is summed unless ``events`` are asked for."""
        known = self.played.get(limits_w)
        if known is None or (events and not known.by_events):
            summed = self.serial.ended(limits_w) if self.serial is not None and not events else None
            if summed is not None:
                known = Played(records=summed[0], level=summed[1], summed_at=limits_w)
            else:
                known = self.ended(Engine(Core(self.graph, [self.model] * self.graph.gpus, list(limits_w))).run())
            self.keep(limits_w, known)
        return known

    def known(self, limits_w: Limits) -> bool:
        """Whether what it draws under fixed power targets takes no run of the engine."""
        return self.serial is not None or limits_w in self.played

    def keep(self, limits_w: Limits, played: Played) -> None:
        """Remember a run."""
        if self.whole or len(self.played) >= MAX_PLAYED:
            self.played.clear()
        if not self.whole or self.graph.kernels <= MAX_KEPT_KERNELS:
            self.played[limits_w] = played

    def at_clocks(self, held: Limits) -> Ran | None:
        """A serial program at clocks of the grid, by tables; None for other programs or clocks."""
        here = steps_of(self.model.gpu, held)
        return None if here is None else self.at_steps(*here)

    def at_steps(self, steps: Sequence[int], limit_w: float) -> Ran | None:
        """The same at steps of the grid, each GPU below the power ``limit_w``."""
        if self.serial is None:
            return None
        if self._at_clocks is None or self._at_clocks.limit_w != limit_w:
            self._curves = self._curves or SerialCurves(self.serial)
            self._at_clocks = SerialAtClocks(self._curves, limit_w)
        return self._at_clocks.at(steps)

    def ended(self, records: Recorder) -> Played:
        """A run of it by the engine."""
        if self.graph.gpus == 1:
            return Played(records=records, level=True)
        last_ps = np.zeros(self.graph.gpus, dtype=np.int64)
        gpu = np.asarray(self.graph.op_gpu)[np.frombuffer(records.span_op, dtype=np.int64)]
        np.maximum.at(last_ps, gpu, np.frombuffer(records.span_end_ps, dtype=np.int64))
        return Played(records=records, level=int(last_ps.min()) == records.end_ps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """``repeat`` equal pieces in a row: ``number`` is their place in the sequence."""

    number: int
    piece: Piece
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedPiece:
    """``repeat`` repetitions in a row that ran alike."""

    number: int
    piece: Piece
    played: Played
    repeat: int

    def stretches(self, gpu: int) -> Iterator[tuple[float, float]]:
        """Seconds and watts of one GPU's stretches in order; repetitions are one stretch at their mean power."""
        records = self.played.records
        if self.repeat > 1:
            end_s = records.end_ps * 1e-12
            yield self.repeat * end_s, self.played.energy_j[gpu] / end_s
            return
        steps = zip(records.step_gpu, records.step_time_ps, records.step_state, strict=True)
        own = [(time_ps, state) for index, time_ps, state in steps if index == gpu]
        ends = [time_ps for time_ps, _ in own[1:]] + [records.end_ps]
        for (begin_ps, state), end_ps in zip(own, ends, strict=True):
            yield (end_ps - begin_ps) * 1e-12, records.states[state].power_w


def play(sequence: Sequence[Repeated], limits_w: Limits, *, events: bool = False) -> list[RepeatedPiece]:
    """The parts of one run under fixed power targets, each different one by ``events`` or by the fastest way.

    Raises :class:`FoldError` where a cut is not level.
    """
    parts = []
    for step in sequence:
        played = step.piece.play(limits_w, events=events)
        if (step.repeat > 1 or step is not sequence[-1]) and not played.level:
            raise _not_level(step)
        parts.append(RepeatedPiece(number=step.number, piece=step.piece, played=played, repeat=step.repeat))
    return parts


def _not_level(step: Repeated) -> FoldError:
    return FoldError(f"GPUs end '{step.piece.graph.segments[0][1]}' at different times: layers do not repeat")


def mean_w_at(sequence: Sequence[Repeated], held: Limits) -> list[float]:
    """Each GPU's mean power over a run, its serial programs by tables where all GPUs are held at clocks of the grid.

    Raises :class:`FoldError` where a cut is not level, as :func:`play` does.
    """
    length_ps, energy_j = 0.0, [0.0] * len(held)
    here = steps_of(sequence[0].piece.model.gpu, held)
    for step in sequence:
        ran = (here and step.piece.at_steps(*here)) or step.piece.play(held)
        if (step.repeat > 1 or step is not sequence[-1]) and not ran.level:
            raise _not_level(step)
        length_ps += step.repeat * ran.end_ps
        energy_j = [have + step.repeat * more for have, more in zip(energy_j, ran.energy_j, strict=True)]
    return [joules / (length_ps * 1e-12) for joules in energy_j]


def by_events(parts: Sequence[RepeatedPiece]) -> list[RepeatedPiece]:
    """The same parts with those that were summed run by SimPy."""
    return [
        part
        if part.played.summed_at is None
        else replace(part, played=part.piece.play(part.played.summed_at, events=True))
        for part in parts
    ]


def play_governed(sequence: Sequence[Repeated], limiter: Limiters) -> list[RepeatedPiece]:
    """The parts of one run with the limiters acting in time, as
    :meth:`sim.engine.governor.Limiter.process` has them act.
    """
    parts: list[RepeatedPiece] = []
    gpus = range(sequence[0].piece.graph.gpus)
    gpu = sequence[0].piece.model.gpu
    limiter.begin(gpu.idle_w(gpu.max_clock_hz))
    tick_ps = limiter.tick_ps
    left_ps = tick_ps  # until the next tick
    since_j = [0.0 for _ in gpus]  # since the last one
    limits = tuple(limiter.targets())
    for step in sequence:
        todo = step.repeat
        while todo:
            if left_ps == 0:
                limits = tuple(limiter.step(since_j))
                since_j, left_ps = [0.0 for _ in gpus], tick_ps
            # A whole run rarely has the same targets twice: the limiters run with it from the start.
            played = None if step.piece.whole else step.piece.play(limits)
            alike = min(todo, left_ps // played.records.end_ps) if played else 0
            if played and alike:
                end_ps = played.records.end_ps
                left_ps -= alike * end_ps
                since_j = [have + alike * more for have, more in zip(since_j, played.energy_j, strict=True)]
            else:
                alike = 1
                live = _Live(limiter, left_ps, since_j, limits)
                if played is None or not live.replayed(played):
                    played = live.rerun(step.piece)
                    limits = tuple(limiter.targets())
                left_ps, since_j = live.left_ps, live.since_j
            if (step.repeat > 1 or step is not sequence[-1]) and not played.level:
                raise FoldError(f"GPUs end '{step.piece.graph.segments[0][1]}' at different times")
            parts.append(RepeatedPiece(number=step.number, piece=step.piece, played=played, repeat=alike))
            todo -= alike
    length_ps = sum(part.repeat * part.played.records.end_ps for part in parts)
    limiter.end(since_j, tick_ps - left_ps, length_ps)
    return parts


class _Live:
    """The limiters' ticks inside one repetition: against its replay until a target changes, then with a run of it."""

    def __init__(self, limiter: Limiters, left_ps: int, since_j: Sequence[float], limits_w: Limits) -> None:
        self.limiter = limiter
        self.left_ps = left_ps
        self.since_j = list(since_j)
        self.limits_w = limits_w
        self.change_ps = 0
        self.energy_j = [0.0 for _ in since_j]

    def replayed(self, played: Played) -> bool:
        """Tick through the replay; False, at the tick of the first change, when a target moves."""
        tick_ps = self.limiter.tick_ps
        end_ps = played.records.end_ps
        at_ps, before = self.left_ps, [-carried for carried in self.since_j]
        while at_ps < end_ps:
            now = [played.energy_until_j(gpu, at_ps) for gpu in range(len(before))]
            if tuple(self.limiter.step([a - b for a, b in zip(now, before, strict=True)])) != self.limits_w:
                self.change_ps, self.energy_j = at_ps, now
                return False
            before, at_ps = now, at_ps + tick_ps
        self.left_ps = at_ps - end_ps
        self.since_j = [total - b for total, b in zip(played.energy_j, before, strict=True)]
        return True

    def rerun(self, piece: Piece) -> Played:
        """Run the piece again with the change, the limiters continuing."""
        core = Core(piece.graph, [piece.model] * piece.graph.gpus, list(self.limits_w))
        records = Engine(core, self).run()
        self.left_ps -= records.end_ps
        self.since_j = [gpu.energy_j - before for gpu, before in zip(core.gpus, self.energy_j, strict=True)]
        return piece.ended(records)

    def process(self, engine: Engine) -> Generator[Event, Any, None]:
        """The limiters from the first change on; see :class:`sim.engine.driver.Governor`."""
        limiter, core = self.limiter, engine.core
        yield Tick(engine.env, self.change_ps)
        while True:
            for gpu, target in zip(core.gpus, limiter.targets(), strict=True):
                core.change_limit(gpu.index, *bounds(target, gpu.clock_cap_hz))
            self.left_ps = engine.env.now + limiter.tick_ps
            yield Tick(engine.env, limiter.tick_ps)
            now = [core.energy_until_now(gpu.index, engine.env.now) for gpu in core.gpus]
            limiter.step([a - b for a, b in zip(now, self.energy_j, strict=True)])
            self.energy_j = now
