"""``wattline measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sim.cli.options import scenario_of, scenario_options
from sim.cli.paths import FOLDER, INPUT, OUTPUT, PathCommand


@click.command("measure", cls=PathCommand)
@click.argument("file", required=False, type=INPUT)
@scenario_options
@click.option(
    "--out",
    type=OUTPUT,
    default=Path("measured.jsonl"),
    show_default=True,
    help="records, appended to; a scenario that they hold already is not run again",
)
@click.option("--traces", type=FOLDER, help="folder for a profiler trace of each GPU's settled step")
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    default="torch",
    show_default=True,
    help="vllm: a real server with random weights; FILE may also be requests (.csv, .jsonl), as of serve --trace",
)
@click.option("--no-predict", is_flag=True, help="measure only")
def command(file: Path | None, out: Path, traces: Path | None, engine: str, no_predict: bool, **fields: Any) -> None:
    """Run one scenario on this machine's GPUs with random weights, and compare with the prediction.

    Takes the scenario as simulate does. Clocks and limits of the card stay as they are.
    """
    if engine == "vllm":
        from sim.cli.measure_engine import measure

        measure(file, out, traces, predict=not no_predict, fields=fields)
        return
    from hardware.calibrate.suite.run import run_rows
    from hardware.calibrate.suite.worker import SuiteOptions
    from sim.cli.console import wide_console
    from sim.validation.measure import planned_row
    from sim.validation.validate import error_table, validate
    from sim.validation.validate_report import print_groups, print_worst

    scenario = scenario_of(file, fields)
    row, shapes = planned_row(scenario)
    gained = run_rows(
        [{"kind": "host", "world": scenario.world}, row],
        SuiteOptions(out=out, world=scenario.world, shapes=shapes, traces=traces),
        label=f"{scenario.model} {scenario.phase}",
    )
    click.echo(f"{gained} records added to {out}")
    if no_predict:
        return
    rows = validate((out,))
    console = wide_console()
    print_groups(error_table(rows, ["phase"]), console)
    print_worst(rows, 5, console)
