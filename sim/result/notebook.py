"""A run as a notebook shows it: two tables in HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from sim.result.report import ENERGY_COLUMNS, ENERGY_TITLE, energy_rows, figures, title
from sim.result.run import Run

LEFT = ' style="text-align:left"'


def html_of(run: Run) -> str:
    """Headline figures and energy by kernel class; the notebook's own style draws the tables."""
    name, what = title(run)
    head = "".join(f"<tr>{_cell(label, LEFT, 'th')}{_cell(value, LEFT)}</tr>" for label, value in figures(run))
    columns = "".join(_cell(column, "", "th") for column in ENERGY_COLUMNS)
    rows = "".join(f"<tr>{_row(cells)}</tr>" for cells in energy_rows(run))
    return (
        f"<div><p><b>{escape(name)}</b> {escape(what)}</p><table><tbody>{head}</tbody></table>"
        f"<p>{ENERGY_TITLE}</p><table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(cells: Iterable[str]) -> str:
    first, *others = cells
    return _cell(first, LEFT) + "".join(_cell(cell) for cell in others)


def _cell(text: str, style: str = "", tag: str = "td") -> str:
    return f"<{tag}{style}>{escape(text)}</{tag}>"
