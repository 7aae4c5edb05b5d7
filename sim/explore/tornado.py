"""Which inputs of a sweep matter: how far each one, alone, moves an objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sim.errors import SimError
from sim.explore.choice import Objective, varied
from sim.explore.picture import picture

# An input with more values than this is cut into as many ranges of equally many rows.
LEVELS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The mean factor on the objective at the levels of ``field`` that make it least and most."""

    field: str
    low: float
    high: float
    low_at: str
    high_at: str

    @property
    def swing(self) -> float:
        """Ratio of the two."""
        return self.high / self.low


def effects(table: pd.DataFrame, objective: Objective) -> list[Effect]:
    """Inputs by how much they move ``objective``, the strongest first.

    The effect of a level is the geometric mean of the objective over its rows, as a factor on that of all rows. In a
    full grid and in a Latin hypercube other inputs average out; inputs that move together (a ``zip``) cannot be
    distinguished, nor can conditions that leave points out be undone: such tables mix effects.

    >>> rows = pd.DataFrame({"tp": [1, 1, 2, 2], "batch": [1, 8, 1, 8], "energy_j": [1.0, 4.0, 2.0, 8.0]})
    >>> [(e.field, round(e.swing, 9)) for e in effects(rows, Objective(name="e", column="energy_j", title="J"))]
    [('batch', 4.0), ('tp', 2.0)]
    """
    values = table[objective.column].to_numpy(dtype=float)
    if not (values > 0.0).all():
        raise SimError(f"{objective.column} = {values.min():g}: factors are of values above 0: leave such rows out")
    logs = pd.Series(np.log(values), index=table.index)
    found = []
    for name in varied(table):
        means = logs.groupby(_levels(table[name]), observed=True).mean() - logs.mean()
        (low_at, low), *_, (high_at, high) = sorted(means.items(), key=lambda level: level[1])
        found.append(
            Effect(
                field=name, low=float(np.exp(low)), high=float(np.exp(high)), low_at=str(low_at), high_at=str(high_at)
            )
        )
    if not found:
        raise SimError(f"nothing varies in these {len(table)} rows: sweep at least one field")
    return sorted(found, key=lambda effect: -effect.swing)


def _levels(column: pd.Series[Any]) -> pd.Series[str]:
    """Values as text, many numbers as ranges; what was left out is a level of its own."""
    if column.nunique() > 2 * LEVELS and pd.api.types.is_numeric_dtype(column):
        levels = pd.qcut(column.astype(float), LEVELS, duplicates="drop")
        ranges = levels.map(lambda part: f"{part.left:.4g} to {part.right:.4g}", na_action="ignore").astype(object)
        if ranges.nunique(dropna=False) > 1:  # one range holds all where most rows have one value
            return ranges.fillna("default")
    return column.map(lambda v: "default" if v is None or v != v else f"{v:g}" if isinstance(v, float) else str(v))


def write_plot(found: Sequence[Effect], objective: Objective, path: Path) -> None:
    """Bars from the least to the greatest mean factor, strongest on top (PNG or SVG by the file's ending)."""
    with picture(path, height=1.2 + 0.45 * len(found)) as axis:
        for row, effect in enumerate(reversed(found)):
            axis.barh(row, effect.high - effect.low, left=effect.low, color="tab:blue")
            axis.annotate(
                effect.low_at, (effect.low, row), xytext=(-4, 0), textcoords="offset points", ha="right", va="center"
            )
            axis.annotate(effect.high_at, (effect.high, row), xytext=(4, 0), textcoords="offset points", va="center")
        axis.set_yticks(range(len(found)), [effect.field for effect in reversed(found)])
        axis.set_xscale("log")
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.use_sticky_edges = False  # room for the labels of the longest bar
        axis.margins(x=0.25)
        axis.set_xlabel(f"factor on the mean of: {objective.title}")
