"""Intervals of a prediction: the run again under profiles that the records allow as well as the fitted one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardware.profile import Profile
from hardware.uncertainty import drawn_profiles
from sim.result.timeline import Timeline
from sim.run.runner import simulate
from sim.scenario.machine import machine_with
from sim.scenario.spec import Scenario

LEVEL = 0.90
# Standard deviations on either side that hold LEVEL of a normal distribution.
REACH = 1.6449
DRAWS = 32
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """What LEVEL of runs like this one should lie within: latency (s) and energy (J, all GPUs), low and high."""

    latency_s: tuple[float, float]
    energy_j: tuple[float, float]
    draws: int
    level: float = LEVEL

    def holds(self, *, latency_s: float, energy_j: float) -> tuple[bool, bool]:
        """Whether each of two figures lies within."""
        (low_s, high_s), (low_j, high_j) = self.latency_s, self.energy_j
        return low_s <= latency_s <= high_s, low_j <= energy_j <= high_j

    def __str__(self) -> str:
        """Both in one line.

        >>> print(Intervals(latency_s=(0.195, 0.213), energy_j=(136.0, 149.0), draws=32))
        90 % of such runs should lie within 195 to 213 ms and 136 to 149 J
        """
        (low_s, high_s), (low_j, high_j) = self.latency_s, self.energy_j
        return (
            f"{100 * self.level:.0f} % of such runs should lie within {low_s * 1e3:.4g} to {high_s * 1e3:.4g} ms and "
            f"{low_j:.4g} to {high_j:.4g} J"
        )


def intervals(run: Timeline, *, draws: int = DRAWS, seed: int = SEED) -> Intervals:
    """The intervals of ``run`` from ``draws`` more, each under a drawn profile; equal calls give equal figures.

    The ends are those of a lognormal distribution with the mean and spread of the runs: percentiles of a few dozen
    runs would be noise. A generation is judged by its prefill and its decode step at the mean context.

    >>> run = simulate(model="llama3-8b", layers=2, seq_len=512)
    >>> low, high = intervals(run, draws=8).energy_j
    >>> 0.0 < low < run.energy_j < high < 2 * low
    True
    """
    parts, known = _parts(run.scenario), run.scenario.chip_power_factor is not None
    latency_s, energy_j = _sums(parts, None)
    logs = np.array(
        [
            np.log(np.array(_sums(parts, profile)) / (latency_s, energy_j))
            for profile in drawn_profiles(run.machine.profile, gpus=run.gpus, count=draws, seed=seed, known_chips=known)
        ]
    )
    middle, reach = logs.mean(axis=0), REACH * logs.std(axis=0, ddof=1)
    low, high = np.exp(middle - reach).tolist(), np.exp(middle + reach).tolist()
    return Intervals(
        latency_s=(low[0] * run.latency_s, high[0] * run.latency_s),
        energy_j=(low[1] * run.energy_j, high[1] * run.energy_j),
        draws=draws,
    )


def _parts(scenario: Scenario) -> list[tuple[Scenario, int]]:
    """Runs whose sum stands for ``scenario``, and how often each counts."""
    if scenario.phase != "generate":
        return [(scenario, 1)]
    assert scenario.output_len is not None
    fields = scenario.model_dump(exclude_defaults=True) | {"output_len": None}
    mean = scenario.seq_len + scenario.output_len // 2
    prefill = Scenario.parse(fields | {"phase": "prefill"}, where="uncertainty")
    decode = Scenario.parse(fields | {"phase": "decode", "seq_len": mean}, where="uncertainty")
    return [(prefill, 1), (decode, scenario.output_len - 1)]


def _sums(parts: list[tuple[Scenario, int]], profile: Profile | None) -> tuple[float, float]:
    """Latency (s) and energy (J) of all parts, on their own machine or under ``profile``."""
    latency_s = energy_j = 0.0
    for scenario, count in parts:
        run = simulate(scenario, target=None if profile is None else machine_with(scenario, profile), shortcuts=True)
        latency_s += count * run.latency_s
        energy_j += count * run.energy_j
    return latency_s, energy_j
