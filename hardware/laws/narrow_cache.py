"""Decode attention over a cache of 8-bit keys and values: what the SMs add to its bytes.

The kernels (FlashAttention 3 on a paged cache, as vLLM 0.24 runs it) turn every block of keys and values for the tensor
cores, so that half the bytes are not half the time: at 2 TB/s of them the SMs are the bound.
"""

from __future__ import annotations

from dataclasses import replace

from hardware.laws.attention import BLOCK, decode_parts
from hardware.laws.sizes import DecodeSizes
from hardware.laws.terms import KernelTerms

# SM cycles of a block of 128 keys and their values in heads of 128, and of the start and end of each part of a
# sequence: fitted on eight decode rows with kv_dtype fp8_e4m3 in records/*/vllm/kernels.jsonl (docs/laws.md).
CYCLES_PER_KEY_BLOCK = 3090.0  # standard error 110
CYCLES_PER_PART = 4120.0  # standard error 760
_HEAD_DIM = 128  # of those rows


def with_narrow_cache(terms: KernelTerms, sizes: DecodeSizes, sms: int) -> KernelTerms:
    """``terms`` of a decode whose cache has 8 bits an element or fewer, priced by its bytes so far.

    >>> from hardware.laws.terms import KernelTerms
    >>> sizes = DecodeSizes(batch=64, kv_len=4096, q_heads=32, kv_heads=8, head_dim=128, kv_bytes=1)
    >>> with_narrow_cache(KernelTerms(floor_s=0.0, blocks=512, cycles_per_block=0.0), sizes, 132).cycles_per_block
    103000.0
    """
    parts = decode_parts(sizes.batch * sizes.kv_heads, sizes.kv_len, sms)
    cycles = (sizes.kv_len / parts / BLOCK * CYCLES_PER_KEY_BLOCK + CYCLES_PER_PART) * sizes.head_dim / _HEAD_DIM
    return replace(terms, cycles_per_block=cycles, extrapolated=True)  # no row of this kernel is of this stack
