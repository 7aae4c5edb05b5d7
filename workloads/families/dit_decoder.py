"""A VAE's decoder as its modules run it: convolutions, and the memory-bound kernels between them.

All decoders share one course: a convolution, a middle of two residual blocks around attention, stages of three blocks
with an upsampling behind all but the last, a convolution. What each launches on the way is data
(``workloads.decoder``).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from workloads.decoder import Decoder, DecoderTiles, load_decoder
from workloads.diffusion import DECODER_BLOCKS, DitSpec
from workloads.kernel_names import EngineOp
from workloads.kernels import host_kernel, product_kernel
from workloads.program import Kernel, Segment
from workloads.work import AttentionWork, ConvolutionWork, ElementwiseWork


@dataclass(frozen=True, slots=True)
class LatentGrid:
    """Frames, height and width of a tensor."""

    frames: int
    height: int
    width: int

    @property
    def area(self) -> int:
        """Pixels of a frame."""
        return self.height * self.width

    @property
    def pixels(self) -> int:
        """Pixels of all frames."""
        return self.frames * self.area


def decoder_segments(spec: DitSpec, latents: LatentGrid, videos: int) -> tuple[Segment, ...]:
    """``videos`` of ``latents`` through the decoder of ``spec``, a segment for each part that it works on."""
    assert spec.decoder is not None
    decoder = load_decoder(spec.decoder)
    match decoder.frames:
        case "whole":
            return (_part("decoder", _Walk(decoder, spec, videos, latents)),)
        case "chunks":
            return _chunks(decoder, spec, videos, latents)
        case "tiles":
            assert decoder.tiles is not None
            return _tiled(decoder, decoder.tiles, spec, videos, latents)


def _part(name: str, walk: _Walk, repeat: int = 1) -> Segment:
    walk.decode()
    return Segment(name=name, kernels=tuple(walk.kernels), repeat=repeat)


def _chunks(decoder: Decoder, spec: DitSpec, videos: int, latents: LatentGrid) -> tuple[Segment, ...]:
    """The first latent frame, and all others, each joined to the frames before: of these the mean number."""
    one, others = replace(latents, frames=1), latents.frames - 1
    first = _Walk(decoder, spec, videos, one)
    first.point("post_quant", spec.latent_channels, grid=latents, channels=spec.latent_channels)
    segments = [_part("decoder, first frame", first)]
    whole = replace(first.grid, frames=1 + others * spec.vae[0])
    if others:
        walk = _Walk(decoder, spec, videos, one, later=True)
        segments.append(_part("decoder, a latent frame", walk, others))
        joined = sum(1 + (i + 1) * spec.vae[0] for i in range(others)) * whole.area // others
        walk.run("cat", "cat_video", joined, channels=3)
        segments[-1] = replace(segments[-1], kernels=tuple(walk.kernels))
    end = _Walk(decoder, spec, videos, whole)
    end.run("clamp", "clamp", whole.pixels, channels=3)
    return (*segments, Segment(name="video", kernels=tuple(end.kernels)))


def _tiled(
    decoder: Decoder, tiles: DecoderTiles, spec: DitSpec, videos: int, latents: LatentGrid
) -> tuple[Segment, ...]:
    """Tiles one after the other, and the blends of their seams."""
    along, down, across = spec.vae
    if latents.frames > tiles.frames // along:
        frames = _cuts(latents.frames, tiles.frames // along + 1, tiles.frames_apart // along)
    else:
        frames = [latents.frames]
    large = max(latents.height * down, latents.width * across) > tiles.pixels
    heights, widths = (
        _cuts(size, tiles.pixels // ratio, tiles.pixels_apart // ratio) if large else [size]
        for size, ratio in ((latents.height, down), (latents.width, across))
    )
    seam, ratio = tiles.pixels - tiles.pixels_apart, (down, across)
    rows = sum(min(seam, height * ratio[0]) for height in heights[1:]) * len(widths)
    rows += sum(min(seam, width * ratio[1]) for width in widths[1:]) * len(heights)
    rows = rows * len(frames) + (tiles.frames - tiles.frames_apart) * (len(frames) - 1)
    counts = Counter(LatentGrid(t, h, w) for t in frames for h in heights for w in widths)
    segments = [
        _part(f"tile of {grid.frames} x {grid.height} x {grid.width}", _Walk(decoder, spec, videos, grid), count)
        for grid, count in counts.items()
    ]
    if rows:
        segments.append(
            Segment(name="seams", kernels=(host_kernel("blend", rows * tiles.blend_row_s, decoder.engine),))
        )
    return tuple(segments)


def _cuts(size: int, tile: int, apart: int) -> list[int]:
    """Sizes of tiles that begin ``apart`` from one another.

    >>> _cuts(60, 32, 24), _cuts(16, 5, 3)
    ([32, 32, 12], [5, 5, 5, 5, 4, 1])
    """
    return [min(tile, size - start) for start in range(0, size, apart)]


@dataclass(slots=True)
class _Walk:
    """The tensor on its way through a decoder, and the kernels so far. ``later``: frames before it are kept."""

    decoder: Decoder
    spec: DitSpec
    videos: int
    grid: LatentGrid
    later: bool = False
    channels: int = 0
    swapped: bool = False
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def _convolved(self) -> bool:
        """Whether the kernel before is a convolution, which adds its bias in place."""
        return bool(self.kernels) and isinstance(self.kernels[-1].work, ConvolutionWork)

    @property
    def keeps_swapped(self) -> bool:
        """Whether channels stay innermost once they are."""
        return self.videos > 1 and self.decoder.keeps_several_swapped

    def decode(self) -> None:
        """All of the decoder."""
        widths = self.spec.decoder_widths
        self.channels = self.spec.latent_channels
        if self.decoder.frames == "tiles":
            self.point("post_quant", self.channels)
        self.convolve("conv_in", widths[0])
        self.residual(widths[0])
        self.attend()
        self.residual(widths[0])
        for stage, width in enumerate(widths):
            for _ in range(DECODER_BLOCKS):
                self.residual(width)
            if stage < len(widths) - 1:
                self.upsample(stage)
        if self.swapped:
            self.run("swap", "order_out", self.grid.pixels)
        self.run("norm", "norm_out", self.grid.pixels)
        self.run("activation", "silu_out", self.grid.pixels)
        self.convolve("conv_out", 3)

    def run(self, place: str, name: str, pixels: int, *, channels: int | None = None) -> None:
        """The memory-bound kernels of ``place`` over so many ``pixels``: none where the decoder has none there."""
        ops = self.decoder.kernels.get(place, ())
        for op in ops:
            count = self.videos * pixels * (channels or self.channels)
            moved = self.decoder.element_bytes[op] * count
            work = ElementwiseWork(
                op=op, rows=self.videos * pixels, width=channels or self.channels, bytes_moved=moved,
                images=self.videos, fresh=op is EngineOp.GROUP_NORM and self._convolved, engine=self.decoder.engine,
            )  # fmt: skip
            label = name if len(ops) == 1 else f"{name}.{op.value.removeprefix('image_')}"
            self.kernels.append(Kernel(name=label, work=work, flops=float(count), bytes_moved=float(moved)))

    def residual(self, width: int) -> None:
        """Two convolutions with a norm before each, and what came in, by a product where the channels change."""
        before, came = self.channels, self.grid
        if self.decoder.attention == "convolution" and width != before:
            self.point("shortcut", width, padded=True)
            self.channels = before
        if self.swapped:
            self.run("swap", "order", came.pixels)
            self.swapped = self.decoder.swapped_until != "norm"
        for i in (1, 2):
            self.run("norm", "norm", self.grid.pixels)
            self.run("activation", "silu", self.grid.pixels)
            self.convolve(f"conv{i}", width)
        if self.decoder.attention == "linear" and width != before:
            self.channels = before
            self.point("shortcut", width, padded=True)
        self.run("swapped_sum" if self.swapped else "sum", "residual", self.grid.pixels)

    def attend(self) -> None:
        """Attention of one head over all channels."""
        grid, width = self.grid, self.channels
        tokens, batch = grid.pixels, self.videos
        self.run("norm", "norm_attn", grid.pixels)
        if self.decoder.attention == "convolution":  # over each frame by itself
            tokens, batch = grid.area, self.videos * grid.frames
            self.point("qkv_conv", 3 * width)
            self.run("swap", "order_qkv", grid.pixels)
            self.channels = width
        else:
            for part in ("q", "k", "v"):
                if self.keeps_swapped:  # tokens of one image are a view
                    self.run("swap", f"order_{part}", grid.pixels)
                self.kernels.append(product_kernel(f"{part}_gemm", batch * tokens, width, width))
                self.run("bias", f"bias_{part}", grid.pixels)
        self.run("mask", "mask", tokens * tokens, channels=1)
        work = AttentionWork(
            batch=batch, q_len=tokens, kv_len=tokens, q_heads=1, kv_heads=1, head_dim=width, causal=False,
            dtype=self.decoder.dtype, engine=self.decoder.engine,
        )  # fmt: skip
        moved = 4.0 * self.decoder.dtype.bytes * batch * tokens * width
        self.kernels.append(Kernel(name="attention", work=work, flops=work.flops, bytes_moved=moved))
        if self.decoder.attention == "convolution":
            self.run("swap", "order_out", grid.pixels)
            self.point("o_conv", width)
            self.run("sum", "residual_attn", grid.pixels)
            return
        self.kernels.append(product_kernel("o_gemm", batch * tokens, width, width))
        self.run("swapped_sum", "residual_attn", grid.pixels)
        self.swapped = True

    def upsample(self, stage: int) -> None:
        """Height and width doubled, and time where the model's does, then a convolution."""
        doublings = round(math.log2(self.spec.vae[0]))
        if self.swapped and not self.keeps_swapped:
            self.run("swap", "order", self.grid.pixels)
            self.swapped = False
        match self.decoder.frames:
            case "chunks":
                if self.later and stage < doublings:
                    self._double_frames()
                if self.grid.frames > 1:
                    self.run("to_frames", "to_frames", self.grid.pixels)
                self.run("upsample", "upsample", self.grid.pixels)
            case "tiles":
                last = len(self.spec.decoder_widths) - 1
                self._enlarge(2 if last - doublings <= stage < last else 1)
            case "whole":
                self.run("swapped_upsample" if self.swapped else "upsample", "upsample", self.grid.pixels)
        self.grid = replace(self.grid, height=2 * self.grid.height, width=2 * self.grid.width)
        if self.decoder.frames == "chunks":  # frame by frame
            width = self.channels // 2 if self.decoder.halves else self.channels
            self._add_convolution("conv_up", width, read=self.grid.pixels, taps=9)
        else:
            self.convolve("conv_up", self.channels, channels_last=self.swapped)

    def _double_frames(self) -> None:
        """Two frames out of one, by a convolution over three of them."""
        grid, before = self.grid, self.channels
        self._keep()
        longer = grid.pixels + 2 * grid.area
        self.run("cat", "cat", longer)
        self.run("point_pad", "pad", longer)
        self._add_convolution("conv_time", 2 * before, read=longer, taps=3)
        self.run("cat", "stack", grid.pixels)
        self.channels, self.grid = before, replace(grid, frames=2 * grid.frames)

    def _enlarge(self, in_time: int) -> None:
        """The first frame by itself, the others in space and time, and both joined."""
        grid, others = self.grid, self.grid.frames - 1
        self.run("to_frames", "first_frame", grid.area)
        self.run("upsample", "upsample_first", grid.area)
        if not others:
            return
        self.run("to_frames", "other_frames", others * grid.area)
        made = 4 * in_time * others * grid.area
        self.run("upsample_video", "upsample", others * grid.area + made)
        self.run("cat", "cat", 4 * grid.area + made)
        self.grid = replace(grid, frames=1 + in_time * others)

    def _keep(self) -> None:
        """The last two frames of what a convolution reads, kept for the next chunk."""
        grid = self.grid
        self.run("keep", "keep", min(grid.frames, 2) * grid.area)
        if self.later and grid.frames < 2:
            self.run("cat", "keep_two", 2 * grid.area)

    def convolve(self, name: str, width: int, *, channels_last: bool = False) -> None:
        """A convolution 3 wide in space and, over videos, in time, with what pads its input."""
        grid, depth = self.grid, self.spec.decoder_depth
        if depth == 1:
            self._add_convolution(name, width, read=grid.pixels, taps=9, channels_last=channels_last)
            return
        longer = replace(grid, frames=grid.frames + depth - 1)
        padded = longer.frames * (grid.height + 2) * (grid.width + 2)
        if self.decoder.frames == "chunks":
            self._keep()
            copied = grid
            if self.later:
                self.run("cat", f"cat_{name}", longer.pixels)
                copied = longer
            self.run("pad", f"pad_{name}", padded + 2 * copied.pixels)
        else:
            self.run("pad", f"pad_{name}", grid.pixels + padded)
        self._add_convolution(name, width, read=padded, taps=9 * depth)

    def point(
        self,
        name: str,
        width: int,
        *,
        padded: bool = False,
        grid: LatentGrid | None = None,
        channels: int | None = None,
    ) -> None:
        """A product over channels at each pixel; ``padded``: behind a copy that pads by nothing."""
        pixels = (grid or self.grid).pixels
        if padded:
            twice = 2 if self.decoder.frames == "tiles" else 1  # its pads count what they read and what they write
            self.run("point_pad", f"pad_{name}", twice * pixels)
            if self.decoder.frames == "chunks" and self.grid.frames > 1:
                self.run("to_frames", f"order_{name}", pixels)
        self.channels = channels or self.channels
        self._add_convolution(name, width, read=pixels, taps=1, pixels=pixels)

    def _add_convolution(
        self, name: str, width: int, *, read: int, taps: int, pixels: int | None = None, channels_last: bool = False
    ) -> None:
        made, before, dtype = self.videos * (pixels or self.grid.pixels), self.channels, self.decoder.dtype
        work = ConvolutionWork(
            pixels=made, read=self.videos * read, channels_in=before, channels_out=width, taps=taps, dtype=dtype,
            channels_last=channels_last, engine=self.decoder.engine,
        )  # fmt: skip
        elements = work.read * before + made * width + taps * before * width
        flops = 2.0 * made * width * taps * before
        self.kernels.append(Kernel(name=name, work=work, flops=flops, bytes_moved=float(dtype.bytes * elements)))
        self.channels = width
