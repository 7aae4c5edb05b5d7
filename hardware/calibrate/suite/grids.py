"""What a library launches on a part of the SMs: kernels with their grids, by the profiler, on CUDA green contexts.

``python -m hardware.calibrate.suite.grids --rows RECORDS --out grids.json`` on one NVIDIA GPU: three launches of each
row of kind ``partition``. Needs PyTorch and cuda-bindings.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardware.calibrate.suite import plan
from hardware.calibrate.suite.cases import build
from hardware.calibrate.suite.partitions import Partition, Splitter, on
from hardware.calibrate.suite.run import free_port
from hardware.calibrate.suite.timing import Bench
from hardware.calibrate.suite.worker import SuiteOptions, make_bench

LAUNCHES = 3


def launched(bench: Bench, work: Mapping[str, Any], own: Partition) -> list[dict[str, Any]]:
    """Kernels of some launches on a partition: name, grid, block, registers, shared memory (bytes), microseconds."""
    torch = bench.torch
    with on(bench, own):
        case = build(bench, work)
        case.launch(0)
        if bench.dry:
            return []
        bench.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as session:
            for i in range(LAUNCHES):
                case.launch(i)
            bench.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text("utf-8"))["traceEvents"])


def kernels_of(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Kernels among a profiler's events.

    >>> kernels_of([{"cat": "cpu_op"}, {"cat": "kernel", "name": "copy", "dur": 2.5, "args": {"grid": [8, 1, 1]}}])
    [{'name': 'copy', 'grid': [8, 1, 1], 'block': None, 'registers': None, 'shared': None, 'us': 2.5}]
    """
    return [
        {
            "name": event["name"][:160],
            "grid": event["args"].get("grid"),
            "block": event["args"].get("block"),
            "registers": event["args"].get("registers per thread"),
            "shared": event["args"].get("shared memory"),
            "us": round(event["dur"], 2),
        }
        for event in events
        if event.get("cat") == "kernel"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of this module: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m hardware.calibrate.suite.grids", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="records of kind partition: kernels and SMs")
    parser.add_argument("--out", type=Path, required=True, help="one JSON list")
    parser.add_argument("--dry-run", action="store_true", help="check every row without a GPU")
    arguments = parser.parse_args(argv)
    rows = [row for row in map(plan.asked, plan.load(arguments.rows)) if row["kind"] == "partition"]
    try:
        bench = make_bench(0, [], SuiteOptions(out=arguments.out, world=1, port=free_port(), dry=arguments.dry_run))
    except ImportError:
        print("grids: measuring needs PyTorch: pip install 'wattline[measure]'", file=sys.stderr)
        return 2
    splitter, seen = Splitter(bench), []
    for row in rows:
        asked = row["asked_sms"]
        own = splitter.whole() if asked is None else splitter.split(asked)[0]
        seen.append({"kernel": row["kernel"], "asked_sms": asked, "kernels": launched(bench, row["kernel"], own)})
    arguments.out.write_text(json.dumps(seen, separators=(",", ":")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
