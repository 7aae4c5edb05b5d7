"""Laws of the kernels that a serving engine brings along, where they differ from those of the libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files

import msgspec

from hardware.laws.adapters import AdapterCoefficients
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients
from hardware.laws.correction import Correction
from hardware.laws.decoder import ConvolutionCoefficients, GroupNormCoefficients, WideAttentionCoefficients
from hardware.laws.elementwise import ElementwiseCoefficients
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.routed import RoutedCoefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Learnt factors of one family: on time and on energy above idle."""

    time: Correction
    energy: Correction


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutErrors:
    """Errors on rows that were left out of the fit: how many, mean absolute shares of time and of energy."""

    rows: int
    time: float
    energy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceRow:
    """The engine's own all-reduce: ranks, bytes of the buffer, seconds in a loop, watts above idle and awake links."""

    world: int
    buffer_bytes: int
    seconds: float
    power_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaws:
    """One engine's kernels on one GPU type. Products, attention, elementwise kernels and ``adapters`` by type or name.

    ``routed``, ``scaled``: by type of the weights, with ``_block`` where scales are of blocks of 128; ``decode``: by
    type of the cache; ``masked``: prefill under a mask of padded keys (cuDNN's). ``convolution`` and ``wide`` attention
    of VAE decoders: by type; ``norm``: their group norms. ``mean_power_factor``: watts above idle of the mean card over
    those of the measured ones. ``left_out`` and ``standard_errors`` (of logs) by family; ``files`` by name with their
    digests.
    """

    command: str
    date: str
    files: Mapping[str, str]
    row_digests: tuple[str, ...]
    routed: Mapping[str, RoutedCoefficients]
    scaled: Mapping[str, GemmCoefficients]
    prefill: PrefillCoefficients
    decode: Mapping[str, DecodeCoefficients]
    elementwise: Mapping[str, ElementwiseCoefficients]
    corrections: Mapping[str, Learnt]
    all_reduce: tuple[AllReduceRow, ...] = ()
    adapters: Mapping[str, AdapterCoefficients] = field(default_factory=dict)
    masked: PrefillCoefficients | None = None
    convolution: Mapping[str, ConvolutionCoefficients] = field(default_factory=dict)
    wide: Mapping[str, WideAttentionCoefficients] = field(default_factory=dict)
    norm: GroupNormCoefficients | None = None
    mean_power_factor: float = 1.0
    left_out: Mapping[str, LeftOutErrors] = field(default_factory=dict)
    standard_errors: Mapping[str, float] = field(default_factory=dict)

    def learnt(self, family: str) -> Learnt:
        """The corrections of ``family``; none where it has none."""
        return self.corrections.get(family) or Learnt(time=Correction.none(), energy=Correction.none())

    def with_adapters(self, known: EngineLaws) -> EngineLaws:
        """These laws, with those of adapters of ``known`` where no row of them is here."""
        taken = {name: law for name, law in known.adapters.items() if name not in self.adapters}
        learnt = {family: known.learnt(family) for family in (f"adapters.{name}" for name in taken)}
        return replace(self, adapters={**self.adapters, **taken}, corrections={**self.corrections, **learnt})


def dump_laws(laws: EngineLaws) -> str:
    """The laws as JSON text, stable to the byte."""
    from pydantic import TypeAdapter  # whose schema takes longer to make than all shipped laws to read

    return json.dumps(TypeAdapter(EngineLaws).dump_python(laws, mode="json"), indent=1, sort_keys=True) + "\n"


@lru_cache(maxsize=1)
def decoder() -> msgspec.json.Decoder[EngineLaws]:
    """Of shipped files of laws."""
    return msgspec.json.Decoder(EngineLaws)


ENGINES = ("vllm", "diffusers")


@lru_cache(maxsize=32)
def shipped_engines(gpu_id: str) -> dict[str, EngineLaws]:
    """Every engine whose kernels were measured on ``gpu_id``, by name."""
    found = {}
    for engine in ENGINES:
        path = files("hardware") / "data" / "engines" / engine / f"{gpu_id}.json"
        if path.is_file():
            found[engine] = decoder().decode(path.read_bytes())
    return found
