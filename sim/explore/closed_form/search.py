"""Search for another structure: symbolic regression (pyoperon, extra ``search``) on the closed form's own samples.

The search knows no physics. Its inputs are logarithms of the counted sizes, its target the logarithm of a phase's
energy over the mean, so that what it minimises is a relative error, as in the closed form's fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.errors import SimError
from sim.explore.closed_form.formula import Floats, columns
from sim.explore.closed_form.rivals import Scores
from sim.explore.closed_form.samples import PHASES, Sample, column
from sim.explore.closed_form.sizes import Phase

# Counted sizes that may enter, by the letters of the closed form; all are positive.
INPUTS = {
    "F": "flops",
    "H": "hbm_bytes",
    "B": "repeated_bytes",
    "K": "kernels",
    "m": "micro_batches",
    "p": "pp",
    "t": "tp",
}
SYMBOLS = "add,sub,mul,div,exp,logabs,square,constant,variable"
MAX_LENGTH = 30
EVALUATIONS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Searched:
    """A formula found for one phase: of the logarithm of energy over ``scale_j``, in logarithms of INPUTS."""

    model: Any
    scale_j: float
    formula: str

    def energy_j(self, samples: Sequence[Sample], phase: Phase) -> Floats:
        """Energy (J, all GPUs) of ``samples``."""
        return np.asarray(self.scale_j * np.exp(self.model.predict(_inputs(samples, phase))))


def search(train: Sequence[Sample], phase: Phase, *, seed: int) -> Searched:
    """The formula of the front of error and length that the Bayesian information criterion prefers on ``train``.

    Raises :class:`SimError` without pyoperon.
    """
    try:
        from pyoperon.sklearn import SymbolicRegressor
    except ImportError:
        raise SimError("--search needs the extra: pip install 'wattline[search]'") from None
    energy_j = column(train, "energy_j", phase)
    scale_j = float(np.exp(np.log(energy_j).mean()))
    model = SymbolicRegressor(
        allowed_symbols=SYMBOLS,
        objectives=["r2", "length"],
        optimizer_iterations=5,
        max_length=MAX_LENGTH,
        population_size=500,
        generations=200,
        max_evaluations=EVALUATIONS,
        model_selection_criterion="bayesian_information_criterion",
        n_threads=1,  # more are quicker and never the same twice
        random_state=seed,
    ).fit(_inputs(train, phase), np.log(energy_j / scale_j))
    formula = model.get_model_string(model.model_, precision=4, names=[f"ln({letter})" for letter in INPUTS])
    return Searched(model=model, scale_j=scale_j, formula=f"{scale_j:.4g} J * exp{formula}")


def searched(found: dict[Phase, Searched]) -> Scores:
    """Energy of a whole request batch by the searched formulas."""

    def score(test: Sequence[Sample]) -> Floats:
        steps = np.array([s.steps for s in test])
        energy = {phase: found[phase].energy_j(test, phase) for phase in PHASES}
        return np.asarray(energy["prefill"] + steps * energy["decode"])

    return score


def _inputs(samples: Sequence[Sample], phase: Phase) -> Floats:
    work = columns([sample.sizes[phase] for sample in samples])
    return np.log(np.column_stack([work[name] for name in INPUTS.values()]))
