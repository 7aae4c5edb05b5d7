"""``wattline serve``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from sim.cli.options import given, table_options
from sim.serving.spec import ServeSpec


@click.command("serve")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@table_options(ServeSpec)
@click.option("--out", type=click.Path(path_type=Path), help="write one row a request (.csv or .parquet)")
@click.option(
    "--power", type=click.Path(path_type=Path), help="write power, batch and queue over time (.csv, .parquet)"
)
@click.option("--timeline", type=click.Path(path_type=Path), help="write steps and requests (.json or .json.gz)")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    file: Path | None,
    out: Path | None,
    power: Path | None,
    timeline: Path | None,
    as_json: bool,
    quiet: bool,
    **fields: Any,
) -> None:
    """Serve requests on a simulated server, given as flags, as a FILE (.toml, .json), or both (flags win)."""
    from sim.cli.console import wide_console
    from sim.output import check_table_ending, write_table
    from sim.serving import serve
    from sim.serving.report import print_summary
    from sim.serving.trace import write_served

    for path in (out, power):
        if path is not None:
            check_table_ending(path)
    spec = ServeSpec.load(file, **given(fields)) if file is not None else ServeSpec.of(**given(fields))
    if quiet or not sys.stderr.isatty():
        run = serve(spec)
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=sys.stderr)) as bar:
            task = bar.add_task("requests served")
            run = serve(spec, progress=lambda done, of: bar.update(task, completed=done, total=of))
    for path, table in ((out, run.requests), (power, run.stretches)):
        if path is not None:
            write_table(table, path)
    if timeline is not None:
        write_served(run, timeline)
    if as_json:
        click.echo(json.dumps(run.summary | {"scenario": spec.model_dump(mode="json")}, allow_nan=False))
        return
    print_summary(run, wide_console())
    if timeline is not None:
        click.echo(f"\ntrace: {timeline}  (open it at ui.perfetto.dev: 'Open trace file')")
