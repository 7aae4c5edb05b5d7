"""Flash attention: prefill by blocks of 128 x 128 on tensor cores, decode by streaming the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.sizes import DecodeSizes, PrefillSizes
from hardware.laws.streaming import few_sms
from hardware.laws.terms import KernelTerms

# Blocks of the decode kernel that an SM has room for: 128 threads of 183 registers and 86,336 bytes of shared memory
# each (cudnn_generated_fort_native_sdpa_sm80_flash_fprop in records/h200-sxm-141gb/traces and measurements/kineto).
DECODE_RESIDENT = 2
# Query and key rows of one block of the flash kernel (profiler traces: a persistent grid of one CTA per SM).
BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCoefficients:
    """``efficiency`` of the tensor peak inside blocks; ``tile_overhead`` in blocks per query tile;
    ``imbalance`` in units of a tenth of the longest tile; energies per FLOP computed (masked half of the
    diagonal blocks included)."""

    efficiency: float
    tile_overhead: float
    imbalance: float
    floor_s: float
    flop_energy_j: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCoefficients:
    """Streaming rate of the KV cache and fixed costs of a call.

    A sequence's keys are split over SMs where there are few sequences: ``split_s`` once, ``merge_s`` for each
    part, and ``split_slowdown`` of the transfer time for each doubling of the parts (shorter streams).
    """

    floor_s: float
    split_s: float
    merge_s: float
    split_slowdown: float
    hbm_bytes_per_s: float
    hbm_bytes_per_s_per_sm: float
    core_byte_energy_j: float
    hbm_byte_energy_j: float
    sm_power_w: float


@lru_cache(maxsize=65536)
def prefill_base_terms(
    coefficients: PrefillCoefficients,
    sizes: PrefillSizes,
    gpu: GpuSpec,
    *,
    hbm_bytes_per_s: float,
    hbm_byte_energy_j: float,
) -> KernelTerms:
    """Terms of one prefill attention call before correction; rate and energy of HBM are those of products.

    A query tile of 128 rows meets ceil(kv / 128) key blocks, or those up to its diagonal when causal;
    time = (blocks + overhead per tile) / SMs + a share of the longest tile, at least the longest tile.
    """
    c = coefficients
    tiles = math.ceil(sizes.q_len / BLOCK)
    keys = math.ceil(sizes.kv_len / BLOCK)
    if sizes.causal:
        # The last query row sees all keys; a tile's row of blocks ends at its diagonal.
        first = max(keys - tiles, 0)
        per_head = sum(min(first + i + 1, keys) for i in range(tiles)) if tiles < 4096 else tiles * (keys + 1) // 2
    else:
        per_head = tiles * keys
    heads = sizes.batch * sizes.q_heads
    blocks = heads * per_head
    longest = float(keys)
    block_cycles = 4.0 * BLOCK * BLOCK * sizes.head_dim / (gpu.tensor_flops_per_cycle_per_sm("bf16") * c.efficiency)
    work = blocks + c.tile_overhead * heads * tiles
    total_tiles = heads * tiles
    flops = 4.0 * blocks * BLOCK * BLOCK * sizes.head_dim
    rows = sizes.q_len * sizes.q_heads + sizes.kv_len * sizes.kv_heads  # queries and results, keys and values
    hbm_bytes = float(2 * sizes.batch * sizes.head_dim * 2 * rows)
    alone = total_tiles <= gpu.sms
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=total_tiles,
        cycles_per_block=(longest + c.tile_overhead if alone else work / total_tiles) * block_cycles,
        tail_cycles=0.0 if alone else 0.1 * c.imbalance * longest * block_cycles,
        quantised=False,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=hbm_bytes_per_s,
        core_energy_j=c.flop_energy_j * flops,
        hbm_energy_j=hbm_byte_energy_j * hbm_bytes,
        tensor_share=1.0,
        load_wait=few_sms().attention_load_wait,
    )


@lru_cache(maxsize=65536)
def decode_base_terms(coefficients: DecodeCoefficients, sizes: DecodeSizes, sms: int) -> KernelTerms:
    """Terms of one decode attention call: K and V stream from HBM once; few sequences split over SMs."""
    c = coefficients
    streams = sizes.batch * sizes.kv_heads
    hbm_bytes = float(2 * streams * sizes.kv_len * sizes.head_dim * sizes.kv_bytes)
    parts = decode_parts(streams, sizes.kv_len, sms)
    blocks = round(streams * parts)
    return KernelTerms(
        floor_s=c.floor_s + min(parts - 1.0, 1.0) * (c.split_s + c.merge_s * parts),
        blocks=blocks,
        cycles_per_block=0.0,
        quantised=False,
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=c.hbm_bytes_per_s / (1.0 + c.split_slowdown * math.log2(parts)),
        hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm * streams * parts / blocks,
        core_energy_j=c.core_byte_energy_j * hbm_bytes,
        hbm_energy_j=c.hbm_byte_energy_j * hbm_bytes,
        sm_power_w=c.sm_power_w,
        tensor_share=1.0,
        sm_bytes_per_s=few_sms().decode_sm_bytes_per_s,
        resident=DECODE_RESIDENT if parts == 1.0 else 0,  # else how many blocks there are is known on average alone
        few_sms_sharpness=few_sms().wait_sharpness,
    )


# Streams of keys fill the GPU where there is one for each of so many of its SMs (public flash-attention kernels).
FILLED = 0.8
MOST_PARTS = 128


def decode_parts(streams: int, kv_len: int, sms: int) -> float:
    """Mean number of parts of each sequence's keys: enough to fill the SMs, none shorter than a key block.

    Kernels take whole numbers of parts, which jump with the number of key blocks between choices of nearly equal
    time; our rows show no such jumps, so that the law uses the mean.

    >>> round(decode_parts(8, 8192, 132), 9), decode_parts(256, 8192, 132)
    (13.2, 1.0)
    """
    return max(1.0, min(FILLED * sms / streams, kv_len / BLOCK, MOST_PARTS))


def prefill_features(sizes: PrefillSizes) -> tuple[float, ...]:
    """Correction coordinates: heads in all, query and key length (log2), mask."""
    heads, keys_each = sizes.batch * sizes.q_heads, sizes.kv_len / sizes.q_len
    return (math.log2(heads), math.log2(sizes.q_len), math.log2(keys_each), 4.0 * sizes.causal)


def decode_features(sizes: DecodeSizes) -> tuple[float, ...]:
    """Correction coordinates: KV streams, length, query heads a KV head (log2)."""
    streams, heads_each = sizes.batch * sizes.kv_heads, sizes.q_heads / sizes.kv_heads
    return (math.log2(streams), math.log2(sizes.kv_len), math.log2(heads_each))
