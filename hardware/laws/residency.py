"""What stays in L2 from one kernel to the next: the rule of every law for a kernel's HBM bytes."""

from __future__ import annotations

# Bytes of up to half of L2 (one of its two partitions) stay, of its whole size or more come from HBM; between the two
# the share that comes from HBM grows linearly (calibration/first/elementwise.jsonl and gaps.jsonl; docs/laws.md).
STAYS, STREAMS = 0.5, 1.0


def hbm_share(footprint_bytes: float, l2_bytes: float) -> float:
    """Share of ``footprint_bytes`` used again that comes from HBM, not from an L2 of ``l2_bytes``: 0 to 1.

    >>> [hbm_share(size * 1e6, 50e6) for size in (20, 37.5, 60)]
    [0.0, 0.5, 1.0]
    """
    return min(max((footprint_bytes / l2_bytes - STAYS) / (STREAMS - STAYS), 0.0), 1.0)
