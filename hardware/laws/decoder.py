"""Kernels of a VAE's decoder on libraries: convolutions with their copies, attention whose heads are wider than 256."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.terms import KernelTerms

# A tile of cuDNN's convolution, pixels by channels (names of its kernels: 128x128, 256x128, 64x128). Fewer channels
# than whole steps of 64 take as long: kernels 16, 32 and 96 wide run at half of the others' rate.
_TILE_PIXELS, _TILE_CHANNELS, _CHANNEL_STEP = 128, 128, 64
# Share of the operands' time of a 1 x 1 convolution that its arithmetic does not hide: chosen by leaving rows of
# records/h200-sxm-141gb/diffusers/decoder.jsonl out in turn (docs/laws.md).
_POINT_WAITS = 0.25
# Heads that FlashAttention takes: a decoder's one head over all channels is wider.
MOST_FLASH_HEAD_DIM = 256
# Queries of one block of the kernel for wide heads (fmha_cutlassF 32x128 in the traces).
_QUERIES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSizes:
    """``pixels`` of the result in all frames and images, ``read`` of the input with its padding.

    ``taps`` are the points that one pixel sums over (27 of a 3 x 3 x 3), ``element`` is bf16 or f32 (multiplied as
    tf32).
    """

    pixels: int
    read: int
    channels_in: int
    channels_out: int
    taps: int
    element: str

    @property
    def copied(self) -> bool:
        """Whether input, weights and result are brought into cuDNN's order and back: a point is a product."""
        return self.taps > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionCoefficients:
    """A product of unfolded pixels, copies before and behind it, and a sum with the bias, one after the other.

    ``efficiency`` of the tensor peak; ``copy_bytes_per_s`` of the copies, or of a point's operands,
    ``bias_bytes_per_s`` of the sum.
    """

    floor_s: float
    efficiency: float
    copy_bytes_per_s: float
    bias_bytes_per_s: float
    flop_energy_j: float
    hbm_byte_energy_j: float
    sm_power_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WideAttentionSizes:
    """``tokens`` queries over ``keys`` of each head of a ``batch``; ``element`` as in convolutions."""

    batch: int
    tokens: int
    keys: int
    head_dim: int
    element: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WideAttentionCoefficients:
    """``efficiency`` of the tensor peak in blocks of 32 queries; joules a FLOP."""

    floor_s: float
    efficiency: float
    flop_energy_j: float


@lru_cache(maxsize=4096)
def convolution_base_terms(c: ConvolutionCoefficients, gpu: GpuSpec, sizes: ConvolutionSizes) -> KernelTerms:
    """Terms of one convolution with a bias in PyTorch's order of numbers."""
    each = _element_bytes(sizes.element)
    inputs, results = float(each * sizes.read * sizes.channels_in), float(each * sizes.pixels * sizes.channels_out)
    weights = float(each * sizes.taps * sizes.channels_in * sizes.channels_out)
    copied = (2.0 if sizes.copied else _POINT_WAITS) * (inputs + weights + results)
    biased = 2.0 * results
    columns = _CHANNEL_STEP * math.ceil(sizes.channels_out / _CHANNEL_STEP)
    flops = 2.0 * sizes.pixels * columns * sizes.taps * sizes.channels_in
    tiles = math.ceil(sizes.pixels / _TILE_PIXELS) * math.ceil(columns / _TILE_CHANNELS)
    rate = _flops_per_cycle_per_sm(gpu, sizes.element) * c.efficiency
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=tiles,
        cycles_per_block=flops / tiles / rate,
        quantised=False,
        hbm_bytes=copied + biased,
        hbm_bytes_per_s=(copied + biased) / (copied / c.copy_bytes_per_s + biased / c.bias_bytes_per_s),
        sharpness=1.0,  # one kernel after the other
        core_energy_j=c.flop_energy_j * flops,
        hbm_energy_j=c.hbm_byte_energy_j * (copied + biased),
        sm_power_w=c.sm_power_w,
    )


def convolution_features(sizes: ConvolutionSizes) -> tuple[float, ...]:
    """Correction coordinates (log2): pixels, channels of the result, and the depth of the sums."""
    depth = sizes.taps * sizes.channels_in
    return (math.log2(sizes.pixels), math.log2(sizes.channels_out), math.log2(depth))


@lru_cache(maxsize=1024)
def wide_attention_base_terms(c: WideAttentionCoefficients, gpu: GpuSpec, sizes: WideAttentionSizes) -> KernelTerms:
    """Terms of attention of single heads; sums pass through memory's caches, so that no byte bounds it."""
    blocks = sizes.batch * math.ceil(sizes.tokens / _QUERIES)
    flops = 4.0 * blocks * _QUERIES * sizes.keys * sizes.head_dim
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=blocks,
        cycles_per_block=flops / blocks / (_flops_per_cycle_per_sm(gpu, sizes.element) * c.efficiency),
        quantised=False,
        core_energy_j=c.flop_energy_j * flops,
    )


def wide_attention_features(tokens: int, keys: int) -> tuple[float, ...]:
    """Correction coordinates (log2): queries and keys."""
    return (math.log2(tokens), math.log2(keys))


def _element_bytes(element: str) -> int:
    return 4 if element == "f32" else 2


def _flops_per_cycle_per_sm(gpu: GpuSpec, element: str) -> float:
    """Of the tensor cores: tf32 at half the rate of bf16."""
    return gpu.tensor_flops_per_cycle_per_sm("bf16") / (2.0 if element == "f32" else 1.0)
