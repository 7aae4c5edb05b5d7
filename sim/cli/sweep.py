"""``wattline sweep``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sim.cli.paths import INPUT, OUTPUT, PathCommand, keep_inputs


@click.command("sweep", cls=PathCommand)
@click.argument("file", type=INPUT)
@click.option("--out", required=True, type=OUTPUT, help="table to write (.parquet or .csv)")
@click.option(
    "--backend",
    type=click.Choice(["processes", "dask", "ray"]),
    default="processes",
    show_default=True,
    help="what runs the rows",
)
@click.option("--address", help="scheduler of the cluster, such as tcp://10.0.0.1:8786")
@click.option("--jobs", type=click.IntRange(1), help="processes on this machine [default: its cores]")
@click.option("--fresh", is_flag=True, help="run again what FILE's table already has")
@click.option("--uncertainty", is_flag=True, help="add 90 % intervals of latency and energy (some 30 runs a row)")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    file: Path,
    out: Path,
    backend: Any,
    address: str | None,
    jobs: int | None,
    fresh: bool,
    uncertainty: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run every scenario of a grid FILE (.toml, .json); the same command resumes what was interrupted."""
    from sim.errors import SimError
    from sim.explore.grid import load_grid
    from sim.explore.sweep import journal_of, sweep
    from sim.explore.workers import Pool
    from sim.output.console import one_line
    from sim.output.files import check_sweep_ending

    check_sweep_ending(out)
    if backend == "processes" and address is not None:
        raise SimError(f"--address {address} needs --backend dask or ray")
    grid = load_grid(file)
    keep_inputs([case.fields for case in grid.cases], journal_of(out))
    pool = Pool(backend=backend, address=address, **({} if jobs is None else {"jobs": jobs}))
    with progress_bar(quiet, journal_of(out)) as progress:
        task = progress.add_task("simulating", total=len(grid.cases), failed=0)
        done = sweep(
            grid,
            out,
            pool=pool,
            fresh=fresh,
            uncertainty=uncertainty,
            step=lambda n, failed: progress.update(task, completed=n, failed=failed),
        )
    if as_json:
        counts = {
            name: getattr(done, name) for name in ("rows", "failed", "excluded", "resumed", "wall_s", "first_error")
        }
        click.echo(json.dumps(counts | {"scenarios_per_s": done.scenarios_per_s, "out": str(out)}, allow_nan=False))
        return
    if done.first_error is not None and not quiet:
        click.echo(one_line(f"the first that failed: {done.first_error}"), err=True)
    click.echo(
        f"{done.rows:,} rows in {out}, {done.failed:,} failed (column error), {done.resumed:,} from an earlier run, "
        f"{done.excluded:,} points left out by conditions; {done.wall_s:.1f} s, {done.scenarios_per_s:.3g} scenarios/s"
    )


def progress_bar(quiet: bool, journal: Path) -> Any:
    """Done, rate and time left, on a terminal, and below them the scenario of ``journal`` that takes long."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.text import Text

    from sim.explore.in_work import slowest
    from sim.output.console import visible

    class Rate(TextColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed or task.finished_speed or 0.0:.0f}/s")

    class WithSlowest(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield from super().get_renderables()
            if line := slowest(journal, time.time()):
                yield Text(visible(line), style="dim", no_wrap=True, overflow="ellipsis")

    return WithSlowest(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(""),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=quiet or not sys.stderr.isatty(),
    )
