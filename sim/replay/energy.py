"""Joules of a replay: each row's watts over its time, what runs at once within the fast limiter, idle power beneath."""

from __future__ import annotations

import math

import numpy as np

from sim.replay.price import Priced
from traces.capture import Capture
from traces.intervals import length
from traces.records import Floats, Ints


def energy_j(
    capture: Capture, prices: Priced, spans_ns: tuple[Ints, Ints], *, works_ns: Floats, head_ns: int | None,
    limit_w: float = math.inf,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Joules of each row beyond idle, and of each rank's GPU with idle between its first and last work.

    ``spans_ns`` are starts and ends of the rows. With ``head_ns``: from so long before the first to the last of all
    ranks, which began and ended at once. A row that takes longer than ``works_ns`` waits for other ranks. Idle power is
    that at the clock of what runs; another where nothing does. Rows that run beside one another never add up to more
    than ``limit_w``, the fast limiter's.
    """
    start_ns, end_ns = spans_ns
    own_j = (prices.dynamic_w * works_ns + prices.waiting_w * (end_ns - start_ns - works_ns)) * 1e-9
    ranks_j = []
    for rank in capture.ranks:
        mine = np.flatnonzero(capture.work.rank == rank)
        since_ns, until_ns = start_ns[mine], end_ns[mine]
        busy_ns = length(since_ns, until_ns)
        of = mine if head_ns is None else slice(None)
        span_ns = int(end_ns[of].max() - start_ns[of].min()) + (head_ns or 0)
        time_ns = until_ns - since_ns
        busy_w = float((prices.idle_w[mine] * time_ns).sum() / max(1, time_ns.sum()))
        own_j[mine] *= _held(own_j[mine], since_ns, until_ns, room_w=limit_w - busy_w)
        free_j = float(prices.free_w[mine[0]]) * (span_ns - busy_ns) * 1e-9
        ranks_j.append(float(own_j[mine].sum()) + busy_w * busy_ns * 1e-9 + free_j)
    return own_j, np.array(ranks_j)


def _held(own_j: Floats, start_ns: Ints, end_ns: Ints, *, room_w: float) -> Floats:
    """The share of its joules that each row of a GPU keeps where all that run at once share ``room_w``.

    >>> _held(np.array([6e-9, 6e-9]), np.array([0, 5]), np.array([10, 15]), room_w=0.9).tolist()
    [0.875, 0.875]
    """
    time_ns = np.maximum(end_ns - start_ns, 1)
    power_w = own_j / (time_ns * 1e-9)
    moments, place = np.unique(np.concatenate([start_ns, start_ns + time_ns]), return_inverse=True)
    begins, ends = place.reshape(2, -1)
    steps_w = np.zeros(len(moments))
    np.add.at(steps_w, begins, power_w)
    np.subtract.at(steps_w, ends, power_w)
    drawn_w = np.cumsum(steps_w)[:-1]
    if not (drawn_w > room_w).any():
        return np.ones(len(own_j))
    # A kernel that passes the limit on its own was priced within it: what is left are sums.
    share = np.minimum(1.0, max(room_w, 0.0) / np.maximum(drawn_w, 1e-12))
    so_far = np.append(0.0, np.cumsum(share * np.diff(moments)))
    return np.asarray((so_far[ends] - so_far[begins]) / time_ns)
