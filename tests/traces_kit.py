"""Small traces of any shape, as files; and the folder of real ones."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from traces.read.load import read_trace

RECORDED = Path(__file__).parents[1] / "records"
SHARED = Path(os.environ.get("WATTLINE_SHARED", Path(__file__).parents[2] / "shared"))
PUBLIC, OURS = SHARED / "public" / "traces", SHARED / "measurements" / "kineto"
REAL = sorted([*PUBLIC.rglob("*.json.gz"), *OURS.glob("*.json.gz")])
needs_real = pytest.mark.skipif(not REAL, reason=f"no traces under {SHARED}: set WATTLINE_SHARED")

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A kernel of a recorded trace; times in microseconds of its file's clock."""

    name: str
    stream: int
    blocks: int
    start: float
    end: float

    @property
    def us(self) -> float:
        """How long it ran."""
        return self.end - self.start

    def beside(self, other: Ran) -> bool:
        """Whether both ran at some time."""
        return self.start < other.end and other.start < self.end


def recorded(gpu: str, name: str, rank: int = 0) -> list[Ran]:
    """Kernels of one rank of a committed trace, by start."""
    return ran(RECORDED / gpu / "traces" / f"{name}.rank{rank}.json.gz")


def ran(path: Path) -> list[Ran]:
    """Kernels of a trace, by start."""
    capture = read_trace(path)
    work, origin = capture.work, capture.work.start_ns.min()
    return [
        Ran(
            name=capture.names[work.name[row]],
            stream=int(work.stream[row]),
            blocks=int(work.blocks[row]),
            start=int(work.start_ns[row] - origin) / 1e3,
            end=int(work.end_ns[row] - origin) / 1e3,
        )
        for row in capture.kernels[np.argsort(work.start_ns[capture.kernels], kind="stable")]
    ]


def recorded_rows(path: str, **fields: Any) -> list[dict[str, Any]]:
    """Rows of a committed file of records that have these fields."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (RECORDED / path).read_text().splitlines()]
    return [row for row in rows if all(row.get(key) == value for key, value in fields.items())]


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
