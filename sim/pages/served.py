"""The report of a served run: ``wattline serve --report served.html``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sim.explore.choice import command_of
from sim.output.files import write_atomically
from sim.pages import basis
from sim.pages.figures import LINES, MAX_LINES, MUTED, at_bin_edges, bar, float32
from sim.pages.page import Page, Section, TextTable, html
from sim.pages.sums import mean_rates
from sim.result.report import duration
from sim.result.trace import release
from sim.scenario.precision import precision_of
from sim.serving.report import LATENCIES, PART_WORDS
from sim.serving.result import ServeResult

# Bins of the pictures over time.
BINS = 1200
# Requests drawn one by one; of more, an even choice.
MAX_POINTS = 3000
SLOWEST = 10
# Columns of ``ServeResult.stretches``: name, title, unit, scale.
ROWS = (
    ("power_w_per_gpu", "power of a GPU, W", "W", 1.0),
    ("clock_hz", "SM clock, MHz", "MHz", 1e-6),
    ("decoding", "sequences that decode", "sequences", 1.0),
    ("waiting", "requests that wait", "requests", 1.0),
    ("blocks", "KV blocks in use", "blocks", 1.0),
)
PARTS = {"prefill": "#e07b2a", "decode": "#3f7fe0", "transfer": "#d1467a", "idle": "#8d949e"}


def write_served_report(run: ServeResult, path: Path) -> None:
    """Write ``run`` as one HTML page that needs no network; a :class:`SimError` where that cannot be done."""
    write_atomically(path, html(served_page(run, path.name)).encode())


def served_page(run: ServeResult, name: str = "served.html") -> Page:
    """The page of ``run``; ``name`` is the file's, for the command at its end."""
    spec, data, table = run.spec, run.summary, run.requests
    replicas = sorted({(row.replica, row.stage) for row in run.log.stretches})
    shown = replicas if len(replicas) <= MAX_LINES else replicas[:: -(-len(replicas) // MAX_LINES)]
    each = "replica" if spec.pp == 1 else "stage"
    some = f" {len(shown)} of {len(replicas)} {each}s are drawn." * (len(shown) < len(replicas))
    every = -(-len(table) // MAX_POINTS)
    dashed = "Dashed: the objective." if data["slo_share"] is not None else ""
    points = "" if every == 1 else f" One request in {every} is drawn over its arrival."
    return Page(
        title=f"{spec.model} served on {data['gpus']} x {data['gpu']}",
        lead=_lead(run),
        tiles=_tiles(run),
        sections=[
            Section(
                title="The server over time",
                figures=[_over_time(run, shown)],
                note=f"Means over {duration(run.end_s / BINS)}, each {each} by itself.{some}",
            ),
            Section(
                title="Latency",
                figures=[_distribution(run), _by_arrival(table.iloc[::every])],
                table=_percentiles(run),
                note=f"{dashed}{points}".strip(),
            ),
            Section(title="Where the joules go", figures=[_joules(run)], table=_parts(run)),
            Section(title="The slowest requests", table=_slowest(table), note="By time to the first token."),
            Section(title="What these numbers rest on", table=_basis(run)),
            *basis.details(run.machine, spec),
        ],
        command=f"{command_of(spec, 'serve')} --report {name}",
        made_by=f"wattline {release()}",
    )


def _lead(run: ServeResult) -> str:
    spec = run.spec
    traffic = (
        f"requests of {spec.trace.name}"
        if spec.trace is not None
        else f"{spec.concurrency} requests at any time"
        if spec.concurrency is not None
        else f"{spec.arrivals} arrivals, {spec.rate_per_s:g} a second"
    )
    return f"{spec.roles}, {precision_of(spec.group()).words()}, {spec.router.replace('_', ' ')} routing; {traffic}"


def _tiles(run: ServeResult) -> list[tuple[str, str, str]]:
    data = run.summary
    left_out = f"; {data['requests_left_out']:,} without output left out" if data["requests_left_out"] else ""
    tiles = [
        ("requests", f"{data['requests']:,}", f"in {duration(data['duration_s'])}{left_out}"),
        (
            "throughput",
            f"{data['output_tokens_per_s']:,.0f} output tokens/s",
            f"{data['requests_per_s']:.4g} requests/s",
        ),
    ]
    for label, key in (("time to first token, p99", "ttft_s"), ("time per output token, p99", "tpot_s")):
        if data[key] is not None:
            tiles.append((label, duration(data[key]["p99"]), f"median {duration(data[key]['p50'])}"))
    if data["slo_share"] is not None:
        tiles.append(("within the objective", f"{data['slo_share']:.1%}", f"{data['goodput_per_s']:.4g} requests/s"))
    return [
        *tiles,
        (
            "energy",
            f"{data['energy_j_per_output_token']:.4g} J/output token",
            f"{data['energy_j_per_request']:.4g} J a request",
        ),
        ("mean power a GPU", f"{data['power_w_per_gpu']:.0f} W", f"{_joules_text(data['energy_j'])} in all"),
    ]


def _over_time(run: ServeResult, replicas: Sequence[tuple[int, int]]) -> go.Figure:
    table = run.stretches
    rows = [row for row in ROWS if row[0] in table and np.isfinite(table[row[0]].to_numpy(dtype=float)).all()]
    figure = make_subplots(rows=len(rows), shared_xaxes=True, vertical_spacing=0.06)
    edges = np.linspace(0.0, run.end_s, BINS + 1)
    for colour, (replica, stage) in zip(LINES, replicas, strict=False):
        mine = table[table["replica"] == replica]
        name = f"replica {replica}"
        if run.spec.pp > 1:
            mine, name = mine[mine["stage"] == stage], f"{name}, stage {stage}"
        start, end = mine["start_s"].to_numpy(), mine["end_s"].to_numpy()
        for number, (column, _, unit, scale) in enumerate(rows, start=1):
            means = mean_rates(start, end, mine[column].to_numpy(dtype=float) * scale, edges)
            figure.add_scatter(
                x=float32(edges), y=float32(at_bin_edges(means)), name=name, legendgroup=name,
                showlegend=number == 1 and len(replicas) > 1, mode="lines", row=number, col=1,
                line={"width": 1.6, "color": colour, "shape": "hv"}, hovertemplate=f"%{{y:.4~g}} {unit}",
            )  # fmt: skip
    for number, (_, title, _, _) in enumerate(rows, start=1):
        top = figure.layout[f"yaxis{number if number > 1 else ''}"].domain[1]
        figure.add_annotation(
            text=title, x=0, xref="paper", xanchor="left", y=top, yref="paper", yanchor="bottom", showarrow=False
        )
        figure.update_yaxes(rangemode="tozero", row=number, col=1)
    figure.update_xaxes(title="time, s", row=len(rows), col=1)
    figure.update_layout(hovermode="x unified", hoversubplots="axis", height=90 + 155 * len(rows))
    return figure


def _distribution(run: ServeResult) -> go.Figure:
    """Share of requests that were at least so quick, by kind of latency."""
    figure = go.Figure()
    limits = {"ttft_s": run.spec.slo_ttft_s, "tpot_s": run.spec.slo_tpot_s}
    share = np.linspace(0.0, 1.0, 401)
    for colour, (label, key) in zip(LINES, LATENCIES, strict=False):
        values = run.requests[key].dropna() if key in run.requests else pd.Series(dtype=float)
        values = values[values > 0.0]
        if values.empty:
            continue
        figure.add_scatter(
            x=float32(np.quantile(values, share) * 1e3), y=float32(share * 100), name=label, mode="lines",
            line={"width": 2, "color": colour},
            hovertemplate=f"%{{y:.4~g}} % within %{{x:.4~g}} ms<extra>{label}</extra>",
        )  # fmt: skip
        limit_s = limits.get(key)
        if limit_s is not None:
            figure.add_scatter(
                x=[limit_s * 1e3] * 2, y=[0, 100], mode="lines", showlegend=False, hoverinfo="skip",
                line={"width": 1.4, "color": colour, "dash": "dash"},
            )  # fmt: skip
    slowest_ms = float(run.requests["e2e_s"].max()) * 1e3
    figure.update_xaxes(type="log", dtick=1, title="milliseconds", range=[-1, np.log10(slowest_ms) + 0.1])
    figure.update_yaxes(title="requests, %", range=[0, 101])
    figure.update_layout(height=360)
    return figure


def _by_arrival(table: pd.DataFrame) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(
        x=float32(table["arrival_s"]), y=float32(table["ttft_s"] * 1e3), mode="markers", name="a request",
        marker={"size": 4, "opacity": 0.6, "color": LINES[0]}, hovertemplate="%{y:.4~g} ms<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="arrival, s")
    figure.update_yaxes(title="time to first token, ms", rangemode="tozero")
    figure.update_layout(height=280)
    return figure


def _joules(run: ServeResult) -> go.Figure:
    figure = go.Figure()
    for part, joules in run.summary["energy_j_by_part"].items():
        if joules > 0.0:
            bar(figure, ["all GPUs"], [joules], PART_WORDS.get(part, part), PARTS.get(part, MUTED), "J")
    figure.update_xaxes(title="energy of all GPUs, J")
    figure.update_yaxes(showticklabels=False, showgrid=False)
    figure.update_layout(barmode="stack", height=180)
    return figure


def _percentiles(run: ServeResult) -> TextTable:
    rows = [
        [label, *(duration(run.summary[key][name]) for name in ("mean", "p50", "p90", "p99"))]
        for label, key in LATENCIES
        if run.summary[key] is not None
    ]
    return TextTable(head=["", "mean", "median", "90 %", "99 %"], rows=rows, minor=(3,))


def _parts(run: ServeResult) -> TextTable:
    data = run.summary
    rows = [
        [
            PART_WORDS.get(part, part),
            _joules_text(joules),
            f"{joules / data['energy_j']:.1%}",
            f"{joules / data['requests']:.4g}",
        ]
        for part, joules in data["energy_j_by_part"].items()
    ]
    return TextTable(head=["part", "energy", "share", "J a request"], rows=rows)


def _joules_text(joules: float) -> str:
    return f"{joules * 1e-3:.4g} kJ" if joules >= 1e4 else f"{joules:.4g} J"


def _slowest(table: pd.DataFrame) -> TextTable:
    rows = [
        [
            str(request["request"]),
            duration(request["arrival_s"]),
            str(request["replica"]),
            f"{request['input_tokens']:,}",
            f"{request['output_tokens']:,}",
            duration(request["queue_s"]),
            duration(request["ttft_s"]),
            duration(request["e2e_s"]),
            f"{request['prefill_j'] + request['decode_j'] + request['transfer_j']:.4g}",
            str(request["preemptions"]),
        ]
        for request in table.nlargest(SLOWEST, "ttft_s").to_dict("records")
    ]
    head = ["request", "arrival", "replica", "input", "output", "queue", "first token", "end to end", "J", "preempted"]
    return TextTable(head=head, rows=rows, minor=(1, 2, 4, 8, 9))


def _basis(run: ServeResult) -> TextTable:
    data, machine = run.summary, run.machine
    rows = [
        ["status", f"{data['status']}: {'; '.join(data['status_reasons'])}"],
        ["of single runs", machine.profile.expected_error() or "-"],
        *basis.profile_rows(machine.profile),
        ["power", f"cap {machine.limits.cap_w:g} W a GPU; the limiters live as long as the server"],
        ["steps", "priced by the engine at grid points of size and power target, linear between them"],
        ["preemptions", f"{data['preemptions']:,}"],
        ["prompt tokens found in cache", f"{data['hit_tokens']:,}"],
    ]
    return TextTable(head=[], rows=rows, words=(0, 1))
