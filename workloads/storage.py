"""How numbers lie in memory: bits of an element, and how many elements share a scale (and a zero point)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from inputs.texts import shown
from workloads.errors import WorkloadError

# Bits of an element. nf4 and fp4 are bitsandbytes' code books; fp4_e2m1 is the element of NVFP4 and MXFP4.
BITS = {
    "fp32": 32, "bf16": 16, "fp16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int6": 6, "int5": 5, "int4": 4,
    "int3": 3, "int2": 2, "fp4_e2m1": 4, "nf4": 4, "fp4": 4,
}  # fmt: skip
PLAIN = ("bf16", "fp16", "fp32")
# What people and public files call them.
ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32",
    "fp8": "fp8_e4m3", "float8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "e4m3": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3", "fp8_block": "fp8_e4m3_block128", "fp8_block128": "fp8_e4m3_block128",
    "fp8_channel": "fp8_e4m3_channel", "fp8_token": "fp8_e4m3_channel", "fp8_e4m3_token": "fp8_e4m3_channel",
    "fp8_e5m2fn": "fp8_e5m2", "float8_e5m2": "fp8_e5m2", "int8_token": "int8_channel",
    "int4": "int4_g128", "gptq": "int4_g128_zero", "awq": "int4_g128_zero", "nf4": "nf4_g64", "fp4": "fp4_g64",
    "fp4_e2m1": "nvfp4", "fp4_e2m1_g16": "nvfp4", "fp4_e2m1_g32": "mxfp4", "mxfp8": "fp8_e4m3_g32",
}  # fmt: skip
_NAMED = {"nvfp4": ("fp4_e2m1", 16), "mxfp4": ("fp4_e2m1", 32)}
_GRAMMAR = re.compile(
    rf"(?P<element>{'|'.join(sorted(BITS, key=len, reverse=True))})"
    r"(_(?P<channel>channel)|_block(?P<rows>\d{1,5})(x(?P<depth>\d{1,5}))?|_g(?P<group>\d{1,5}))?(?P<more>(_zero16|_zero|_double)*)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One operand: a matrix whose rows lie along the axis that a product sums over.

    A scale stands for ``rows`` x ``depth`` elements (0: for all there are; both 0: one for the whole, or none).
    ``zero``: each scale comes with a zero point as wide as an element, or with ``wide_zero`` of 16 bits. ``double``:
    scales are quantised themselves, to 8 bits and a 32-bit number for 256 of them (bitsandbytes).

    >>> str(storage("fp8_block128")), storage("awq").bytes_of(4096, 4096)
    ('fp8_e4m3_block128', 8716288)
    """

    element: str
    rows: int = 0
    depth: int = 0
    zero: bool = False
    double: bool = False
    wide_zero: bool = False

    @property
    def bits(self) -> int:
        """Bits of an element, without its share of a scale."""
        return BITS[self.element]

    @property
    def scale_bits(self) -> float:
        """Bits of a scale with its zero point; one scale for the whole is a number in the kernel's arguments."""
        if not (self.rows or self.depth):
            return 0.0
        if self.double:
            return 8.0 + 32 / 256
        if self.element == "fp4_e2m1" or (self.element.startswith("fp8") and self.rows == 1 and self.depth == 32):
            scale = 8  # e4m3 (NVFP4), e8m0 (MX formats)
        elif self.element.startswith("int") and self.depth:
            scale = 16  # groups of GPTQ, AWQ, Marlin: in the activations' type
        else:
            scale = 32
        return scale + (16 if self.wide_zero else self.bits) * self.zero

    def bytes_of(self, rows: int, depth: int) -> int:
        """Bytes of a ``rows`` x ``depth`` matrix with its scales and zero points."""
        scales = 0.0
        if self.rows or self.depth:
            scales = math.ceil(rows / (self.rows or rows)) * math.ceil(depth / (self.depth or depth)) * self.scale_bits
        return math.ceil((rows * depth * self.bits + scales) / 8)

    @property
    def plain(self) -> bool:
        """16 or 32 bits without scales: what a checkpoint that is not quantised holds."""
        return self.element in PLAIN

    def __str__(self) -> str:
        """The name that :func:`storage` reads."""
        named = next((name for name, made in _NAMED.items() if made == (self.element, self.depth)), None)
        if named is not None:
            return named
        layout = ""
        if self.rows == 1 and not self.depth:
            layout = "_channel"
        elif self.rows == 1:
            layout = f"_g{self.depth}"
        elif self.rows:
            layout = f"_block{self.rows}" + ("" if self.rows == self.depth else f"x{self.depth}")
        return self.element + layout + ("_zero16" if self.wide_zero else "_zero") * self.zero + "_double" * self.double


@lru_cache(maxsize=256)
def storage(name: str) -> Storage:
    """A storage by its name or one that people use for it: element, layout of scales, zero points.

    >>> storage("int4_g64_zero")
    Storage(element='int4', rows=1, depth=64, zero=True, double=False, wide_zero=False)
    >>> storage("int9")
    Traceback (most recent call last):
        ...
    workloads.errors.WorkloadError: 'int9' is no known format: give one like bf16, fp8_e4m3, fp8_e4m3_block128, \
int8_channel, int4_g128, int4_g128_zero, nvfp4, mxfp4, nf4
    """
    text = name.strip().lower().replace("-", "_")
    text = ALIASES.get(text, text)
    if text in _NAMED:
        element, depth = _NAMED[text]
        return Storage(element=element, rows=1, depth=depth)
    found = _GRAMMAR.fullmatch(text)
    if found is None or (found["element"] in PLAIN and text != found["element"]):
        raise _unknown(name)
    rows = depth = 0
    if found["channel"]:
        rows = 1
    elif found["rows"]:
        rows = int(found["rows"])
        depth = int(found["depth"] or rows)
    elif found["group"]:
        rows, depth = 1, int(found["group"])
    if (found["rows"] or found["group"]) and not depth:
        raise _unknown(name)
    return Storage(
        element=found["element"],
        rows=rows,
        depth=depth,
        zero="_zero" in found["more"],
        double="_double" in found["more"],
        wide_zero="_zero16" in found["more"],
    )


def _unknown(name: str) -> WorkloadError:
    return WorkloadError(
        f"{shown(name)} is no known format: give one like bf16, fp8_e4m3, fp8_e4m3_block128, int8_channel, int4_g128, "
        "int4_g128_zero, nvfp4, mxfp4, nf4"
    )
