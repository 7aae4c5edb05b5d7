"""``wattline validate``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sim.cli.paths import INPUT, OUTPUT, PathCommand


@click.command("validate", cls=PathCommand)
@click.argument("files", nargs=-1, required=True, type=INPUT)
@click.option("--by", default="", help="split groups further, for example world,dtype,launch,phase")
@click.option("--profile", type=INPUT, help="profile of your own (wattline calibrate)")
@click.option(
    "--typical-temperature",
    is_flag=True,
    help="chips as warm as the profile's [default: as the record says: nothing here predicts the cooling]",
)
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--csv", "csv", type=OUTPUT, help="write one line a record")
@click.option("--plot", type=OUTPUT, help="write measured against predicted (PNG)")
@click.option("--worst", default=5, show_default=True, help="how many of the worst rows to print")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    files: tuple[Path, ...],
    by: str,
    profile: Path | None,
    typical_temperature: bool,
    as_json: bool,
    csv: Path | None,
    plot: Path | None,
    worst: int,
    quiet: bool,
) -> None:
    """Predict each record of FILES (JSON lines) from its inputs and its room's temperature, and print the errors."""
    from rich.console import Console
    from rich.progress import track

    from sim.cli.console import wide_console
    from sim.validation.ordering import orderings
    from sim.validation.records import read_records
    from sim.validation.validate import error_table, validate
    from sim.validation.validate_report import (
        print_groups,
        print_orderings,
        print_served,
        print_worst,
        write_csv,
        write_plot,
    )

    total = sum(1 for path in files for _ in read_records(path))
    ticks = iter(
        track(
            range(total),
            description="predicting",
            console=Console(file=sys.stderr),
            disable=quiet or not sys.stderr.isatty(),
        )
    )
    rows = validate(
        files, profile=profile, typical_temperature=typical_temperature, step=lambda: void(next(ticks, None))
    )
    fields = [field.strip() for field in by.split(",") if field.strip()]
    groups = error_table(rows, fields)
    if csv is not None:
        write_csv(rows, csv)
    if plot is not None:
        write_plot(rows, plot)
    if as_json:
        document = {"groups": _plain(groups.to_dict("records")), "rows": [row.as_json() for row in rows]}
        document["orderings"] = [asdict(ordering) for ordering in orderings(rows)]
        click.echo(json.dumps(document, allow_nan=False))
        return
    console = wide_console()
    print_groups(groups, console)
    print_orderings(orderings(rows), console)
    print_served(rows, console)
    print_worst(rows, worst, console)


def void(_: object) -> None:
    """Swallow a value."""


def _plain(records: list[dict[Any, Any]]) -> list[dict[str, Any]]:
    """NaN, which pandas puts for None, is not JSON."""
    return [
        {key: None if isinstance(value, float) and value != value else value for key, value in record.items()}
        for record in records
    ]
