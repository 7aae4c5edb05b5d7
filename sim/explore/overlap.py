"""The overlap study: which transform, how many chunks, how many blocks for communication, at which batch and TP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sim.explore.operators import REFUSALS, in_sequence, sequential_fields, words
from sim.explore.pareto import front
from sim.result.rates import row_of
from sim.result.timeline import Timeline
from sim.run.runner import simulate
from sim.scenario.spec import Scenario

# Fields that say how a schedule overlaps; schedules that agree in all others do the same work in the same layout.
HOW = frozenset({"overlap", "overlap_chunks", "overlap_ops", "comm_ctas", "sm_margin", "sm_partitions", "sm_partition"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPoint:
    """One schedule and what it costs (s, J over all GPUs)."""

    scenario: Scenario
    tokens: float
    latency_s: float
    energy_j: float
    exposed_communication_s: float
    on_front: bool
    events_kernels: int = 0  # that SimPy ran
    derived_kernels: int = 0
    trace: Path | None = None
    status: str = "unchecked"
    status_reasons: tuple[str, ...] = ()
    used: Mapping[str, float | None] = field(default_factory=dict)  # rates, MFU, MBU and memory of the run

    @property
    def latency_s_per_token(self) -> float:
        """Batches do different work: schedules are compared per token."""
        return self.latency_s / self.tokens

    @property
    def energy_j_per_token(self) -> float:
        """Joules of all GPUs over tokens."""
        return self.energy_j / self.tokens

    @property
    def sequential(self) -> bool:
        """True when nothing runs beside anything."""
        return in_sequence(self.scenario)

    @property
    def label(self) -> str:
        """How a user would say it."""
        s = self.scenario
        degree = f"EP{s.ep}" if s.ep > 1 else f"TP{s.tp}"
        return f"{degree}, batch {s.batch}, {transform(s)}, {blocks(s)}{partition(s)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSchedule:
    """A schedule of the grid that cannot run, and why."""

    scenario: Scenario
    reason: str


def transform(scenario: Scenario) -> str:
    """The transform of a scenario in words."""
    margin = " with SM margin" if scenario.sm_margin else ""
    if in_sequence(scenario):
        return "sequential"
    if scenario.overlap_ops:
        return "per operator"
    match scenario.overlap:
        case "chunks" if scenario.overlap_chunks == 1:
            return "as the model says"
        case "chunks":
            return f"{scenario.overlap_chunks} chunks{margin}"
        case "tile_signal":
            return f"{scenario.overlap_chunks} groups of signalling tiles"
        case "ring_exchange":
            return "ring exchange"
        case "two_batch":
            return f"two micro-batches{margin}"
        case "bulk":
            return f"bulk{margin}"


def blocks(scenario: Scenario) -> str:
    """The blocks for communication in words; of single operators, with their chunks."""
    if scenario.overlap_ops and not in_sequence(scenario):
        return words(scenario)
    if scenario.comm_ctas:
        return f"{scenario.comm_ctas} CTAs"
    return "copy engines" if scenario.overlap == "ring_exchange" else "the library's CTAs"


def partition(scenario: Scenario) -> str:
    """The partitions of the SMs in words, after the blocks."""
    return "".join(f", {name} on {sms} SMs" for name, sms in scenario.sm_partitions or ())


def study(
    grid: Sequence[Scenario],
    *,
    traces: Path | None = None,
    step: Callable[[], None] = lambda: None,
    events: bool = True,
) -> tuple[list[OverlapPoint], list[RefusedSchedule]]:
    """Simulate the grid, its Pareto front with every kernel as ``events``, whose timelines go into ``traces``.

    Schedules that cannot run (chunks that do not divide the tokens, models that do not fit) are left out by name;
    where none can, the first refusal is raised.
    """
    runs: list[Timeline] = []
    left_out: list[RefusedSchedule] = []
    refusal: Exception | None = None
    for scenario in grid:
        try:
            runs.append(simulate(scenario, shortcuts=True))
        except REFUSALS as error:
            refusal = refusal or error
            left_out.append(RefusedSchedule(scenario=scenario, reason=str(error)))
        step()
    if not runs and refusal is not None:
        raise refusal
    best = set(front([(run.latency_s / run.tokens, run.energy_j / run.tokens) for run in runs]))
    if events:
        runs = [simulate(run.scenario) if i in best else run for i, run in enumerate(runs)]
    points = [
        point_of(run, on_front=i in best, trace=_write_trace(run, traces) if traces is not None and i in best else None)
        for i, run in enumerate(runs)
    ]
    return points, left_out


def point_of(run: Timeline, *, on_front: bool, trace: Path | None) -> OverlapPoint:
    return OverlapPoint(
        scenario=run.scenario,
        tokens=run.tokens,
        latency_s=run.latency_s,
        energy_j=run.energy_j,
        exposed_communication_s=run.exposed_communication_s,
        on_front=on_front,
        events_kernels=run.outcome.events_kernels,
        derived_kernels=run.outcome.derived_kernels,
        trace=trace,
        status=run.standing.status,
        status_reasons=run.standing.reasons,
        used=row_of(run),
    )


def _write_trace(run: Timeline, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    s = run.scenario
    parts = [f"tp{s.tp}", f"ep{s.ep}" if s.ep > 1 else "", f"b{s.batch}", s.overlap, f"chunks{s.overlap_chunks}"]
    parts += ["-".join(f"{name}{sms}" for name, sms in s.sm_partitions or ())]
    parts += ["margin" if s.sm_margin else "", "ctasdefault" if s.comm_ctas is None else f"ctas{s.comm_ctas}"]
    return run.to_chrome(folder / ("_".join(part for part in parts if part) + ".json.gz"))


def advice(points: Sequence[OverlapPoint], default: OverlapPoint | None = None) -> str:
    """One sentence: the best schedule, and what the best overlap gains over the best sequential schedule.

    Both do the same work in the same layout. What it gains over ``default``, which leaves the blocks to the library, is
    said apart: blocks for communication can be chosen without any overlap.
    """
    quickest = min(points, key=lambda p: p.latency_s_per_token)
    frugal = min(points, key=lambda p: p.energy_j_per_token)
    if frugal is quickest:
        text = f"{quickest.label} is best here, quickest and most frugal per token"
    else:
        text = f"{quickest.label} is quickest per token, {frugal.label} most frugal"
    pair = headline_pair(points)
    if pair is not None:
        overlapped, sequential = pair
        text += (
            f"; the best overlap {saves(overlapped, sequential)} over the best schedule in sequence "
            f"({overlapped.label}, against {blocks(sequential.scenario)})"
        )
        if default is not None and default is not sequential:
            text += f", and {saves(overlapped, default)} over the default ({blocks(default.scenario)} in sequence)"
    return text + "."


def headline_pair(points: Sequence[OverlapPoint]) -> tuple[OverlapPoint, OverlapPoint] | None:
    """Of the work in which overlap saves most energy: its best overlapped and its best sequential schedule."""
    groups: dict[tuple[Any, ...], list[OverlapPoint]] = {}
    for point in points:
        groups.setdefault(work_of(point), []).append(point)
    pairs = [
        tuple(min((p for p in group if p.sequential is how), key=lambda p: p.energy_j) for how in (False, True))
        for group in groups.values()
        if len({p.sequential for p in group}) == 2
    ]
    if not pairs:
        return None
    overlapped, sequential = min(pairs, key=lambda pair: pair[0].energy_j / pair[1].energy_j)
    return overlapped, sequential


def default_of(points: Sequence[OverlapPoint]) -> OverlapPoint | None:
    """The plain run of the headline's work: in sequence, the library's blocks; simulated where the grid has it not."""
    pair = headline_pair(points)
    if pair is None:
        return None
    plain = pair[0].scenario
    scenario = Scenario.parse(
        plain.model_dump() | sequential_fields(plain) | {"comm_ctas": None}, where="overlap study"
    )
    for point in points:
        if point.scenario == scenario:
            return point
    try:
        return point_of(simulate(scenario), on_front=False, trace=None)
    except REFUSALS:
        return None


def saves(one: OverlapPoint, other: OverlapPoint) -> str:
    """Shares that ``one`` saves over ``other``, in words; one verb where both go the same way."""
    energy, latency = 1.0 - one.energy_j / other.energy_j, 1.0 - one.latency_s / other.latency_s
    verbs = ["saves" if share > 0 else "costs" for share in (energy, latency)]
    again = "" if verbs[0] == verbs[1] else f"{verbs[1]} "
    return f"{verbs[0]} {abs(100 * energy):.1f} % energy and {again}{abs(100 * latency):.1f} % time"


def work_of(point: OverlapPoint) -> tuple[Any, ...]:
    return tuple(sorted((k, str(v)) for k, v in point.scenario.model_dump().items() if k not in HOW))


def table(points: Sequence[OverlapPoint]) -> pd.DataFrame:
    """One row a schedule, the full scenario included."""
    return pd.DataFrame(
        [
            {
                **point.scenario.model_dump(exclude_none=True),
                "transform": transform(point.scenario),
                "latency_s": point.latency_s,
                "energy_j": point.energy_j,
                "energy_j_per_token": point.energy_j_per_token,
                "exposed_communication_s": point.exposed_communication_s,
                **point.used,
                "pareto": point.on_front,
                "events_kernels": point.events_kernels,
                "derived_kernels": point.derived_kernels,
                "trace": str(point.trace) if point.trace else None,
                "status": point.status,
                "status_reasons": "; ".join(point.status_reasons),
            }
            for point in points
        ]
    )
