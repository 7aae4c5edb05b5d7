"""Pictures of a front: PNG and SVG by matplotlib, a self-contained interactive page by plotly."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sim.errors import SimError
from sim.explore.choice import Objective, command_of, groups, scenario_of, varied
from sim.output.files import check_extra, check_picture_ending, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# An axis that spans more than this factor is logarithmic.
WIDE = 20.0
# One a group, told apart by the colour-blind.
HUES = ("#3f7fe0", "#e07b2a", "#2f9f72", "#d1467a", "#8b6cd9", "#b08b1e", "#1ba3b8", "#a0605a")
# Where a click puts the command of a point.
_CLICK = """
const box = document.createElement('pre');
box.textContent = 'Click a point for its command.';
box.style = 'font:14px ui-monospace,monospace;padding:1em;background:#f4f4f4;white-space:pre-wrap';
document.body.appendChild(box);
document.getElementById('{plot_id}').on('plotly_click', e => { box.textContent = e.points[0].customdata; });
"""


def label(values: dict[str, object]) -> str:
    """A group or a scenario in words: the fields that tell it apart."""
    return ", ".join(f"{name} {f'{v:g}' if isinstance(v, float) else v}" for name, v in values.items() if v == v)


def write_plot(
    table: pd.DataFrame, on_front: pd.Series[bool], objectives: Sequence[Objective], by: Sequence[str], path: Path
) -> None:
    """The first two objectives of every row, each group's front joined (PNG or SVG by the file's ending)."""
    with picture(path, height=5.0) as axis:
        x, y = _two(objectives)
        for key, rows in groups(table, by):
            best = rows[on_front[rows.index]].sort_values(x.column)
            (line,) = axis.plot(
                best[x.column] * x.scale, best[y.column] * y.scale, marker="o", linewidth=1, label=label(key) or None
            )
            axis.scatter(rows[x.column] * x.scale, rows[y.column] * y.scale, s=12, alpha=0.4, color=line.get_color())
        axis.set(xlabel=x.title, ylabel=y.title, xscale=_scale(table, x), yscale=_scale(table, y))
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")


@contextmanager
def picture(path: Path, *, height: float) -> Iterator[Axes]:
    """Axes of a picture ``height`` inches high, written when they are done (PNG or SVG by the file's ending)."""
    check_picture_ending(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8.5, height), constrained_layout=True)
    yield axis
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], dpi=130)
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


def write_page(
    table: pd.DataFrame, on_front: pd.Series[bool], objectives: Sequence[Objective], by: Sequence[str], path: Path
) -> None:
    """One file that needs no network: every point shows its scenario, a click its command."""
    check_extra("--html", "explore", "plotly")
    import plotly.graph_objects as go

    x, y = _two(objectives)
    fields = varied(table)
    figure = go.Figure()
    for number, (key, rows) in enumerate(groups(table, by)):
        best = rows[on_front[rows.index]].sort_values(x.column)
        for part, mode, size in ((rows[~on_front[rows.index]], "markers", 6), (best, "lines+markers", 10)):
            if part.empty:
                continue
            figure.add_scatter(
                x=(part[x.column] * x.scale).tolist(),
                y=(part[y.column] * y.scale).tolist(),
                mode=mode,
                marker={"size": size, "color": HUES[number % len(HUES)]},  # a group's front and its others alike
                line_color=HUES[number % len(HUES)],
                opacity=1.0 if part is best else 0.5,
                name=f"{label(key)}{', ' if key else ''}{'front' if part is best else 'others'}",
                customdata=[command_of(scenario_of(row)) for _, row in part.iterrows()],
                text=[_hover(row, fields, objectives) for _, row in part.iterrows()],
                hovertemplate="%{text}<extra></extra>",
            )
    figure.update_layout(
        title="wattline: Pareto front",
        xaxis={"title": x.title, "type": _scale(table, x)},
        yaxis={"title": y.title, "type": _scale(table, y)},
        template="plotly_white",
    )
    page = figure.to_html(include_plotlyjs=True, full_html=True, post_script=_CLICK, div_id="front")
    write_atomically(path, page.encode())


def _hover(row: pd.Series[Any], fields: Sequence[str], objectives: Sequence[Objective]) -> str:
    lines = [f"{o.title}: {float(str(row[o.column])) * o.scale:.4g}" for o in objectives]
    return "<br>".join([label({name: row[name] for name in fields}), *lines])


def _scale(table: pd.DataFrame, objective: Objective) -> str:
    values = table[objective.column]
    return "log" if values.max() > WIDE * values.min() else "linear"


def _two(objectives: Sequence[Objective]) -> tuple[Objective, Objective]:
    if len(objectives) < 2:
        raise SimError("a picture needs two objectives, such as --objectives latency,energy")
    return objectives[0], objectives[1]
