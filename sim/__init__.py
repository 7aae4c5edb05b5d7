"""wattline: where work meets hardware. ``from sim import simulate``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sim.neighbours import check_neighbours

if TYPE_CHECKING:
    from inputs.errors import WattlineError
    from sim.explore.frame import sweep
    from sim.result.timeline import Timeline
    from sim.run.runner import simulate
    from sim.scenario.fields import ScenarioFields
    from sim.scenario.spec import Scenario
    from sim.serving.server import serve

check_neighbours()

__all__ = ["Scenario", "ScenarioFields", "Timeline", "WattlineError", "serve", "simulate", "sweep"]

# Lazy, so that the command line can print its help without importing pandas.
_HOMES = {
    "Scenario": "sim.scenario.spec",
    "ScenarioFields": "sim.scenario.fields",
    "Timeline": "sim.result.timeline",
    "WattlineError": "inputs.errors",
    "serve": "sim.serving.server",
    "simulate": "sim.run.runner",
    "sweep": "sim.explore.frame",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from inputs.collector import collector_paused  # a neighbour, checked by now

        with collector_paused():  # what is imported stays: collecting takes a tenth of a first run
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sim' has no attribute '{name}'")
