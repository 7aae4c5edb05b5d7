"""Whether a run needs positions that its model was not made for."""

from __future__ import annotations

import workloads
from sim.scenario.spec import Scenario


def positions(scenario: Scenario) -> dict[str, int | bool] | None:
    """The last position that a run needs and those its model was made for; None where the model does not say.

    >>> positions(Scenario.of(model="llama3-8b", phase="decode", seq_len=8192))
    {'needed': 8193, 'of_the_model': 8192, 'beyond': True}
    """
    if scenario.phase == "denoise":
        return None
    model = workloads.load_model(scenario.model)
    if not model.max_positions:
        return None
    new = {"decode": 1, "generate": (scenario.output_len or 1) - 1}.get(scenario.phase, 0)
    needed = scenario.seq_len + new
    return {"needed": needed, "of_the_model": model.max_positions, "beyond": workloads.beyond(model, needed)}
