"""``wattline tornado``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click

from sim.cli.paths import INPUT, OUTPUT, PathCommand


@click.command("tornado", cls=PathCommand)
@click.argument("file", type=INPUT)
@click.option("--objective", default="energy", show_default=True, help="as of wattline pareto")
@click.option("--where", multiple=True, help="condition on rows, such as \"phase == 'decode'\" (repeatable)")
@click.option("--plot", type=OUTPUT, help="tornado plot (.png or .svg)")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
def command(file: Path, objective: str, where: tuple[str, ...], plot: Path | None, as_json: bool) -> None:
    """Which inputs of a sweep's table FILE matter most for an objective."""
    from rich.table import Table

    from sim.cli.console import wide_console
    from sim.explore.choice import eligible, objectives_of
    from sim.explore.table import read_table
    from sim.explore.tornado import effects, write_plot
    from sim.output.files import check_picture_ending

    if plot is not None:
        check_picture_ending(plot)
    table = read_table(file)
    (wanted,) = objectives_of(objective, table)
    table = eligible(table, where, [wanted])
    found = effects(table, wanted)
    if plot is not None:
        write_plot(found, wanted, plot)
    if as_json:
        inputs = [dataclasses.asdict(effect) | {"swing": effect.swing} for effect in found]
        click.echo(json.dumps({"rows": len(table), "inputs": inputs}, allow_nan=False))
        return
    shown = Table(title=f"What moves {wanted.title}, of {len(table):,} rows", title_justify="left")
    for name in ("input", "least at", "greatest at", "factor between"):
        shown.add_column(name, justify="left" if name == "input" else "right")
    for effect in found:
        shown.add_row(effect.field, effect.low_at, effect.high_at, f"{effect.swing:.3g}")
    wide_console().print(shown)
