"""The controls of one scenario and the places of its answer, as Dash components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from dash import dcc, html

from hardware.catalog import list_gpus
from sim.pages.figures import COLOURS
from sim.scenario.spec import Scenario
from sim.ui.answer import GB, Answer
from sim.ui.state import FIELDS
from workloads.catalog import list_models
from workloads.stack import STACKS

LABELS = {
    "model": "model", "gpu": "GPU", "stack": "serving stack", "phase": "phase", "batch": "batch",
    "seq_len": "tokens", "dtype": "type", "tp": "TP", "ep": "EP", "pp": "PP", "dp": "DP",
    "sequence_parallel": "sequence parallel", "overlap_chunks": "chunks", "comm_ctas": "blocks",
    "sm_clock_mhz": "clock, MHz", "power_cap_w": "cap, W",
}  # fmt: skip
# What an empty field means.
EMPTY = {"comm_ctas": "library's", "sm_clock_mhz": "free", "power_cap_w": "TDP"}
PHASES = ("prefill", "decode")  # those that answer at once
WAIT_S = 0.05  # after a key, for the next one
WIDE = ("model", "gpu", "stack")
ROOFS = (
    "Lines: what arithmetic and HBM allow by the datasheet (dotted), and at this run's clock (solid). A marker is a "
    "kernel, as large as its share of the time."
)
CONFIG = {"displayModeBar": False, "responsive": True}


def ident(side: str, **what: str) -> dict[str, str]:
    """The id of a component of one side."""
    return {"side": side, **what}


def side(letter: str, fields: Mapping[str, Any], *, compared: bool) -> Any:
    """The column of one scenario."""
    outputs = [
        html.Div(id=ident(letter, out="text"), className="answer"),
        html.Div([html.H3("Memory"), html.Div(id=ident(letter, out="memory"))], className="card"),
        _card(letter, "timeline", "Timeline", _legend(), html.P(id=ident(letter, out="note"), className="note")),
        _card(letter, "roofline", "Roofline", _legend(), html.P(ROOFS, className="note")),
        html.Div(id=ident(letter, out="end"), className="answer"),
    ]
    heading = [html.H2(letter.upper())] if compared else []
    return html.Section(
        [
            *heading,
            html.Div([_control(letter, name, fields.get(name)) for name in FIELDS], className="form card"),
            html.Div(outputs, className="outputs", id=ident(letter, out="all")),
            dcc.Store(id=ident(letter, store="figures")),
            dcc.Store(id=ident(letter, store="pictures")),
            dcc.Store(id=ident(letter, store="shown")),
        ],
        className="side" + " compared" * compared,
        id=f"side-{letter}",
    )


def _card(letter: str, name: str, title: str, *more: Any) -> Any:
    return html.Div([html.H3(title), html.Div(id=f"{name}-{letter}"), *more], className="card")


def _legend() -> Any:
    """The colours of kernels, in words that wrap as the page is wide."""
    families = [(name, colour) for name, colour in COLOURS.items() if name != "idle"]
    return html.P(
        [html.Span([html.I(style={"background": colour}), name]) for name, colour in families], className="legend"
    )


def _control(letter: str, name: str, value: Any) -> Any:
    field = Scenario.model_fields[name]
    own = ident(letter, field=name)
    if name == "sequence_parallel":
        choice = dcc.Checklist(id=own, options=[{"label": "on", "value": "true"}], value=["true"] if value else [])
        return _labelled(name, choice)
    if (options := _options(name)) is not None:
        chosen = value if value is not None else None if field.is_required() else field.default
        return _labelled(name, dcc.Dropdown(id=own, options=options, value=chosen, clearable=False))
    default = EMPTY.get(name) or str(field.default)
    number = None if value is None else float(value) if "." in str(value) else int(value)
    entry = dcc.Input(
        id=own, type="number", value=number, min=1, placeholder=default, debounce=WAIT_S, className="number",
        inputMode="numeric",
    )  # fmt: skip
    return _labelled(name, entry)


def _labelled(name: str, control: Any) -> Any:
    description = Scenario.model_fields[name].description
    return html.Div(
        [html.Label(LABELS[name]), control], className="field" + " wide" * (name in WIDE), title=description or ""
    )


def _options(name: str) -> list[str] | None:
    match name:
        case "model":
            return list(list_models())
        case "gpu":
            return list(list_gpus())
        case "stack":
            return [name for name, stack in STACKS.items() if not (stack.of_diffusion or stack.framework)]
        case "phase":
            return list(PHASES)
        case "dtype":
            return list(get_args(Scenario.model_fields["dtype"].annotation))
        case _:
            return None


def headline(found: Answer) -> Any:
    """Title and headline figures."""
    return [html.H3(found.title), html.Div([_tile(*tile) for tile in found.tiles], className="tiles")]


MEMORY = (
    ("weights", "weights", "#3f7fe0"),
    ("kv_cache", "KV cache", "#2f9f72"),
    ("activations", "activations", "#e07b2a"),
    ("room", "free", "#d8dce2"),
)


def memory(held: Mapping[str, float]) -> Any:
    """One bar, the GPU's memory long, and its parts in GB."""
    shares = [
        html.Span(style={"background": colour, "width": f"{max(0.0, held[key]) / held['gpu']:.2%}"})
        for key, _, colour in MEMORY
    ]
    words = [
        html.Span([html.I(style={"background": colour}), f"{name} {held[key] / GB:.1f} GB"])
        for key, name, colour in MEMORY
    ]
    return [html.Div(shares, className="bar"), html.P(words, className="legend")]


def refused(message: str) -> Any:
    """Why there is no answer, in the one line of the command."""
    return html.P(message, className="refused", role="alert")


def _tile(label: str, value: str, small: str) -> Any:
    return html.Div([html.Span(label), html.B(value), html.Small(small)], className="tile")


def ending(found: Answer, trace: str) -> Any:
    """How to take the answer elsewhere: the timeline, the command, and what the figures rest on."""
    return [
        html.Div(
            [
                html.Button(
                    "Open in Perfetto", className="perfetto", **{"data-trace": trace, "data-title": found.title}
                ),
                html.A("Save the trace", href=trace, download="timeline.json.gz"),
            ],
            className="buttons",
        ),
        html.Pre(found.command, className="command"),
        html.P(f"These numbers are {found.basis}.", className="note"),
        html.P(f"Simulated in {found.seconds * 1e3:.0f} ms.", className="note"),
    ]


def differences(rows: Sequence[tuple[str, str]]) -> Any:
    """B against A, a tile a figure."""
    return [html.H2("B against A"), html.Div([_tile(name, value, "") for name, value in rows], className="tiles")]


def study() -> Any:
    """The part of the page for the overlap study."""
    return html.Section(
        [
            html.H2("Overlap study"),
            html.P(
                "A with every number of chunks and communication blocks; schedules that nothing beats in both time and "
                "energy are marked with a star. A click on a cell shows that schedule above.",
                className="note",
            ),
            html.Div(
                [
                    html.Button("Run the study of A", id="run-study", n_clicks=0),
                    dcc.RadioItems(id="measure", options=["latency", "energy"], value="latency", inline=True),
                ],
                className="buttons",
            ),
            dcc.Loading(html.Div(id="advice"), type="dot", delay_show=200),
            html.Div(
                [
                    html.Div(dcc.Graph(id="heat", figure={}, config=CONFIG), className="card"),
                    html.Div(dcc.Graph(id="front", figure={}, config=CONFIG), className="card"),
                ],
                id="study-pictures",
                className="pair",
                hidden=True,
            ),
        ],
        className="study",
    )
