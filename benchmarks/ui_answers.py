"""How long the page of ``wattline ui`` takes to answer: ``python benchmarks/ui_answers.py`` (Chromium and playwright).

From the last key in a field to the moment at which both pictures are drawn, in a browser 1280 pixels wide. The page
waits 0.1 s of it for a further key.
"""

from __future__ import annotations

import statistics
import threading
from typing import Any

from sim.ui.app import page
from tests.browser_kit import DESKTOP, chromium

CHANGES = (
    ("batch", (3, 4, 5, 6)),
    ("tokens", (1024, 2048, 3072)),
    ("clock, MHz", (1410, 1200, 1005)),
    ("TP", (8, 2, 4)),
    ("chunks", (1, 2, 4, 8)),
    ("blocks", (4, 8, 16)),
)
START = "a.model=llama3-70b&a.gpu=h100-sxm-80gb&a.batch=2&a.seq_len=4096&a.tp=4&a.sequence_parallel=true"
WATCH = """() => {
  const asked = window.fetch;
  window.fetch = async (...words) => {
    window.sent ??= performance.now();
    const answer = await asked(...words);
    window.heard ??= performance.now();
    return answer;
  };
  document.querySelectorAll("#side-a .js-plotly-plot").forEach((graph, place) =>
    graph.on("plotly_afterplot", () => { window.drawn[place] ??= performance.now(); }));
}"""
FORGET = "() => { window.sent = window.heard = undefined; window.drawn = []; }"
TIMES = "([begun]) => [window.sent - begun, window.heard - begun, Math.max(...window.drawn) - begun]"
READY = "() => window.heard && window.drawn.filter(Boolean).length == 2"


def answers(view: Any) -> dict[str, list[tuple[float, float, float]]]:
    """Milliseconds from the key to the request, the answer and the drawn pictures, by the field that changed."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    view.evaluate(WATCH)
    for label, values in CHANGES:
        field = view.locator("#side-a .field").filter(has=view.get_by_text(label, exact=True)).locator("input")
        for value in values:
            view.evaluate(FORGET)
            field.focus()
            begun = view.evaluate("performance.now()")
            field.fill(str(value))
            view.wait_for_function(READY)
            found.setdefault(label, []).append(tuple(view.evaluate(TIMES, [begun])))
            view.wait_for_timeout(500)
    return found


def main() -> None:
    """Print a line a field."""
    made = page(start=START)
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    with chromium() as browser:
        view = browser.new_page(viewport={"width": DESKTOP, "height": 900})
        view.goto(made.link)
        view.wait_for_selector("#side-a .js-plotly-plot .barlayer path")
        view.wait_for_timeout(3000)
        times = answers(view)
    print("field        request   answer  pictures (ms after the key: median, worst)")
    for label, rows in times.items():
        cells = (f"{statistics.median(column):4.0f} {max(column):4.0f}" for column in zip(*rows, strict=True))
        print(f"{label:10}", *cells)
    made.server.shutdown()


if __name__ == "__main__":
    main()
