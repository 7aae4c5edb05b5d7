"""``wattline fit``."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.cli.paths import INPUT, OUTPUT, PathCommand, keep_inputs
from sim.cli.waiting import TimeLeft

if TYPE_CHECKING:
    from sim.explore.closed_form.samples import Sample
    from sim.explore.grid import ScenarioGrid
    from sim.explore.workers import Pool


@click.command("fit", cls=PathCommand)
@click.argument("file", type=INPUT)
@click.option("--samples", type=click.IntRange(1), default=50, show_default=True, help="layouts that a fit may see")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="of the draw of samples")
@click.option("--splits", type=click.IntRange(1), default=10, show_default=True, help="halves to cross-validate on")
@click.option("--rows", type=OUTPUT, help="keep the runs here (.parquet or .csv) and resume from it")
@click.option("--more", type=INPUT, help="grid file of further samples: a random forest with 500")
@click.option("--search", is_flag=True, help="search for other formulas by symbolic regression (extra search)")
@click.option("--jobs", type=click.IntRange(1), help="processes on this machine [default: its cores]")
@click.option("--python", type=OUTPUT, help="write the fitted formula as a Python module")
@click.option("--latex", type=OUTPUT, help="write the fitted formula as LaTeX")
@click.option("--out", type=OUTPUT, help="write everything as JSON")
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    file: Path,
    samples: int,
    seed: int,
    splits: int,
    rows: Path | None,
    more: Path | None,
    search: bool,
    jobs: int | None,
    python: Path | None,
    latex: Path | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Fit a closed form of latency and energy over layouts, and judge it on scenarios that it has not seen.

    FILE is a grid file as of wattline sweep, of phase generate. The formula is wattline's own: twelve coefficients a
    phase with units and standard errors.
    """
    from sim.explore.closed_form.export import to_json, to_latex, to_python
    from sim.explore.closed_form.fit import check_samples
    from sim.explore.closed_form.judge import Splits, judge
    from sim.explore.grid import load_grid
    from sim.explore.table import read_table
    from sim.explore.workers import Pool
    from sim.output.files import check_extra, write_atomically

    if search:
        check_extra("--search", "search", "pyoperon")
    if more is not None:
        check_extra("--more", "explore", "sklearn")
    check_samples(samples)  # before minutes of simulating
    grids = {path: load_grid(path) for path in (file, more) if path is not None}
    keep_inputs([case.fields for grid in grids.values() for case in grid.cases])
    pool = Pool() if jobs is None else Pool(jobs=jobs)

    def say(text: str) -> None:
        if not (quiet or as_json):
            click.echo(text, err=True)

    with tempfile.TemporaryDirectory() as folder:
        rows = rows or Path(folder) / "rows.parquet"
        kept = {file: rows} | ({more: rows.with_stem(f"{rows.stem}_more")} if more else {})
        found, *others = (_simulated(grids[of], table, pool, say, quiet=quiet) for of, table in kept.items())
        statuses = read_table(rows)["status"].value_counts().to_dict()
    judging = TimeLeft(what="judging on splits", total=splits, say=say)
    others_too = list(chain.from_iterable(others))
    halves = Splits(number=splits, samples=samples, seed=seed)
    verdict = judge(found, halves, more=others_too, search=search, step=judging)
    ours = verdict.scores["closed form"]
    result: dict[str, Any] = {
        "top1": ours["top1"][0],
        "pairwise": ours["pairwise"][0],
        "energy_mape": max(verdict.errors["energy_prefill"][0], verdict.errors["energy_decode"][0]),
        "parameters": to_json(verdict.forms),
        "samples": samples,
        "seed": seed,
        "splits": splits,
        "scenarios": verdict.scenarios,
        "status_of_scenarios": statuses,
        "fewest_layouts": verdict.fewest_layouts,
        "best_layout_changes": verdict.changes,
        "errors": verdict.errors,
        "larger_batches": verdict.larger_batches,
        "compared": verdict.scores,
        "searched": verdict.searched,
    }
    for path, text in ((python, to_python), (latex, to_latex)):
        if path is not None:
            write_atomically(path, text(verdict.forms).encode())
    if out is not None:
        write_atomically(out, json.dumps(result, indent=1, allow_nan=False).encode())
    if as_json:
        click.echo(json.dumps(result, allow_nan=False))
        return
    _print(result)


def _simulated(grid: ScenarioGrid, table: Path, pool: Pool, say: Callable[[str], None], *, quiet: bool) -> list[Sample]:
    from sim.cli.sweep import progress_bar
    from sim.explore.closed_form.samples import runs_of, simulated
    from sim.explore.sweep import journal_of

    total = len(runs_of(grid).cases)
    say(f"simulating {total:,} prefills and decode steps on {pool.jobs} core{'s' * (pool.jobs > 1)}, then judging")
    left = TimeLeft(what="simulating", total=total, say=say)
    with progress_bar(quiet, journal_of(table)) as progress:
        task = progress.add_task("simulating", total=total, failed=0)

        def step(done: int, failed: int) -> None:
            progress.update(task, completed=done, failed=failed)
            if not sys.stderr.isatty():  # on a terminal the bar says it
                left(done)

        return simulated(grid, table, pool=pool, step=step)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    from sim.cli.console import wide_console

    console = wide_console()
    form = Table(title="wattline's own closed form, fitted", title_justify="left")
    for name in ("coefficient", "meaning", "unit", "prefill", "+-", "decode", "+-"):
        form.add_column(name, justify="left" if name in ("coefficient", "meaning", "unit") else "right")
    for name, prefill in result["parameters"]["prefill"].items():
        cells = []
        for parameters in (prefill, result["parameters"]["decode"][name]):
            error = parameters["standard_error"]
            cells += [f"{parameters['value']:.3g}", "-" if error is None else f"{error:.1g}"]
        form.add_row(name, prefill["meaning"], prefill["unit"], *cells)
    console.print(form)
    title = f"Choice of layout on scenarios not sampled ({result['scenarios']} in all, 95 % intervals)"
    choice = Table(title=title, title_justify="left")
    for name in ("way to choose", "right choice", "pairs in order", "energy above the best"):
        choice.add_column(name, justify="left" if name == "way to choose" else "right")
    for name, score in result["compared"].items():
        choice.add_row(name, *(_percent(score[key]) for key in ("top1", "pairwise", "excess")))
    if result["larger_batches"]:
        score = result["larger_batches"]
        name = "closed form, batch <= 32 to larger ones"
        choice.add_row(name, *(_percent(score[key]) for key in ("top1", "pairwise", "excess")))
    console.print(choice)
    for phase, formula in result["searched"].items():
        console.print(f"symbolic regression, energy of {phase}: {formula}", markup=False)
    counts = ", ".join(f"{count:,} {status}" for status, count in result["status_of_scenarios"].items())
    console.print(f"simulated scenarios are {counts}; errors below are against these simulations, not measurements")
    for name, error in result["errors"].items():
        console.print(f"mean error of {name.replace('_', ', ')}: {_percent(error)}")


def _percent(interval: tuple[float, float, float]) -> str:
    mean, low, high = (100 * value for value in interval)
    return f"{mean:.1f} % ({low:.1f} to {high:.1f})"
