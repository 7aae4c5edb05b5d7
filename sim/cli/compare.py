"""``wattline compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sim.cli.options import scenario_of, scenario_options
from sim.cli.paths import INPUT, OUTPUT, PathCommand, keep_inputs


@click.command("compare", cls=PathCommand)
@click.argument("trace", nargs=-1, required=True, type=INPUT)
@click.option("--scenario", "file", type=INPUT, help="scenario file (.toml, .json); flags win")
@scenario_options
@click.option("--rank", type=click.IntRange(min=0), help="rank of the trace to compare [default: the first]")
@click.option("--window", help="milliseconds after the first GPU work, as START:END; either may be left out")
@click.option("--rules", type=INPUT, help="own kernel classes (.toml), asked before the built-in")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--csv", "csv", type=OUTPUT, help="write one line a kernel of the step")
@click.option("--timeline", type=OUTPUT, help="write both timelines into one file (.json, .json.gz, .pftrace)")
def command(
    trace: tuple[Path, ...],
    file: Path | None,
    rank: int | None,
    window: str | None,
    rules: Path | None,
    as_json: bool,
    csv: Path | None,
    timeline: Path | None,
    **fields: Any,
) -> None:
    """Lay the repeated step of a real TRACE beside the prediction of a scenario, kernel by kernel.

    TRACE is a profiler trace (Kineto JSON, Nsight .sqlite), a folder of one file a rank, or several. Times are parts of
    the step: they sum to it on both sides; kernels that only one side has are listed as such.
    """
    from sim.cli.console import wide_console
    from sim.compare.compare import compare_capture
    from sim.compare.report import as_document, as_table, print_comparison
    from sim.compare.timeline import write_both
    from sim.output.files import write_atomically
    from sim.output.spreadsheet import to_csv
    from sim.replay.inspect import window_of
    from traces.read.load import read_trace
    from traces.write.by_name import check_ending

    if timeline is not None:
        check_ending(timeline)
    capture = read_trace(list(trace), window_of(window))  # what is no trace is said before what else is missing
    scenario = scenario_of(file, fields)
    keep_inputs(scenario.model_dump())
    found = compare_capture(capture, scenario, rank=rank, rules=rules)
    written = {}
    if csv is not None:
        write_atomically(csv, to_csv(as_table(found)))
        written["csv"] = str(csv)
    if timeline is not None:
        write_both(found, timeline)
        written["timeline"] = str(timeline)
    if as_json:
        click.echo(json.dumps(as_document(found) | {"files": written}, allow_nan=False))
        return
    print_comparison(found, wide_console())
    if timeline is not None:
        click.echo(
            f"timeline: {timeline}  (open it at ui.perfetto.dev: 'Open trace file'; real above, simulated below)"
        )
