"""Steps of a diffusion run that reuse the last computed residual: which they are, given three ways.

After GalaxyDiT (arXiv 2512.03451): conditional and unconditional branch decide together, a proxy is read at the
conditional branch's first block, and nothing is reused in the first 20 % of the steps.
"""

from __future__ import annotations

import csv
import io
import math
import re
from itertools import pairwise
from pathlib import Path

from inputs.files import read_text
from workloads.errors import WorkloadError

FIRST_SHARE = 0.2
FORMS = "steps:1-10,13,16, rate:0.58 or metric:FILE.csv,COLUMN,THRESHOLD"


def computed_steps(reuse: str, steps: int) -> tuple[bool, ...]:
    """For each of ``steps`` steps whether it is computed (else reused).

    ``steps:`` lists the computed ones, from 1. ``rate:`` reuses that share of all steps, evenly spread behind the
    first. ``metric:`` adds up a recorded column of a CSV file (a row a step) since the last computed step, and
    computes when the sum reaches the threshold.

    >>> computed_steps("rate:0.4", 10)
    (True, True, True, False, True, False, True, False, True, False)
    >>> sum(computed_steps("steps:1-10,13,17,20", 20))
    13
    """
    kind, _, value = reuse.partition(":")
    first = math.ceil(round(FIRST_SHARE * steps, 9))
    match kind:
        case "steps":
            computed = _listed(value, steps)
        case "rate":
            computed = _spread(value, steps, first)
        case "metric":
            computed = _gated(value, steps, first)
        case _:
            raise WorkloadError(f"reuse = '{reuse}': give {FORMS}")
    early = [step + 1 for step in range(first) if not computed[step]]
    if early:
        raise WorkloadError(f"reuse = '{reuse}': step {early[0]} is among the first {first}, which are never reused")
    return computed


def _listed(value: str, steps: int) -> tuple[bool, ...]:
    chosen: set[int] = set()
    for part in value.split(","):
        found = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if found is None:
            raise WorkloadError(f"reuse = 'steps:{value}': '{part}' is not a step or range like 1-10")
        low, high = int(found[1]), int(found[2] or found[1])
        if not 1 <= low <= high <= steps:
            raise WorkloadError(f"reuse = 'steps:{value}': '{part}' is not within 1 to {steps}")
        chosen |= set(range(low, high + 1))
    return tuple(step + 1 in chosen for step in range(steps))


def _spread(value: str, steps: int, first: int) -> tuple[bool, ...]:
    rate = _number(value)
    most = (steps - first) / steps
    if rate is None or not 0.0 <= rate <= most:
        raise WorkloadError(f"reuse = 'rate:{value}': give the share of reused steps, 0 to {most:g} of {steps} steps")
    reused, rest = round(rate * steps), steps - first
    # Step i of the rest is reused where the straight line from 0 to ``reused`` passes a whole number.
    line = [(i * reused) // rest for i in range(rest + 1)]
    spread = [after == before for before, after in pairwise(line)]
    return (True,) * first + tuple(spread)


def _gated(value: str, steps: int, first: int) -> tuple[bool, ...]:
    where = f"reuse = 'metric:{value}'"
    parts = value.rsplit(",", 2)
    threshold = _number(parts[-1])
    if len(parts) != 3 or threshold is None or threshold <= 0:
        raise WorkloadError(f"{where}: give metric:FILE.csv,COLUMN,THRESHOLD with a positive threshold")
    metric = metric_columns(Path(parts[0])).get(parts[1])
    if metric is None:
        raise WorkloadError(f"{where}: {parts[0]} has no column '{parts[1]}'")
    if len(metric) != steps:
        raise WorkloadError(f"{where}: {parts[0]} has {len(metric)} rows, the run {steps} steps: give one a step")
    computed, change = [], 0.0
    for step, value_now in enumerate(metric):
        change += value_now
        now = step < first or change >= threshold
        change = 0.0 if now else change
        computed.append(now)
    return tuple(computed)


def metric_columns(path: Path) -> dict[str, list[float]]:
    """Columns of numbers of a CSV file by name, a row a step."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path, "metrics", WorkloadError), newline="")))
    except csv.Error as error:
        raise WorkloadError(f"cannot read metrics '{path}': {error}") from None
    if not rows:
        raise WorkloadError(f"{path}: no rows: give a header and a row for each step")
    columns: dict[str, list[float]] = {name: [] for name in rows[0] if name is not None}
    for line, row in enumerate(rows, start=2):
        for name, column in columns.items():
            number = _number(row[name] or "")
            if number is None:
                raise WorkloadError(f"{path}, line {line}: {name} = {row[name]!r}: give a finite number")
            column.append(number)
    return columns


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
