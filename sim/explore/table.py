"""The table of a sweep as a file: Parquet or CSV, by its ending."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from inputs.files import check_regular
from inputs.texts import truncated
from sim.errors import SimError
from sim.explore.row import INTERVALS, RESULTS
from sim.output.files import check_sweep_ending, write_table
from sim.output.spreadsheet import without_quotes
from sim.scenario.spec import Scenario

_SCHEMA = Scenario.model_json_schema()["properties"]
# Columns of numbers; all others are text, or true and false.
NUMERIC = frozenset(
    name
    for name, schema in _SCHEMA.items()
    if {part.get("type") for part in schema.get("anyOf", [schema])} & {"integer", "number"}
) | (RESULTS - {"status", "status_reasons"} | {"world", *INTERVALS})


def write_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write rows, columns typed by their values; lists become JSON text."""
    check_sweep_ending(path)
    table = pd.DataFrame(_columns(rows))
    if path.suffix == ".parquet":
        # A column that is empty in this sweep keeps the type that it has in others.
        for name in table.columns[table.isna().all()]:
            table[name] = table[name].astype("float64" if name in NUMERIC else "str")
    write_table(table, path)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Columns of ``rows`` in the order in which they appear."""
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
        values = [row.get(name, math.nan) for row in rows]
        if list in set(map(type, values)):
            values = [json.dumps(value) if isinstance(value, list) else value for value in values]
        columns[name] = values
    return columns


def read_table(path: Path) -> pd.DataFrame:
    """The table of a sweep; :class:`SimError` when the file is none."""
    check_sweep_ending(path)
    if path.exists():
        check_regular(path, "table", SimError)
    try:
        with path.open("rb"):
            pass  # readable at all? what the readers raise below is about the contents
    except OSError as error:
        raise SimError(f"cannot read '{path}': {error.strerror or error}") from None
    try:
        if path.suffix == ".csv":
            table = without_quotes(pd.read_csv(path, low_memory=False))
        else:
            import fastparquet

            table = fastparquet.ParquetFile(str(path)).to_pandas()
    except Exception as error:
        raise SimError(f"'{path}' is not a table that 'wattline sweep' wrote ({type(error).__name__})") from None
    missing = {"scenario_id", "model", "error", "feasible"} - set(table.columns)
    if missing:
        raise SimError(f"'{path}' is not a table that 'wattline sweep' wrote: column {min(missing)} is missing")
    for name in sorted(NUMERIC & set(table.columns)):
        numbers = pd.to_numeric(table[name], errors="coerce")
        wrong = (numbers.isna() & table[name].notna()) | numbers.isin([math.inf, -math.inf])
        if wrong.any():
            value = table[name][wrong].iloc[0]
            raise SimError(f"'{path}': {name} = {truncated(str(value), 60)}: no number that 'wattline sweep' writes")
        table[name] = numbers
    if not set(table["feasible"].map(str)) <= {"True", "False"}:
        raise SimError(f"'{path}': column feasible: give True or False")
    return table.assign(feasible=table["feasible"].map(str) == "True")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a table, what is empty as None."""
    table = read_table(path).astype(object)
    return [{str(k): v for k, v in row.items()} for row in table.where(table.notna(), None).to_dict(orient="records")]
