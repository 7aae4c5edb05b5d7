"""A settled step under the PyTorch profiler: one Kineto trace a rank, to lay beside a simulated timeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from hardware.calibrate.suite.comm import most
from hardware.calibrate.suite.timing import SETTLE_CAPPED_S, Bench, EventTimer

KEPT_STEPS = 2


def profile_steps(bench: Bench, replay: Callable[[], None], path: Path) -> None:
    """Write ``KEPT_STEPS`` steps of this rank to ``path`` (.json.gz), after the slow limiter has settled.

    The profiler is already on while it settles, so that starting it lets no GPU cool down.
    """
    if bench.dry:
        return
    profiler = bench.torch.profiler
    timer = EventTimer(bench)
    start = timer.record()
    replay()
    each_s = most(bench.comm, timer.seconds(start, timer.record()))
    settling = math.ceil(SETTLE_CAPPED_S / each_s)
    kinds = profiler.ProfilerActivity
    path.parent.mkdir(parents=True, exist_ok=True)
    with profiler.profile(
        activities=[kinds.CPU, kinds.CUDA],
        schedule=profiler.schedule(wait=0, warmup=1, active=1),
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
    ) as session:
        for _ in range(settling):
            replay()
        bench.synchronize()
        session.step()
        for _ in range(KEPT_STEPS):
            replay()
        bench.synchronize()
        session.step()
