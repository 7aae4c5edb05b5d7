"""Kernels at two true SM clocks (at_clock rows): what of their time follows the clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hardware.calibrate.fit_kit import Row
from hardware.calibrate.suite.at_clock import kernel_row

Pair = tuple[Row, Row]
# Between products copies, SiLU and RMSNorm take 1 to 5 % less time than alone, at two thirds of the clock: how well the
# ratio of a pair is known (log), and how much longer a kernel takes at the lower clock that follows it.
BETWEEN_SIGMA = FOLLOWS = 0.02
# Buffers of a kernel alone stay in L2, between products they do not: only far larger ones compare.
LEAST_L2_SIZES = 2.0
# Repetitions of one setting differ by less in clock, the two settings by far more.
APART = 0.95
_MEASURED = frozenset({"seconds", "clock_mhz", "samples", "session"})


def clock_pairs(
    rows: Sequence[Row],
    *,
    l2_bytes: float,
    moved: Callable[[Row], float] | None = None,
    law: Callable[[Row], str] = lambda row: str(row["kind"]),
) -> dict[str, list[Pair]]:
    """By ``law``, memory-bound kernels at the lower and the higher clock: rows with ``latency_s`` and ``clock_hz``.

    The stamps' own time, that of a row in which nothing runs between them, is taken off. ``moved`` gives the bytes of
    a kernel's row (left out: :func:`moved_bytes`).
    """
    moved = moved or moved_bytes
    at_clock = [row for row in rows if row["kind"] == "at_clock"]
    stamps_s = [row["seconds"] for row in at_clock if row["work"] == "nothing"]
    own_s = float(np.mean(stamps_s)) if stamps_s else 0.0
    found: dict[object, list[dict[str, Any]]] = {}
    for row in at_clock:
        kernel = {key: value for key, value in kernel_row(row).items() if key not in _MEASURED}
        if row["work"] == "nothing" or moved(kernel) < LEAST_L2_SIZES * l2_bytes:
            continue
        timed = {**kernel, "latency_s": row["seconds"] - own_s, "clock_hz": 1e6 * row["clock_mhz"]}
        found.setdefault(repr(sorted(kernel.items())), []).append(timed)
    pairs: dict[str, list[Pair]] = {}
    for same in found.values():
        slow, fast = min(same, key=lambda row: row["clock_hz"]), max(same, key=lambda row: row["clock_hz"])
        if slow["clock_hz"] < APART * fast["clock_hz"]:
            pairs.setdefault(law(slow), []).append((slow, fast))
    return pairs


def follow_the_clock(pairs: Sequence[Pair]) -> bool:
    """True where the rows of a kind take longer at the lower clock (their mean ratio)."""
    return bool(pairs) and float(np.mean([math.log(s["latency_s"] / f["latency_s"]) for s, f in pairs])) > FOLLOWS


def moved_bytes(row: Mapping[str, Any]) -> float:
    """Bytes of an elementwise row, 0 of other kinds; the MoE helpers' rows give rows and width only.

    gather reads and writes each row; index_add multiplies (read, write) and adds (two reads, one write);
    topk_sum multiplies eight rows (read, write), sums them (read) and writes one.
    """
    if "bytes_moved" in row:
        return float(row["bytes_moved"])
    passes = {"gather": 2.0, "index_add": 5.0, "topk_sum": 3.0 + 1.0 / 8.0}.get(row["kind"], 0.0)
    return float(passes * row.get("rows", 0) * row.get("width", 0) * 2.0)
