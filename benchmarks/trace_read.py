"""Time and memory of reading a million kernel events: ``python benchmarks/trace_read.py [EVENTS] [--launches]``."""

from __future__ import annotations

import gzip
import resource
import sys
import tempfile
import time
from pathlib import Path

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


def main() -> None:
    """Write once, read in a process of known memory."""
    events = next((int(word) for word in sys.argv[1:] if word.isdigit()), 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json.gz"
        write(path, events, "--launches" in sys.argv)
        begin, cpu = time.perf_counter(), time.process_time()
        capture = read_trace(path)
        read_s, read_cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        summary = summarise(capture, classify(capture))
        total_s = time.perf_counter() - begin
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    took = f"read {read_s:.1f} s ({read_cpu_s:.1f} s of processor), with classes and summary {total_s:.1f} s"
    print(f"{summary.kernels:,} kernels: {took}, {peak_gb:.2f} GB")


if __name__ == "__main__":
    main()
