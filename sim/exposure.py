"""Where GPUs do not compute: data that moves alone, ranks that wait, and pipeline bubbles."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Intervals = tuple[Floats, Floats]


def exposed_by_kind(spans: pd.DataFrame) -> pd.DataFrame:
    """Seconds, mean over GPUs, in which a GPU runs communication and nothing else, one row a kind of collective.

    ``exposed_s``: data moves. ``waiting_s``: the rank is there, the last one is not, and nothing else moves.
    The columns together sum to the time in which communication runs alone. ``spans`` is ``Timeline.kernels``.
    """
    gpus = max(1, spans["gpu"].nunique())
    kinds = spans.loc[spans["collective"], "kind"].unique().tolist()
    table = pd.DataFrame(0.0, index=pd.Index(kinds, name="kind"), columns=["exposed_s", "waiting_s"])
    for _, of_gpu in spans.groupby("gpu"):
        covered = of_gpu[~of_gpu["collective"]][["start_s", "end_s"]]
        length = covered_s(covered["start_s"], covered["end_s"])
        # What an earlier row has covered is not counted again, so that the parts sum to the whole.
        for column, begin, end in (("exposed_s", "moving_s", "end_s"), ("waiting_s", "start_s", "moving_s")):
            for kind in kinds:
                mine = of_gpu[of_gpu["collective"] & (of_gpu["kind"] == kind)]
                more = pd.DataFrame({"start_s": mine[begin], "end_s": mine[end]})
                covered = pd.concat([covered, more])
                grown = covered_s(covered["start_s"], covered["end_s"])
                table.loc[kind, column] += (grown - length) / gpus
                length = grown
    return table


def bubble_s(spans: pd.DataFrame, latency_s: float, gpus: int) -> float:
    """Seconds, mean over GPUs, in which a GPU neither computes nor moves data; gaps between kernels do not count."""
    busy = 0.0
    for _, of_gpu in spans.groupby("gpu"):
        begin = np.where(of_gpu["collective"], of_gpu["moving_s"], of_gpu["start_s"] - of_gpu["gap_s"])
        busy += covered_s(pd.Series(begin), of_gpu["end_s"])
    return max(0.0, latency_s - busy / gpus)


def covered_s(start: pd.Series[float], end: pd.Series[float]) -> float:
    """Length of the union of intervals, s.

    >>> covered_s(pd.Series([0.0, 1.0, 5.0]), pd.Series([2.0, 3.0, 6.0]))
    4.0
    """
    if start.empty:
        return 0.0
    begin = start.to_numpy()
    order = np.argsort(begin, kind="stable")
    begin, finish = begin[order], np.maximum.accumulate(end.to_numpy()[order])
    first = np.append(True, begin[1:] > finish[:-1])
    return float(np.sum(finish[np.append(first[1:], True)] - begin[first]))
