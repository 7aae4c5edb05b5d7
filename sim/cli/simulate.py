"""``wattline simulate``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from sim.cli.options import scenario_of, scenario_options


@click.command("simulate")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@scenario_options
@click.option("--trace", "trace", type=click.Path(path_type=Path), help="write the timeline (.json.gz, .pftrace)")
@click.option("--trace-layout", type=click.Choice(["one", "hta"]), default="one", help="one file, or one per rank")
@click.option("--report", type=click.Path(path_type=Path), help="write the run as one HTML page that needs no network")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    file: Path | None,
    trace: Path | None,
    trace_layout: Any,
    report: Path | None,
    as_json: bool,
    quiet: bool,
    **fields: Any,
) -> None:
    """Simulate one scenario, given as flags, as a FILE (.toml, .json), or both (flags win)."""
    from rich.console import Console

    from sim.cli.console import wide_console
    from sim.report import print_summary, summary
    from sim.runner import simulate
    from sim.studies.report.page import check_report

    if report is not None:
        check_report(report)
    scenario = scenario_of(file, fields)
    stderr = Console(file=sys.stderr)
    if quiet:
        run = simulate(scenario)
    elif not sys.stderr.isatty():
        run = simulate(scenario, progress=_cost_only)
    else:
        with stderr.status("building kernels") as status:
            run = simulate(scenario, progress=status.update)
    written = run.to_chrome(trace, layout=trace_layout) if trace is not None else None
    if report is not None:
        from sim.studies.report.run import write_report

        write_report(run, report)
    if as_json:
        files = {"trace": str(written) if written else None, "report": str(report) if report else None}
        click.echo(json.dumps(summary(run) | files, allow_nan=False))
        return
    print_summary(run, wide_console())
    if written is not None:
        click.echo(f"\ntrace: {written}  (open it at ui.perfetto.dev: 'Open trace file')")
    if report is not None:
        click.echo(f"\nreport: {report}  (open it in a browser)")


def _cost_only(text: str) -> None:
    """Where nobody watches, only what is worth keeping: what a run in full detail will take."""
    from sim.runner import FULL_DETAIL

    if text.startswith(FULL_DETAIL):
        click.echo(text, err=True)
