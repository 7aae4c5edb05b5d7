"""What a trace holds, as plain columns: lanes, spans, counters. Times are integer picoseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One row of the timeline: a thread ``tid`` of process ``pid`` (a GPU); ``order`` sorts rows.

    An ``asynchronous`` one is no thread but the life of one of many things at once (a request), distinguished by
    ``tid``: its spans nest, and Perfetto packs all those of one name into as few rows as they need.
    """

    pid: int
    tid: int
    name: str
    order: int
    asynchronous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanKind:
    """What spans of one kind share: the name shown, the category, and arguments.

    ``timed`` kinds carry joules of their own in every span; ``communication`` kinds are collectives.
    """

    name: str
    category: str
    args: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = False
    communication: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Spans as columns: lane and kind are indices; ``energy_j`` NaN leaves the argument out."""

    lane: Ints
    kind: Ints
    start_ps: Ints
    end_ps: Ints
    energy_j: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counter:
    """One counter of one process: values that hold from their time on. Equal names share an axis.

    A ``total`` only grows: what it counts is the difference of two of its values.
    """

    pid: int
    name: str
    time_ps: Ints
    value: Floats
    unit: str = ""
    total: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A whole trace. ``processes`` maps pid to name; ``flows`` are pairs of span indices (from, to)."""

    processes: Mapping[int, str]
    lanes: Sequence[Lane]
    kinds: Sequence[SpanKind]
    spans: Spans
    counters: Sequence[Counter] = ()
    flows: Sequence[tuple[int, int]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
