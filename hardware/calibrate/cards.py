"""Rows of several cards on one footing: each card's watts brought to those of the card with the most rows.

Chips of one type draw a few per cent more or less for the same work. Rows that two sessions have in common and that
stay below the power cap say by how much; what is fitted is then one chip, and :class:`ChipSpread` says how far
others are from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hardware.gpu import GpuSpec
from hardware.power import PowerCurve

Row = Mapping[str, Any]
_MEASURED = frozenset(
    {"latency_s", "power_w", "energy_j", "sm_clock_mhz", "temperature_c", "session", "max_rows", "tiles64", "tiles256"}
)
# Watts above idle from which on a row tells cards apart, and rows in common that a factor needs.
LEAST_W, LEAST_ROWS = 100.0, 3
# A row above this share of the limit may sit at the cap, where the limiter sets the watts, not the chip.
BELOW_CAP = 0.93


def to_one_card(rows: Sequence[Row], gpu: GpuSpec, curve: PowerCurve) -> tuple[list[Row], dict[str, float]]:
    """One-GPU kernel rows with power and energy scaled to the reference card, and each session's factor.

    A session with fewer than three rows in common keeps its own figures (factor 1).
    """
    own = [row for row in rows if _comparable(row, gpu)]
    sessions = {row["session"] for row in own}
    if len(sessions) < 2:
        return list(rows), dict.fromkeys(sessions, 1.0)
    reference = reference_session(rows)
    known: dict[object, list[float]] = {}
    for row in own:
        if row["session"] == reference:
            known.setdefault(_inputs(row), []).append(_above_idle_w(row, gpu, curve))
    factors = {}
    for session in sessions:
        seen = [(_inputs(row), _above_idle_w(row, gpu, curve)) for row in own if row["session"] == session]
        factors[session] = _ratio(seen, known) or 1.0
    return [_scaled(row, factors.get(row["session"], 1.0), curve) for row in rows], factors


def mean_chip(rows: Sequence[Row], gpu: GpuSpec, curve: PowerCurve) -> float:
    """Watts above idle of the mean card over those of the card that the laws are fitted on.

    Each card counts once, by the median over the kernels that it has in common with that one, the card itself too.
    """
    reference = reference_session(rows)
    known: dict[object, list[float]] = {}
    own: dict[tuple[str, int | None], list[tuple[object, float]]] = {}
    for row in rows:
        index = row.get("gpu_index")
        bare = {key: value for key, value in row.items() if key != "gpu_index"}
        if not _comparable(bare, gpu):
            continue
        if index is None and row["session"] == reference:
            known.setdefault(_inputs(bare), []).append(_above_idle_w(row, gpu, curve))
        else:
            own.setdefault((row["session"], index), []).append((_inputs(bare), _above_idle_w(row, gpu, curve)))
    return float(np.mean([1.0, *[ratio for seen in own.values() if (ratio := _ratio(seen, known)) is not None]]))


def _ratio(seen: Sequence[tuple[object, float]], known: Mapping[object, Sequence[float]]) -> float | None:
    """Watts of a card over ``known`` ones, the median of the inputs that both have; None where those are too few."""
    ratios = [watts / float(np.mean(known[inputs])) for inputs, watts in seen if inputs in known]
    return float(np.median(ratios)) if len(ratios) >= LEAST_ROWS else None


def reference_session(rows: Sequence[Row]) -> str:
    """The session with the most one-GPU rows: what is fitted is its card."""
    return Counter(str(row["session"]) for row in rows if row["world"] == 1).most_common(1)[0][0]


def of_one_kind(rows: Sequence[Row]) -> list[Row]:
    """``rows`` without 8-bit ones of other sessions than the reference, where it has such rows itself.

    8-bit products with fast accumulation take 5 to 12 % less time at the power cap than those without, PyTorch's usual
    ones: 361 and 400 us for 4096 x 4096 x 14336 on one card (values.jsonl), 365 and 410 us in two sessions that had
    one each. The casts of those sessions differ by 30 % in power.
    """
    reference = reference_session(rows)
    own = {row["kind"] for row in rows if row["session"] == reference and _eight_bit(row)}
    return [row for row in rows if row["session"] == reference or not (_eight_bit(row) and row["kind"] in own)]


def _eight_bit(row: Row) -> bool:
    kind: str = row["kind"]
    return kind == "cast_fp8" or (kind == "gemm" and str(row["dtype"]).startswith("fp8"))


def _comparable(row: Row, gpu: GpuSpec) -> bool:
    """A metered one-GPU kernel below the cap that draws enough to tell cards apart."""
    watts = (row.get("power_w") or [None])[0]
    if row["world"] != 1 or "gpu_index" in row or row["kind"] in ("duty", "idle") or not row.get("energy_j"):
        return False
    return watts is not None and gpu.idle_w + LEAST_W < watts < BELOW_CAP * gpu.tdp_w


def _inputs(row: Row) -> object:
    return tuple(sorted((key, str(value)) for key, value in row.items() if key not in _MEASURED))


def _above_idle_w(row: Row, gpu: GpuSpec, curve: PowerCurve) -> float:
    return float(row["power_w"][0] - curve.at(row["temperature_c"][0]).idle_w(gpu.max_clock_hz))


def _scaled(row: Row, factor: float, curve: PowerCurve) -> Row:
    if factor == 1.0 or not _meters_one_kernel(row):
        return row
    clock_hz = row["sm_clock_mhz"][0] * 1e6
    idle_w = curve.at(row["temperature_c"][0]).idle_w(clock_hz)
    watts = idle_w + (row["power_w"][0] - idle_w) / factor
    return {**row, "power_w": [watts], "energy_j": watts * row["latency_s"]}


def _meters_one_kernel(row: Row) -> bool:
    return row["world"] == 1 and "gpu_index" not in row and bool(row.get("energy_j")) and "sm_clock_mhz" in row
