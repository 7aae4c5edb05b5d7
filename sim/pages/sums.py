"""A run cut into bins of time, and its kernels added up: the numbers behind the pictures of a report.

Everything is taken from the parts of the outcome, so that equal GPUs and equal layers are counted, not laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sim.build.cost import flops_of
from sim.engine.graph import KernelClass
from sim.result.exposure import S_PER_PS, covered, moving_ps
from sim.result.outcome import Outcome
from sim.result.tally import power_steps
from sim.shortcuts.pieces import RepeatedPiece

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class KernelSum:
    """All launches of one kernel in one phase, over all GPUs (GPU-seconds, joules, FLOPs, bytes)."""

    phase: str
    name: str
    family: str
    launches: int = 0
    time_s: float = 0.0
    energy_j: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0
    extrapolated: bool = False
    sizes: dict[str, list[object]] = field(default_factory=dict)  # name -> values met, in order

    @property
    def intensity(self) -> float:
        """FLOPs per byte of HBM traffic; NaN for a kernel that does no arithmetic or moves nothing."""
        return self.flops / self.hbm_bytes if self.flops and self.hbm_bytes else float("nan")

    def add(self, cls: KernelClass, launches: int, time_s: float, energy_j: float) -> None:
        """Add ``launches`` kernels of one class, which took ``time_s`` and ``energy_j`` together."""
        self.launches += launches
        self.time_s += time_s
        self.energy_j += energy_j
        self.flops += launches * flops_of(cls)
        self.hbm_bytes += launches * cls.terms.hbm_bytes
        self.link_bytes += launches * cls.terms.link_bytes
        self.extrapolated |= cls.terms.extrapolated
        for name, value in cls.describe.items():
            met = self.sizes.setdefault(name, [])
            if value not in met:
                met.append(value)


def kernel_sums(outcome: Outcome) -> list[KernelSum]:
    """One row a kernel name and phase, the most joules first; all rows and idling sum to the run's energy."""
    rows: dict[tuple[str, str], KernelSum] = {}
    multiplicity = np.asarray(outcome.folding.multiplicity)
    for part in outcome.parts:
        graph, spans = part.piece.graph, _Spans.of(part)
        phases = [kind_of_phase(name) for name in outcome.phases[part.number]]
        names = sorted(set(phases))
        phase = np.array([names.index(name) for name in phases])[np.asarray(graph.op_segment)[spans.op]]
        key = phase * len(graph.classes) + np.asarray(graph.op_class)[spans.op]
        times = part.repeat * multiplicity[spans.gpu]
        used, where = np.unique(key, return_inverse=True)
        sums = [
            np.bincount(where, column * times).tolist()
            for column in (np.ones(len(where)), (spans.end - spans.start) * S_PER_PS, spans.energy_j)
        ]
        for number, launches, time_s, energy_j in zip(used.tolist(), *sums, strict=True):
            cls, name = graph.classes[number % len(graph.classes)], names[number // len(graph.classes)]
            row = rows.setdefault((name, cls.name), KernelSum(phase=name, name=cls.name, family=cls.family))
            row.add(cls, round(launches), time_s, energy_j)
    return sorted(rows.values(), key=lambda row: -row.energy_j)


def kind_of_phase(name: str) -> str:
    """Steps of a generation are one phase here.

    >>> kind_of_phase("decode 17")
    'decode'
    """
    return name.split(" ", 1)[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binned:
    """Means over equal bins of time. ``edges_s`` has one more entry than the rows of the others have columns.

    Rows of ``power_w``, ``clock_hz``, ``hbm_bytes_per_s`` and ``link_bytes_per_s`` are simulated GPUs (each stands
    for some ranks); ``family_w`` holds the watts of all GPUs by kernel class, ``idle`` what they draw between kernels.
    """

    edges_s: Floats
    power_w: Floats
    clock_hz: Floats
    hbm_bytes_per_s: Floats
    link_bytes_per_s: Floats
    family_w: dict[str, Floats]


def binned(outcome: Outcome, bins: int) -> Binned:
    """The run in ``bins`` bins; power times width, added up, is the run's energy."""
    edges_ps = np.linspace(0.0, outcome.end_ps, bins + 1)
    multiplicity = np.asarray(outcome.folding.multiplicity, dtype=np.float64)
    steps: dict[int, list[tuple[Floats, ...]]] = {gpu: [] for gpu in range(len(multiplicity))}
    families: dict[str, list[tuple[Floats, Floats, Floats]]] = {}
    begin_ps = 0
    for part in outcome.parts:
        records, graph = part.played.records, part.piece.graph
        shift = begin_ps + records.end_ps * np.arange(part.repeat, dtype=np.float64)[:, None]
        spans = _Spans.of(part)
        used = np.asarray(graph.op_class)[spans.op]
        of_class = np.array([cls.family for cls in graph.classes])
        # The pause before a kernel is billed to it: its joules begin there.
        gap = np.array([round(cls.gap_s / S_PER_PS) for cls in graph.classes])[used]
        begin = spans.start - gap
        rate = multiplicity[spans.gpu] * spans.energy_j / np.maximum(spans.end - begin, 1)  # J/ps
        for family in np.unique(of_class[used]).tolist():
            mine = of_class[used] == family
            families.setdefault(family, []).append(_repeated(begin[mine], spans.end[mine], rate[mine], shift))
        gpu, state, held_s = power_steps(records)
        end = np.concatenate([np.cumsum(held_s[gpu == index]) for index in range(graph.gpus)]) / S_PER_PS
        start = end - held_s / S_PER_PS
        values = np.array(
            [
                (s.power_w, s.clock_hz, s.hbm_bytes_per_s, s.link_bytes_per_s, 0.0 if s.rates else s.power_w)
                for s in records.states
            ]
        )
        for index in range(graph.gpus):
            mine = gpu == index
            first, last, _ = _repeated(start[mine], end[mine], start[mine], shift)
            steps[index].append((first, last, np.tile(values[state[mine]], (part.repeat, 1))))
        begin_ps += part.repeat * records.end_ps
    means = np.empty((5, len(multiplicity), bins))
    for index, parts in steps.items():
        first, last = (np.concatenate([part[side] for part in parts]) for side in (0, 1))
        table = np.concatenate([part[2] for part in parts])
        for number in range(len(means)):
            means[number, index] = mean_rates(first, last, table[:, number], edges_ps)
    power, clock, hbm, link, idle = means
    family_w = {}
    for family, pieces in families.items():
        first, last, watts = (np.concatenate(column) for column in zip(*pieces, strict=True))
        family_w[family] = mean_rates(first, last, watts / S_PER_PS, edges_ps)
    # The power of a kernel that shares its GPU changes while it runs: bins add up to what was drawn in them.
    idle_w = multiplicity @ idle
    spread_w = sum(family_w.values(), np.zeros(bins))
    scale = np.divide(multiplicity @ power - idle_w, spread_w, out=np.zeros(bins), where=spread_w > 0.0)
    family_w = {family: watts * scale for family, watts in family_w.items()} | {"idle": idle_w}
    return Binned(
        edges_s=edges_ps * S_PER_PS,
        power_w=power,
        clock_hz=clock,
        hbm_bytes_per_s=hbm,
        link_bytes_per_s=link,
        family_w=family_w,
    )


def mean_rates(start: Floats, end: Floats, rate: Floats, edges: Floats) -> Floats:
    """Mean over each bin of the sum of ``rate`` over the intervals that are open; overlaps add up.

    >>> mean_rates(np.array([0.0, 1.0]), np.array([2.0, 4.0]), np.array([3.0, 1.0]), np.array([0.0, 2.0, 4.0])).tolist()
    [3.5, 1.0]
    """
    time = np.concatenate([start, end])
    order = np.argsort(time, kind="stable")
    time, change = time[order], np.concatenate([rate, -rate])[order]
    level = np.cumsum(change)[:-1]
    so_far = np.concatenate([[0.0], np.cumsum(level * np.diff(time))])
    means: Floats = np.diff(np.interp(edges, time, so_far)) / np.diff(edges)
    return means


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Seconds of a GPU's run, mean over GPUs: they sum to the latency."""

    compute_s: float  # nothing moves between GPUs
    hidden_s: float  # compute beside communication
    exposed_s: dict[str, float]  # data moves alone, by kind of collective
    waiting_s: float  # for the last rank of a collective
    idle_s: float


def split_of(outcome: Outcome, exposed: dict[str, tuple[float, float]]) -> TimeShares:
    """Where the time of a mean GPU goes; ``exposed`` is the timeline's ``exposed_and_waiting_s``."""
    gpus = sum(outcome.folding.multiplicity)
    moving_s = 0.0
    for part in outcome.parts:
        spans, graph = _Spans.of(part), part.piece.graph
        together = np.asarray(graph.op_collective)[spans.op]
        begin = moving_ps(together, spans.start, spans.end)
        mine, times = together >= 0, np.asarray(outcome.folding.multiplicity)
        each = covered(spans.gpu[mine], begin[mine], spans.end[mine], len(times))
        moving_s += float(each @ times) * S_PER_PS * part.repeat / gpus
    alone = {kind: seconds for kind, (seconds, _) in exposed.items() if seconds > 0.0}
    waiting_s = sum(seconds for _, seconds in exposed.values())
    working_s = float(outcome.per_gpu[:, 5].mean())
    hidden_s = max(0.0, moving_s - sum(alone.values()))
    return TimeShares(
        compute_s=max(0.0, working_s - moving_s),
        hidden_s=hidden_s,
        exposed_s=alone,
        waiting_s=waiting_s,
        idle_s=max(0.0, outcome.end_ps * S_PER_PS - working_s - waiting_s),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """Columns of one run of a part: kernels of the simulated GPUs, times in ps."""

    op: Ints
    gpu: Ints
    start: Ints
    end: Ints
    energy_j: Floats

    @classmethod
    def of(cls, part: RepeatedPiece) -> _Spans:
        records = part.played.records
        op, start, end = (
            np.frombuffer(column, dtype=np.int64)
            for column in (records.span_op, records.span_start_ps, records.span_end_ps)
        )
        gpu = np.asarray(part.piece.graph.op_gpu)[op]
        return cls(op, gpu, start, end, np.frombuffer(records.span_energy_j, dtype=np.float64))


def _repeated(start: Ints | Floats, end: Ints | Floats, rate: Floats, shift: Floats) -> tuple[Floats, Floats, Floats]:
    """Intervals of one repetition laid out for all."""
    return (start + shift).ravel(), (end + shift).ravel(), np.tile(rate, len(shift))


def merged(names: Sequence[int]) -> str:
    """Ranks in words, runs of neighbours joined.

    >>> merged((0, 1, 2, 5))
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted(names):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
