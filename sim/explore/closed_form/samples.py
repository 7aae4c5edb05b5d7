"""Samples of the closed form: a request batch on a layout, its prefill and its mean decode step simulated apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sim.errors import SimError
from sim.explore.closed_form.formula import Floats
from sim.explore.closed_form.sizes import PassSizes, Phase
from sim.explore.grid import GridPoint, ScenarioGrid
from sim.explore.row import row_id
from sim.explore.sweep import Step, sweep
from sim.explore.table import read_rows
from sim.explore.workers import Pool
from sim.scenario.spec import Scenario

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one layout costs: latency (s) and energy (J, all GPUs) of the prefill and of the mean decode step."""

    scenario: Scenario
    sizes: Mapping[Phase, PassSizes]
    latency_s: Mapping[Phase, float]
    energy_j: Mapping[Phase, float]

    @property
    def work(self) -> tuple[str, int, int, int]:
        """What is asked for; layouts are what one chooses."""
        s = self.scenario
        return (s.model, s.batch, s.seq_len, self.steps + 1)

    @property
    def layout(self) -> tuple[int, int, str, float, str]:
        """What one chooses: tensor (or expert) and pipeline degree, card, clock (MHz, 0: free) and type."""
        sizes = self.sizes["decode"]
        return (sizes.tp, sizes.pp, *self.machine)

    @property
    def machine(self) -> tuple[str, float, str]:
        """Card, clock and type."""
        s = self.scenario
        return (s.gpu, s.sm_clock_mhz or 0.0, s.weight_dtype or s.dtype)

    @property
    def steps(self) -> int:
        """Decode steps: the prefill gives the first token."""
        return (self.scenario.output_len or 1) - 1

    def whole(self, by_phase: Mapping[Phase, float]) -> float:
        """Prefill and all decode steps."""
        return by_phase["prefill"] + self.steps * by_phase["decode"]


def parts(fields: Mapping[str, Any]) -> dict[Phase, dict[str, Any]]:
    """The prefill and the decode step, at the mean context, of a ``generate`` scenario.

    The cost of a step is so nearly straight in its context that the step at the mean context costs the mean.
    """
    scenario = Scenario.parse(fields, where="closed form")
    if scenario.phase != "generate" or scenario.output_len is None:
        raise SimError(f"phase = '{scenario.phase}': the closed form needs phase = 'generate' and output_len")
    rest = {name: value for name, value in fields.items() if name != "output_len"}
    mean = scenario.seq_len + scenario.output_len // 2
    return {"prefill": rest | {"phase": "prefill"}, "decode": rest | {"phase": "decode", "seq_len": mean}}


def runs_of(grid: ScenarioGrid) -> ScenarioGrid:
    """The prefills and decode steps of ``grid``, each once."""
    runs = {row_id(part): GridPoint(fields=part) for case in grid.cases for part in parts(case.fields).values()}
    return ScenarioGrid(cases=tuple(runs.values()), excluded=grid.excluded)


def simulated(grid: ScenarioGrid, rows: Path, *, pool: Pool, step: Step) -> list[Sample]:
    """Samples of every case of ``grid``; ``rows`` keeps the runs, so that a second call is quick."""
    sweep(runs_of(grid), rows, pool=pool, step=step)
    found = {row["scenario_id"]: row for row in read_rows(rows)}
    samples = []
    for fields, both in ((case.fields, parts(case.fields)) for case in grid.cases):
        runs = {phase: found[row_id(part)] for phase, part in both.items()}
        if all(run["error"] is None for run in runs.values()):
            samples.append(
                Sample(
                    scenario=Scenario.parse(fields, where="closed form"),
                    sizes={
                        phase: PassSizes.of(Scenario.parse(part, where="closed form"), phase)
                        for phase, part in both.items()
                    },
                    latency_s={phase: float(run["latency_s"]) for phase, run in runs.items()},
                    energy_j={phase: float(run["energy_j"]) for phase, run in runs.items()},
                )
            )
    return samples


def by_work(samples: Sequence[Sample]) -> dict[tuple[str, int, int, int], list[Sample]]:
    """Layouts of the same work, where there are at least two."""
    groups: dict[tuple[str, int, int, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.work, []).append(sample)
    return {work: group for work, group in groups.items() if len(group) > 1}


def column(samples: Sequence[Sample], name: str, phase: Phase) -> Floats:
    """``latency_s`` or ``energy_j`` of one phase."""
    return np.array([getattr(sample, name)[phase] for sample in samples])
