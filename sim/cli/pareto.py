"""``wattline pareto``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sim.cli.choosing import by_of, choosing_options, print_rows, rows_json
from sim.cli.paths import OUTPUT, PathCommand


@click.command("pareto", cls=PathCommand)
@choosing_options
@click.option("--objectives", default="latency,energy", show_default=True, help="two or more, comma-separated")
@click.option("--plot", type=OUTPUT, help="picture of the first two objectives (.png or .svg)")
@click.option("--html", type=OUTPUT, help="self-contained interactive page")
def command(
    file: Path,
    where: tuple[str, ...],
    by: str | None,
    objectives: str,
    plot: Path | None,
    html: Path | None,
    as_json: bool,
    **factors: float | None,
) -> None:
    """Rows of a sweep's table FILE that no other row of the same work beats in every objective.

    Objectives: latency, energy (per token), request-energy, throughput, efficiency (tokens/s/W), gpus, ttft, tpot,
    carbon, cost.
    """
    from sim.explore.choice import eligible, fronts, objectives_of, priced, varied
    from sim.explore.picture import write_page, write_plot
    from sim.explore.table import read_table
    from sim.output.files import check_extra, check_picture_ending
    from sim.result.prices import Prices

    if plot is not None:
        check_picture_ending(plot)
    if html is not None:
        check_extra("--html", "explore", "plotly")
    table = priced(read_table(file), Prices(**factors))
    wanted = objectives_of(objectives, table)
    table = eligible(table, where, wanted)
    on_front = fronts(table, wanted, by_of(by))
    if plot is not None:
        write_plot(table, on_front, wanted, by_of(by), plot)
    if html is not None:
        write_page(table, on_front, wanted, by_of(by), html)
    best = table[on_front]
    if as_json:
        click.echo(json.dumps({"rows": len(table), "front": rows_json(best)}, allow_nan=False))
        return
    title = f"Pareto front of {len(table):,} rows: {len(best):,}"
    print_rows(best, title=title, shown=wanted, fields=varied(table))
