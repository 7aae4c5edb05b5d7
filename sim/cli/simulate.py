"""``wattline simulate``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sim.cli.choosing import price_options, prices_of
from sim.cli.help import complete_model
from sim.cli.options import named_scenario, scenario_options
from sim.cli.outputs import HOW_TO_OPEN, Outputs, output_options
from sim.cli.paths import INPUT, PathCommand, keep_inputs


@click.command("simulate", cls=PathCommand)
@click.argument("file", required=False, type=INPUT, metavar="[FILE|MODEL]", shell_complete=complete_model)
@scenario_options
@price_options
@output_options
@click.option("--uncertainty", is_flag=True, help="90 % intervals of latency and energy (some 30 more runs)")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(file: Path | None, outputs: Outputs, uncertainty: bool, as_json: bool, quiet: bool, **fields: Any) -> None:
    """Simulate one scenario, given as flags, as a FILE (.toml, .json), as a MODEL, or several (flags win)."""
    from rich.console import Console

    from sim.cli.console import wide_console
    from sim.result.report import print_summary, summary
    from sim.run.runner import simulate

    outputs.check()
    prices = prices_of(fields)
    scenario = named_scenario(file, fields)
    keep_inputs(scenario.model_dump(), *outputs.replaced())
    stderr = Console(file=sys.stderr)
    if quiet:
        run = simulate(scenario)
    elif not sys.stderr.isatty():
        run = simulate(scenario, progress=_cost_only)
    else:
        with stderr.status("building kernels") as status:
            run = simulate(scenario, progress=status.update)
    found = None
    if uncertainty:
        from sim.explore.uncertainty import intervals

        found = intervals(run)
    written = outputs.write(run)
    if as_json:
        extra = {"trace": written.get("trace"), "files": written} | ({"uncertainty": asdict(found)} if found else {})
        click.echo(json.dumps(summary(run, prices) | extra, allow_nan=False))
        return
    print_summary(run, wide_console(), prices)
    if found is not None:
        click.echo(f"\n{found}")
    for name, path in written.items():
        click.echo(f"\n{name}: {path}  ({HOW_TO_OPEN[name]})")


def _cost_only(text: str) -> None:
    """Where nobody watches, only what is worth keeping: what a run in full detail will take."""
    from sim.run.runner import FULL_DETAIL

    if text.startswith(FULL_DETAIL):
        click.echo(text, err=True)
