"""``wattline overlap``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.cli.help import complete_gpu, complete_model
from sim.cli.options import split_named
from sim.cli.paths import FOLDER, INPUT, OUTPUT, PathCommand, keep_inputs

if TYPE_CHECKING:
    from sim.explore.overlap import OverlapPoint, RefusedSchedule

TRANSFORMS = ("chunks", "ring_exchange", "tile_signal", "two_batch", "bulk")


class Numbers(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """A comma-separated list of whole numbers, none below ``least``."""

    name = "numbers"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The numbers of ``value``."""
        if isinstance(value, list):
            return value
        try:
            numbers = [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"'{value}' is not a list of whole numbers like 1,2,4", param, ctx)
        if min(numbers) < self.least:
            self.fail(f"'{value}': every number must be at least {self.least}", param, ctx)
        return numbers


class Transforms(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """A comma-separated list of overlap transforms."""

    name = "transforms"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """The names in ``value``; ``all`` is all of them."""
        names = list(TRANSFORMS) if value == "all" else value.split(",")
        for name in names:
            if name not in TRANSFORMS:
                self.fail(f"'{name}' is not one of {', '.join(TRANSFORMS)}, all", param, ctx)
        return names


@click.command("overlap", cls=PathCommand)
@click.argument("file", required=False, type=INPUT, metavar="[FILE|MODEL]", shell_complete=complete_model)
@click.option("--model", help="model id (wattline models), .toml file or config.json", shell_complete=complete_model)
@click.option("--gpu", help="GPU id or .toml file [default: h100-sxm-80gb]", shell_complete=complete_gpu)
@click.option("--seq-len", type=click.IntRange(1), help="[default: 4096]")
@click.option("--layers", type=click.IntRange(1), help="layers to run [default: all]")
@click.option("--overlap", "overlap", type=Transforms(), help=f"transforms: {', '.join(TRANSFORMS)}, or all")
@click.option("--chunks", "overlap_chunks", type=Numbers(1), help="pieces along tokens [default: 1,2,4,8]")
@click.option("--ctas", "comm_ctas", type=Numbers(0), help="blocks for communication [default: 2,4,8,16,32]")
@click.option(
    "--comm-sms", type=Numbers(0), help="SMs of a partition of their own for communication [default: 0, none]"
)
@click.option("--sm-margin/--no-sm-margin", default=None, help="products leave those blocks' SMs free")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), help="[default: prefill]")
@click.option("--ep-mode", type=click.Choice(["all_to_all", "all_reduce"]), help="of experts [default: all_to_all]")
@click.option("--batch", type=Numbers(1), help="[default: 2]")
@click.option("--tp", type=Numbers(1), help="ranks that share a layer, or its experts [default: 2,4]")
@click.option("--power-cap-w", type=float, help="power limit of each GPU [default: TDP]")
@click.option("--csv", type=OUTPUT, help="write one row a schedule")
@click.option("--plot", type=OUTPUT, help="write the Pareto front (.png or .svg)")
@click.option("--html", type=OUTPUT, help="write a self-contained page whose points open traces")
@click.option("--traces", type=FOLDER, help="folder for the timelines of the front")
@click.option(
    "--per-operator/--no-per-operator", default=True, help="also search a setting for each operator [default: yes]"
)
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    file: Path | None,
    sm_margin: bool | None,
    csv: Path | None,
    plot: Path | None,
    html: Path | None,
    traces: Path | None,
    per_operator: bool,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Ways to run communication beside compute: energy and latency of every schedule of a grid.

    The grid is given by flags, by a FILE with tables [base] (a scenario) and [grid] (lists of its fields), as a MODEL,
    or several (flags win).
    """
    from rich.console import Console
    from rich.progress import Progress

    from sim.cli.console import wide_console
    from sim.explore.by_operator import per_operator as by_operator
    from sim.explore.overlap import advice, default_of, study, table
    from sim.explore.overlap_grid import AXES, COMM_SMS, read_grid, scenarios
    from sim.explore.overlap_page import write_page, write_plot
    from sim.output.files import check_page_ending, check_picture_ending, write_atomically
    from sim.output.spreadsheet import to_csv

    if plot is not None:
        check_picture_ending(plot)
    if html is not None:
        check_page_ending(html, "--html", "page")
    file, flags = split_named(file, flags)
    base, grid = read_grid(file) if file is not None else ({}, {})
    keep_inputs([base, grid])
    base = {"seq_len": 4096} | base
    for name, value in flags.items():
        if value is not None:
            (grid if name in AXES or name == COMM_SMS else base)[name] = value
    if sm_margin is not None:
        grid["sm_margin"] = [sm_margin]
    wanted = scenarios(base, grid)
    with Progress(console=Console(file=sys.stderr), disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating", total=len(wanted))
        points, left_out = study(wanted, traces=traces, step=lambda: progress.advance(task))
        default = default_of(points)
        each = None
        if per_operator:
            searching = progress.add_task("operator by operator", total=None)
            each = by_operator(points, step=lambda: progress.advance(searching))
        if html is not None:
            drawing = progress.add_task("timelines of the page", total=len(points))
            write_page(points, html, default=default, step=lambda: progress.advance(drawing))
    if csv is not None:
        write_atomically(csv, to_csv(table(points)))
    if plot is not None:
        write_plot(points, plot)
    if as_json:
        rows = json.loads(table(points).to_json(orient="records"))
        skipped = [
            {"scenario": refused.scenario.model_dump(exclude_none=True), "reason": refused.reason}
            for refused in left_out
        ]
        document = {"advice": advice(points, default), "points": rows, "left_out": skipped}
        document["per_operator"] = None if each is None else each.document() | {"words": each.words()}
        click.echo(json.dumps(document, allow_nan=False))
        return
    console = wide_console()
    _print(points, left_out, console)
    console.print(advice(points, default))
    if each is not None:
        console.print(f"By operator: {each.words()}")


def _print(points: Sequence[OverlapPoint], left_out: Sequence[RefusedSchedule], console: Any) -> None:
    from rich.table import Table

    from sim.cli.console import print_reasons
    from sim.explore.overlap import blocks, partition, transform

    shown = Table(title="Schedules (times in ms, Pareto front marked)", title_justify="left")
    ranks = "EP" if points[0].scenario.ep > 1 else "TP"
    columns = ("batch", "transform", "blocks", "latency", "energy J", "mJ/token", "exposed", "front")
    for name in (ranks, *columns, "status"):
        # The longest status has its room: headings of two words break before it is cut.
        room = len("uncalibrated") if name == "status" else None
        shown.add_column(name, justify="left" if name in ("transform", "status") else "right", min_width=room)
    for point in points:
        s = point.scenario
        shown.add_row(
            str(max(s.tp, s.ep)),
            str(s.batch),
            transform(s),
            blocks(s) + partition(s),
            f"{point.latency_s * 1e3:.2f}",
            f"{point.energy_j:.1f}",
            f"{point.energy_j_per_token * 1e3:.3f}",
            f"{point.exposed_communication_s * 1e3:.2f}",
            "*" if point.on_front else "",
            point.status,
        )
    console.print(shown)
    print_reasons(points, console)
    for reason in dict.fromkeys(refused.reason for refused in left_out):
        count = sum(refused.reason == reason for refused in left_out)
        console.print(f"{count} schedule{'s' if count > 1 else ''} left out: {reason}")
