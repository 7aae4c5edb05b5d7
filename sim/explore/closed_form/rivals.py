"""Other ways to choose a layout, from the same samples: what the closed form is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

import workloads
from sim.explore.closed_form.fit import Fitted, fit
from sim.explore.closed_form.formula import Floats
from sim.explore.closed_form.samples import PHASES, Sample, by_work, column

# Scores of samples: the lowest of a group is the chosen layout. Energies (J) where the rival predicts any.
Scores = Callable[[Sequence[Sample]], Floats]


def fitted(train: Sequence[Sample]) -> dict[str, Fitted]:
    """The closed form of both phases."""
    return {
        phase: fit([s.sizes[phase] for s in train], column(train, "latency_s", phase), column(train, "energy_j", phase))
        for phase in PHASES
    }


def closed_form(forms: dict[str, Fitted]) -> Scores:
    """Energy by the closed form."""

    def score(test: Sequence[Sample]) -> Floats:
        steps = np.array([s.steps for s in test])
        energy = {phase: forms[phase].predict([s.sizes[phase] for s in test])[1] for phase in PHASES}
        return np.asarray(energy["prefill"] + steps * energy["decode"])

    return score


def commonest(train: Sequence[Sample]) -> Scores:
    """The layout that is best most often in the training scenarios, of which it may see every layout."""
    best = Counter(min(group, key=energy).layout for group in by_work(train).values())
    order = [layout for layout, _ in best.most_common()]
    return lambda test: np.array(
        [order.index(s.layout) if s.layout in order else len(order) for s in test], dtype=float
    )


def fewest_gpus(test: Sequence[Sample]) -> Floats:
    """A rule of thumb: the fewest GPUs that hold the work, among those the fewest pipeline stages."""
    return np.array([s.sizes["decode"].gpus + s.layout[1] / 1e3 for s in test])


def fewest_on_best(train: Sequence[Sample]) -> Scores:
    """The same rule, on the card, clock and type that are best most often in the training scenarios."""
    best = Counter(min(group, key=energy).machine for group in by_work(train).values())
    order = [machine for machine, _ in best.most_common()]

    def score(test: Sequence[Sample]) -> Floats:
        rank = [order.index(s.machine) if s.machine in order else len(order) for s in test]
        return fewest_gpus(test) + np.array(rank) / 1e6

    return score


def latency_optimal(test: Sequence[Sample]) -> Floats:
    """The layout that is quickest in truth, not in a prediction."""
    return np.array([s.whole(s.latency_s) for s in test])


def bilinear(train: Sequence[Sample]) -> Scores:
    """Energy of a request as ``a in + b out + c in out`` (the form of earlier work), one for each layout.

    A layout with fewer than three samples takes the coefficients of all layouts together.
    """

    def solve(rows: Sequence[Sample]) -> Floats:
        terms = np.array([_tokens(s) for s in rows])
        target = np.array([energy(s) / s.scenario.batch for s in rows])
        return np.asarray(np.linalg.lstsq(terms / target[:, None], np.ones(len(rows)), rcond=None)[0])

    everything = solve(train)
    layouts = {s.layout for s in train}
    own = {layout: [s for s in train if s.layout == layout] for layout in layouts}
    coefficients = {layout: solve(rows) for layout, rows in own.items() if len(rows) >= 3}
    return lambda test: np.array(
        [s.scenario.batch * float(np.dot(_tokens(s), coefficients.get(s.layout, everything))) for s in test]
    )


def forest(train: Sequence[Sample]) -> Scores | None:
    """A random forest on the logarithms of the inputs; None without scikit-learn (extra ``explore``)."""
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError:
        return None
    model = RandomForestRegressor(n_estimators=100, random_state=0).fit(
        _inputs(train), np.log([energy(s) for s in train])
    )
    return lambda test: np.exp(model.predict(_inputs(test)))


def energy(sample: Sample) -> float:
    """The whole request batch (J, all GPUs)."""
    return sample.whole(sample.energy_j)


def _tokens(sample: Sample) -> tuple[float, float, float]:
    tokens_in, tokens_out = sample.scenario.seq_len, sample.steps + 1
    return (tokens_in, tokens_out, tokens_in * tokens_out)


def _inputs(samples: Sequence[Sample]) -> Floats:
    def row(sample: Sample) -> list[float]:
        model = workloads.load_model(sample.scenario.model)
        sizes = (workloads.params(model), workloads.params(model, active=True))
        of = sample.sizes["decode"]
        machine = (of.per_flop, of.per_byte, of.per_joule, of.per_watt)
        return [*sizes, *machine, of.tp, of.pp, sample.scenario.batch, sample.scenario.seq_len, sample.steps + 1]

    return np.log([row(sample) for sample in samples])
