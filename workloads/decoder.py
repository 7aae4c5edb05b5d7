"""VAE decoders as data: which kernels their modules launch around convolutions and attention, and in which parts."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Literal

from workloads.kernel_names import EngineOp
from workloads.work import DType

_FOLDER = files("workloads") / "data" / "decoders"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTiles:
    """A tile's sides in pixels and frames, and how far apart they begin; a row of a seam takes ``blend_row_s``."""

    pixels: int
    pixels_apart: int
    frames: int
    frames_apart: int
    blend_row_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One decoder's modules: ``kernels`` by their place, ``element_bytes`` of each kernel.

    ``frames``: an image or video at once, in ``chunks`` of a latent frame whose convolutions keep frames, or in
    ``tiles``. ``swapped_until``: where what attention left, its channels innermost, is put in order for good; of
    several images at once never (``keeps_several_swapped``).
    ``halves``: convolutions behind an upsampling leave half of the channels.
    """

    id: str
    dtype: DType
    frames: Literal["whole", "chunks", "tiles"]
    attention: Literal["linear", "convolution"]
    kernels: Mapping[str, tuple[EngineOp, ...]]
    element_bytes: Mapping[EngineOp, int]
    tiles: DecoderTiles | None = None
    swapped_until: Literal["norm", "upsample"] | None = None
    keeps_several_swapped: bool = False
    halves: bool = False
    engine: str = field(default="diffusers")


@lru_cache(maxsize=8)
def load_decoder(name: str) -> Decoder:
    """A decoder by the name of its class in diffusers.

    >>> load_decoder("AutoencoderKLWan").frames
    'chunks'
    """
    data = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    plain = {key: value for key, value in data.items() if key not in ("dtype", "kernels", "bytes", "tiles")}
    return Decoder(
        dtype=DType(data["dtype"]),
        kernels={place: tuple(EngineOp(op) for op in ops) for place, ops in data["kernels"].items()},
        element_bytes={EngineOp(op): size for op, size in data["bytes"].items()},
        tiles=DecoderTiles(**data["tiles"]) if "tiles" in data else None,
        **plain,
    )


@lru_cache(maxsize=1)
def list_decoders() -> tuple[str, ...]:
    """Names of all decoders, sorted."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))
