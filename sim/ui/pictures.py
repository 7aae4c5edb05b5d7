"""The pictures of the page, as plotly's plain data: memory, timeline lanes, roofline, heat map and front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.pages import figures
from sim.pages.sums import kernel_sums, merged
from sim.result.exposure import S_PER_PS

if TYPE_CHECKING:
    from sim.explore.overlap import OverlapPoint
    from sim.result.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure as plotly's plain data, and its height in pixels, which the page gives it; its width is the page's."""

    figure: dict[str, Any]
    height_px: int


INK, SOFT, GRID = "#1c2128", "#59626e", "#e6e9ee"
# Lanes of more GPUs, and more kernels than this, are a blur on a screen.
MOST_GPUS = 4
MOST_SPANS = 400
STUDY_PX = 320
LETTER_PX = 7  # of a label's font, on average
LIBRARY = "library's"


def dressed(
    data: Sequence[Mapping[str, Any]],
    layout: Mapping[str, Any],
    *,
    height: int,
    legend: bool = True,
    left: int | None = None,
) -> Picture:
    """A figure in the page's type and colours; axes are drawn alike.

    With room of ``left`` pixels for the labels it is drawn once: plotly draws a figure again where it is to find its
    margins by itself, which takes half of the time.
    """
    fitted = left is None
    margin = {"l": 8, "r": 8, "t": 40 if legend else 12, "b": 8} if fitted else {"l": left, "r": 14, "t": 12, "b": 44}
    made: dict[str, Any] = {
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": INK, "size": 12, "family": "system-ui, sans-serif"},
        "margin": margin,
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top", "traceorder": "normal"},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": GRID, "font": {"color": INK}},
        "dragmode": False,
        **layout,
    }
    # Handles to drag axes and a second look at labels that may not fit take time and are not used.
    quick = {"fixedrange": True, "ticklabeloverflow": "allow"}
    for name in ("xaxis", "yaxis"):
        axis = {"automargin": fitted, "gridcolor": GRID, "zerolinecolor": GRID, **quick, **made.get(name, {})}
        if isinstance(title := axis.get("title"), str):
            axis["title"] = {"text": title, "standoff": 10, "font": {"color": SOFT, "size": 12}}
        made[name] = axis
    return Picture(figure={"data": [dict(one) for one in data], "layout": made}, height_px=height)


def lanes(run: Timeline) -> tuple[Picture, str]:
    """Kernels of the stretch that takes most of the run (a layer, where layers repeat), a lane a GPU and stream."""
    outcome = run.outcome
    part = max(outcome.parts, key=lambda one: one.repeat * one.played.end_ps)
    graph, records = part.piece.graph, part.played.records
    op, start, end = (
        np.frombuffer(column, dtype=np.int64)
        for column in (records.span_op, records.span_start_ps, records.span_end_ps)
    )
    gpu = np.asarray(graph.op_gpu)[op]
    order = np.argsort(start, kind="stable")
    kept = order[gpu[order] < MOST_GPUS][:MOST_SPANS]
    cls, queue = np.asarray(graph.op_class)[op[kept]], np.asarray(graph.op_queue)[op[kept]]
    stream = np.asarray(graph.queue_stream)[queue]
    begin_ps = int(start[kept].min())
    unit_s, unit = _unit((int(end[kept].max()) - begin_ps) * S_PER_PS)
    first = (start[kept] - begin_ps) * (S_PER_PS / unit_s)
    length = (end[kept] - start[kept]) * (S_PER_PS / unit_s)
    names = [f"GPU {merged(outcome.folding.classes[one])}" for one in gpu[kept].tolist()]
    lane = [f"{name}, stream {one}" if one else name for name, one in zip(names, stream.tolist(), strict=True)]
    family = np.array([graph.classes[one].family for one in cls], dtype=object)
    bars = []
    for name in dict.fromkeys(family.tolist()):
        mine = np.flatnonzero(family == name)
        bars.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [lane[i] for i in mine],
                "base": first[mine].tolist(),
                "x": length[mine].tolist(),
                "customdata": [graph.classes[cls[i]].name for i in mine],
                "marker": {"color": figures.COLOURS.get(name, "#8b6cd9"), "line": {"width": 0.5, "color": "#ffffff"}},
                "hovertemplate": f"<b>%{{customdata}}</b><br>%{{x:.4~g}} {unit}<extra></extra>",
            }
        )
    rows = sorted(dict.fromkeys(lane))
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": {"title": f"time, {unit}", "rangemode": "tozero"},
        "yaxis": {"categoryorder": "array", "categoryarray": rows[::-1], "showgrid": False},
    }
    note = f"One of {part.repeat} equal stretches of the run." if part.repeat > 1 else "The longest stretch of the run."
    if len(kept) < len(op):
        note += f" The first {len(kept)} of its {len(op):,} kernels."
    left = 14 + LETTER_PX * max(map(len, rows))
    return dressed(bars, layout, height=64 + 34 * len(rows), legend=False, left=left), note


def roofline(run: Timeline) -> Picture:
    """The report's roofline; the page's own legend has its colours."""
    traces = figures.roofline_traces(run, kernel_sums(run.outcome), numbered=False)
    titles = zip(("xaxis", "yaxis"), figures.ROOFLINE_TITLES, strict=True)
    axes = {axis: {"type": "log", "dtick": 1, "title": title} for axis, title in titles}
    return dressed(traces, axes, height=320, legend=False, left=56)


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


def _unit(seconds: float) -> tuple[float, str]:
    return (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "us")


def of_cell(x: str, y: str) -> dict[str, int | None]:
    """The fields of a cell of :func:`heat` by its labels.

    >>> of_cell("4", "8"), of_cell("1", LIBRARY)
    ({'overlap_chunks': 4, 'comm_ctas': 8}, {'overlap_chunks': 1, 'comm_ctas': None})
    """
    return {"overlap_chunks": int(x), "comm_ctas": None if y == LIBRARY else int(y)}
