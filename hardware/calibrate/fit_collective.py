"""Collective tables from loop rows; what a collective costs inside a step from in_context rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from hardware.calibrate.fit_kit import FitSetting, Row
from hardware.laws.collective_time import CollectiveCoefficients, CollectiveTable, bus_bytes, default_ctas

# From here on a loop's launch hides behind its transfer (bytes).
LONG_BYTES = 64 * 2**20


def fit_collectives(rows: Sequence[Row], setting: FitSetting, gap_s: float) -> CollectiveCoefficients:
    """Tables per operation and world; step energies by non-negative least squares."""
    power_w, bus_j, call_j, links_w = _step_energy(rows, setting, gap_s)
    tables: dict[tuple[str, int], dict[tuple[int, int], list[tuple[float, float]]]] = {}
    for row in rows:
        if row["kind"] == "collective" and "launch" not in row:
            watts = [p for p in row["power_w"] if p is not None]
            above = float(np.mean(watts)) - setting.idle_w(row) - links_w if watts else 0.0
            tables.setdefault((row["op"], row["world"]), {}).setdefault((blocks_of(row), row["bytes"]), []).append(
                (row["latency_s"], above)
            )
    return CollectiveCoefficients(
        tables=tuple(
            CollectiveTable(
                op=op,
                world=world,
                rows=tuple(
                    (blocks, size, float(np.mean([s for s, _ in seen])), round(float(np.mean([w for _, w in seen])), 3))
                    for (blocks, size), seen in sorted(points.items())
                ),
            )
            for (op, world), points in sorted(tables.items())
        ),
        step_power_w=power_w,
        bus_byte_energy_j=bus_j,
        call_energy_j=call_j,
        waiting_power_w=power_w,
        links_power_w=links_w,
    )


def blocks_of(row: Row) -> int:
    """Blocks that a collective row ran in; the library's own number where the row leaves it free."""
    return int(row["ctas"] or default_ctas(row["op"]))


def _step_energy(rows: Sequence[Row], setting: FitSetting, gap_s: float) -> tuple[float, float, float, float]:
    """Watts above idle while a collective runs inside a step, J per bus byte, J per call; watts of awake links.

    Each in_context row's energy above idle less that of the same GEMM alone is the collective's, and that of links
    which stay awake for the whole step. (With no such constant the rows of two GPUs, in which collectives take a
    quarter of the time, come out 10 W too low and those of four, where they take half, 5 W too high.) Rows whose GEMM
    nears the power cap (m of 128 and more) are left out: their clock changes with the collective beside it. Long
    transfers cost the same in a loop, so loop rows of 64 MiB and more with the library's own number of blocks fix the
    energy per byte.
    """
    steps = [r for r in rows if r["kind"] == "in_context" and r["gemm_mnk"][0] < 128]
    alone = {_beside(r): r for r in steps if r["collective"] == "none"}
    features, energies = [], []
    for row in steps:
        if row["collective"] == "none":
            continue
        base = alone[_beside(row)]
        moved = bus_bytes(row["collective"], row["world"], row["bytes"])
        added_s = row["latency_s"] - base["latency_s"] - gap_s
        features.append([added_s, moved * 1e-9, 1e-3, row["latency_s"]])
        energies.append(_above_idle_j(row, setting) - _above_idle_j(base, setting))
    for row in rows:
        if row["kind"] == "collective" and row["ctas"] is None and row["bytes"] >= LONG_BYTES and row["energy_j"]:
            moved = bus_bytes(row["op"], row["world"], row["bytes"])
            features.append([row["latency_s"], moved * 1e-9, 1e-3, row["latency_s"]])
            energies.append(_above_idle_j(row, setting))
    weights = [1.0 / (joules + 2e-4) for joules in energies]
    w = np.asarray(weights)
    solution, _ = nnls(np.asarray(features) * w[:, None], np.asarray(energies) * w)
    return float(solution[0]), float(solution[1]) * 1e-9, float(solution[2]) * 1e-3, float(solution[3])


def _above_idle_j(row: Row, setting: FitSetting) -> float:
    return float(row["energy_j"] / row["world"] - setting.idle_w(row) * row["latency_s"])


def _beside(row: Row) -> object:
    """The same GEMM on the same cards."""
    return row["session"], row["world"], tuple(row["gemm_mnk"])
