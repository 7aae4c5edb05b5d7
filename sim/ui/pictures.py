"""The pictures of the overlap study, as plotly's plain data: heat map and front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.pages import figures

if TYPE_CHECKING:
    from sim.explore.overlap import OverlapPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure as plotly's plain data, and its height in pixels, which the page gives it; its width is the page's."""

    figure: dict[str, Any]
    height_px: int


INK, SOFT, GRID = "#1c2128", "#59626e", "#e6e9ee"
STUDY_PX = 320
LIBRARY = "library's"


def dressed(
    data: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    *,
    height: int,
    legend: bool = True,
) -> Picture:
    """A figure in the page's type and colours; axes are drawn alike."""
    made: dict[str, Any] = {
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        "margin": {"l": 8, "r": 8, "t": 40 if legend else 12, "b": 8},
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top", "traceorder": "normal"},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": GRID, "font": {"color": INK}},
        "dragmode": False,
        **layout,
    }
    # Handles to drag axes and a second look at labels that may not fit take time and are not used.
    quick = {"fixedrange": True, "ticklabeloverflow": "allow"}
    for name in ("xaxis", "yaxis"):
        axis = {"automargin": True, "gridcolor": GRID, "zerolinecolor": GRID, **quick, **made.get(name, {})}
        if isinstance(title := axis.get("title"), str):
            axis["title"] = {"text": title, "standoff": 10, "font": {"color": SOFT, "size": 12}}
        made[name] = axis
    return Picture(figure={"data": [dict(one) for one in data], "layout": made}, height_px=height)


def heat(points: Sequence[OverlapPoint], measure: str) -> Picture:
    """The overlap study, chunks over blocks; a cell is a schedule, those of the front are marked."""
    chunks = sorted({p.scenario.overlap_chunks for p in points})
    blocks = sorted({p.scenario.comm_ctas or 0 for p in points})
    at = {(p.scenario.overlap_chunks, p.scenario.comm_ctas or 0): p for p in points}
    scale, unit = (1e3, "ms") if measure == "latency" else (1.0, "J")

    def value(point: OverlapPoint | None) -> float | None:
        if point is None:
            return None
        return (point.latency_s if measure == "latency" else point.energy_j) * scale

    cells = [[at.get((c, b)) for c in chunks] for b in blocks]
    shown = [[value(p) for p in row] for row in cells]
    text = [["" if p is None else f"{v:.4g}" + (" *" if p.on_front else "") for v, p in zip(*two, strict=True)]
            for two in zip(shown, cells, strict=True)]  # fmt: skip
    trace = {
        "type": "heatmap",
        "x": [str(c) for c in chunks],
        "y": [str(b) if b else LIBRARY for b in blocks],
        "z": shown,
        "text": text,
        "texttemplate": "%{text}",
        "colorscale": [[0, "#2f9f72"], [0.5, "#f3e9c6"], [1, "#d1467a"]],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "hovertemplate": f"%{{x}} chunks, %{{y}} blocks: %{{z:.5~g}} {unit}<extra></extra>",
    }
    axes = {
        "xaxis": {"type": "category", "title": f"chunks (1: in sequence); {measure} in {unit}"},
        "yaxis": {"type": "category", "title": "blocks"},
    }
    return dressed([trace], axes, height=STUDY_PX, legend=False)


def front(points: Sequence[OverlapPoint]) -> Picture:
    """Energy over latency of every schedule, one hue a number of chunks, the front joined."""
    traces: list[dict[str, Any]] = []
    edge = sorted((p for p in points if p.on_front), key=lambda p: p.latency_s)
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "front",
            "x": [p.latency_s * 1e3 for p in edge],
            "y": [p.energy_j for p in edge],
            "line": {"color": SOFT, "width": 1},
            "hoverinfo": "skip",
        }
    )
    counts = sorted({p.scenario.overlap_chunks for p in points})
    for colour, chunks in zip(figures.LINES, counts, strict=False):
        mine = [p for p in points if p.scenario.overlap_chunks == chunks]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "in sequence" if chunks == 1 else f"{chunks} chunks",
                "x": [p.latency_s * 1e3 for p in mine],
                "y": [p.energy_j for p in mine],
                "text": [p.label for p in mine],
                "marker": {"color": colour, "size": [12 if p.on_front else 7 for p in mine]},
                "hovertemplate": "%{text}<br>%{x:.4~g} ms, %{y:.4~g} J<extra></extra>",
            }
        )
    axes = {"xaxis": {"title": "latency, ms"}, "yaxis": {"title": "energy of all GPUs, J"}}
    return dressed(traces, axes, height=STUDY_PX)


def of_cell(x: str, y: str) -> dict[str, int | None]:
    """The fields of a cell of :func:`heat` by its labels.

    >>> of_cell("4", "8"), of_cell("1", LIBRARY)
    ({'overlap_chunks': 4, 'comm_ctas': 8}, {'overlap_chunks': 1, 'comm_ctas': None})
    """
    return {"overlap_chunks": int(x), "comm_ctas": None if y == LIBRARY else int(y)}
