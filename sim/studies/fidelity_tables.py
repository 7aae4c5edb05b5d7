"""Markdown tables of the accuracy page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.studies.fidelity_errors import GroupError
from sim.validation.validate import Row


def error_table(errors: Sequence[GroupError]) -> str:
    """One line a group, errors in per cent."""
    if not errors:
        return "No rows."
    lines = [
        (
            group.file,
            group.group,
            str(group.n),
            percent(group.mean),
            "-" if group.interval is None else f"{percent(group.interval[0])} to {percent(group.interval[1])}",
            percent(group.median),
            percent(group.worst),
            percent(group.bias),
        )
        for group in errors
    ]
    return table(("file", "group", "n", "mean", "95 %", "median", "worst", "bias"), lines, left=2)


def table(head: Sequence[str], lines: Sequence[Sequence[str]], *, left: int, text_last: bool = False) -> str:
    """A Markdown table whose first ``left`` columns hold text and whose others hold figures."""
    rule = ["---" if i < left or (text_last and i == len(head) - 1) else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def percent(value: float | None) -> str:
    """A fraction as per cent with one decimal, ``-`` for none."""
    if value is None or math.isnan(value):
        return "-"
    # No negative zero.
    return f"{round(100 * value, 1) + 0.0:.1f}"


def inputs_text(row: Row) -> str:
    """What was asked in ``row``, as ``name=value`` pairs."""
    shown = {k: v for k, v in row.record.inputs.items() if k not in ("kind", "gpu", "regime") and v is not None}
    return ", ".join(f"{name}={value}" for name, value in shown.items())
