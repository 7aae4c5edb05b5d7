"""Diffusion transformers as sizes: loaded strictly from TOML, tokens of a video, bytes that a rank must hold."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from inputs.files import contents, read_text
from inputs.suggest import nearest
from inputs.texts import parse_toml, shown
from workloads.decoder import list_decoders, load_decoder
from workloads.errors import WorkloadError
from workloads.fields import flag, positive, refuse_unknown
from workloads.work import DType

# Each stage of a VAE's decoder doubles height and width for the next: layers of two convolutions a stage.
DECODER_BLOCKS = 3
# Phases of a program; a number follows that of a step.
TEXT, STEP, DECODE = "encode text", "denoise", "decode video"


@dataclass(frozen=True, slots=True, kw_only=True)
class DitSpec:
    """A diffusion transformer. ``vae`` and ``patch`` divide (frames, height, width) into latent tokens.

    ``cross_layers`` attend to themselves, then to the text; ``double_layers`` hold weights of their own for image and
    text, which attend together; ``single_layers`` run attention and feed-forward side by side on both. The text
    encoder is a T5 of ``text_layers`` x ``text_width``; ``decoder_widths`` are the VAE decoder's, latent end first,
    its kernels 3 wide in space and ``decoder_depth`` in time, ``decoder`` the class of its modules (None: convolutions
    alone). ``masks_text``: its modules hand attention a mask of the text's padding. ``text_launches``: launches of a
    layer of the text encoder where each operation is a kernel (0: not known); ``pooled_launches``: those of a second,
    small encoder, whose text is one vector (CLIP's: its kernels take a tenth of their launches). ``images_only``: it
    makes no videos.
    """

    id: str
    source: str
    d_model: int
    heads: int
    head_dim: int
    d_ff: int
    text_tokens: int
    latent_channels: int
    vae: tuple[int, int, int]
    patch: tuple[int, int, int]
    text_layers: int
    text_width: int
    text_d_ff: int
    decoder_widths: tuple[int, ...]
    decoder_depth: int
    cross_layers: int = 0
    double_layers: int = 0
    single_layers: int = 0
    masks_text: bool = False
    images_only: bool = False
    decoder: str | None = None
    text_launches: int = 0
    pooled_launches: int = 0

    @property
    def layers(self) -> int:
        """Layers of all kinds."""
        return self.cross_layers + self.double_layers + self.single_layers

    @property
    def patch_width(self) -> int:
        """Latent numbers in one token."""
        across, down, along = self.patch
        return across * down * along * self.latent_channels

    @property
    def joint_text(self) -> int:
        """Text tokens that attend beside the image's."""
        return 0 if self.cross_layers else self.text_tokens

    def parameters(self) -> int:
        """Weights of the transformer's layers and its embeddings (norms and biases left out).

        >>> [f"{load_dit(name).parameters() / 1e9:.1f} B" for name in list_dits()]
        ['11.9 B', '12.5 B', '1.4 B', '14.3 B']
        """
        d, ff = self.d_model, self.d_ff
        attention, feed = 4 * d * d, 2 * d * ff
        cross = 2 * attention + feed
        double = 2 * (attention + feed + 6 * d * d)
        single = attention + feed + 3 * d * d
        ends = 2 * self.patch_width * d + self.text_width * d + d * d + 6 * d * d
        return self.cross_layers * cross + self.double_layers * double + self.single_layers * single + ends


TEXT_HEAD_DIM = 64
_NUMBERS = ("d_model", "heads", "head_dim", "d_ff", "text_tokens", "latent_channels", "text_layers", "text_width",
            "text_d_ff", "decoder_depth")  # fmt: skip
_LAYERS = ("cross_layers", "double_layers", "single_layers")
_LAUNCHES = ("text_launches", "pooled_launches")
_LISTS = {"vae": 3, "patch": 3, "decoder_widths": None}


@lru_cache(maxsize=1)
def list_dits() -> tuple[str, ...]:
    """Ids of all diffusion transformers in the catalog, sorted."""
    folder = files("workloads") / "data" / "dit"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_dit(name: str) -> DitSpec:
    """A diffusion transformer by id or .toml file of one's own, read anew where that changed.

    >>> load_dit("wan2.1-14b").heads
    40
    """
    return _load(name, contents(name) if name.endswith(".toml") or "/" in name else ())


@lru_cache(maxsize=16)
def _load(name: str, _: tuple[object, ...]) -> DitSpec:
    if name.endswith(".toml") or "/" in name:
        return parse_dit(read_text(Path(name), "model", WorkloadError), where=name)
    if name not in list_dits():
        raise WorkloadError(f"unknown diffusion transformer '{name}': {nearest(name, list_dits())}")
    text = (files("workloads") / "data" / "dit" / f"{name}.toml").read_text(encoding="utf-8")
    return parse_dit(text, where=f"{name}.toml")


def parse_dit(text: str, *, where: str) -> DitSpec:
    """A diffusion transformer from TOML text; every problem is one line that names file, field, value and remedy."""
    data = parse_toml(text, where, WorkloadError)
    refuse_unknown(data, tuple(field.name for field in fields(DitSpec)), where)
    for name in ("id", "source"):
        if not isinstance(data.get(name), str) or not data[name]:
            raise WorkloadError(f"{where}: {name} = {shown(data.get(name))}: give a text")
    sizes: dict[str, Any] = {name: positive(data.get(name), name, where) for name in _NUMBERS}
    sizes |= {name: positive(data[name], name, where) for name in (*_LAYERS, *_LAUNCHES) if name in data}
    sizes |= {name: _whole_numbers(data.get(name), name, count, where) for name, count in _LISTS.items()}
    decoder = data.get("decoder")
    if decoder is not None and decoder not in list_decoders():
        raise WorkloadError(f"{where}: decoder = {shown(decoder)}: give one of {', '.join(list_decoders())}")
    sizes |= {name: flag(data, name, where) for name in ("masks_text", "images_only")}
    if decoder is not None and load_decoder(decoder).halves:
        for width in sizes["decoder_widths"][:-1]:
            if width % 2:
                raise WorkloadError(
                    f"{where}: decoder_widths = {width}: {decoder} halves channels as it upsamples: give an even number"
                )
    spec = DitSpec(id=data["id"], source=data["source"], decoder=decoder, **sizes)
    if not spec.layers or (spec.cross_layers and spec.layers > spec.cross_layers):
        raise WorkloadError(f"{where}: layers: give cross_layers, or double_layers and single_layers")
    if spec.text_width % TEXT_HEAD_DIM:
        raise WorkloadError(
            f"{where}: text_width = {spec.text_width}: give a multiple of {TEXT_HEAD_DIM}, a head of the text encoder"
        )
    if spec.heads * spec.head_dim != spec.d_model:
        raise WorkloadError(
            f"{where}: heads = {spec.heads} of head_dim = {spec.head_dim} do not make d_model = {spec.d_model}"
        )
    return spec


def _whole_numbers(value: Any, name: str, count: int | None, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or len(value) != (count or len(value)):
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give a list of {count or 'positive'} whole numbers")
    return tuple(positive(item, name, where) for item in value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """What is to be made: pixels and frames."""

    width: int
    height: int
    frames: int


def parse_video(text: str) -> Video:
    """A video as ``WIDTHxHEIGHTxFRAMES``, an image as ``WIDTHxHEIGHT``.

    >>> parse_video("1280x720x81")
    Video(width=1280, height=720, frames=81)
    """
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", text)
    if found is None:
        raise WorkloadError(f"video = '{text}': give WIDTHxHEIGHTxFRAMES like 1280x720x81, or WIDTHxHEIGHT")
    width, height, frames = found.groups(default="1")
    return Video(width=int(width), height=int(height), frames=int(frames))


def latent_grid(spec: DitSpec, video: Video) -> tuple[int, int, int]:
    """Latent tokens along frames, height and width: the first frame alone, then one for each ``vae[0]``."""
    if spec.images_only and video.frames > 1:
        image = f"{video.width}x{video.height}"
        raise WorkloadError(f"video = {image}x{video.frames}: {spec.id} makes single images: give {image}")
    sizes = [(1 + (video.frames - 1) // spec.vae[0]) // spec.patch[0]]
    if (video.frames - 1) % spec.vae[0]:
        raise WorkloadError(
            f"frames = {video.frames}: {spec.id} makes one and a multiple of {spec.vae[0]}: "
            f"give {1 + (video.frames - 1) // spec.vae[0] * spec.vae[0]}"
        )
    for size, name, axis in ((video.height, "height", 1), (video.width, "width", 2)):
        cell = spec.vae[axis] * spec.patch[axis]
        if size % cell:
            raise WorkloadError(f"{name} = {size}: {spec.id} cuts it into cells of {cell}: give a multiple")
        sizes.append(size // cell)
    return sizes[0], sizes[1], sizes[2]


def video_tokens(spec: DitSpec, video: Video) -> int:
    """Latent tokens of a video.

    >>> video_tokens(load_dit("wan2.1-1.3b"), parse_video("832x480x81"))
    32760
    >>> video_tokens(load_dit("wan2.1-14b"), parse_video("1280x720x81"))
    75600
    """
    along, down, across = latent_grid(spec, video)
    return along * down * across


def reuse_cache_bytes(spec: DitSpec, tokens: int) -> int:
    """What reused steps keep over all ranks: of both branches the last residual and the activation it is judged by.

    GalaxyDiT (arXiv 2512.03451) gives 2.88 GB for four such tensors of Wan2.1-14B at 720p.

    >>> round(reuse_cache_bytes(load_dit("wan2.1-14b"), 75_600) / 2**30, 2)
    2.88
    """
    return 4 * tokens * spec.d_model * DType.BF16.bytes


def dit_memory_bytes(spec: DitSpec, *, tokens: int, ranks: int, branches: int, reuse: bool) -> float:
    """Bytes of one rank: all weights, activations of one layer (``branches`` of them at once), the reuse cache.

    Text encoder and VAE have gone, or have not come, while the transformer runs.
    """
    own = branches * (tokens + spec.joint_text) / ranks
    activations = own * (6 * spec.d_model + spec.d_ff) * DType.BF16.bytes
    cache = reuse_cache_bytes(spec, tokens) / ranks if reuse else 0.0
    return spec.parameters() * DType.BF16.bytes + activations + cache
