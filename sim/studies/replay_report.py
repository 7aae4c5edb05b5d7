"""A replay as one JSON document and as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from sim.studies.replay import Replayed
from traces.summary import RankTimes

FIGURES = ("span_us", "computation_us", "communication_us", "overlap_us", "exposed_us", "idle_us")


def as_document(result: Replayed) -> dict[str, Any]:
    """The fixed interface of ``--json``: microseconds; the figures at the top are those of the first rank read."""
    measured, unchanged, simulated = result.measured[0], result.unchanged.ranks[0], result.simulated.ranks[0]
    return {
        "sources": list(result.capture.sources),
        "measured_span_us": measured.span_us,
        "simulated_span_us": simulated.span_us,
        "measured_overlap_us": measured.overlap_us,
        "simulated_overlap_us": simulated.overlap_us,
        "unchanged_span_us": unchanged.span_us,
        "unchanged_overlap_us": unchanged.overlap_us,
        "edges": result.dag.counts,
        "pause_us": result.pause_ns / 1e3,
        "unchanged_energy_j": result.unchanged.energy_j,
        "simulated_energy_j": result.simulated.energy_j,
        "gpu": result.gpu,
        "status": result.status,
        "kernels_priced_by_shape": result.by_shape,
        "chunked_collectives": result.chunked_collectives,
        "ranks": [
            {"rank": a.rank} | {
                kind: {name: getattr(times, name) for name in FIGURES}
                for kind, times in (("measured", a), ("unchanged", b), ("simulated", c))
            }
            for a, b, c in zip(result.measured, result.unchanged.ranks, result.simulated.ranks, strict=True)
        ],
    }  # fmt: skip


def print_replay(result: Replayed, console: Console) -> None:
    """The trace, its replay and the replay under changes, rank by rank."""
    edges = ", ".join(
        f"{kind} {edge['count']:,}" + (f" (confidence {edge['confidence']:.2f})" if edge["confidence"] < 1 else "")
        for kind, edge in result.dag.counts.items() if edge["count"]
    )  # fmt: skip
    console.print(f"edges: {edges}; kernels that queue pause {result.pause_ns / 1e3:.2f} us", highlight=False)
    table = Table(title="one GPU a block, unions of intervals in us", title_justify="left")
    for name in ("rank", "", *(figure.removesuffix("_us") for figure in FIGURES)):
        table.add_column(name, justify="left" if not name else "right")
    three = zip(result.measured, result.unchanged.ranks, result.simulated.ranks, strict=True)
    for measured, unchanged, simulated in three:
        _add(table, "measured", measured)
        _add(table, "replayed", unchanged)
        if result.simulated is not result.unchanged:
            _add(table, "changed", simulated)
    console.print(table)
    outcomes = {"replayed": result.unchanged} | (
        {"changed": result.simulated} if result.simulated is not result.unchanged else {}
    )
    known = [
        f"{label} {outcome.energy_j:.4g} J ({outcome.power_w:.0f} W a GPU)"
        for label, outcome in outcomes.items() if outcome.energy_j is not None
    ]  # fmt: skip
    if known:
        console.print(
            f"energy of all GPUs: {', '.join(known)}; by the laws of {result.gpu} ({result.status}), "
            f"{result.by_shape:,} kernels by recorded shape",
            highlight=False,
        )
    if result.chunked_collectives:
        console.print(f"collectives cut into parts: {result.chunked_collectives:,}", highlight=False)
    for row in result.capture.findings:
        console.print(f"{row.rule}: {row.count:,} (first: {row.first}): {row.remedy}", markup=False, highlight=False)


def _add(table: Table, label: str, times: RankTimes) -> None:
    table.add_row(str(times.rank), label, *(f"{getattr(times, figure):,.1f}" for figure in FIGURES))
