"""Judge the closed form on scenarios that it has not seen: choice of layout, order of pairs, errors, intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np
from scipy.stats import bootstrap

from sim.errors import SimError
from sim.explore.closed_form import rivals
from sim.explore.closed_form import search as symbolic
from sim.explore.closed_form.fit import Fitted
from sim.explore.closed_form.formula import Floats
from sim.explore.closed_form.samples import PHASES, Sample, by_work, column

# What the forest gets beside the closed form's own samples.
FOREST_SAMPLES = 500
Interval = tuple[float, float, float]


@dataclass(slots=True, kw_only=True)
class Score:
    """Results of one way to choose, one entry a tested scenario."""

    hits: list[float] = field(default_factory=list)
    ordered: list[float] = field(default_factory=list)
    excess: list[float] = field(default_factory=list)

    def add(self, group: Sequence[Sample], predicted: Floats) -> None:
        """Judge one scenario's layouts."""
        truth = np.array([rivals.energy(sample) for sample in group])
        chosen = int(np.argmin(predicted))
        self.hits.append(float(chosen == int(np.argmin(truth))))
        self.excess.append(float(truth[chosen] / truth.min() - 1.0))
        pairs = [(i, j) for i, j in combinations(range(len(group)), 2) if truth[i] != truth[j]]
        self.ordered.append(float(np.mean([(truth[i] < truth[j]) == (predicted[i] < predicted[j]) for i, j in pairs])))

    def summary(self) -> dict[str, Interval]:
        """Mean and 95 % bootstrap interval of: right choice, right pairs, energy above the best layout's."""
        return {"top1": interval(self.hits), "pairwise": interval(self.ordered), "excess": interval(self.excess)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Everything that `wattline fit` says."""

    forms: dict[str, Fitted]
    searched: dict[str, str]
    scores: dict[str, dict[str, Interval]]
    errors: dict[str, Interval]
    larger_batches: dict[str, Interval]
    scenarios: int
    fewest_layouts: int
    changes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How often scenarios are split at random into halves, and how many samples of the first half are fitted on."""

    number: int
    samples: int
    seed: int

    def rng(self, split: int) -> np.random.Generator:
        """The random numbers of one split."""
        return np.random.default_rng([self.seed, split])


def judge(
    samples: Sequence[Sample],
    splits: Splits,
    *,
    more: Sequence[Sample] = (),
    search: bool = False,
    step: Callable[[int], None] = lambda _done: None,
) -> Verdict:
    """Fit on samples of one half of the scenarios and judge on the other half, at each of ``splits``.

    ``more`` are samples of scenarios that are never judged on: with them, a random forest gets FOREST_SAMPLES.
    ``search`` looks for other formulas by symbolic regression; ``step`` gets how many splits are done. The
    coefficients and formulas that are returned are those of the first split. Raises :class:`SimError` when there are
    too few scenarios or samples.
    """
    groups = by_work(samples)
    if len(groups) < 4:
        raise SimError(f"{len(groups)} scenarios with several layouts: the closed form needs at least 4 to be judged")
    works = sorted(groups)
    scores: dict[str, Score] = {}
    errors: dict[str, list[float]] = {f"{name}_{phase}": [] for name in ("latency", "energy") for phase in PHASES}
    forms: dict[str, Fitted] = {}
    formulas: dict[str, str] = {}
    for split in range(splits.number):
        step(split)
        rng = splits.rng(split)
        order = rng.permutation(len(works))
        seen = [s for i in order[: len(works) // 2] for s in groups[works[i]]]
        train = draw(seen, splits.samples, rng)
        fitted = rivals.fitted(train)
        forms = forms or fitted
        ways = {
            "closed form": rivals.closed_form(fitted),
            f"commonest layout of {len(works) // 2} scenarios": rivals.commonest(seen),
            "fewest GPUs that fit": rivals.fewest_gpus,
            "fewest GPUs, on the machine that is best most often": rivals.fewest_on_best(seen),
            "quickest layout": rivals.latency_optimal,
            f"bilinear in tokens, {splits.samples} samples": rivals.bilinear(train),
            f"random forest, {splits.samples} samples": rivals.forest(train),
            f"random forest, all {len(works) // 2} scenarios of the half": rivals.forest(seen),
        }
        if more:
            everything = [*seen, *more]
            many = draw(everything, min(FOREST_SAMPLES, len(everything)), rng)
            ways[f"random forest, {len(many)} samples"] = rivals.forest(many)
        if search:
            found = {phase: symbolic.search(train, phase, seed=split) for phase in PHASES}
            formulas = formulas or {phase: one.formula for phase, one in found.items()}
            ways[f"symbolic regression, {splits.samples} samples"] = symbolic.searched(found)
        for i in order[len(works) // 2 :]:
            group = groups[works[i]]
            for name, way in ways.items():
                if way is not None:
                    scores.setdefault(name, Score()).add(group, way(group))
            for phase in PHASES:
                latency, energy = fitted[phase].predict([s.sizes[phase] for s in group])
                errors[f"latency_{phase}"].append(_mape(latency, column(group, "latency_s", phase)))
                errors[f"energy_{phase}"].append(_mape(energy, column(group, "energy_j", phase)))
    best = [min(groups[work], key=rivals.energy).layout for work in works]
    return Verdict(
        forms=forms,
        searched=formulas,
        scores={name: score.summary() for name, score in scores.items()},
        errors={name: interval(values) for name, values in errors.items()},
        larger_batches=_larger(groups, splits),
        scenarios=len(works),
        fewest_layouts=min(len(group) for group in groups.values()),
        changes=sum(a != b for a, b in pairwise(best)),
    )


def _larger(groups: dict[tuple[str, int, int, int], list[Sample]], splits: Splits) -> dict[str, Interval]:
    """Trained on batches up to 32, judged on larger ones; empty when the samples do not span that."""
    small = [s for work, group in groups.items() if work[1] <= 32 for s in group]
    large = [group for work, group in groups.items() if work[1] > 32]
    if len(small) < splits.samples or not large:
        return {}
    score = Score()
    for split in range(splits.number):
        way = rivals.closed_form(rivals.fitted(draw(small, splits.samples, splits.rng(split))))
        for group in large:
            score.add(group, way(group))
    return score.summary()


def draw(samples: Sequence[Sample], count: int, rng: np.random.Generator) -> list[Sample]:
    """``count`` samples without repetition."""
    if count > len(samples):
        raise SimError(f"samples = {count}: half of the scenarios have {len(samples)} layouts: ask for fewer")
    return [samples[i] for i in rng.choice(len(samples), count, replace=False)]


def interval(values: Sequence[float]) -> Interval:
    """Mean and its 95 % bootstrap interval.

    >>> interval([1.0, 1.0, 1.0])
    (1.0, 1.0, 1.0)
    """
    data = np.asarray(values)
    mean = float(data.mean())
    if np.ptp(data) == 0.0:
        return (mean, mean, mean)
    found = bootstrap((data,), np.mean, method="percentile", n_resamples=2000, rng=np.random.default_rng(0))
    return (mean, float(found.confidence_interval.low), float(found.confidence_interval.high))


def _mape(predicted: Floats, truth: Floats) -> float:
    return float(np.mean(np.abs(predicted / truth - 1.0)))
