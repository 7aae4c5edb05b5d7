"""GPUs coupled by running collectives: which are solved together, and the common rate of a collective's members."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sim.engine.between import Between
from sim.engine.running import GpuState
from sim.engine.state import Flow, Gpu
from sim.errors import LivelockError


def tied_together(gpus: Sequence[Gpu], dirty: Iterable[int]) -> set[int]:
    """The ``dirty`` GPUs and all that running collectives couple to them."""
    group = set(dirty)
    queue = list(group)
    while queue:
        for entry in gpus[queue.pop()].running:
            if entry.flow.collective >= 0 and not entry.flow.missing:
                for member in entry.flow.entries:
                    if member.gpu.index not in group:
                        group.add(member.gpu.index)
                        queue.append(member.gpu.index)
    return group


def common_paces(
    solved: list[tuple[Gpu, GpuState]], tied: set[Flow], between: Between | None = None
) -> dict[Flow, float]:
    """Set the rate of each collective to its slowest member's, at most what the network ``between`` nodes allows.

    Kernels beside it get the bandwidth that this frees.
    Replaces states in ``solved``; rates only fall from round to round, so that it ends.
    """
    bound = dict.fromkeys(tied, math.inf)
    for _ in range(8 * len(solved)):
        slowest = dict(bound)
        fastest = dict.fromkeys(tied, 0.0)
        for gpu, state in solved:
            for entry, rate in zip(gpu.running, state.rates, strict=True):
                flow = entry.flow
                if flow in tied:
                    slowest[flow] = min(slowest[flow], rate)
                    fastest[flow] = max(fastest[flow], rate)
        if between is not None:
            between.share(slowest)
        if all(fastest[flow] <= slowest[flow] * (1.0 + 1e-9) for flow in tied):
            return slowest
        bound = slowest
        for position, (gpu, _) in enumerate(solved):
            key = tuple([(e.class_id, e.sms, e.flow.missing > 0, e.fill) for e in gpu.running])
            caps = tuple([bound.get(e.flow, math.inf) for e in gpu.running])
            solved[position] = (gpu, gpu.model.solve(key, gpu.limit_w, gpu.clock_cap_hz, caps))
    raise LivelockError(f"collectives {sorted(f.collective for f in tied)} find no common pace")
