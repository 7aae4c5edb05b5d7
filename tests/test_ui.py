"""``wattline ui``: driven in a browser as a phone and a desktop show it; only this machine's reader is answered."""

from __future__ import annotations

import gzip
import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from sim import simulate
from sim.cli import app as command_line
from sim.cli import main
from sim.errors import SimError
from sim.result.report import duration
from sim.ui.state import State, given, scenario_of
from tests.browser_kit import DESKTOP, PHONE, chromium

SMALL = "a.model=llama3-8b&a.tp=2&a.batch=2&a.seq_len=1024"
TOKEN = "a-token"
PATIENCE_MS = 60_000  # before a page that does not answer fails its test, on a machine that others load too


# -- the state and its link ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        State(a={"model": "llama3-8b"}),
        State(a={"model": "llama3-70b", "tp": "4", "sequence_parallel": "true"}, b={"model": "gpt2", "batch": "8"}),
    ],
)
def test_a_link_reproduces_the_state(state: State) -> None:
    assert State.parse(state.query()) == state
    assert State.parse(f"http://127.0.0.1:1/token/?{state.query()}") == state


@pytest.mark.parametrize("query", ["c.model=llama3-8b", "model=llama3-8b", "a.colour=red"])
def test_links_of_something_else_are_refused_by_name(query: str) -> None:
    with pytest.raises(SimError, match=r"link of the page: unknown '.*': give a.FIELD or b.FIELD"):
        State.parse(query)


def test_empty_controls_are_not_given() -> None:
    fields = given(["model", "batch", "sequence_parallel", "tp", "stack"], ["llama3-8b", None, False, 2, ""])
    assert fields == {"model": "llama3-8b", "tp": 2}
    assert scenario_of(fields).tp == 2
    with pytest.raises(SimError, match="no model is chosen: pick one"):
        scenario_of({"tp": 2})


# -- without the package, and the command ----------------------------------------------------------------------


def test_a_base_install_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sim.output.files.installed", lambda name: name != "dash")
    with pytest.raises(SystemExit) as stop:
        main(["ui"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "wattline: wattline ui needs the extra: pip install 'wattline[ui]'\n"


def test_a_foreign_link_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("dash", reason="pip install 'wattline[ui]'")
    with pytest.raises(SystemExit) as stop:
        main(["ui", "--no-open", "x.model=llama3-8b"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("wattline: link of the page: unknown 'x.model'")
    assert error.count("\n") == 1


# -- the server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Any:
    pytest.importorskip("dash", reason="pip install 'wattline[ui]'")
    from sim.ui.app import application

    return application(TOKEN).server.test_client()


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        (f"/{TOKEN}/", "127.0.0.1:8061", 200),
        (f"/{TOKEN}/", "localhost:8061", 200),
        (f"/{TOKEN}/", "evil.example:8061", 403),
        ("/", "127.0.0.1:8061", 403),
        ("/another/", "127.0.0.1:8061", 403),
        (f"/{TOKEN}", "127.0.0.1:8061", 403),
        ("/another/_dash-layout", "127.0.0.1:8061", 403),
        (f"/{TOKEN}/_dash-layout", "127.0.0.1:8061", 200),
    ],
)
def test_only_this_machines_reader_with_the_token_is_answered(client: Any, path: str, host: str, status: int) -> None:
    answer = client.get(path, headers={"Host": host})
    assert answer.status_code == status
    assert answer.headers["Referrer-Policy"] == "no-referrer" and answer.headers["X-Frame-Options"] == "DENY"


def test_the_trace_of_a_side_holds_its_first_layers(client: Any) -> None:
    answer = client.get(f"/{TOKEN}/trace?{SMALL}", headers={"Host": "127.0.0.1"})
    events = json.loads(gzip.decompress(answer.data))["traceEvents"]
    layers = {e["name"] for e in events if e.get("ph") == "X" and e.get("tid") == 2}
    assert answer.status_code == 200 and len([name for name in layers if name.startswith("layer")]) == 2
    refused = client.get(f"/{TOKEN}/trace?a.model=llama3-8b&a.tp=3", headers={"Host": "127.0.0.1"})
    assert refused.status_code == 400 and "tp" in refused.text and "\n" not in refused.text


# -- in a browser ----------------------------------------------------------------------------------------------

VIEWER = """<script>
onmessage = event => {
  if (event.data === "PING") event.source.postMessage("PONG", event.origin);
  else window.given = event.data.perfetto.title + ", " + event.data.perfetto.buffer.byteLength + " bytes";
};
</script>"""


@pytest.fixture(scope="module")
def link() -> Iterator[str]:
    pytest.importorskip("dash", reason="pip install 'wattline[ui]'")
    from sim.ui.app import page

    made = page(start=SMALL)
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made.link
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@contextmanager
def visited(browser: Any, link: str, *, width: int = DESKTOP) -> Iterator[Any]:
    """The page in a window; it must report no error and ask nothing of any other machine."""
    window = browser.new_context(viewport={"width": width, "height": 900}, has_touch=width == PHONE)
    window.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=VIEWER, content_type="text/html"))
    window.set_default_timeout(PATIENCE_MS)
    page = window.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    own = ("http://127.0.0.1:", "data:", "blob:")
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith(own) else None)
    page.goto(link)
    page.wait_for_selector("#side-a .tile, .refused")
    yield page
    assert said == []
    window.close()


