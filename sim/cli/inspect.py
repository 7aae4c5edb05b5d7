"""``wattline inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sim.cli.paths import INPUT, PathCommand


@click.command("inspect", cls=PathCommand)
@click.argument("trace", nargs=-1, required=True, type=INPUT)
@click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout")
@click.option("--lint", is_flag=True, help="advice; what Perfetto, HTA or TensorBoard would drop, counted")
@click.option("--diff", type=INPUT, help="the same figures of another trace beside these")
@click.option("--open", "show", is_flag=True, help="serve the trace to the Perfetto UI on this machine")
@click.option("--rank", "ranks", type=int, multiple=True, help="only this rank (repeatable)")
@click.option("--window", help="milliseconds after the first GPU work, as START:END; either may be left out")
@click.option("--category", type=click.Choice(["kernel", "memcpy", "memset"]), multiple=True, help="only these")
@click.option("--rules", type=INPUT, help="own kernel classes (.toml), asked before the built-in")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="kernels in the table")
def command(
    trace: tuple[Path, ...],
    as_json: bool,
    lint: bool,
    diff: Path | None,
    show: bool,
    ranks: tuple[int, ...],
    window: str | None,
    category: tuple[str, ...],
    rules: Path | None,
    top: int,
) -> None:
    """Where the time of a profiler trace went: TRACE is a file (Kineto JSON, Nsight .sqlite), a folder, or several.

    Reads real traces and our own: time by kernel class and stream, exposed and hidden communication, idle time
    by cause, the critical path, launch-bound regions, top kernels, energy where the trace holds it.
    """
    from sim.cli.console import wide_console
    from sim.pages.perfetto_ui import serve
    from sim.replay.inspect import inspect_trace, window_of
    from sim.replay.inspect_report import as_document, print_difference, print_inspection

    chosen = window_of(window, ranks, category)
    result = inspect_trace(trace, window=chosen, rules=rules, lint=lint, top=top)
    other = inspect_trace((diff,), window=chosen, rules=rules, lint=lint, top=top) if diff is not None else None
    if as_json:
        document = as_document(result) | ({"diff": as_document(other)} if other is not None else {})
        click.echo(json.dumps(document, allow_nan=False))
    elif other is not None:
        print_difference(result, other, wide_console())
    else:
        print_inspection(result, wide_console())
    if show:
        serve(result.capture.sources)
