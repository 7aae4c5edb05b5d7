"""The pictures of a run as plotly figures; colours of text, grid and ground are the page's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sim.pages.sums import Binned, KernelSum, TimeShares, merged
from sim.result.timeline import Timeline

# Legible on white and on near-black, and distinguished by the colour-blind.
COLOURS = {
    "gemm": "#3f7fe0",
    "attention": "#e07b2a",
    "elementwise": "#2f9f72",
    "communication": "#d1467a",
    "idle": "#8d949e",
}
LINES = ("#3f7fe0", "#e07b2a", "#2f9f72", "#d1467a", "#8b6cd9", "#b08b1e", "#1ba3b8", "#a0605a")
MUTED = "#8d949e"
# GPUs that get a line of their own; of more, those spread over the range of energies.
MAX_LINES = len(LINES)
# Bins that a moving mean takes in.
TREND = 50
# Kernels of a GPU above which a stack of single kernels is only noise on a screen.
MAX_STEPS = 120
# Share of GPU time from which a marker of the roofline carries its kernel's number.
NUMBERED = 0.01


def over_time(run: Timeline, bins: Binned, shown: Sequence[int]) -> go.Figure:
    """Power, SM clock and cumulative energy of the simulated GPUs ``shown`` over one time axis.

    Power and clock are drawn twice: faint as they step, and as a moving mean over ``TREND`` bins.
    """
    titles = ("power, W", "SM clock, MHz", "energy since the start, J")
    figure = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.09, row_heights=[0.4, 0.3, 0.3])
    scale, unit = time_unit(run.latency_s)
    time = bins.edges_s * scale
    width_s = float(bins.edges_s[1] - bins.edges_s[0])
    for colour, gpu in zip(LINES, shown, strict=False):
        power, clock = bins.power_w[gpu], bins.clock_hz[gpu] * 1e-6
        joules = np.concatenate([[0.0], np.cumsum(power) * width_s])
        name = gpu_name(run, gpu)
        for row, values in ((1, power), (2, clock)):
            label = {"name": name, "legendgroup": name, "row": row, "col": 1, "mode": "lines"}
            steps = {"width": 1, "color": colour, "shape": "hv"}
            figure.add_scatter(
                x=float32(time), y=float32(at_bin_edges(values)), line=steps, opacity=0.45, showlegend=False,
                hovertemplate=f"%{{y:.5~g}} {('W', 'MHz')[row - 1]}", **label,
            )  # fmt: skip
            figure.add_scatter(
                x=float32(time), y=float32(moving_mean(values)), hoverinfo="skip",
                line={"width": 2.4, "color": colour}, showlegend=row == 1, **label,
            )  # fmt: skip
        figure.add_scatter(
            x=float32(time), y=float32(joules), name=name, legendgroup=name, showlegend=False,
            line={"width": 2, "color": colour}, mode="lines", hovertemplate="%{y:.5~g} J", row=3, col=1,
        )  # fmt: skip
    cap_w = run.machine.limits.cap_w
    if np.isfinite(cap_w):
        figure.add_scatter(
            x=[0.0, time[-1]], y=[cap_w, cap_w], name=f"power cap {cap_w:g} W", mode="lines", hoverinfo="skip",
            line={"dash": "dash", "width": 1.2, "color": MUTED}, row=1, col=1,
        )  # fmt: skip
    for row, title in enumerate(titles, start=1):
        domain = figure.layout[f"yaxis{row if row > 1 else ''}"].domain
        figure.add_annotation(
            text=title, x=0, xref="paper", xanchor="left", y=domain[1], yref="paper", yanchor="bottom", showarrow=False
        )
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    clocks = bins.clock_hz[list(shown)] * 1e-6
    figure.update_yaxes(range=[0.95 * clocks.min(), 1.03 * clocks.max()], row=2, col=1)
    figure.update_yaxes(rangemode="tozero", row=3, col=1)
    figure.update_xaxes(title=f"time, {unit}", row=3, col=1)
    figure.update_layout(hovermode="x unified", hoversubplots="axis", height=640)
    return figure


def by_class_over_time(run: Timeline, bins: Binned) -> go.Figure:
    """Watts of all GPUs over time, stacked by kernel class; of many kernels, moving means."""
    figure = go.Figure()
    many = smoothed(run)
    scale, unit = time_unit(run.latency_s)
    for family, watts in bins.family_w.items():
        if not watts.any():
            continue
        figure.add_scatter(
            x=float32(bins.edges_s * scale),
            y=float32(moving_mean(watts) if many else at_bin_edges(watts)),
            name=family,
            mode="lines",
            stackgroup="power",
            line={"width": 0, "color": _colour(family), "shape": "linear" if many else "hv"},
            fillcolor=_colour(family),
            hovertemplate="%{y:.4~g} W",
        )
    figure.update_xaxes(title=f"time, {unit}")
    figure.update_yaxes(title="power of all GPUs, W")
    figure.update_layout(hovermode="x unified", height=340)
    return figure


def by_class(sums: Sequence[KernelSum], idle_j: float) -> go.Figure:
    """Joules of all GPUs: a bar a phase, stacked by kernel class."""
    figure = go.Figure()
    phases = list(dict.fromkeys(row.phase for row in sums))[::-1]
    for family in dict.fromkeys(row.family for row in sums):
        joules = [sum(row.energy_j for row in sums if (row.phase, row.family) == (phase, family)) for phase in phases]
        bar(figure, phases, joules, family, _colour(family), "J")
    idle_counts = idle_j > 1e-3 * sum(row.energy_j for row in sums)
    if idle_counts:
        bar(figure, ["idle"], [idle_j], "idle", _colour("idle"), "J")
    figure.update_xaxes(title="energy of all GPUs, J")
    figure.update_yaxes(showgrid=False)
    figure.update_layout(barmode="stack", height=150 + 44 * (len(phases) + idle_counts))
    return figure


def gpu_time(split: TimeShares, latency_s: float) -> go.Figure:
    """Where the run of a mean GPU goes: one bar, the latency long."""
    figure = go.Figure()
    scale, unit = time_unit(latency_s)
    parts = [
        ("compute alone", split.compute_s, COLOURS["gemm"]),
        ("compute beside communication", split.hidden_s, "#8b6cd9"),
        *(
            (f"exposed {kind}", seconds, colour)
            for (kind, seconds), colour in zip(split.exposed_s.items(), _REDS, strict=False)
        ),
        ("waiting for the last rank", split.waiting_s, "#b08b1e"),
        ("idle", split.idle_s, COLOURS["idle"]),
    ]
    for name, seconds, colour in parts:
        if seconds > 0.0:
            bar(figure, ["mean GPU"], [seconds * scale], name, colour, unit)
    figure.update_xaxes(title=f"time, {unit}")
    figure.update_yaxes(showticklabels=False, showgrid=False)
    figure.update_layout(barmode="stack", height=170 + 20 * len(figure.data))  # narrow legends take a line an entry
    return figure


_REDS = ("#d1467a", "#e58aa9", "#8f2d53", "#f0b3c8", "#6b1f3d") * 2


def roofline(run: Timeline, sums: Sequence[KernelSum]) -> go.Figure:
    """Achieved FLOP/s of a GPU over FLOPs per HBM byte, under the roofs of the datasheet and of this run's clock."""
    figure = go.Figure(roofline_traces(run, sums))
    figure.update_xaxes(type="log", dtick=1, title=ROOFLINE_TITLES[0])
    figure.update_yaxes(type="log", dtick=1, title=ROOFLINE_TITLES[1])
    figure.update_layout(height=460)
    return figure


