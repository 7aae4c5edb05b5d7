"""Open pages in a headless Chromium, as a phone and as a desktop show them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PHONE, DESKTOP = 390, 1280


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips, saying so, where there is none."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None or find_spec("playwright") is None:
        pytest.skip("pages are opened where Chromium is on the PATH and playwright installed (pip install -e '.[dev]')")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, *, width: int) -> Iterator[Any]:
    """``path`` in a window without a network; errors that the page reports fail the test."""
    window = browser.new_context(viewport={"width": width, "height": 900}, offline=True, has_touch=width == PHONE)
    page = window.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
    page.goto(path.resolve().as_uri())
    yield page
    assert said == []
    window.close()
