"""Choose among the rows of a sweep: objectives, a user's factors, fronts, the best row, and the command behind it."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from inputs.suggest import nearest
from inputs.texts import parse_json
from sim.errors import SimError
from sim.explore.conditions import Condition
from sim.explore.pareto import front
from sim.result.prices import Prices
from sim.scenario.field_table import FieldTable
from sim.scenario.spec import Scenario

# Rows that do the same work may be compared; batch and layout are what one chooses between.
SAME_WORK = ("model", "phase", "seq_len", "output_len", "layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A column that is to be small, or large. ``scale`` turns SI into the shown unit."""

    name: str
    column: str
    title: str
    largest: bool = False
    scale: float = 1.0

    def cost(self, table: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The column as numbers that are to be small."""
        values = table[self.column].to_numpy(dtype=float)
        return -values if self.largest else values


OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective(name="latency", column="latency_s", title="latency (ms)", scale=1e3),
        Objective(name="energy", column="energy_j_per_token", title="energy per token (mJ, all GPUs)", scale=1e3),
        Objective(name="request-energy", column="energy_j_per_request", title="energy per request (J, all GPUs)"),
        Objective(name="throughput", column="tokens_per_s", title="tokens per second", largest=True),
        Objective(name="efficiency", column="tokens_per_s_per_w", title="tokens per second and watt", largest=True),
        Objective(name="gpus", column="world", title="GPUs"),
        Objective(name="ttft", column="ttft_s", title="time to first token (ms)", scale=1e3),
        Objective(name="tpot", column="tpot_s", title="time per output token (ms)", scale=1e3),
        Objective(name="carbon", column="carbon_g_per_million_tokens", title="carbon (g CO2e per million tokens)"),
        Objective(name="cost", column="cost_per_million_tokens", title="cost (per million tokens)"),
    )
}


def priced(table: pd.DataFrame, prices: Prices) -> pd.DataFrame:
    """``table`` with carbon and cost per million tokens, as far as ``prices`` say.

    >>> rows = pd.DataFrame({"energy_j_per_token": [3.6], "tokens_per_s": [1e6 / 3600], "world": [2]})
    >>> priced(rows, Prices(carbon_g_per_kwh=400))["carbon_g_per_million_tokens"].item()
    400.0
    >>> round(priced(rows, Prices(price_per_kwh=0.1, price_per_gpu_hour=2.0))["cost_per_million_tokens"].item(), 9)
    4.1
    """
    for name in ("energy_j_per_token", "tokens_per_s", "world"):
        if name not in table:
            raise SimError(f"the table has no column {name}: none of its rows ran")
    table = table.copy()
    energy_j, gpu_s = table["energy_j_per_token"] * 1e6, table["world"] * 1e6 / table["tokens_per_s"]
    found = {"carbon_g": prices.carbon_g(energy_j), "cost": prices.cost(energy_j, gpu_s)}
    for name, column in found.items():
        if column is not None:
            table[f"{name}_per_million_tokens"] = column
    return table


def objectives_of(names: str, table: pd.DataFrame) -> list[Objective]:
    """Objectives from a comma-separated list; :class:`SimError` names what is unknown or not in the table."""
    found = []
    for name in names.split(","):
        objective = OBJECTIVES.get(name.strip())
        if objective is None:
            raise SimError(f"unknown objective '{name}': {nearest(name, OBJECTIVES)}")
        if objective.column not in table.columns:
            flags = {"carbon": "--carbon-g-per-kwh", "cost": "--price-per-kwh or --price-per-gpu-hour"}
            raise SimError(f"objective '{name}' needs {flags.get(name, f'the column {objective.column}')}")
        found.append(objective)
    return found


def eligible(table: pd.DataFrame, where: Sequence[str], objectives: Sequence[Objective]) -> pd.DataFrame:
    """Rows that ran, met the sweep's own conditions and ``where``, and have every objective."""
    kept = table[table["error"].isna() & table["feasible"].astype(bool)]
    kept = kept.dropna(subset=[objective.column for objective in objectives])
    columns = {str(name) for name in table.columns}
    for text in where:
        condition = Condition.parse(text, known=columns)
        needed = kept[sorted(condition.names)].astype(object)
        records = needed.where(needed.notna(), None).to_dict(orient="records")
        kept = kept[[condition.holds({str(k): v for k, v in row.items()}) for row in records]]
    if kept.empty:
        filters = f" that meets {' and '.join(repr(w) for w in where)}" if where else ""
        raise SimError(
            f"no row of {len(table)}{filters}: {int(table['error'].notna().sum())} failed; loosen the conditions"
        )
    return kept


def groups(table: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Rows that do the same work: the columns of ``by`` that tell groups apart, and the rows of each."""
    for name in by:
        if name not in table.columns:
            near = difflib.get_close_matches(name, [str(c) for c in table.columns], n=1)
            raise SimError(f"--by: unknown column '{name}'" + (f": did you mean '{near[0]}'?" if near else ""))
    telling = [name for name in by if table[name].nunique(dropna=False) > 1]
    if not telling:
        yield {}, table
        return
    for key, rows in table.groupby(telling, dropna=False, sort=False):
        yield dict(zip(telling, key, strict=True)), rows


def fronts(table: pd.DataFrame, objectives: Sequence[Objective], by: Sequence[str]) -> pd.Series[bool]:
    """Whether each row is on the Pareto front of its group."""
    on_front = pd.Series(False, index=table.index)
    for _, rows in groups(table, by):
        costs = np.column_stack([objective.cost(rows) for objective in objectives])
        on_front.loc[rows.index[front([tuple(row) for row in costs.tolist()])]] = True
    return on_front


def best(table: pd.DataFrame, objective: Objective, by: Sequence[str], *, within: float | None = None) -> pd.DataFrame:
    """The best row of each group; with ``within``, among rows at most that share slower than the group's fastest."""
    chosen = []
    for _, rows in groups(table, by):
        limit_s = np.inf if within is None else rows["latency_s"].min() * (1.0 + within)
        quick = rows[rows["latency_s"] <= limit_s]
        chosen.append(quick.index[int(np.argmin(objective.cost(quick)))])
    return table.loc[chosen]


def varied(table: pd.DataFrame) -> list[str]:
    """Scenario columns that differ between rows."""
    return [name for name in Scenario.model_fields if name in table and table[name].nunique(dropna=False) > 1]


def scenario_of(row: pd.Series[Any]) -> Scenario:
    """The scenario of a row."""
    fields: dict[str, Any] = {}
    for name, field in Scenario.model_fields.items():
        value = row.get(name)
        if value is None or value != value:
            continue
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, str) and value.startswith("["):
            value = parse_json(value, f"column {name}", SimError, one_line=True)
        if field.is_required() or value != field.default:
            fields[name] = value
    return Scenario.of(**fields)


def command_of(scenario: FieldTable, command: str = "simulate") -> str:
    """The shell command that simulates ``scenario``, or does ``command`` with it.

    >>> command_of(Scenario.of(model="llama3-8b", batch=4, lm_head=False, power_cap_w=500))
    'wattline simulate --model llama3-8b --batch 4 --no-lm-head --power-cap-w 500'
    """
    words = ["wattline", command]
    for name, value in scenario.model_dump(exclude_defaults=True).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, tuple):
            words += [flag, ",".join(str(part) for part in value)]
        else:
            words += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