ROOFLINE_TITLES = ("FLOPs per byte of HBM traffic", "TFLOP/s of one GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """What arithmetic and HBM allow: by the datasheet (``dotted``), or at a run's clock."""

    label: str
    flops_per_s: float
    bytes_per_s: float
    dotted: bool


def roofs(run: Timeline) -> list[Roof]:
    """Those of a run's types."""
    gpu, clock_hz = run.machine.gpu, float(np.mean(run.sm_clock_hz_per_gpu))
    found: list[Roof] = []
    for dtype in dict.fromkeys(("bf16", run.scenario.dtype)):
        if dtype in gpu.tensor_flops_per_s:
            a_clock = gpu.tensor_flops_per_cycle_per_sm(dtype) * gpu.sms
            sheet = (f"datasheet {dtype}", a_clock * gpu.reference_clock_hz, gpu.hbm_bytes_per_s, True)
            real_bytes = run.machine.profile.hbm_bytes_per_s(gpu)
            real = (f"{dtype} at this run's {clock_hz / 1e6:.0f} MHz", a_clock * clock_hz, real_bytes, False)
            found += [
                Roof(label=label, flops_per_s=flops, bytes_per_s=moved, dotted=dotted)
                for label, flops, moved, dotted in (sheet, real)
            ]
    return found


def roofline_traces(run: Timeline, sums: Sequence[KernelSum]) -> list[dict[str, Any]]:
    """Roofs and markers of :func:`roofline` as plotly's plain data, numbered as in the table of kernels."""
    traces: list[dict[str, Any]] = []
    rows = [row for row in sums if row.intensity == row.intensity]
    reach = [row.intensity for row in rows] or [1.0]
    ends = (min(reach) / 3, max(reach) * 3)
    for roof in roofs(run):
        x = np.sort(np.append(np.geomspace(*ends, 60), np.clip(roof.flops_per_s / roof.bytes_per_s, *ends)))
        traces.append(
            {
                "type": "scatter",
                "x": float32(x),
                "y": float32(np.minimum(roof.flops_per_s, x * roof.bytes_per_s) * 1e-12),
                "name": roof.label,
                "mode": "lines",
                "line": {"width": 1.4, "color": MUTED, "dash": "dot" if roof.dotted else "solid"},
                "hovertemplate": "%{y:.4~g} TFLOP/s",
            }
        )
    total_s = sum(row.time_s for row in sums)
    for family in dict.fromkeys(row.family for row in rows):
        mine = [(number, row) for number, row in enumerate(sums, start=1) if row in rows and row.family == family]
        traces.append(
            {
                "type": "scatter",
                "x": [row.intensity for _, row in mine],
                "y": [row.flops / row.time_s * 1e-12 for _, row in mine],
                "name": family,
                "mode": "markers+text",
                "marker": {
                    "size": [8 + 30 * (row.time_s / total_s) ** 0.5 for _, row in mine],
                    "color": _colour(family),
                    "opacity": 0.85,
                },
                "text": [str(number) if row.time_s >= NUMBERED * total_s else "" for number, row in mine],
                "textfont": {"size": 11, "color": "#ffffff"},
                "cliponaxis": False,
                "customdata": [
                    [escape(row.name), row.phase, row.time_s / row.launches * 1e6, row.energy_j / row.launches]
                    for _, row in mine
                ],
                "hovertemplate": "<b>%{customdata[0]}</b> (%{customdata[1]})<br>%{y:.4~g} TFLOP/s at %{x:.4~g} "
                "FLOP/byte<br>mean %{customdata[2]:.4~g} us, %{customdata[3]:.3~g} J<extra></extra>",
            }
        )
    return traces


def smoothed(run: Timeline) -> bool:
    """Whether the run has too many kernels to draw each."""
    return run.outcome.kernels > MAX_STEPS * run.gpus


def moving_mean(values: Any) -> Any:
    """Mean of the ``TREND`` bins around every edge; fewer at the ends.

    >>> moving_mean(np.full(100, 3.0))[[0, 50, 100]].tolist()
    [3.0, 3.0, 3.0]
    """
    so_far = np.concatenate([[0.0], np.cumsum(values)])
    edges = np.arange(len(so_far))
    low, high = np.maximum(edges - TREND // 2, 0), np.minimum(edges + TREND // 2, len(values))
    return (so_far[high] - so_far[low]) / (high - low)


def time_unit(latency_s: float) -> tuple[float, str]:
    """The factor from seconds, and its unit, in which ``latency_s`` has few digits."""
    if latency_s >= 1.0:
        return 1.0, "s"
    return (1e3, "ms") if latency_s >= 1e-3 else (1e6, "us")


def gpu_name(run: Timeline, gpu: int) -> str:
    """The ranks that simulated GPU ``gpu`` stands for."""
    ranks = run.outcome.folding.classes[gpu]
    return f"GPU {merged(ranks)}" if len(ranks) == 1 else f"GPUs {merged(ranks)}, each"


def shown_gpus(run: Timeline) -> list[int]:
    """Simulated GPUs that get a line: all, or of many those at equal steps of energy."""
    gpus = len(run.outcome.folding.classes)
    if gpus <= MAX_LINES:
        return list(range(gpus))
    first = [ranks[0] for ranks in run.outcome.folding.classes]
    order = sorted(range(gpus), key=lambda gpu: run.energy_j_per_gpu[first[gpu]])
    return sorted(order[round(i * (gpus - 1) / (MAX_LINES - 1))] for i in range(MAX_LINES))


def bar(figure: go.Figure, y: list[str], x: list[float], name: str, colour: str, unit: str) -> None:
    """Add a part to the stacked bars ``y``."""
    figure.add_bar(
        y=y,
        x=x,
        name=name,
        orientation="h",
        marker={"color": colour},
        hovertemplate=f"{name}: %{{x:.4~g}} {unit}<extra></extra>",
    )


def _colour(family: str) -> str:
    return COLOURS.get(family, "#8b6cd9")


def at_bin_edges(values: Any) -> Any:
    """Values of bins at their edges: each holds to the next one, the last to the end."""
    return np.append(values, values[-1])


def float32(values: Any) -> Any:
    """Single precision: seven digits are more than a screen shows, in half the bytes."""
    return np.asarray(values, dtype=np.float32)
