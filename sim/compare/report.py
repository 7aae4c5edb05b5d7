"""A comparison as a first line that names the miss, a table, one JSON document, and one row a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from sim.compare.compare import PAUSES, Comparison, Line
from sim.compare.sides import StepKernel, shown

# Lines below this share of the longer step are summed up in one.
SMALL = 0.002
NAMES_WIDTH = 25


def headline(comparison: Comparison) -> str:
    """How far off the step is, and which kernel that is."""
    real_us, predicted_us = comparison.real.step_us, comparison.predicted.step_us
    line = comparison.worst()
    off = comparison.error
    how = f"{100 * abs(off):.1f} % {'slow' if off > 0 else 'fast'}"
    times = f"predicted {predicted_us:,.0f} us, real {real_us:,.0f} us"
    share = comparison.share(line)
    if share is None:
        return (
            f"the step is as long as predicted ({times}); {_name(line)} misses most, by {line.difference_us:+,.0f} us"
        )
    if share > 1.0:
        return (
            f"the step is predicted {how} ({times}): {_name(line)} alone {line.difference_us:+,.0f} us, others cancel"
        )
    return f"the step is predicted {how} ({times}): {100 * share:.0f} % of that is {_name(line)}"


def notes_of(comparison: Comparison) -> list[str]:
    """How the step was found, and what does not fit."""
    steps = comparison.steps
    lengths = [step.length_ns / 1e3 for step in steps.steps]
    ways = {
        "graph launches": "told apart by graph launches",
        "regions": "told apart by regions that the engine marks",
        "period": "told apart by their kernels' names",
    }
    if steps.how == "whole":
        notes = ["no repeated step found: the whole trace counts as one step"]
    elif len(lengths) == 1:
        notes = [f"rank {comparison.rank}, the one step with another behind it, {ways[steps.how]}"]
    else:
        extent = f"{min(lengths):,.0f} to {max(lengths):,.0f} us"
        notes = [f"rank {comparison.rank}, the median of {len(lengths)} steps alike ({extent}), {ways[steps.how]}"]
    ours, theirs = (side.attentions() for side in (comparison.predicted, comparison.real))
    if not comparison.all_paired("attention"):
        notes.append(f"the scenario has {ours} attentions, the step of the trace {theirs}: is --layers right?")
    return notes


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The first line, how the step was found, the table."""
    console.print(headline(comparison), highlight=False, soft_wrap=True)
    for note in notes_of(comparison):
        console.print(note, highlight=False, soft_wrap=True)
    table = Table(title="Time of one step (kernels: real, predicted)", title_justify="left")
    table.add_column("kernel", no_wrap=True)
    table.add_column("in the trace", max_width=NAMES_WIDTH, no_wrap=True)
    for head in ("kernels", "real us", "pred. us", "diff. us", "of error"):
        table.add_column(head, justify="right", no_wrap=True)
    least = SMALL * max(comparison.real.step_us, comparison.predicted.step_us)
    kept = [line for line in comparison.lines if max(line.real_us, line.predicted_us) >= least]
    rest = [line for line in comparison.lines if line not in kept]
    for line in kept:
        table.add_row(*_cells(comparison, line))
    if rest:
        table.add_row(*_cells(comparison, _summed(rest, f"{len(rest)} small ones")))
    table.add_section()
    table.add_row(*_cells(comparison, _summed(comparison.lines, "step")))
    console.print(table)


def as_document(comparison: Comparison) -> dict[str, Any]:
    """The fixed interface of ``--json``: microseconds."""
    run = comparison.run
    return {
        "headline": headline(comparison),
        "notes": notes_of(comparison),
        "sources": list(comparison.capture.sources),
        "rank": comparison.rank,
        "real_step_us": comparison.real.step_us,
        "predicted_step_us": comparison.predicted.step_us,
        "error": comparison.error,
        "steps_alike": len(comparison.steps.steps),
        "steps_told_apart_by": comparison.steps.how,
        "status": run.standing.as_json(),
        "lines": [
            {
                "kernel": line.kernel,
                "class": line.cls,
                "real_kernels": list(line.real_names),
                "real_count": line.real_count,
                "predicted_count": line.predicted_count,
                "real_us": line.real_us,
                "predicted_us": line.predicted_us,
                "difference_us": line.difference_us,
                "share_of_error": comparison.share(line),
            }
            for line in comparison.lines
        ],
    }


def as_table(comparison: Comparison) -> pd.DataFrame:
    """One row a kernel, in the order of the step, and one for the pauses: columns of us sum to the steps."""
    rows: list[dict[str, Any]] = []
    for pair in comparison.pairs:
        first = pair.predicted or pair.real
        assert first is not None
        rows.append(
            {"layer": pair.layer, "kernel": shown(first) if pair.predicted is None else first.name, "class": first.cls}
            | {"real_kernel": "" if pair.real is None else pair.real.name}
            | {"real_us": pair.real_us, "predicted_us": pair.predicted_us}
            | {"difference_us": pair.predicted_us - pair.real_us}
            | _times("real", pair.real)
            | _times("predicted", pair.predicted)
        )
    pauses = comparison.lines[-1]
    row: dict[str, Any] = {"layer": "", "kernel": PAUSES, "class": "", "real_kernel": ""}
    row |= {"real_us": pauses.real_us, "predicted_us": pauses.predicted_us, "difference_us": pauses.difference_us}
    rows.append(row | _times("real", None) | _times("predicted", None))
    return pd.DataFrame(rows)


def _times(side: str, kernel: StepKernel | None) -> dict[str, Any]:
    """When it ran, how long, and the pause before it."""
    values = (None,) * 3 if kernel is None else (kernel.start_us, kernel.duration_us, kernel.pause_us)
    return {f"{side}_{name}": v for name, v in zip(("start_us", "duration_us", "pause_us"), values, strict=True)}


def _name(line: Line) -> str:
    """The line in words."""
    if line.kernel == PAUSES:
        return "pauses in which the GPU runs nothing"
    if not line.predicted_count:
        return f"{line.kernel}, which is not predicted"
    return line.kernel if line.real_count else f"{line.kernel}, which the trace has not"


def _cells(comparison: Comparison, line: Line) -> list[str]:
    share = comparison.share(line)
    digits = 1 if comparison.real.step_us < 2e4 else 0
    return [
        "(not predicted)" if line.cls and not line.predicted_count else line.kernel,
        ", ".join(line.real_names) or ("(not in the trace)" if line.predicted_count and line.cls else ""),
        f"{line.real_count}"
        if line.real_count == line.predicted_count
        else f"{line.real_count}, {line.predicted_count}",
        f"{line.real_us:,.{digits}f}",
        f"{line.predicted_us:,.{digits}f}",
        f"{line.difference_us:+,.{digits}f}",
        "-" if share is None else f"{100 * share:.0f} %",
    ]


def _summed(lines: Sequence[Line], name: str) -> Line:
    return Line(
        kernel=name,
        cls="",
        real_names=(),
        real_count=sum(line.real_count for line in lines if line.kernel != PAUSES),
        predicted_count=sum(line.predicted_count for line in lines if line.kernel != PAUSES),
        real_us=sum(line.real_us for line in lines),
        predicted_us=sum(line.predicted_us for line in lines),
    )
