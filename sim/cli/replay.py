"""``wattline replay``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("replay")
@click.argument("trace", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--rank", "ranks", type=int, multiple=True, help="only this rank (repeatable)")
@click.option("--window", help="milliseconds after the first GPU work, as START:END; either may be left out")
@click.option("--rules", type=click.Path(path_type=Path), help="own kernel classes (.toml), asked before the built-in")
def command(
    trace: tuple[Path, ...], as_json: bool, ranks: tuple[int, ...], window: str | None, rules: Path | None
) -> None:
    """Run a real trace again: TRACE is a file (Kineto JSON, Nsight .sqlite), a folder of one file a rank, or several.

    Durations, host calls and dependencies are the trace's; when each kernel starts is simulated.
    """
    from sim.cli.console import wide_console
    from sim.studies.inspect import window_of
    from sim.studies.replay import replay_trace
    from sim.studies.replay_report import as_document, print_replay

    result = replay_trace(trace, window=window_of(window, ranks), rules=rules)
    if as_json:
        click.echo(json.dumps(as_document(result), allow_nan=False))
    else:
        print_replay(result, wide_console())
