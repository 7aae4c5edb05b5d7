"""What one GPU is: the datasheet facts that time and power laws start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuSpec:
    """One GPU as sold, in SI units (Hz, bytes, W; FLOP/s at ``reference_clock_hz``).

    Peak rates are dense (no structured sparsity). ``tensor_flops_per_s`` is keyed by dtype
    (``bf16``, ``fp16``, ``fp8_e4m3``, ``int8``, ...) and holds at ``reference_clock_hz``; the rate at
    another clock scales with the clock. Link figures are per direction. Clocks and watts of a slice are its card's.

    >>> from hardware.catalog import load_gpu
    >>> gpu = load_gpu("h100-sxm-80gb")
    >>> gpu.sms, round(gpu.max_clock_hz / 1e6)
    (132, 1980)
    """

    id: str
    name: str
    architecture: str
    sms: int
    reference_clock_hz: float
    max_clock_hz: float
    min_clock_hz: float
    clock_step_hz: float
    tensor_flops_per_s: Mapping[str, float]
    memory_bytes: float
    hbm_bytes_per_s: float
    l2_bytes: float
    link: str
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    tdp_w: float
    idle_w: float
    sources: Mapping[str, str]
    confidence: Mapping[str, Confidence]
    card: GpuSpec | None = None  # of a MIG slice: the GPU that it is cut from
    slices: int = 1  # of this size that the card has

    @property
    def clusters(self) -> bool:
        """Whether blocks of a kernel can be launched as clusters on neighbouring SMs (Hopper and later)."""
        return self.architecture in ("hopper", "blackwell")

    @property
    def sheet(self) -> list[tuple[str, float | str, Confidence, str]]:
        """Every figure that has a source: its name, value (SI), confidence and source."""
        rates = self.tensor_flops_per_s
        return [
            (name, rates[name] if name in rates else getattr(self, name, "-"), self.confidence[name], source)
            for name, source in self.sources.items()
        ]

    def same_figures(self, other: GpuSpec) -> bool:
        """Whether both are one card, whoever says so."""
        names = {field.name for field in fields(GpuSpec)} - {"sources", "confidence"}
        return self is other or all(getattr(self, name) == getattr(other, name) for name in names)

    def tensor_flops_per_cycle_per_sm(self, dtype: str) -> float:
        """Dense multiply-add FLOPs one SM retires per clock cycle for ``dtype``."""
        return self.product_flops_per_s(dtype) / (self.reference_clock_hz * self.sms)

    def multiplies(self, dtype: str) -> bool:
        """Whether there is a rate for products of ``dtype``."""
        return dtype in self.tensor_flops_per_s or (dtype == "bf16" and "fp16" in self.tensor_flops_per_s)

    def product_flops_per_s(self, dtype: str) -> float:
        """Peak rate for ``dtype``; a GPU without bf16 (V100) runs 16-bit work at its fp16 rate."""
        rates = self.tensor_flops_per_s
        return rates["fp16"] if dtype == "bf16" and "bf16" not in rates else rates[dtype]
