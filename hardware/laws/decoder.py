"""Kernels of a VAE's decoder: convolutions with their copies, group norms, attention whose heads are wider than 256."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from hardware.gpu import GpuSpec
from hardware.laws.residency import hbm_share
from hardware.laws.sizes import MovedSizes
from hardware.laws.streaming import tensor_clock_hz
from hardware.laws.terms import KernelTerms

# A tile of cuDNN's convolution, pixels by channels (names of its kernels: 128x128, 256x128, 64x128). Fewer channels
# than whole steps of 64 take as long: kernels 16, 32 and 96 wide run at half of the others' rate.
_TILE_PIXELS, _TILE_CHANNELS, _CHANNEL_STEP = 128, 128, 64
# Share of the operands' time of a 1 x 1 convolution that its arithmetic does not hide: chosen by leaving rows of
# records/h200-sxm-141gb/diffusers/decoder.jsonl out in turn (docs/laws.md).
_POINT_WAITS = 0.25
# Heads that FlashAttention takes: a decoder's one head over all channels is wider.
MOST_FLASH_HEAD_DIM = 256
# Groups of a norm, a block each, and blocks of 512 threads that an SM holds at once.
NORM_GROUPS, _NORM_BLOCKS_PER_SM = 32, 4
# Of what a group norm moves: what statistics read; a pass behind them reads it again and writes as much.
_NORM_READ_SHARE = 1.0 / 3.0
# Of what was touched last, what counts against L2: 33.6 MB of it are found there whole and 67 MB not at all, in rows
# (decoder.jsonl) and in traces of decodes, of 129 us where their input was written in place, else 218.
_NORM_HELD = 0.75
# Bytes of a line that L2 fetches at once, and how many times as much is read again where none stays: copies of images
# of 1024 x 1024 take 3.5 times as long a byte as of 256 x 256 (decoder.jsonl).
_LINE_BYTES, _READ_AGAIN = 64, 2.5
# Of a video's upsampling, what one more takes beside it: 512 channels of 7 x 64 x 64 (708.5, 745.5 us;
# records/h200-sxm-141gb/diffusers/decoder_again.jsonl).
_ONE_VIDEO_MORE = 0.0522
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
    channels_last: bool = False

    @property
    def copied(self) -> bool:
        """Whether weights are brought into cuDNN's order, and where channels do not lie innermost (``channels_last``)
        input and result too, there and back: a point is a product.
        """
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
class GroupNormCoefficients:
    """Statistics of each group in one block, then a pass over all numbers, one after the other.

    ``block_bytes_per_s`` that a block reads from HBM at the maximum clock, ``block_l2_bytes_per_s`` from L2,
    ``pass_bytes_per_s`` of the pass. Joules a byte of both, in the SMs and in HBM.
    """

    floor_s: float
    block_bytes_per_s: float
    block_l2_bytes_per_s: float
    pass_bytes_per_s: float
    core_byte_energy_j: float
    hbm_byte_energy_j: float


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
    ordered = 0.0 if sizes.copied and sizes.channels_last else inputs + results
    copied = (2.0 if sizes.copied else _POINT_WAITS) * (ordered + weights)
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
        top_clock_hz=tensor_clock_hz(gpu),
    )


def convolution_features(sizes: ConvolutionSizes) -> tuple[float, ...]:
    """Correction coordinates (log2): pixels, channels of the result, depth of the sums; whether channels are last."""
    depth = sizes.taps * sizes.channels_in
    return (math.log2(sizes.pixels), math.log2(sizes.channels_out), math.log2(depth), float(sizes.channels_last))


def reordered_bytes(bytes_moved: float, *, pixels: int, l2_bytes: float) -> float:
    """Bytes that pass between memory and L2 where an image of ``pixels`` is copied whose channels lie innermost.

    A plane of one channel is written after the other, so that lines of 64 bytes of each pixel are read again for each
    channel on them: from L2 as long as one line a pixel stays there.

    >>> [round(reordered_bytes(1e6, pixels=side**2, l2_bytes=50e6)) for side in (512, 768, 1024)]
    [1000000, 2274874, 3500000]
    """
    return bytes_moved * (1.0 + _READ_AGAIN * hbm_share(_LINE_BYTES * pixels, l2_bytes))


def upsampled_share(videos: int) -> float:
    """Of the time that ``videos`` upsampled in turn take, what they take at once.

    PyTorch's kernel has a thread for a pixel of a channel, which finds its place once for all videos: that takes the
    time, and not memory, of which it uses a twentieth.

    >>> round(2 * upsampled_share(2), 4), upsampled_share(1)
    (1.0522, 1.0)
    """
    return (1.0 + _ONE_VIDEO_MORE * (videos - 1)) / videos


@lru_cache(maxsize=1024)
def group_norm_base_terms(c: GroupNormCoefficients, gpu: GpuSpec, sizes: MovedSizes) -> KernelTerms:
    """Terms of a group norm over images, each of which has a block for each of 32 groups.

    Blocks of several images stand side by side, on SMs of their own and then up to four on each; the pass over all
    numbers grows with them. Its input lies in L2 where what was touched last fits there: the input alone where it was
    just written in place; else as much again.
    """
    blocks, bytes_moved = NORM_GROUPS * sizes.images, sizes.bytes_moved
    read_bytes = _NORM_READ_SHARE * bytes_moved
    share = hbm_share(_NORM_HELD * (read_bytes if sizes.fresh else 2.0 * read_bytes), gpu.l2_bytes)
    a_byte_s = share / c.block_bytes_per_s + (1.0 - share) / c.block_l2_bytes_per_s
    read_s = read_bytes / blocks * a_byte_s
    rounds = max(1.0, blocks / (_NORM_BLOCKS_PER_SM * gpu.sms))
    return KernelTerms(
        floor_s=c.floor_s,
        blocks=min(blocks, gpu.sms),
        cycles_per_block=rounds * read_s * gpu.max_clock_hz,
        quantised=False,
        hbm_bytes=bytes_moved - read_bytes,
        hbm_bytes_per_s=c.pass_bytes_per_s,
        sharpness=1.0,  # one kernel after the other
        core_energy_j=c.core_byte_energy_j * bytes_moved,
        hbm_energy_j=c.hbm_byte_energy_j * share * bytes_moved,
    )


def group_norm_features(sizes: MovedSizes) -> tuple[float, ...]:
    """Correction coordinates (log2): bytes that an image moves, and images."""
    return (math.log2(max(sizes.bytes_moved / sizes.images, 1.0)), math.log2(sizes.images))


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
