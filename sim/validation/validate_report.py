"""Error tables, CSV and picture of a validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from sim.output.files import write_atomically
from sim.output.spreadsheet import to_csv
from sim.validation.ordering import Ordering
from sim.validation.validate import Row

# Entries of a list beyond which a table tells its length alone.
MOST_SHOWN = 8


def print_groups(groups: pd.DataFrame, console: Console) -> None:
    """One line a group; errors in per cent, clock in MHz."""
    table = Table(title="Errors of prediction against measurement (absolute, %)", title_justify="left")
    for name in ("file", "kind", "group"):
        table.add_column(name, overflow="fold")
    for name in ("n", "lat. mean", "median", "worst", "bias", "en. mean", "median", "worst", "bias", "MHz"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in groups.to_dict("records"):
        table.add_row(
            Path(str(row["file"])).name,
            str(row["kind"]),
            " ".join(f"{v}" for v in row["by"].values()),
            str(row["n"]),
            *(_percent(row[f"latency_{k}"]) for k in ("mape", "median_ape", "max_ape", "bias")),
            *(_percent(row[f"energy_{k}"]) for k in ("mape", "median_ape", "max_ape", "bias")),
            _number(row["clock_mae_mhz"]),
        )
    console.print(table)


def print_worst(rows: Sequence[Row], count: int, console: Console) -> None:
    """The rows with the largest error of either kind, and why rows were skipped."""
    scored = [(max(abs(row.error("latency_s") or 0.0), abs(row.error("energy_j") or 0.0)), row) for row in rows]
    worst = sorted((item for item in scored if item[0] > 0), key=lambda item: -item[0])[:count]
    if worst:
        table = Table(title="Worst rows", title_justify="left")
        for name in ("file:line", "kind", "latency error", "energy error", "fitted", "inputs"):
            table.add_column(name, overflow="fold")
        for _, row in worst:
            inputs = {k: v for k, v in row.record.inputs.items() if k not in ("kind", "gpu") and v is not None}
            table.add_row(
                f"{row.record.path.name}:{row.record.line}",
                row.record.kind,
                _percent(row.error("latency_s")),
                _percent(row.error("energy_j")),
                "yes" if row.fitted else "no",
                ", ".join(f"{k}={_short(v)}" for k, v in inputs.items()),
            )
        console.print(table)
    reasons: dict[str, int] = {}
    for row in rows:
        if row.skipped:
            reasons[row.skipped] = reasons.get(row.skipped, 0) + 1
    for reason, count_ in reasons.items():
        console.print(f"skipped {count_}: {reason}", style="dim")


def print_orderings(found: Sequence[Ordering], console: Console) -> None:
    """Order and choice in each group of overlap rows."""
    if not found:
        return
    table = Table(title="Order and choice among overlap rows", title_justify="left")
    for name in ("group", "by", "pairs right", "choice above best", "chunks right", "one chunk", "most chunks"):
        table.add_column(name, justify="left" if name in ("group", "by") else "right")
    for group in found:
        table.add_row(
            " ".join(str(value) for value in group.group.values()),
            group.output,
            f"{group.pairs_right} of {group.pairs}",
            f"{100 * group.choice_excess:.1f} %",
            f"{group.chunk_right} of {group.chunk_cases}",
            f"{group.one_chunk_right} of {group.chunk_cases}",
            f"{group.most_chunks_right} of {group.chunk_cases}",
        )
    console.print(table)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line a record: inputs, measured, predicted, errors."""
    table = pd.DataFrame(
        [
            {
                "file": str(row.record.path),
                "line": row.record.line,
                "kind": row.record.kind,
                **{k: v for k, v in row.record.inputs.items() if k != "kind"},
                "measured_latency_s": row.measured.get("latency_s"),
                "predicted_latency_s": getattr(row.predicted, "latency_s", None),
                "latency_error": row.error("latency_s"),
                "measured_energy_j": row.measured.get("energy_j"),
                "predicted_energy_j": getattr(row.predicted, "energy_j", None),
                "energy_error": row.error("energy_j"),
                "fitted": row.fitted,
                "skipped": row.skipped,
            }
            for row in rows
        ]
    )
    write_atomically(path, to_csv(table))


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted over measured, latency and energy side by side, one colour a kind."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), constrained_layout=True)
    for axis, output, unit in zip(axes, ("latency_s", "energy_j"), ("s", "J"), strict=True):
        kinds = sorted({row.record.kind for row in rows})
        for kind in kinds:
            points = [
                (row.measured[output], (row.error(output) or 0.0) * 100)
                for row in rows
                if row.record.kind == kind and row.error(output) is not None
            ]
            if points:
                axis.scatter(*zip(*points, strict=True), s=14, alpha=0.75, label=kind)
        axis.axhline(0.0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_xlabel(f"measured {output.rsplit('_', 1)[0]} ({unit})")
        axis.set_ylabel("error of prediction (%)")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


def _percent(value: Any) -> str:
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f}"


def _number(value: Any) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.0f}"


def _short(value: object) -> object:
    """``value``, a long list by its length alone."""
    return f"[{len(value)} entries]" if isinstance(value, list) and len(value) > MOST_SHOWN else value


def print_served(rows: Sequence[Row], console: Console) -> None:
    """Latencies of servers under their own arrivals: measured, predicted, and how far off."""
    found = [(row, row.predicted.served) for row in rows if row.predicted is not None and row.predicted.served]
    if not found:
        return
    names = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
    table = Table(title="Servers under their own arrivals (ms; joules in %)", title_justify="left")
    for name in ("file:line", "first token, median", "99 %", "between tokens, median", "99 %", "energy"):
        table.add_column(name, justify="left" if name == "file:line" else "right")
    for row, predicted in found:
        measured = row.measured["served"]
        pairs = [(measured[name], predicted[name]) for name in names]
        cells = [f"{1e3 * was:.1f} -> {1e3 * said:.1f} ({100 * (said / was - 1):+.0f} %)" for was, said in pairs]
        energy = row.error("energy_j")
        cells.append("-" if energy is None else f"{100 * energy:+.1f}")
        table.add_row(f"{row.record.path.name}:{row.record.line}", *cells)
    console.print(table)
