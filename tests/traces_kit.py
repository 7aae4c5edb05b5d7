"""Small traces of any shape, as files; and the folder of real ones."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[2] / "shared"))
PUBLIC, OURS = SHARED / "public" / "traces", SHARED / "measurements" / "kineto"
REAL = sorted([*PUBLIC.rglob("*.json.gz"), *OURS.glob("*.json.gz")])
needs_real = pytest.mark.skipif(not REAL, reason=f"no traces under {SHARED}: set WATTLINE_SHARED")

Event = dict[str, Any]


def kernel(
    name: str, ts: float | str, dur: float, *, stream: int = 7, correlation: int | None = None, **more: Any
) -> Event:
    """A kernel event of device 0; ``more`` goes into its arguments."""
    args = {"device": 0, "stream": stream} | ({} if correlation is None else {"correlation": correlation}) | more
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, correlation: int, *, name: str = "cudaLaunchKernel", dur: float = 2.0) -> Event:
    """A launching call of host thread 1."""
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 99, "tid": 1, "ts": ts, "dur": dur, "args": args}


def write(path: Path, events: list[Event] | str, **metadata: Any) -> Path:
    """A trace file; ``events`` given as text go in as they are."""
    text = events if isinstance(events, str) else json.dumps(events)
    head = json.dumps({"schemaVersion": 1} | metadata)[:-1]
    path.write_text(f'{head}, "traceEvents": {text}, "traceName": "t"}}')
    return path


def plain(path: Path) -> dict[str, Any]:
    """The whole document through the standard library: the independent reader."""
    with gzip.open(path) as stream:
        document: dict[str, Any] = json.load(stream)
    return document
