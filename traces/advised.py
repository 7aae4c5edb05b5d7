"""One piece of advice about a trace: what was seen, where, and what to try.

Times count from the first GPU work, as ``--window`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traces.capture import Capture

NAME_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One finding: where (rank, microseconds, kernel), what was seen, what to try, and what that would save at most.

    ``saves_us`` and ``saves_j`` are None where nobody can tell; the simulator fills in what it can.
    """

    rule: str
    rank: int
    start_us: float
    end_us: float
    kernel: str
    seen: str
    remedy: str
    saves_us: float | None = None
    saves_j: float | None = None


def us_of(capture: Capture, at_ns: int) -> float:
    """Microseconds after the first GPU work."""
    return float(at_ns - capture.work.start_ns.min()) / 1e3


def span_of(capture: Capture, mine: NDArray[np.bool_]) -> int:
    """Nanoseconds from the first start to the last end of some rows."""
    work = capture.work
    return int(work.end_ns[mine].max() - work.start_ns[mine].min())


def shown(found: Sequence[Advice]) -> list[str]:
    """A line each."""
    lines = []
    for advice in found:
        saves = ""
        if advice.saves_us is not None:
            joules = "" if advice.saves_j is None else f", {advice.saves_j:.3g} J"
            saves = f" (saves at most {advice.saves_us:,.0f} us{joules})"
        lines.append(
            f"{advice.rule}: rank {advice.rank}, {advice.start_us / 1e3:,.3f} to {advice.end_us / 1e3:,.3f} ms, "
            f"'{advice.kernel}': {advice.seen}: {advice.remedy}{saves}"
        )
    return lines
