"""Decode over a latent cache: one vector a token is key and value of all heads, so that it can be compute-bound."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients, decode_base_terms, decode_parts
from hardware.laws.sizes import DecodeSizes, LatentSizes
from hardware.laws.terms import KernelTerms

# Query heads of one block: the rows of a tensor-core instruction on Hopper (wgmma has m = 64), which FlashMLA's
# public kernel uses as its block; fewer heads on a rank are padded up to it.
HEADS_PER_BLOCK = 64


@lru_cache(maxsize=65536)
def latent_base_terms(
    streaming: DecodeCoefficients, tensor: PrefillCoefficients, sizes: LatentSizes, gpu: GpuSpec
) -> KernelTerms:
    """Terms of one call: the cache streams once as in plain decode, scores and values run at prefill's efficiency.

    Not measured by us. Checked against FlashMLA's published figures (its README: up to 3000 GB/s where memory
    bounds it and 660 TFLOP/s where compute does, H800 SXM5, whose SMs and HBM are the H100's).
    """
    batch, kv_len, sms = sizes.batch, sizes.kv_len, gpu.sms
    blocks_of_heads = math.ceil(sizes.q_heads / HEADS_PER_BLOCK)
    stream = DecodeSizes(
        batch=batch,
        kv_len=kv_len,
        q_heads=sizes.q_heads,
        kv_heads=1,
        head_dim=sizes.cached_dim,
        kv_bytes=sizes.kv_bytes,
    )
    terms = decode_base_terms(streaming, stream, sms)
    once = 0.5 * terms.hbm_bytes  # that law counts keys and values; here they are the same bytes
    flops = 2.0 * batch * kv_len * (sizes.cached_dim + sizes.v_dim) * blocks_of_heads * HEADS_PER_BLOCK
    blocks = terms.blocks * blocks_of_heads
    # Where each block has an SM, the mean number of parts says how the work divides, as in plain decode.
    shared = batch * decode_parts(batch, kv_len, sms) * blocks_of_heads if blocks <= sms else blocks
    return replace(
        terms,
        blocks=blocks,
        cycles_per_block=flops / shared / (gpu.tensor_flops_per_cycle_per_sm("bf16") * tensor.efficiency),
        hbm_bytes=once,
        core_energy_j=0.5 * terms.core_energy_j + tensor.flop_energy_j * flops,
        hbm_energy_j=0.5 * terms.hbm_energy_j,
        extrapolated=True,
    )
