"""How kernels of cuBLAS and NCCL come to SMs: facts of the libraries, shared by all profiles, each with its source."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """Clusters, tiles and races for SMs; ``hardware/data/scheduling.toml`` says where each figure comes from.

    A block of a product has ``own_tiles`` by its number and fetches further ones; ``gemm_cluster`` of them start
    together, ``collective_cluster`` of a collective's, for which ``cluster_sms`` must be free beside a product. Where
    one kernel releases a product and a collective, the collective asks for SMs its lead (by launch) after the pause
    between kernels. A product of more tiles than its blocks' own clears a counter first, in a memset of ``memset_s``,
    behind which it pauses for ``cleared_pause_s``; against such a product the collective is first in
    ``collective_wins`` of all cases. In a graph a kernel starts ``joining_gap_s`` after one of another stream that it
    waits for, a collective on a side stream ``side_start_s`` after the one before it.
    """

    own_tiles: int
    gemm_cluster: int
    collective_cluster: int
    cluster_sms: int
    collective_lead_graph_s: float
    collective_lead_eager_s: float
    memset_s: float
    cleared_pause_s: float
    collective_wins: float
    joining_gap_s: float
    side_start_s: float

    @property
    def clearing_s(self) -> float:
        """From the release of a product whose counter has to be cleared to the moment at which its blocks may start."""
        return self.memset_s + self.cleared_pause_s


@lru_cache(maxsize=1)
def scheduling() -> Scheduling:
    """The facts that are shipped.

    >>> scheduling().own_tiles
    2
    """
    return Scheduling(**shipped("scheduling.toml"))


def shipped(name: str) -> dict[str, Any]:
    """The values of a file of facts in ``hardware/data``."""
    data = tomllib.loads((files("hardware") / "data" / name).read_text(encoding="utf-8"))
    return {key: fact["value"] for key, fact in data.items()}
