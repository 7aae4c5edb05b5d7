"""What a setting for each operator gains over one for all, of the work in which overlap does best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sim.explore.operators import Search, flags, in_sequence
from sim.explore.overlap import OverlapPoint, blocks, headline_pair, point_of, saves, transform, work_of
from sim.result.timeline import Timeline
from sim.scenario.spec import Scenario
from workloads.ops import Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class PerOperator:
    """One work in its best setting for all operators, and with a setting for each: by energy and by latency."""

    for_all: tuple[OverlapPoint, OverlapPoint]
    each: tuple[OverlapPoint, OverlapPoint]
    simulated: int

    def words(self) -> str:
        """What each operator's own setting gains."""
        texts = []
        found = [*zip(self.for_all, self.each, ("most frugal", "quickest"), strict=True)]
        if (frugal := found[0])[:2] == found[1][:2]:
            found = [(*frugal[:2], "quickest and most frugal")]
        for best, one, by in found:
            if _cost(one, by) >= _cost(best, by) * (1.0 - 1e-9):
                texts.append(f"the {by} is one setting for all ({transform(best.scenario)}, {blocks(best.scenario)})")
            else:
                texts.append(
                    f"the {by} setting ({blocks(one.scenario)}: {flags(one.scenario)}) {saves(one, best)} "
                    f"over the best one for all ({transform(best.scenario)}, {blocks(best.scenario)})"
                )
        return "; ".join(texts) + "."

    def document(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            by: {
                "for_all": {"transform": transform(best.scenario), "blocks": blocks(best.scenario)}
                | {"latency_s": best.latency_s, "energy_j": best.energy_j},
                "each": {"overlap_ops": dict(one.scenario.overlap_ops or ())}
                | {"latency_s": one.latency_s, "energy_j": one.energy_j},
                "energy_saved": 1.0 - one.energy_j / best.energy_j,
                "latency_saved": 1.0 - one.latency_s / best.latency_s,
            }
            for best, one, by in zip(self.for_all, self.each, ("energy", "latency"), strict=True)
        } | {"simulated": self.simulated}


def _cost(point: OverlapPoint | Timeline, by: str) -> float:
    return point.latency_s if by.startswith("quickest") else point.energy_j


def per_operator(points: Sequence[OverlapPoint], step: Callable[[], None] = lambda: None) -> PerOperator | None:
    """Settings by operator of the work in which overlap does best, from the chunks and blocks of the grid; None where
    the grid cuts nothing."""
    pair = headline_pair(points)
    if pair is None:
        return None
    alike = [p for p in points if work_of(p) == work_of(pair[0]) and _plain_chunks(p.scenario)]
    if all(p.sequential for p in alike):
        return None
    settings = tuple(
        dict.fromkeys(Overlap(chunks=p.scenario.overlap_chunks, comm_ctas=p.scenario.comm_ctas or None) for p in alike)
    )
    found: list[tuple[OverlapPoint, OverlapPoint]] = []
    simulated = 0
    for by in ("most frugal", "quickest"):
        best = min(alike, key=partial(_cost, by=by))
        one = Search(start=best.scenario, settings=settings, step=step)
        run = one.best(partial(_cost, by=by))
        found.append((best, point_of(run, on_front=False, trace=None)))
        simulated += len(one.known)
    for_all, each = zip(*found, strict=True)
    return PerOperator(for_all=for_all, each=each, simulated=simulated)


def _plain_chunks(scenario: Scenario) -> bool:
    for_all = in_sequence(scenario) or scenario.overlap_chunks > 1
    return scenario.overlap == "chunks" and for_all and not (scenario.sm_margin or scenario.sm_partitions)
