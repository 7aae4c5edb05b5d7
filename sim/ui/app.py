"""The page's server: a Dash application under a path that only its reader knows, on this machine alone."""

from __future__ import annotations

import importlib
import secrets
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dash import ALL, MATCH, ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update
from flask import Response, abort, request
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from inputs.errors import WattlineError
from sim.explore.overlap import advice
from sim.explore.overlap_page import first_layers_trace
from sim.ui import form, pictures
from sim.ui.answer import BUSY, answer, beside
from sim.ui.pictures import Picture
from sim.ui.state import SIDES, given, scenario_of
from sim.ui.state import State as PageState
from sim.ui.study import studied

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class UiServer:
    """A server that is ready to answer, and its address, which holds the token."""

    server: BaseWSGIServer
    link: str


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: Any) -> None:
        """Nothing: a line a request would bury the address."""


def page(port: int = 0, start: str = "") -> UiServer:
    """The page on ``port`` (0: any free one), opened at the state of the link ``start``."""
    token = secrets.token_urlsafe(16)
    state = PageState.parse(start)
    server = make_server(HOST, port, application(token).server, threaded=True, request_handler=_Quiet)
    threading.Thread(target=_warm, args=(state,), daemon=True, name="warm up").start()
    return UiServer(server=server, link=f"http://{HOST}:{server.port}/{token}/?{state.query()}")


def _warm(state: PageState) -> None:
    """While the browser loads the page: answer what it will ask first, and import what only mixtures of experts use."""
    with suppress(WattlineError):  # the page will show it
        answer(state.a)
    importlib.import_module("scipy.optimize")


def application(token: str) -> Dash:
    """The Dash application under the path ``/token/``."""
    app = Dash(
        __name__,
        url_base_pathname=f"/{token}/",
        title="wattline",
        update_title="",
        suppress_callback_exceptions=True,
        enable_mcp=False,
        add_log_handler=False,
    )
    app.layout = html.Main([dcc.Location(id="url", refresh=False), html.Div(id="root")])
    _callbacks(app)
    _guard(app, token)
    return app


def _guard(app: Dash, token: str) -> None:
    """Answer only this machine's own browser, by name and with the token in the path."""

    @app.server.before_request
    def check() -> None:
        name = request.host.rsplit(":", 1)[0]
        if name not in (HOST, "localhost"):  # a foreign name that leads here
            abort(403, "wattline ui answers at 127.0.0.1 only")
        if not request.path.startswith(f"/{token}/"):
            abort(403, "wattline ui: take the address, with its token, that the command printed")

    @app.server.after_request
    def seal(response: Response) -> Response:
        response.headers["Referrer-Policy"] = "no-referrer"  # the token stays here
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        return response

    @app.server.get(f"/{token}/trace")
    def trace() -> Response:
        try:
            scenario = scenario_of(PageState.parse(request.query_string.decode()).a)
            with BUSY, tempfile.TemporaryDirectory() as folder:
                data = first_layers_trace(scenario, Path(folder))
        except WattlineError as error:
            return Response(str(error), status=400, mimetype="text/plain")
        return Response(data, mimetype="application/gzip")


