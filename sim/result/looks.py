"""How the search for a run's settled clock went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Looks:
    """Counts of a search, added up over those of one run.

    ``engine_runs`` are looks at the mean power that SimPy ran, ``walked_clocks`` those to which the order of an earlier
    run was carried over (:mod:`sim.shortcuts.retiming`), ``order_held`` of them without a change of order. A search
    that went by walks and needed more than the two looks that prove its answer ``fell_back`` to the engine so often.
    """

    engine_runs: int = 0
    walked_clocks: int = 0
    order_held: int = 0
    fell_back: int = 0
