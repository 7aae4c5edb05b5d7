"""``wattline overlap``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click


def _numbers(_: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of whole numbers like 1,2,4", param=parameter) from None
    if min(numbers) < 1:
        raise click.BadParameter(f"'{value}': every number must be at least 1", param=parameter)
    return numbers


@click.command("overlap")
@click.option("--model", required=True)
@click.option("--gpu", default="h100-sxm-80gb", show_default=True)
@click.option("--seq-len", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="layers to run [default: all]")
@click.option("--chunks", default="1,2,4,8", show_default=True, callback=_numbers)
@click.option("--ctas", default="2,4,8,16,32", show_default=True, callback=_numbers, help="blocks for communication")
@click.option("--batch", default="2", show_default=True, callback=_numbers)
@click.option("--tp", default="2,4", show_default=True, callback=_numbers)
@click.option("--power-cap-w", type=float, help="power limit of each GPU [default: TDP]")
@click.option("--csv", type=click.Path(path_type=Path), help="write one row a schedule")
@click.option("--plot", type=click.Path(path_type=Path), help="write the Pareto front (.png or .svg)")
@click.option("--html", type=click.Path(path_type=Path), help="write a self-contained page")
@click.option("--traces", type=click.Path(path_type=Path), help="folder for the timelines of the front")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    chunks: list[int],
    ctas: list[int],
    batch: list[int],
    tp: list[int],
    csv: Path | None,
    plot: Path | None,
    html: Path | None,
    traces: Path | None,
    as_json: bool,
    quiet: bool,
    **base: Any,
) -> None:
    """How many chunks, how many blocks for communication: energy and latency of every schedule."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from sim.cli.console import wide_console
    from sim.output import write_atomically
    from sim.studies.overlap import advice, scenarios, study, table, write_page, write_plot

    grid = scenarios(base, chunks=chunks, ctas=ctas, batch=batch, tp=tp)
    with Progress(console=Console(file=sys.stderr), disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating", total=len(grid))
        points = study(grid, traces=traces, step=lambda: progress.advance(task))
    if csv is not None:
        write_atomically(csv, table(points).to_csv(index=False).encode())
    if plot is not None:
        write_plot(points, plot)
    if html is not None:
        write_page(points, html)
    if as_json:
        rows = json.loads(table(points).to_json(orient="records"))
        click.echo(json.dumps({"advice": advice(points), "points": rows}, allow_nan=False))
        return
    shown = Table(title="Schedules (Pareto front marked)", title_justify="left")
    for name in (
        "TP",
        "batch",
        "CTAs",
        "chunks",
        "latency ms",
        "energy J",
        "mJ per token",
        "exposed comm. ms",
        "front",
    ):
        shown.add_column(name, justify="right")
    for point in points:
        s = point.scenario
        shown.add_row(
            str(s.tp),
            str(s.batch),
            str(s.comm_ctas),
            str(s.overlap_chunks),
            f"{point.latency_s * 1e3:.2f}",
            f"{point.energy_j:.1f}",
            f"{point.energy_j_per_token * 1e3:.3f}",
            f"{point.exposed_communication_s * 1e3:.2f}",
            "*" if point.on_front else "",
        )
    console = wide_console()
    console.print(shown)
    console.print(advice(points))
