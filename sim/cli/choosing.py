"""Flags that ``wattline pareto`` and ``wattline best`` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from sim.cli.paths import INPUT

if TYPE_CHECKING:
    from sim.result.prices import Prices

Decorated = Callable[..., Any]


def choosing_options(function: Decorated) -> Decorated:
    """The table, conditions, groups and a user's factors."""
    by = "columns of which every value is judged alone, comma-separated [default: model, phase and lengths]"
    for option in reversed(
        (
            click.argument("file", type=INPUT),
            click.option("--where", multiple=True, help='condition on rows, such as "ttft_s < 0.5" (repeatable)'),
            click.option("--by", help=by),
            click.option("--json", "as_json", is_flag=True, help="print exactly one JSON document on stdout"),
        )
    ):
        function = option(function)
    return price_options(function)


def price_options(function: Decorated) -> Decorated:
    """A user's prices and the carbon of the grid, as keywords of ``Prices``."""
    for option in reversed(
        (
            click.option("--price-per-gpu-hour", type=click.FloatRange(0), help="price of a GPU for an hour"),
            click.option("--price-per-kwh", type=click.FloatRange(0), help="price of electricity"),
            click.option("--carbon-g-per-kwh", type=click.FloatRange(0), help="grams of CO2e a kWh of the grid"),
        )
    ):
        function = option(function)
    return function


def prices_of(fields: dict[str, Any]) -> Prices:
    """What :func:`price_options` read, taken out of ``fields``."""
    from sim.result.prices import Prices

    names = ("price_per_gpu_hour", "price_per_kwh", "carbon_g_per_kwh")
    return Prices(**{name: fields.pop(name) for name in names})


def by_of(text: str | None) -> tuple[str, ...]:
    """Columns of ``--by``."""
    from sim.explore.choice import SAME_WORK

    return SAME_WORK if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def rows_json(table: Any) -> list[dict[str, Any]]:
    """Rows with all their columns and the command of each."""
    import json

    from sim.explore.choice import command_of, scenario_of

    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    commands = [command_of(scenario_of(row)) for _, row in table.iterrows()]
    return [row | {"command": command} for row, command in zip(rows, commands, strict=True)]


def print_rows(table: Any, *, title: str, shown: list[Any], fields: list[str]) -> None:
    """A table of the fields that differ and the objectives."""
    from rich.table import Table

    from sim.cli.console import wide_console

    out = Table(title=title, title_justify="left")
    rested = ["status"] if "status" in table.columns and "status" not in fields else []
    for name in [*fields, *(objective.title for objective in shown), *rested]:
        out.add_column(name, justify="right")
    for _, row in table.iterrows():
        values = [row[name] for name in fields]
        cells = ["-" if v != v or v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in values]
        out.add_row(*cells, *(f"{row[o.column] * o.scale:.4g}" for o in shown), *(str(row[n]) for n in rested))
    wide_console().print(out)
