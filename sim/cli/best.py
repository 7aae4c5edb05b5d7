"""``wattline best``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sim.cli.choosing import by_of, choosing_options, print_rows, rows_json
from sim.cli.help import Helped


@click.command("best", cls=Helped)
@choosing_options
@click.option("--objective", default="energy", show_default=True, help="what is to be best")
@click.option(
    "--within", type=click.FloatRange(0), help="only rows at most this many percent slower than the fastest of a group"
)
def command(
    file: Path,
    where: tuple[str, ...],
    by: str | None,
    objective: str,
    within: float | None,
    as_json: bool,
    **factors: float | None,
) -> None:
    """The best row of a sweep's table FILE for each piece of work, and the command that simulates it.

    Over a sweep of sm_clock_mhz or power_cap_w this is the energy-optimal clock or cap of each phase:
    wattline best clocks.parquet --objective energy --within 5.
    """
    from sim.explore.choice import OBJECTIVES, best, eligible, objectives_of, priced, varied
    from sim.explore.table import read_table
    from sim.result.prices import Prices

    table = priced(read_table(file), Prices(**factors))
    (wanted,) = objectives_of(objective, table)
    table = eligible(table, where, [wanted])
    chosen = best(table, wanted, by_of(by), within=None if within is None else within / 100)
    if as_json:
        click.echo(json.dumps({"rows": len(table), "best": rows_json(chosen)}, allow_nan=False))
        return
    shown = list({o.name: o for o in (wanted, OBJECTIVES["latency"], OBJECTIVES["energy"])}.values())
    print_rows(chosen, title=f"Best {wanted.title}, of {len(table):,} rows", shown=shown, fields=varied(table))
    for row in rows_json(chosen):
        click.echo(row["command"])
