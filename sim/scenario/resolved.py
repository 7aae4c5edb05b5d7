"""A scenario with what its fields stand for: model, layout and precision, each derived once and passed on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import workloads
from sim.scenario.layout import layout_of
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.scenario.video import Model, model_of
from workloads.diffusion import DitSpec
from workloads.precision import Precision, plain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolved:
    """What runs, whatever runs it; the machine is resolved apart, since a run may be asked for on another one."""

    scenario: Scenario
    model: Model
    layout: workloads.Layout
    precision: Precision

    @property
    def language_model(self) -> workloads.ModelSpec:
        """The model of any phase but ``denoise``."""
        assert isinstance(self.model, workloads.ModelSpec)
        return self.model

    def of(self, scenario: Scenario) -> Resolved:
        """The same model at the same precision as ``scenario`` asks for, which differs in batch or degrees alone."""
        return replace(self, scenario=scenario, layout=layout_of(scenario))


def resolve_scenario(scenario: Scenario) -> Resolved:
    """Read the model of ``scenario`` and fill in its layout and precision.

    >>> found = resolve_scenario(Scenario.of(model="llama3-8b", pp=4, batch=6))
    >>> found.model.id, found.layout.micro_batches, found.precision.words()
    ('llama3-8b', 3, 'bf16')
    """
    model = model_of(scenario)
    precision = plain(workloads.DType(scenario.dtype)) if isinstance(model, DitSpec) else precision_of(scenario, model)
    return Resolved(scenario=scenario, model=model, layout=layout_of(scenario), precision=precision)
