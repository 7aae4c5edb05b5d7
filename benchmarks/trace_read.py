"""Reading large traces: ``python benchmarks/trace_read.py [--kernels N] [--out benchmarks/results.md]``.

Kernel events as Kineto writes them, alone and with as many launches; every file is read in a process of its own.
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

from results import machine, put, section

from traces.classify import classify
from traces.read.load import read_trace
from traces.summary import summarise

KERNEL = (
    '{{"ph": "X", "cat": "kernel", "name": "kernel_{name}", "pid": 0, "tid": 7, "ts": {us}.{ns:03d}, "dur": 22.336, '
    '"args": {{"External id": {number}, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {number}, '
    '"registers per thread": 63, "shared memory": 32, "blocks per SM": 7.757576, "warps per SM": 62.060608, '
    '"grid": [1024, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 50}}}}'
)
LAUNCH = (
    '{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": {us}.{ns:03d}, '
    '"dur": 4.1, "args": {{"External id": {number}, "cbid": 211, "correlation": {number}}}}}'
)


def write(path: Path, events: int, launches: bool) -> None:
    """Kineto's way of writing ``events`` kernels, and as many launches."""
    with gzip.open(path, "wt", compresslevel=1) as out:
        out.write('{"schemaVersion": 1, "baseTimeNanoseconds": 1790857026000000000, "traceEvents": [\n')
        for number in range(events):
            at = {"name": number % 97, "us": 4966705133252 + number * 23, "ns": number % 1000, "number": number}
            out.write(",\n" * bool(number) + KERNEL.format(**at))
            if launches:
                out.write(",\n" + LAUNCH.format(**at))
        out.write("\n]}\n")


def measure(path: Path) -> tuple[str, ...]:
    """Read ``path`` in this process: kernels, seconds of wall and processor, seconds with classes and summary, GB."""
    begin, cpu = time.perf_counter(), time.process_time()
    capture = read_trace(path)
    read_s, read_cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    summary = summarise(capture, classify(capture))
    cpu_s = time.process_time() - cpu
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return f"{summary.kernels:,}", f"{read_s:.1f}", f"{read_cpu_s:.1f}", f"{cpu_s:.1f}", f"{peak_gb:.2f}"


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="put the section into this Markdown file")
    arguments = parser.parse_args()
    where, rows = machine(), []
    with tempfile.TemporaryDirectory() as folder:
        for name, launches in (("kernels", False), ("kernels and launches", True)):
            path = Path(folder) / "trace.json.gz"
            write(path, arguments.kernels, launches)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append((name, *pool.apply(measure, (path,))))
    head = ("events", "kernels", "read s", "read CPU s", "with classes and summary, CPU s", "memory GB")
    text = section("Reading a trace", "python benchmarks/trace_read.py", where, head, rows)
    print(text)
    if arguments.out is not None:
        put(text, arguments.out)


if __name__ == "__main__":
    main()
