"""An inspection as tables and as one JSON document."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from sim.replay.inspect import Inspection
from traces.advised import shown
from traces.summary import RankTimes, Summary

CLASSES_SHOWN, REGIONS_SHOWN, NAME_SHOWN = 12, 5, 70
STREAMS_SHOWN = 64


def as_document(result: Inspection) -> dict[str, Any]:
    """The fixed interface of ``--json``: times in microseconds; unions are those of the first rank read."""
    summary, first = result.summary, result.summary.ranks[0]
    return {
        "sources": list(result.capture.sources),
        "kernels": summary.kernels,
        "streams": summary.streams,
        "collectives": summary.collectives,
        "ranks": [times.rank for times in summary.ranks],
        "span_us": first.span_us,
        "communication_us": first.communication_us,
        "computation_us": first.computation_us,
        "overlap_us": first.overlap_us,
        "exposed_us": first.exposed_us,
        "idle_us": first.idle_us,
        "energy_j": _number(summary.energy_j),
        "by_rank": [_rank(times) for times in summary.ranks],
        "by_class": [
            {"class": row.cls, "count": row.count, "time_us": row.time_us, "energy_j": _number(row.energy_j)}
            for row in summary.by_class
        ],
        "by_stream": [
            {"rank": row.rank, "stream": row.stream, "count": row.count, "busy_us": row.busy_us}
            for row in summary.by_stream
        ],
        "top": [
            {"name": row.name, "class": row.cls, "count": row.count, "time_us": row.time_us, "mean_us": row.mean_us}
            for row in summary.top
        ],
        "launch_bound": [
            {"rank": row.rank, "start_us": row.start_us, "end_us": row.end_us, "kernels": row.kernels,
             "idle_us": row.idle_us}
            for row in summary.launch_bound
        ],
        "critical_path": {
            "length_us": result.path.length_us,
            "by_class_us": result.path.by_class,
            "first": [{"name": row.name, "count": row.count, "time_us": row.time_us} for row in result.path.first],
            "skipped": result.path.skipped,
        },
        "lint": [
            {"rule": row.rule, "count": row.count, "first": row.first, "remedy": row.remedy} for row in result.findings
        ],
        "advice": [asdict(row) for row in result.advice],
    }  # fmt: skip


def _rank(times: RankTimes) -> dict[str, Any]:
    return {name: getattr(times, name) for name in RankTimes.__slots__ if name != "idle_by_cause_us"} | {
        "idle_by_cause_us": dict(times.idle_by_cause_us)
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def print_inspection(result: Inspection, console: Console) -> None:
    """Everything as tables, the most useful first."""
    summary = result.summary
    talk = f", {summary.collectives:,} of them communication" if summary.collectives else ""
    energy = "" if math.isnan(summary.energy_j) else f", {summary.energy_j:.4g} J in kernels"
    console.print(f"{summary.kernels:,} kernels{talk}, {summary.streams} streams, ranks {_ranks(summary)}{energy}")
    console.print(_rank_table(summary))
    console.print(_class_table(summary))
    console.print(_stream_table(summary))
    console.print(_top_table(summary))
    _print_path(result, console)
    _print_regions(summary, console)
    for line in shown(result.advice):
        console.print(line, markup=False, highlight=False)
    for row in result.findings:
        console.print(f"{row.rule}: {row.count:,} (first: {row.first}): {row.remedy}", markup=False, highlight=False)


def print_difference(result: Inspection, other: Inspection, console: Console) -> None:
    """The same figures of two traces side by side, classes by how much they changed."""
    table = Table(title="this trace and the other", title_justify="left")
    for name in ("", "this", "other", "other / this"):
        table.add_column(name, justify="left" if not name else "right")
    one, two = result.summary.ranks[0], other.summary.ranks[0]
    for label in ("span_us", "computation_us", "communication_us", "overlap_us", "exposed_us", "idle_us"):
        _compare(table, label, getattr(one, label), getattr(two, label))
    ours = {row.cls: row.time_us for row in result.summary.by_class}
    theirs = {row.cls: row.time_us for row in other.summary.by_class}
    for cls in sorted(ours.keys() | theirs.keys(), key=lambda c: -abs(ours.get(c, 0) - theirs.get(c, 0))):
        _compare(table, f"{cls} kernels, us", ours.get(cls, 0.0), theirs.get(cls, 0.0))
    console.print(table)


def _compare(table: Table, label: str, before: float, after: float) -> None:
    table.add_row(label, f"{before:,.1f}", f"{after:,.1f}", f"{after / before:.3f}" if before else "-")


def _ranks(summary: Summary) -> str:
    return ", ".join(str(times.rank) for times in summary.ranks)


def _rank_table(summary: Summary) -> Table:
    table = Table(title="one GPU a row, unions of intervals in us", title_justify="left")
    for name in ("rank", "span", "computation", "communication", "hidden", "exposed", "idle"):
        table.add_column(name, justify="right")
    for name in ("host", "dependency", "unknown", "waits for stragglers"):
        table.add_column(name, justify="right", style="dim")
    for times in summary.ranks:
        causes = times.idle_by_cause_us
        values = (
            times.span_us, times.computation_us, times.communication_us, times.overlap_us, times.exposed_us,
            times.idle_us, causes["host"], causes["dependency"], causes["unknown"], times.straggler_us,
        )  # fmt: skip
        table.add_row(str(times.rank), *(f"{value:,.1f}" for value in values))
    return table


def _class_table(summary: Summary) -> Table:
    table = Table(title="by class, sums over kernels", title_justify="left")
    for name in ("class", "count", "time us", "energy J"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for row in summary.by_class[:CLASSES_SHOWN]:
        energy = "-" if math.isnan(row.energy_j) else f"{row.energy_j:.4g}"
        table.add_row(row.cls, f"{row.count:,}", f"{row.time_us:,.1f}", energy)
    return table


def _stream_table(summary: Summary) -> Table:
    many = len(summary.by_stream) > STREAMS_SHOWN
    title = (
        f"by stream, the {STREAMS_SHOWN} busiest of {len(summary.by_stream):,} (all in --json)" if many else "by stream"
    )
    table = Table(title=title, title_justify="left")
    for name in ("rank", "stream", "count", "busy us"):
        table.add_column(name, justify="right")
    for row in sorted(summary.by_stream, key=lambda row: -row.busy_us)[:STREAMS_SHOWN] if many else summary.by_stream:
        table.add_row(str(row.rank), str(row.stream), f"{row.count:,}", f"{row.busy_us:,.1f}")
    return table


def _top_table(summary: Summary) -> Table:
    table = Table(title="top kernels", title_justify="left")
    for name in ("kernel", "class", "count", "time us", "mean us", "share"):
        table.add_column(name, justify="left" if name in ("kernel", "class") else "right", no_wrap=True)
    for row in summary.top:
        table.add_row(
            row.name[:NAME_SHOWN], row.cls, f"{row.count:,}", f"{row.time_us:,.1f}", f"{row.mean_us:,.2f}",
            f"{row.share:.1%}",
        )  # fmt: skip
    return table


def _print_path(result: Inspection, console: Console) -> None:
    path = result.path
    if path.skipped:
        console.print(f"critical path: left out, {path.skipped}", highlight=False)
        return
    parts = ", ".join(f"{cls} {time_us:,.0f}" for cls, time_us in path.by_class.items())
    console.print(f"critical path: {path.length_us:,.0f} us: {parts}", highlight=False)
    for row in path.first:
        line = f"  speed up first: {row.time_us:,.0f} us in {row.count:,} x {row.name[:NAME_SHOWN]}"
        console.print(line, markup=False, highlight=False)


def _print_regions(summary: Summary, console: Console) -> None:
    regions = sorted(summary.launch_bound, key=lambda row: -row.idle_us)
    for row in regions[:REGIONS_SHOWN]:
        console.print(
            f"launch-bound: rank {row.rank}, {row.start_us / 1e3:,.3f} to {row.end_us / 1e3:,.3f} ms, "
            f"{row.kernels:,} pieces of work, {row.idle_us:,.0f} us idle",
            highlight=False,
        )
    if len(regions) > REGIONS_SHOWN:
        console.print(f"and {len(regions) - REGIONS_SHOWN} launch-bound regions more (all in --json)", highlight=False)