def _callbacks(app: Dash) -> None:
    base = app.config.requests_pathname_prefix

    @app.callback(Output("root", "children"), Input("url", "search"))
    def show(search: str | None) -> Any:
        try:
            state = PageState.parse((search or "").removeprefix("?"))
        except WattlineError as error:
            return form.refused(str(error))
        return _root(state)

    @app.callback(
        Output({"side": MATCH, "out": "text"}, "children"),
        Output({"side": MATCH, "store": "pictures"}, "data"),
        Output({"side": MATCH, "out": "memory"}, "children"),
        Output({"side": MATCH, "out": "note"}, "children"),
        Output({"side": MATCH, "out": "end"}, "children"),
        Output({"side": MATCH, "store": "figures"}, "data"),
        Output({"side": MATCH, "out": "all"}, "className"),
        Input({"side": MATCH, "field": ALL}, "value"),
        State({"side": MATCH, "field": ALL}, "id"),
    )
    def answered(values: list[Any], ids: list[dict[str, str]]) -> Any:
        fields = given([one["field"] for one in ids], [_one(value) for value in values])
        try:
            found = answer(fields)
        except WattlineError as error:
            return form.refused(str(error)), no_update, [], "", [], None, "outputs without"
        trace = f"{base}trace?{PageState(a=fields).query()}"
        drawn = {f"timeline-{ids[0]['side']}": found.timeline, f"roofline-{ids[0]['side']}": found.roofline}
        end = form.ending(found, trace)
        held, note = form.memory(found.memory), found.timeline_note
        return form.headline(found), drawn, held, note, end, found.figures, "outputs"

    @app.callback(Output("difference", "children"), Input({"side": ALL, "store": "figures"}, "data"))
    def compared(figures: list[Any]) -> Any:
        if len(figures) < 2 or not all(figures):
            return []
        return form.differences(beside(*figures))

    @app.callback(
        Output("sides", "children"),
        Output("sides", "className"),
        Output("compare", "children"),
        Input("compare", "n_clicks"),
        State({"side": ALL, "field": ALL}, "value"),
        State({"side": ALL, "field": ALL}, "id"),
        prevent_initial_call=True,
    )
    def second(_: int, values: list[Any], ids: list[dict[str, str]]) -> Any:
        sides = _sides(values, ids)
        state = PageState(a=sides["a"], b=None if "b" in sides else sides["a"])
        return _columns(state), _layout(state), _compare(state)

    @app.callback(
        Output("advice", "children"),
        Output("heat", "figure"),
        Output("heat", "style"),
        Output("front", "figure"),
        Output("front", "style"),
        Output("study-pictures", "hidden"),
        Input("run-study", "n_clicks"),
        Input("measure", "value"),
        State({"side": "a", "field": ALL}, "value"),
        State({"side": "a", "field": ALL}, "id"),
        prevent_initial_call=True,
    )
    def overlap(clicks: int, measure: str, values: list[Any], ids: list[dict[str, str]]) -> Any:
        if not clicks:
            return [no_update] * 6
        try:
            points = studied(_sides(values, ids)["a"])
        except WattlineError as error:
            return form.refused(str(error)), *[no_update] * 4, True
        heat, front = pictures.heat(points, measure), pictures.front(points)
        return advice(points), heat.figure, _tall(heat), front.figure, _tall(front), False

    @app.callback(
        Output({"side": "a", "field": ALL}, "value"),
        Input("heat", "clickData"),
        State({"side": "a", "field": ALL}, "id"),
        prevent_initial_call=True,
    )
    def taken(click: dict[str, Any] | None, ids: list[dict[str, str]]) -> Any:
        if click is None:
            return [no_update] * len(ids)
        (point,) = click["points"]
        chosen = pictures.of_cell(point["x"], point["y"])
        return [chosen.get(one["field"], no_update) for one in ids]

    # Pictures are HTML as it stands: thousands of components would take React longer than the browser takes to draw.
    app.clientside_callback(
        ClientsideFunction("wattline", "draw"),
        Output({"side": MATCH, "store": "shown"}, "data"),
        Input({"side": MATCH, "store": "pictures"}, "data"),
    )

    # The address follows the form, so that it can be kept; the server need not be asked for it.
    app.clientside_callback(
        ClientsideFunction("wattline", "link"),
        Output("link", "href"),
        Input({"side": ALL, "field": ALL}, "value"),
        State({"side": ALL, "field": ALL}, "id"),
    )


def _root(state: PageState) -> list[Any]:
    return [
        html.Header(
            [
                html.H1("wattline"),
                html.Div(
                    [
                        html.Button(_compare(state), id="compare", n_clicks=0),
                        html.A(
                            "Link to this state",
                            id="link",
                            href="#",
                            title="copy this address; without a server: wattline ui 'LINK'",
                        ),
                    ],
                    className="buttons",
                ),
            ]
        ),
        html.Section(id="difference"),
        html.Div(_columns(state), id="sides", className=_layout(state)),
        form.study(),
    ]


def _columns(state: PageState) -> list[Any]:
    return [form.side(letter, fields, compared=state.b is not None) for letter, fields in state.sides.items()]


def _layout(state: PageState) -> str:
    return "sides one" if state.b is None else "sides two"


def _compare(state: PageState) -> str:
    return "Compare with a second scenario" if state.b is None else "Close the second scenario"


def _sides(values: list[Any], ids: list[dict[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for letter in SIDES:
        mine = [(one["field"], _one(value)) for one, value in zip(ids, values, strict=True) if one["side"] == letter]
        if mine:
            found[letter] = given([name for name, _ in mine], [value for _, value in mine])
    return found


def _tall(picture: Picture) -> dict[str, str]:
    return {"height": f"{picture.height_px}px"}


def _one(value: Any) -> Any:
    """A ticked box is a list of one."""
    return bool(value) if isinstance(value, list) else value
