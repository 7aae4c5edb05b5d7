"""A scenario with what its fields stand for: model, layout and precision, each derived once and passed on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter

import workloads
from hardware.catalog import load_gpu
from inputs.same import Keyed, Same
from sim.scenario.layout import layout_of
from sim.scenario.precision import precision_of
from sim.scenario.spec import Scenario
from sim.scenario.video import Model, model_of
from workloads.diffusion import DitSpec
from workloads.precision import Precision, plain

# Fields of a scenario that change how its work runs, not what it is: scenarios that differ only here share it.
POLICY = frozenset(
    {
        "power_cap_w", "uncapped", "sm_clock_mhz", "chip_temperature_c", "chip_power_factor", "regime", "detail",
        "ignore_memory",
    }
)  # fmt: skip
_fields_of_work = itemgetter(*(name for name in Scenario.model_fields if name not in POLICY))
# More works than plans of them are remembered anywhere, so that equal ones are one object as long as a plan is.
MAX_WORKS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resolved:
    """What runs, whatever runs it; the machine is resolved apart, since a run may be asked for on another one.

    ``work`` is equal for scenarios that differ in their power policy alone: in keys of memos it stands for all else.
    """

    scenario: Scenario
    model: Model
    layout: workloads.Layout
    precision: Precision
    work: Same[object]

    @property
    def language_model(self) -> workloads.ModelSpec:
        """The model of any phase but ``denoise``."""
        assert isinstance(self.model, workloads.ModelSpec)
        return self.model

    def of(self, scenario: Scenario) -> Resolved:
        """The same model at the same precision as ``scenario`` asks for, which differs in batch or degrees alone."""
        return replace(self, scenario=scenario, layout=layout_of(scenario), work=Same(scenario))


def resolve_scenario(scenario: Scenario) -> Resolved:
    """Read the model of ``scenario`` and fill in its layout and precision.

    >>> found = resolve_scenario(Scenario.of(model="llama3-8b", pp=4, batch=6))
    >>> found.model.id, found.layout.micro_batches, found.precision.words()
    ('llama3-8b', 3, 'bf16')
    >>> found.work == resolve_scenario(Scenario.of(model="llama3-8b", pp=4, batch=6, power_cap_w=500)).work
    True
    """
    model = model_of(scenario)
    draft = None if scenario.draft_model is None else Same(workloads.load_model(scenario.draft_model))
    key = (_fields_of_work(scenario.__dict__), Same(model), Same(load_gpu(scenario.gpu)), draft)
    found = _resolved(Keyed(key, (scenario, model)))
    return Resolved(scenario=scenario, model=model, layout=found.layout, precision=found.precision, work=found.work)


@lru_cache(maxsize=MAX_WORKS)
def _resolved(asked: Keyed[tuple[Scenario, Model]]) -> Resolved:
    scenario, model = asked.held
    precision = plain(workloads.DType(scenario.dtype)) if isinstance(model, DitSpec) else precision_of(scenario, model)
    return Resolved(scenario=scenario, model=model, layout=layout_of(scenario), precision=precision, work=Same(asked))
