"""What a run left behind, kept as short as it was simulated: parts, each with its repetitions, on folded GPUs.

Sums over the whole run (:class:`Outcome`) come from the parts; spans and power steps of every GPU and every
repetition are laid out only when somebody asks for them (:func:`unfold`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from inputs.same import Same
from sim.engine.graph import KernelClass, KernelGraph
from sim.engine.record import Recorder
from sim.engine.running import GpuState
from sim.result.looks import Looks
from sim.result.tally import Tally, TallyLayout
from sim.shortcuts.fold import Folding
from sim.shortcuts.pieces import Played, RepeatedPiece

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """The parts of a run in order of time; all figures are of all GPUs unless the name says per GPU.

    ``phases`` names the phase of each part's segments, ``detail`` says how the run was simulated and ``why``.
    ``first_op`` gives where each part begins in the program of each simulated GPU, in kernels; ``layout``: what sums
    need of a part's graph at any clock. With ``context_buckets`` contexts standing for all decode steps, time and
    energy are wrong by at most ``context_bucket_error``, as a share. ``looks`` says how its settled clock was found.
    """

    folding: Folding
    parts: Sequence[RepeatedPiece]
    phases: Sequence[tuple[str, ...]]
    first_op: Sequence[Ints]
    detail: str
    why: str
    kernels: int
    full_graph: Callable[[], KernelGraph]
    layout: Callable[[KernelGraph], TallyLayout]
    context_buckets: int = 0
    context_bucket_error: float = 0.0
    looks: Looks = field(default_factory=Looks)
    _tallies: dict[Played, Tally] = field(default_factory=dict)

    @cached_property
    def end_ps(self) -> int:
        """Picoseconds from the start to the last completion."""
        return sum(part.repeat * part.played.records.end_ps for part in self.parts)

    @cached_property
    def events_kernels(self) -> int:
        """Kernels that SimPy ran; all others are sums of serial programs, or copies of equal ranks or layers."""
        runs = {part.played: part for part in self.parts if part.played.by_events}
        return sum(part.piece.graph.kernels for part in runs.values())

    @property
    def derived_kernels(self) -> int:
        """The others."""
        return self.kernels - self.events_kernels

    @cached_property
    def events(self) -> int:
        """Events that SimPy scheduled for them."""
        return sum(played.records.events for played in {part.played for part in self.parts})

    @cached_property
    def per_gpu(self) -> Floats:
        """Sums of each rank of the machine; columns as in :class:`Tally`."""
        rows = [[0.0] * 6 for _ in self.folding.classes]
        for repeat, done in self._distinct:
            for row, one in zip(rows, done.per_gpu, strict=True):
                row[:] = [have + repeat * more for have, more in zip(row, one, strict=True)]
        of_rank = {rank: row for row, ranks in zip(rows, self.folding.classes, strict=True) for rank in ranks}
        return np.array([of_rank[rank] for rank in range(len(of_rank))])

    @cached_property
    def _distinct(self) -> list[tuple[int, Tally]]:
        """Each run of a piece once, with how often it stands in the whole."""
        repeats: dict[Tally, int] = {}
        for part in self.parts:
            tally = self.tally(part.piece.graph, part.played)
            repeats[tally] = repeats.get(tally, 0) + part.repeat
        return [(n, tally) for tally, n in repeats.items()]

    def tally(self, graph: KernelGraph, played: Played) -> Tally:
        """Sums of one repetition, worked out once."""
        known = self._tallies.get(played)
        if known is None:
            known = self._tallies[played] = Tally(layout=self.layout(graph), records=played.records)
        return known

    def classes(self) -> Iterator[KernelClass]:
        """Every kernel class that ran (repeated classes may come again)."""
        for one in dict.fromkeys(Same(done.layout.graph) for _, done in self._distinct):
            yield from one.held.classes

    @property
    def flops(self) -> float:
        """Floating-point operations of all kernels."""
        return sum(repeat * done.layout.flops for repeat, done in self._distinct)

    @property
    def hbm_bytes(self) -> float:
        """Bytes that all kernels move to and from HBM."""
        return sum(repeat * done.layout.hbm_bytes for repeat, done in self._distinct)

    @property
    def extrapolated_kernels(self) -> list[str]:
        """Names of kernels beyond the rows that their laws were fitted on, sorted."""
        return sorted({name for _, done in self._distinct for name in done.layout.extrapolated})

    def by_class(self, name: Callable[[KernelClass], str]) -> dict[str, tuple[float, float]]:
        """Joules and GPU-seconds of the kernels, added up under ``name`` of their class."""
        sums: dict[str, tuple[float, float]] = {}
        for repeat, done in self._distinct:
            for cls, energy_j, time_s in zip(done.layout.graph.classes, *done.by_class, strict=True):
                if time_s > 0.0:
                    key = name(cls)
                    have = sums.get(key, (0.0, 0.0))
                    sums[key] = (have[0] + repeat * energy_j, have[1] + repeat * time_s)
        return sums

    def by_phase(self) -> dict[str, tuple[float, float]]:
        """Joules and GPU-seconds of the kernels of each phase."""
        sums: dict[str, tuple[float, float]] = {}
        for part in self.parts:
            done = self.tally(part.piece.graph, part.played)
            for phase, energy_j, time_s in zip(self.phases[part.number], *done.by_segment, strict=True):
                have = sums.get(phase, (0.0, 0.0))
                sums[phase] = (have[0] + part.repeat * energy_j, have[1] + part.repeat * time_s)
        return sums

    def exposed_gpu_s(self) -> dict[str, tuple[float, float]]:
        """GPU-seconds exposed and waiting by kind of collective; see :mod:`sim.result.exposure`."""
        sums: dict[str, tuple[float, float]] = {}
        for repeat, done in self._distinct:
            for kind, (exposed_s, waiting_s) in done.exposure.by_kind.items():
                have = sums.get(kind, (0.0, 0.0))
                sums[kind] = (have[0] + repeat * exposed_s, have[1] + repeat * waiting_s)
        return sums

    def phase_end_ps(self, name: str) -> int:
        """When the last kernel of a phase ends; 0 when it has none."""
        begin = end = 0
        for part in self.parts:
            length = part.played.records.end_ps
            ends = self.tally(part.piece.graph, part.played).segment_end_ps
            last = max((ends[i] for i, phase in enumerate(self.phases[part.number]) if phase == name), default=0)
            if last:
                end = begin + (part.repeat - 1) * length + last
            begin += part.repeat * length
        return end

    def energy_until_j(self, time_ps: int) -> float:
        """Joules of all GPUs from the start to ``time_ps``."""
        energy = 0.0
        multiplicity = self.folding.multiplicity
        for part in self.parts:
            length = part.played.records.end_ps
            whole = min(part.repeat, time_ps // length)
            energy += whole * sum(m * j for m, j in zip(multiplicity, part.played.energy_j, strict=True))
            time_ps -= whole * length
            if whole < part.repeat:
                rest = (part.played.energy_until_j(gpu, time_ps) for gpu in range(len(multiplicity)))
                return energy + sum(m * j for m, j in zip(multiplicity, rest, strict=True))
        return energy


def unfold(outcome: Outcome, graph: KernelGraph) -> Recorder:
    """Records of every rank and repetition, over the full ``graph``."""
    if outcome.detail == "full":
        return outcome.parts[0].played.records
    full = Recorder(idle_energy_j=outcome.per_gpu[:, 1].tolist(), end_ps=outcome.end_ps)
    rank_first = np.searchsorted(np.asarray(graph.op_gpu), np.arange(graph.gpus)).tolist()
    states_at: dict[Same[list[GpuState]], int] = {}
    begin_ps = 0
    at_op = dict(enumerate(outcome.first_op))
    for part in outcome.parts:
        records, piece = part.played.records, part.piece.graph
        states = Same(records.states)
        if states not in states_at:
            states_at[states] = len(full.states)
            full.states.extend(records.states)
        shift = np.arange(part.repeat)[:, None]
        op = np.frombuffer(records.span_op, dtype=np.int64)
        gpu = np.asarray(piece.op_gpu)[op]
        sizes = np.bincount(np.asarray(piece.op_gpu), minlength=piece.gpus)
        piece_first = np.cumsum(sizes) - sizes
        step_gpu = np.frombuffer(records.step_gpu, dtype=np.int32)
        for number, ranks in enumerate(outcome.folding.classes):
            spans, steps = gpu == number, step_gpu == number
            local = op[spans] - piece_first[number] + shift * sizes[number] + at_op[part.number][number]
            moments = shift * records.end_ps + begin_ps
            start, end, time, state = (
                np.frombuffer(column, dtype=np.int64)[mine]
                for column, mine in (
                    (records.span_start_ps, spans),
                    (records.span_end_ps, spans),
                    (records.step_time_ps, steps),
                    (records.step_state, steps),
                )
            )
            energy = np.frombuffer(records.span_energy_j, dtype=np.float64)[spans]
            for rank in ranks:
                _extend(full.span_op, local + rank_first[rank])
                _extend(full.span_start_ps, start + moments)
                _extend(full.span_end_ps, end + moments)
                _extend(full.span_energy_j, np.tile(energy, part.repeat))
                _extend(full.step_gpu, np.full(part.repeat * len(time), rank, dtype=np.int32))
                _extend(full.step_time_ps, time + moments)
                _extend(full.step_state, np.tile(state + states_at[states], part.repeat))
        at_op[part.number] = at_op[part.number] + part.repeat * sizes
        begin_ps += part.repeat * records.end_ps
    return full


def _extend(column: array[int] | array[float], values: NDArray[np.generic]) -> None:
    column.frombytes(values.tobytes())
