"""How long the page of ``wattline ui`` takes to answer: ``python benchmarks/ui_answers.py`` (Chromium and playwright).

From the last key in a field to the moment at which both pictures are drawn, in a browser 1280 pixels wide. The page
waits :data:`WAIT_S` for a further key first. CPU milliseconds are of the server's process and of the page's main thread
(Chromium's ``threadTicks``); with the wait they are what an answer takes where nothing else runs.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

from sim.ui.app import page
from sim.ui.form import WAIT_S
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
  const draw = window.dash_clientside.wattline.draw;
  window.dash_clientside.wattline.draw = pictures => {
    const shown = draw(pictures);
    requestAnimationFrame(() => setTimeout(() => { window.drawn ??= performance.now(); }));  // painted
    return shown;
  };
}"""
FORGET = "() => { window.sent = window.heard = window.drawn = undefined; }"
TIMES = "([begun]) => [window.sent - begun, window.heard - begun, window.drawn - begun]"
SETTLED_MS = 1500
READY = "() => window.heard && window.drawn"


def answers(view: Any) -> dict[str, list[tuple[float, ...]]]:
    """Milliseconds from the key to the request, the answer and the drawn pictures, then CPU milliseconds of the server,
    of the page, and with the wait, by the field that changed."""
    found: dict[str, list[tuple[float, ...]]] = {}
    console = view.context.new_cdp_session(view)
    console.send("Performance.enable", {"timeDomain": "threadTicks"})

    def page_cpu_ms() -> float:
        metrics = {one["name"]: one["value"] for one in console.send("Performance.getMetrics")["metrics"]}
        return 1e3 * float(metrics["TaskDuration"])

    view.evaluate(WATCH)
    for label, values in CHANGES:
        field = view.locator("#side-a .field").filter(has=view.get_by_text(label, exact=True)).locator("input")
        for value in values:
            view.evaluate(FORGET)
            field.focus()
            view.wait_for_timeout(200)
            server_s, page_ms = time.process_time(), page_cpu_ms()
            begun = view.evaluate("performance.now()")
            field.fill(str(value))
            view.wait_for_timeout(SETTLED_MS)  # asking whether it is drawn would be work of the page
            cpu = 1e3 * (time.process_time() - server_s), page_cpu_ms() - page_ms
            view.wait_for_function(READY)
            walls = view.evaluate(TIMES, [begun])
            found.setdefault(label, []).append((*walls, *cpu, 1e3 * WAIT_S + sum(cpu)))
    return found


def main() -> None:
    """Print a line a field."""
    made = page(start=START)
    threading.Thread(target=made.server.serve_forever, daemon=True).start()
    with chromium() as browser:
        view = browser.new_page(viewport={"width": DESKTOP, "height": 900})
        view.goto(made.link)
        view.wait_for_selector("#side-a .track i")
        view.wait_for_timeout(3000)
        times = answers(view)
    print("field        request   answer pictures | CPU: server      page  with the wait (ms: median, worst)")
    for label, rows in times.items():
        cells = (f"{statistics.median(column):4.0f} {max(column):4.0f}" for column in zip(*rows, strict=True))
        print(f"{label:10}", *cells)
    made.server.shutdown()


if __name__ == "__main__":
    main()
