"""wattline: where work meets hardware. ``from sim import simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.result.timeline import Timeline
    from sim.run.runner import simulate
    from sim.scenario.spec import Scenario

__all__ = ["Scenario", "Timeline", "simulate"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the command line can print its help without importing pandas.
    if name == "Scenario":
        from sim.scenario.spec import Scenario

        return Scenario
    if name == "Timeline":
        from sim.result.timeline import Timeline

        return Timeline
    if name == "simulate":
        from sim.run.runner import simulate

        return simulate
    raise AttributeError(f"module 'sim' has no attribute '{name}'")
