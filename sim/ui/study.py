"""The overlap study of a form's scenario: chunks over communication blocks, quick enough to be asked for on a page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Any

from sim.errors import ScenarioError
from sim.explore.overlap import OverlapPoint, study
from sim.scenario.spec import Scenario
from sim.ui.answer import BUSY
from sim.ui.state import scenario_of

CHUNKS = (1, 2, 4, 8)
BLOCKS = (None, 2, 4, 8, 16, 32)  # None: as many as the library takes


def studied(fields: Mapping[str, Any]) -> tuple[OverlapPoint, ...]:
    """The form's scenario with every number of chunks and blocks, as far as it can run so."""
    scenario = scenario_of(fields)
    if max(scenario.tp, scenario.ep) < 2:
        raise ScenarioError("an overlap study needs TP or EP of at least 2: one GPU has nothing to communicate")
    return _studied(scenario)


@lru_cache(maxsize=16)
def _studied(scenario: Scenario) -> tuple[OverlapPoint, ...]:
    chunks = CHUNKS if scenario.tp > 1 else (1,)  # exchanges of experts are not cut
    own = scenario.model_dump(exclude_unset=True)
    grid = [
        Scenario.parse({**own, "overlap_chunks": cut, "comm_ctas": blocks}, where="form")
        for cut, blocks in product(chunks, BLOCKS)
    ]
    with BUSY:
        points, _ = study(grid, events=False)
    return tuple(points)
