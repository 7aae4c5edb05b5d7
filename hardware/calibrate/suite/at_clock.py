"""One kernel at a true SM clock: alone on a cool GPU, or between products that hold the GPU at its power cap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from hardware.calibrate.suite.cases import build
from hardware.calibrate.suite.plan import gemm
from hardware.calibrate.suite.timing import Bench, capture, new_slots, stamps_between
from hardware.errors import HardwareError

Row = Mapping[str, Any]
_LAUNCHES = 6  # of the kernel in a graph
_HEAVY_EACH = 5  # products before each launch
_HEAVY = gemm(4096, 8192, 8192)
# Seconds of replays, and from when on they count: the clock has fallen and stands.
_ALONE_S, _CAPPED_S = (0.15, 0.05), (1.0, 0.6)
_REST_S = 0.01  # between replays alone: the GPU stays far below its cap


def kernel_row(row: Row) -> dict[str, Any]:
    """The kernel row that an at_clock row stands for.

    >>> kernel_row({"kind": "at_clock", "work": "copy", "bytes_moved": 4096, "where": "alone"})
    {'kind': 'copy', 'bytes_moved': 4096}
    """
    return {"kind": row["work"], **{key: value for key, value in row.items() if key not in ("kind", "work", "where")}}


def measure_at_clock(bench: Bench, row: Row) -> dict[str, Any]:
    """Seconds between stamps around the kernel, and the SM clock between them: medians over its launches."""
    where = row["where"]
    if where not in ("alone", "capped"):
        raise HardwareError(f"where = '{where}': alone or capped")
    heavy = build(bench, _HEAVY) if where == "capped" else None
    case = None if row["work"] == "nothing" else build(bench, kernel_row(row))
    slots = new_slots(bench, 2 * _LAUNCHES)

    def body() -> None:
        for i in range(_LAUNCHES):
            if heavy is not None:
                for j in range(_HEAVY_EACH):
                    heavy.launch(i + j)
            bench.kernels.stamp(slots[2 * i])
            if case is not None:
                case.launch(i)
            bench.kernels.stamp(slots[2 * i + 1])

    replay = capture(bench, body)
    last_s, counts_s = _ALONE_S if heavy is None else _CAPPED_S
    pairs = [(2 * i, 2 * i + 1) for i in range(_LAUNCHES)]
    seen: list[tuple[float, float]] = []
    began = time.monotonic()
    while time.monotonic() - began < last_s:
        slots.zero_()
        replay()
        bench.synchronize()
        if bench.dry or time.monotonic() - began > counts_s:
            seen += [
                stamps
                for stamps in stamps_between(bench, slots if bench.dry else slots.cpu(), pairs)
                if stamps[0] > 0.0
            ]
        if bench.dry:
            break
        if heavy is None:
            time.sleep(_REST_S)
    return {
        **(case.facts if case is not None else {}),
        "seconds": statistics.median(seconds for seconds, _ in seen),
        "clock_mhz": round(statistics.median(clock for _, clock in seen), 1),
        "samples": len(seen),
    }
