"""``wattline replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sim.cli.help import complete_gpu
from sim.cli.paths import INPUT, OUTPUT, PathCommand


def _factors(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for value in values:
        cls, equals, factor = value.partition("=")
        try:
            found[cls] = float(factor)
        except ValueError:
            equals = ""
        if not equals or not cls:
            raise click.BadParameter(f"'{value}' is no CLASS=FACTOR like gemm=1.5", param=parameter)
    return found


@click.command("replay", cls=PathCommand)
@click.argument("trace", nargs=-1, required=True, type=INPUT)
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--trace", "out", type=OUTPUT, help="write the simulated timeline (.json, .json.gz, .pftrace)")
@click.option("--rank", "ranks", type=int, multiple=True, help="only this rank (repeatable)")
@click.option("--window", help="milliseconds after the first GPU work, as START:END; either may be left out")
@click.option("--rules", type=INPUT, help="own kernel classes (.toml), asked before the built-in")
@click.option("--trace-gpu", help="GPU that the trace is of (wattline gpus) [default: the one that it names]")
@click.option("--gpu", help="on this GPU instead", shell_complete=complete_gpu)
@click.option("--sm-clock", "sm_clock_mhz", type=float, help="SM clock locked, MHz")
@click.option("--power-cap", "power_cap_w", type=float, help="power cap a GPU, W")
@click.option("--regime", type=click.Choice(["steady", "cold"]), help="repeated until the cap has settled, or one shot")
@click.option("--faster", multiple=True, callback=_factors, help="CLASS=FACTOR: kernels of a class so much faster")
@click.option("--communication-faster", type=float, help="communication so many times faster")
@click.option("--hide-communication", is_flag=True, help="communication takes no time and no SMs")
@click.option("--ctas", type=click.IntRange(min=1), help="blocks of each collective")
@click.option(
    "--chunks", type=click.IntRange(min=2), help="products and exposed collectives next to them in so many parts"
)
@click.option("--launch", type=click.Choice(["graph"]), help="the host launches everything at once, as a graph")
@click.option("--merge-streams", is_flag=True, help="one stream a rank, in the order of launches")
def command(
    trace: tuple[Path, ...],
    as_json: bool,
    out: Path | None,
    ranks: tuple[int, ...],
    window: str | None,
    rules: Path | None,
    trace_gpu: str | None,
    faster: dict[str, float],
    communication_faster: float | None,
    **changes: Any,
) -> None:
    """Run a real trace again: TRACE is a file (Kineto JSON, Nsight .sqlite), a folder of one file a rank, or several.

    Durations, host calls and dependencies are the trace's; when each kernel starts is simulated. The other options
    change an assumption.
    """
    from sim.cli.console import wide_console
    from sim.replay.changes import Changes
    from sim.replay.inspect import window_of
    from sim.replay.report import as_document, print_replay
    from sim.replay.study import replay_trace
    from sim.replay.trace import write_replay
    from traces.write.by_name import check_ending

    if out is not None:
        check_ending(out)
    if communication_faster is not None:
        faster["communication"] = communication_faster
    result = replay_trace(
        trace, Changes(faster=faster, **changes), window=window_of(window, ranks), rules=rules, trace_gpu=trace_gpu
    )
    if out is not None:
        write_replay(result.simulated, out)
    if as_json:
        click.echo(json.dumps(as_document(result), allow_nan=False))
    else:
        print_replay(result, wide_console())
