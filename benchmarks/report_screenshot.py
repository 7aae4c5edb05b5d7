"""A picture of an HTML report: ``python benchmarks/report_screenshot.py run.html OUT.png [--width 1280] [--dark]``.

Needs playwright in this Python and a Chromium on the PATH. The page is opened without a network.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

COLOURS = 96  # of the palette: enough for lines and text, a third of the bytes


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, help="pixels from the top [default: the whole page]")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no chromium on PATH: install it")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        window = browser.new_context(
            viewport={"width": arguments.width, "height": arguments.height or 900},
            color_scheme="dark" if arguments.dark else "light",
            offline=True,
        )
        page = window.new_page()
        page.goto(arguments.report.resolve().as_uri())
        page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)
        png = page.screenshot(full_page=arguments.height is None)
        browser.close()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        arguments.out, optimize=True
    )
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
