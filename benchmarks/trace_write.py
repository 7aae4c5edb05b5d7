"""Processor time to write a trace: ``python benchmarks/trace_write.py [--slices N] [--out benchmarks/results.md]``.

The trace is made up: 8 processes with one lane and one counter each, slices of 10 kinds end to end, every slice with
its joules. It goes to a temporary folder, in every format, each in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from results import machine, put, section

from traces.records import Counter, Lane, SpanKind, Spans, Trace
from traces.write.by_name import write_trace

GPUS, KINDS = 8, 10
SLICE_PS = 25_000_000


def made_up(slices: int) -> Trace:
    """A trace of ``slices`` kernels over eight GPUs, with a power counter that changes at every kernel."""
    per_gpu = slices // GPUS
    index = np.arange(per_gpu * GPUS, dtype=np.int64)
    start_ps = index % per_gpu * SLICE_PS
    kinds = [
        SpanKind(
            name=f"kernel_{number}",
            category="kernel",
            args={"stream": 7, "family": "gemm", "shape": f"4096x{1024 * (number + 1)}x8192", "blocks": 128 * number},
            timed=True,
        )
        for number in range(KINDS)
    ]
    return Trace(
        processes={gpu: f"GPU {gpu}" for gpu in range(GPUS)},
        lanes=[Lane(pid=gpu, tid=7, name="stream 7", order=7) for gpu in range(GPUS)],
        kinds=kinds,
        spans=Spans(
            lane=index // per_gpu,
            kind=index % KINDS,
            start_ps=start_ps,
            end_ps=start_ps + SLICE_PS,
            energy_j=0.01 + index % 997 * 1e-6,
        ),
        counters=[
            Counter(
                pid=gpu,
                name="power W",
                time_ps=start_ps[:per_gpu],
                value=400.0 + np.arange(per_gpu, dtype=np.float64) % 300,
            )
            for gpu in range(GPUS)
        ],
    )


def measure(ending: str, slices: int) -> tuple[str, ...]:
    """Write one file in this process: slices, values of counters, seconds of processor, MB of file and of memory."""
    trace = made_up(slices)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        path = write_trace(trace, Path(folder) / f"trace{ending}")
        seconds = time.process_time() - begin
        file_mb = path.stat().st_size / 1e6
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    values = sum(len(counter.value) for counter in trace.counters)
    return f"{len(trace.spans.start_ps):,}", f"{values:,}", f"{seconds:.1f}", f"{file_mb:.1f}", f"{peak_mb:,.0f}"


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    where, rows = machine(), []
    for ending in (".json.gz", ".json", ".pftrace", ".pftrace.gz"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append((ending, *pool.apply(measure, (ending, arguments.slices))))
    head = ("format", "slices", "counter values", "processor s", "file MB", "memory MB")
    text = section("Writing a trace", "python benchmarks/trace_write.py", where, head, rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
