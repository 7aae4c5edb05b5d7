"""``wattline serve``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.cli.choosing import price_options, prices_of
from sim.cli.help import complete_model
from sim.cli.options import given, no_cache, split_named, table_options
from sim.cli.paths import INPUT, OUTPUT, PathCommand, keep_inputs
from sim.serving.spec import ServeSpec

if TYPE_CHECKING:
    from sim.explore.workers import Pool


class _Pair(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5 only
    """Two numbers with a colon between them, the second of type ``second``."""

    def __init__(self, name: str, second: type[float] | type[int] = float) -> None:
        self.name = name
        self.second = second

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """The numbers of ``value``."""
        first, _, second = str(value).partition(":")
        try:
            return float(first), self.second(second)
        except ValueError:
            self.fail(f"'{value}' is not {self.name}: give two numbers, like 1.5:2", param, ctx)


@click.command("serve", cls=PathCommand)
@click.argument("file", required=False, type=INPUT, metavar="[FILE|MODEL]", shell_complete=complete_model)
@table_options(ServeSpec)
@click.option("--out", type=OUTPUT, help="write one row a request (.csv or .parquet)")
@click.option("--power", type=OUTPUT, help="write power, batch and queue over time (.csv, .parquet)")
@click.option("--timeline", type=OUTPUT, help="write steps and requests (.json.gz, .pftrace)")
@click.option("--report", type=OUTPUT, help="write the run as one HTML page that needs no network")
@click.option("--kernels", type=_Pair("FROM:TO"), help="seconds between which --timeline shows every step's kernels")
@click.option("--kill", type=_Pair("SECOND:REPLICA", int), multiple=True, help="a replica dies; repeatable")
@click.option("--router-down", type=_Pair("FROM:TO"), multiple=True, help="requests wait from then to then; repeatable")
@click.option("--plan", is_flag=True, help="find the fewest GPUs and the lowest energy under the SLO")
@click.option("--max-gpus", type=click.IntRange(1, 4096), default=8, show_default=True, help="GPUs of a plan at most")
@click.option(
    "--within", type=click.FloatRange(0, 1), default=0.99, show_default=True, help="share of requests of a plan's SLO"
)
@click.option(
    "--compare",
    multiple=True,
    metavar="POLICY|KEY=VALUE,...",
    help="serve the same under slo_clock, or with changes like power_cap_w=500,replicas=2; repeatable",
)
@click.option("--jobs", type=click.IntRange(1), help="processes of a plan or comparison [default: one a core]")
@price_options
@no_cache
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--quiet", is_flag=True, help="no progress on stderr")
def command(
    file: Path | None,
    out: Path | None,
    power: Path | None,
    timeline: Path | None,
    report: Path | None,
    kernels: tuple[float, float] | None,
    kill: tuple[tuple[float, int], ...],
    router_down: tuple[tuple[float, float], ...],
    plan: bool,
    max_gpus: int,
    within: float,
    compare: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
    quiet: bool,
    **fields: Any,
) -> None:
    """Serve requests on a simulated server, as flags, as a FILE (.toml, .json), as a MODEL, or several (flags win)."""
    from sim.cli.console import wide_console
    from sim.output.files import check_table_ending, write_table
    from sim.pages.page import check_report
    from sim.result.prices import NO_PRICES
    from sim.serving import serve
    from sim.serving.report import print_summary
    from sim.serving.trace import to_trace
    from traces.write.by_name import check_ending, write_trace

    prices = prices_of(fields)
    for path in (out, power):
        if path is not None:
            check_table_ending(path)
    if report is not None:
        check_report(report)
    if timeline is not None:
        check_ending(timeline)
    if kernels is not None and timeline is None:
        raise click.UsageError("--kernels shows kernels in a trace: give --timeline FILE too")
    if (plan or compare) and prices != NO_PRICES:
        raise click.UsageError("prices are of one server: leave --plan and --compare out, or ask 'wattline plan'")
    if (plan or compare) and (kill or router_down or timeline or out or power or report):
        raise click.UsageError("--plan and --compare make tables only: leave files, --kill and --router-down out")
    file, fields = split_named(file, fields)
    spec = ServeSpec.load(file, **given(fields)) if file is not None else ServeSpec.of(**given(fields))
    keep_inputs(spec.model_dump())
    if plan or compare:
        from sim.explore.workers import Pool

        pool = Pool() if jobs is None else Pool(jobs=jobs)
        if plan:
            _planned(spec, max_gpus, within, pool, as_json=as_json, quiet=quiet)
        else:
            _compared(spec, compare, pool, as_json=as_json)
        return
    events: dict[str, Any] = {"kills": kill, "outages": router_down, "window": kernels}
    if quiet or not sys.stderr.isatty():
        run = serve(spec, **events)
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=sys.stderr)) as bar:
            task = bar.add_task("requests served")
            run = serve(spec, **events, progress=lambda done, of: bar.update(task, completed=done, total=of))
    if out is not None:
        write_table(run.requests, out)
    if power is not None:
        write_table(run.stretches, power)
    shown: dict[str, int] = {}
    if timeline is not None:
        trace = to_trace(run)
        write_trace(trace, timeline)
        if kernels is not None:
            shown = {name: trace.metadata["served"][name] for name in ("events_kernels", "derived_kernels")}
    if report is not None:
        from sim.pages.served import write_served_report

        write_served_report(run, report)
    if as_json:
        click.echo(
            json.dumps(
                run.summary | run.utilisation | run.costs(prices) | shown | {"scenario": spec.model_dump(mode="json")},
                allow_nan=False,
            )
        )
        return
    print_summary(run, wide_console(), prices)
    if timeline is not None:
        click.echo(f"\ntrace: {timeline}  (open it at ui.perfetto.dev: 'Open trace file')")
        if shown:
            ran, derived = shown["events_kernels"], shown["derived_kernels"]
            rest = f", {derived:,} derived" if derived else ""
            click.echo(f"kernels shown: {ran:,} through SimPy{rest}")
    if report is not None:
        click.echo(f"\nreport: {report}  (open it in a browser)")


def _compared(spec: ServeSpec, changes: tuple[str, ...], pool: Pool, *, as_json: bool) -> None:
    """The same traffic under other policies, one row each."""
    from sim.cli.console import wide_console
    from sim.explore.capacity import compare
    from sim.serving.report import print_servers

    rows = [server.row for server in compare(spec, [_changes(text) for text in changes], pool=pool)]
    if as_json:
        click.echo(json.dumps({"servers": rows}, allow_nan=False))
    else:
        print_servers(rows, wide_console(), title="The same traffic")


def _planned(spec: ServeSpec, max_gpus: int, within: float, pool: Pool, *, as_json: bool, quiet: bool) -> None:
    """The servers that keep the objective, with the fewest GPUs and with the least energy."""
    from sim.cli.console import wide_console
    from sim.explore.capacity import capacity
    from sim.serving.report import print_servers

    found = capacity(
        spec,
        max_gpus=max_gpus,
        within=within,
        pool=pool,
        say=lambda text: None if quiet or as_json else click.echo(text, err=True),
    )
    if as_json:
        servers = [server.row for server in found.servers]
        best = {"fewest_gpus": found.fewest.row, "lowest_energy": found.frugal.row}
        click.echo(json.dumps(best | {"servers": servers}, allow_nan=False))
        return
    notes = {id(found.fewest): "fewest GPUs", id(found.frugal): "lowest energy"}
    if found.fewest is found.frugal:
        notes = {id(found.fewest): "fewest GPUs, lowest energy"}
    rows = [server.row | {"": notes.get(id(server), "")} for server in found.servers]
    print_servers(rows, wide_console(), title=f"Servers that keep the objective for {within:.1%} of the requests")


def _changes(text: str) -> dict[str, str]:
    """``policy,key=value`` as fields; their values are checked as every scenario's are."""
    from sim.explore.capacity import POLICIES

    fields: dict[str, str] = {}
    for part in text.split(","):
        if part.strip() in POLICIES:
            fields |= POLICIES[part.strip()]
            continue
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise click.BadParameter(
                f"'{part}' is neither KEY=VALUE nor a policy ({', '.join(POLICIES)})", param_hint="--compare"
            )
        fields[name.strip().replace("-", "_")] = value.strip()
    return fields