def fits(page: Any) -> bool:
    """Whether nothing stands out to the right."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


def tile(page: Any, side: str = "a", number: int = 0) -> Any:
    return page.locator(f"#side-{side} .tile b").nth(number)


def control(page: Any, side: str, label: str) -> Any:
    return page.locator(f"#side-{side} .field").filter(has=page.get_by_text(label, exact=True)).locator("input")


def expect(found: Any) -> Any:
    from playwright.sync_api import expect as wait

    wait.set_options(timeout=PATIENCE_MS)
    return wait(found)


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_page_fits_its_window_whatever_it_shows(browser: Any, link: str, width: int) -> None:
    with visited(browser, link, width=width) as page:
        page.wait_for_selector("#side-a .track i")
        assert fits(page)
        page.click("#run-study")
        page.wait_for_selector("#heat .heatmaplayer image, #heat .heatmaplayer .hm")
        assert fits(page)
        page.click("#compare")
        page.wait_for_selector("#side-b .tile")
        page.wait_for_selector("#difference .tile")
        assert fits(page)
        control(page, "b", "TP").fill("3")
        page.wait_for_selector("#side-b .refused")
        assert fits(page)


def test_a_change_answers_as_simulating_it_does(browser: Any, link: str) -> None:
    before = simulate(model="llama3-8b", tp=2, batch=2, seq_len=1024)
    after = simulate(model="llama3-8b", tp=2, batch=6, seq_len=1024)
    with visited(browser, link) as page:
        expect(tile(page)).to_have_text(duration(before.latency_s))
        control(page, "a", "batch").fill("6")
        expect(tile(page)).to_have_text(duration(after.latency_s))
        expect(tile(page, number=1)).to_have_text(f"{after.energy_j:.4g} J")
        expect(tile(page, number=2)).to_have_text(f"{after.tokens_per_s:,.0f}")
        control(page, "a", "clock, MHz").fill("900")
        expect(tile(page, number=5)).to_have_text("900 MHz")
        shown = page.locator("#side-a pre.command")
        expect(shown).to_have_text(
            "wattline simulate --model llama3-8b --batch 6 --seq-len 1024 --tp 2 --sm-clock-mhz 900"
        )
        words = [*shlex.split(shown.text_content())[1:], "--quiet", "--json"]
        data = json.loads(CliRunner().invoke(command_line, words).stdout)
        expect(tile(page)).to_have_text(duration(data["latency_s"]))


def test_the_address_follows_and_brings_the_same_page(browser: Any, link: str) -> None:
    with visited(browser, link) as page:
        control(page, "a", "tokens").fill("2048")
        # Dash reads a field some 0.2 s after the last key, and says so on the console where the field has gone by then.
        page.wait_for_function("location.search.includes('2048')")
        page.click("#compare")
        page.wait_for_selector("#side-b .tile")
        control(page, "b", "batch").fill("1")
        page.wait_for_function("location.search.includes('b.batch=1')")
        expect(page.locator("#difference .tile").first).not_to_contain_text("+0.0 %")
        address, tiles = page.url, page.locator(".tile").all_text_contents()
        assert page.get_attribute("#link", "href") in address
    with visited(browser, address) as again:
        again.wait_for_selector("#difference .tile")
        assert again.locator(".tile").all_text_contents() == tiles


def test_what_cannot_run_says_why_in_one_line_and_shows_no_picture(browser: Any, link: str) -> None:
    with visited(browser, link) as page:
        page.wait_for_selector("#side-a .track i")
        control(page, "a", "TP").fill("3")
        told = page.wait_for_selector("#side-a .refused")
        assert "tp = 3" in told.text_content()
        assert not page.locator("#side-a .outputs .card").first.is_visible()
        control(page, "a", "TP").fill("1")
        page.wait_for_selector("#side-a .tile")
        page.click("#run-study")
        expect(page.locator("#advice")).to_contain_text("an overlap study needs TP or EP of at least 2")
    with visited(browser, link.partition("?")[0] + "?q.model=x") as page:
        expect(page.locator(".refused")).to_contain_text("unknown 'q.model'")


def test_a_cell_of_the_heat_map_is_the_schedule_that_a_click_on_it_shows(browser: Any, link: str) -> None:
    with visited(browser, link) as page:
        page.click("#run-study")
        expect(page.locator("#advice")).to_contain_text("the best overlap")
        page.wait_for_selector("#heat .heatmaplayer image, #heat .heatmaplayer .hm")
        data = page.evaluate("document.querySelector('#heat .js-plotly-plot').data[0]")
        column, row = data["x"].index("4"), data["y"].index("8")
        cells = page.locator("#heat .nsewdrag")
        cells.scroll_into_view_if_needed()
        box = cells.bounding_box()
        across, up = (column + 0.5) / len(data["x"]), (row + 0.5) / len(data["y"])
        page.mouse.move(box["x"] + across * box["width"] - 5, box["y"] + (1 - up) * box["height"])
        page.mouse.move(box["x"] + across * box["width"], box["y"] + (1 - up) * box["height"])
        page.wait_for_selector("#heat .hoverlayer .hovertext")
        page.mouse.click(box["x"] + across * box["width"], box["y"] + (1 - up) * box["height"])
        expect(control(page, "a", "chunks")).to_have_value("4")
        expect(control(page, "a", "blocks")).to_have_value("8")
        expect(tile(page)).to_have_text(duration(data["z"][row][column] * 1e-3))


def test_the_timeline_goes_to_the_perfetto_viewer(browser: Any, link: str) -> None:
    with visited(browser, link) as page:
        with page.expect_popup() as opened:
            page.click("#side-a button.perfetto")
        viewer = opened.value
        viewer.wait_for_function("window.given")
        title, _, size = viewer.evaluate("window.given").rpartition(", ")
        assert title == "llama3-8b prefill on 2 x h100-sxm-80gb" and int(size.split()[0]) > 1000
