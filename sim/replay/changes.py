"""What a replay may assume otherwise, and what that makes of its durations, launches and streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from inputs.suggest import nearest
from sim.errors import SimError
from sim.replay.run import HostWait, ReplayRows
from traces.classify import COMMUNICATION, Classes
from traces.dag import Dag
from traces.intervals import union
from traces.records import Floats, Ints


class ReplayError(SimError):
    """A wish about a replay that cannot be met as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Assumptions of a replay; nothing given, nothing changed.

    ``faster``: classes of kernels (as ``wattline inspect`` names them) and by which factor; communication is the
    class ``communication``. ``hide_communication`` gives it no time and no SMs. ``launch`` "graph": the host launches
    everything at once, and kernels pause as in a graph on that GPU. ``merge_streams``: one stream a rank, in the
    order of launches. ``chunks``: products and the exposed collectives next to them in so many parts, a part's transfer
    beside the next product (:mod:`sim.replay.chunks`). ``gpu``, ``sm_clock_mhz``, ``power_cap_w``, ``ctas``
    (blocks a collective) and ``chunks`` change durations as the laws of the GPUs say. ``regime`` "steady": the work is
    repeated until the power cap has settled; "cold": each kernel at the clock that the fast limiter allows, as in a
    short trace; left out, steady if and only if the launch or the cap is changed.
    """

    faster: Mapping[str, float] = field(default_factory=dict)
    hide_communication: bool = False
    launch: Literal["graph"] | None = None
    merge_streams: bool = False
    gpu: str | None = None
    sm_clock_mhz: float | None = None
    power_cap_w: float | None = None
    ctas: int | None = None
    chunks: int | None = None
    regime: Literal["steady", "cold"] | None = None

    def __post_init__(self) -> None:
        for cls, factor in self.faster.items():
            if not (factor > 0.0 and math.isfinite(factor)):
                raise ReplayError(f"faster = {cls}={factor:g}: give a factor above 0, like {cls}=2")
        if self.chunks is not None and self.chunks < 2:
            raise ReplayError(f"chunks = {self.chunks}: that cuts nothing: give 2 or more")
        if self.chunks is not None and self.merge_streams:
            raise ReplayError(f"chunks = {self.chunks} with merge_streams: parts run beside one another: leave one out")

    @property
    def steady(self) -> bool:
        """True where power settles under the cap."""
        return self.regime == "steady" or (self.regime is None and (self.launch or self.power_cap_w) is not None)

    @property
    def by_law(self) -> bool:
        """True where durations change as the laws of a GPU say."""
        given = (self.gpu, self.sm_clock_mhz, self.power_cap_w, self.ctas, self.chunks)
        return self.steady or any(value is not None for value in given)

    @property
    def none(self) -> bool:
        """True when nothing is changed."""
        return self == Changes()


def changed(
    changes: Changes, classes: Classes, dag: Dag, load: ReplayRows, waits: list[HostWait], *, graph_pause_ns: int
) -> tuple[Dag, ReplayRows, list[HostWait]]:
    """The parts of a replay under ``changes``.

    Raises :class:`ReplayError` on a class that the trace does not hold.
    """
    dur_ns = load.dur_ns.astype(np.float64)
    present = [label for i, label in enumerate(classes.labels) if (classes.index == i).any()]
    for cls, factor in changes.faster.items():
        if cls not in present:
            hint = nearest(cls, present, f"it holds: {', '.join(present)}")
            raise ReplayError(f"faster = {cls}={factor:g}: no such class in the trace: {hint}")
        dur_ns[classes.is_class(cls)] /= factor
    load = replace(load, dur_ns=np.rint(dur_ns).astype(np.int64))
    if changes.ctas is not None:
        blocks, tiles = (np.where(load.is_collective, changes.ctas, column) for column in (load.blocks, load.tiles))
        load = replace(load, blocks=blocks, tiles=tiles, contest=None)  # known of other blocks only
    if changes.launch == "graph":
        load = replace(
            load,
            lead_ns=load.graph_lead_ns,
            issue_ns=np.full_like(load.issue_ns, load.issue_ns.min()),
            pause_ns=graph_pause_ns,
        )
        waits = []
    if changes.hide_communication:
        is_communication = classes.is_class(COMMUNICATION)
        load = replace(
            load,
            dur_ns=np.where(is_communication, 0, load.dur_ns),
            lead_ns=np.where(is_communication, 0, load.lead_ns),
            blocks=np.where(is_communication, 0, load.blocks),
            is_collective=load.is_collective & ~is_communication,
        )
    if changes.merge_streams:
        dag, load = merged(dag, load), replace(load, contest=None)
    return dag, load, waits


def beside_products(load: ReplayRows, start_ns: Ints, end_ns: Ints) -> Floats:
    """The share of each collective's time, once all ranks are there, in which products ran beside it; 0 for others."""
    share = np.zeros(len(load.rank))
    for rank in np.unique(load.rank):
        mine = load.rank == rank
        products = mine & (load.blocks > 0) & ~load.is_collective
        comm_rows = np.flatnonzero(mine & load.is_collective & (load.dur_ns > 0))
        begins, ends = union(start_ns[products], end_ns[products])
        if not len(begins):
            continue
        moments = np.stack([begins, ends], axis=1).reshape(-1)
        covered = np.stack([np.cumsum(ends - begins) - (ends - begins), np.cumsum(ends - begins)], axis=1).reshape(-1)
        stop_ns, lasts_ns = end_ns[comm_rows], load.dur_ns[comm_rows]
        since, until = (np.interp(at, moments, covered) for at in (stop_ns - lasts_ns, stop_ns))
        share[comm_rows] = (until - since) / lasts_ns
    return share


def merged(dag: Dag, load: ReplayRows) -> Dag:
    """All of a rank's work on one stream, in the order of its launches: its order then makes every wait."""
    place = np.empty(len(load.rank), dtype=np.int64)
    for queue in dag.queues:
        place[queue] = np.arange(len(queue))
    queues = []
    for rank in np.unique(load.rank):
        rows = np.flatnonzero(load.rank == rank)
        queues.append(rows[np.lexsort((place[rows], load.issue_ns[rows]))])
    none = np.empty(0, dtype=np.int64)
    return replace(dag, queues=queues, before=none, after=none)
