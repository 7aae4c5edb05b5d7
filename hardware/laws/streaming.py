"""How fast a few SMs stream from HBM: each has so many bytes in flight, and all together what the memory gives."""

from __future__ import annotations

import math
from dataclasses import replace

from hardware.laws.terms import KernelTerms

# Bytes a second that one SM streams while memory is idle, and how sharply the sum of them meets the memory's rate.
# From the copy and add_rmsnorm rows on 8 to 64 SMs of records/h100-sxm-80gb/partitions/one_gpu.jsonl (8 SMs: 638 and
# 636 GB/s; 32: 2.08 and 2.14 TB/s). The H200's SMs stream as much: 641 GB/s on 8 (not used here).
SM_BYTES_PER_S = 80e9
SHARPNESS = 2.5


def on_few_sms(terms: KernelTerms, sms: float, gpu_sms: float) -> KernelTerms:
    """``terms`` of a kernel of many short blocks on ``sms`` of ``gpu_sms`` SMs: its HBM rate is what those can stream.

    The rate in ``terms`` is that of the whole GPU, which the sum of its SMs already meets.

    >>> from hardware.laws.terms import KernelTerms
    >>> copy = KernelTerms(floor_s=0.0, blocks=9, cycles_per_block=0.0, hbm_bytes=1e9, hbm_bytes_per_s=3e12)
    >>> [round(on_few_sms(copy, sms, 132.0).hbm_bytes_per_s / 1e9) for sms in (8.0, 132.0)]
    [645, 3000]
    """
    if not terms.hbm_bytes or math.isinf(terms.hbm_bytes_per_s):
        return terms
    few, all_sms = (1.0 + (terms.hbm_bytes_per_s / (n * SM_BYTES_PER_S)) ** SHARPNESS for n in (sms, gpu_sms))
    rate = terms.hbm_bytes_per_s * (all_sms / few) ** (1.0 / SHARPNESS)
    return replace(terms, hbm_bytes_per_s=rate, hbm_bytes_per_s_per_sm=math.inf)
