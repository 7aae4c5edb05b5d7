"""What clock and power do in the first seconds of load: the record the governor is fitted on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from hardware.calibrate.suite.steps import build_step
from hardware.calibrate.suite.timing import Bench, EventTimer, capture

Row = Mapping[str, Any]
COLUMNS = ["t_s", "energy_counter_mj", "power_reading_mw", "sm_clock_mhz"]
# (what, seconds) from idle; long enough for the slow limiter, about a second, to act and to let go.
SCHEDULE = (
    ("idle", 1.5),
    ("prefill", 2.0),
    ("idle", 1.5),
    ("decode", 1.4),
    ("prefill", 1.0),
    ("decode", 1.0),
    ("idle", 0.1),
    ("prefill", 0.6),
    ("idle", 0.5),
    ("prefill", 0.6),
    ("idle", 0.7),
)


def measure_transient(bench: Bench, row: Row) -> dict[str, Any]:
    """Samples every 2-3 ms through idle, prefill and decode, and each repetition's time (``marks``, ms)."""
    common = {"kind": "model_step", "model": row["model"], "layers": row["layers"], "lm_head": True, "dtype": "bf16"}
    work = {
        "prefill": {**common, "phase": "prefill", "batch": row["prefill_batch"], "seq_len": row["seq_len"]},
        "decode": {**common, "phase": "decode", "batch": row["decode_batch"], "seq_len": row["seq_len"]},
    }
    timer = EventTimer(bench)
    replays = {name: capture(bench, build_step(bench, fields, {})) for name, fields in work.items()}
    each_s = {}
    for name, replay in replays.items():
        start = timer.record()
        replay()
        each_s[name] = timer.seconds(start, timer.record())
    marks: list[dict[str, Any]] = []
    bench.synchronize()
    time.sleep(0.0 if bench.dry else 1.0)
    bench.meter.start(detail=True)
    origin = time.monotonic()
    for what, seconds in SCHEDULE:
        if what == "idle":
            time.sleep(0.0 if bench.dry else seconds)
            continue
        start_s = time.monotonic() - origin
        count = max(2, round(seconds / each_s[what])) if not bench.dry else 2
        events = [timer.record()]
        for _ in range(count):
            replays[what]()
            events.append(timer.record())
        bench.synchronize()
        steps = [round(1e3 * timer.seconds(a, b), 4) for a, b in pairwise(events)]
        marks.append({"work": what, "start_s": round(start_s, 5), "step_ms": steps})
    bench.meter.stop()
    log = [[round(at - origin, 5), mj, mw, mhz] for at, mj, mw, mhz in bench.meter.samples()]
    return {"columns": COLUMNS, "log": log, "marks": marks}
