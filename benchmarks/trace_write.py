"""Trace writing: one million slices to .json.gz (``python benchmarks/trace_write.py``)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from traces.records import Lane, SpanKind, Spans, Trace
from traces.write.chrome import write_chrome

SLICES, GPUS, KINDS = 1_000_000, 8, 13


def main() -> None:
    """Print seconds and megabytes."""
    per_gpu = SLICES // GPUS
    start = np.tile(np.arange(per_gpu, dtype=np.int64) * 5_000_000, GPUS)
    trace = Trace(
        processes={gpu: f"GPU {gpu}" for gpu in range(GPUS)},
        lanes=[Lane(pid=gpu, tid=7, name="stream 7", order=7) for gpu in range(GPUS)],
        kinds=[
            SpanKind(name=f"kernel {i}", category="kernel", args={"m": 4096, "n": i, "k": 8192}, timed=True)
            for i in range(KINDS)
        ],
        spans=Spans(
            lane=np.repeat(np.arange(GPUS, dtype=np.int64), per_gpu),
            kind=np.arange(SLICES, dtype=np.int64) % KINDS,
            start_ps=start,
            end_ps=start + 4_000_000,
            energy_j=np.full(SLICES, 0.0021),
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json.gz"
        begin = time.perf_counter()
        write_chrome(trace, path)
        print(f"{SLICES:,} slices: {time.perf_counter() - begin:.2f} s, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
