"""Laws of a VAE decoder's convolutions, of its group norms and of its attention, from their kernel rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardware.calibrate.engine_families import EngineFamilies
from hardware.calibrate.engine_rows import Row, convolution_of, moved_of
from hardware.calibrate.fit_kit import Law, Learning
from hardware.gpu import GpuSpec
from hardware.laws.decoder import (
    MOST_FLASH_HEAD_DIM,
    ConvolutionCoefficients,
    GroupNormCoefficients,
    WideAttentionCoefficients,
    WideAttentionSizes,
    convolution_base_terms,
    convolution_features,
    group_norm_base_terms,
    group_norm_features,
    wide_attention_base_terms,
    wide_attention_features,
)

# Length scales of the corrections (octaves).
CONVOLUTION_LENGTHS = (1.5, 1.0, 1.5, 0.5)
WIDE_LENGTHS = (1.0, 1.0)
NORM_LENGTHS = (1.5, 1.0)
FREE_CONVOLUTION = (
    "floor_s", "efficiency", "copy_bytes_per_s", "flop_energy_j", "hbm_byte_energy_j",
)  # fmt: skip
CONVOLUTION_START = ConvolutionCoefficients(
    floor_s=10e-6,
    efficiency=0.75,
    copy_bytes_per_s=2.2e12,
    bias_bytes_per_s=1.5e12,
    flop_energy_j=0.8e-12,
    hbm_byte_energy_j=100e-12,
    sm_power_w=20.0,
)
NORM_START = GroupNormCoefficients(
    floor_s=5e-6,
    block_bytes_per_s=2.5e9,
    block_l2_bytes_per_s=4.5e9,
    pass_bytes_per_s=1.7e12,
    core_byte_energy_j=40e-12,
    hbm_byte_energy_j=80e-12,
)
WIDE_START = WideAttentionCoefficients(floor_s=5e-6, efficiency=0.15, flop_energy_j=2e-12)


def decoder_laws(
    rows: Sequence[Row], fits: EngineFamilies, gpu: GpuSpec
) -> tuple[dict[str, ConvolutionCoefficients], dict[str, WideAttentionCoefficients]]:
    """Laws of a VAE decoder's convolutions and of its attention, by type."""
    convolution: dict[str, ConvolutionCoefficients] = {}
    wide: dict[str, WideAttentionCoefficients] = {}
    for element in ("bf16", "f32"):
        some = [
            row for row in rows
            if row["kind"] == "diffusers_conv" and row["dtype"] == element and row.get("layout") != "nhwc"
        ]  # fmt: skip
        if some:
            start = convolution.get("bf16", CONVOLUTION_START)
            law = Law(
                start=replace(start, bias_bytes_per_s=_bias_rate(rows, element) or start.bias_bytes_per_s),
                free=FREE_CONVOLUTION,
                terms_of=lambda c, row: convolution_base_terms(c, gpu, convolution_of(row)),
                features_of=lambda row: convolution_features(convolution_of(row)),
            )
            learning = Learning(lengths=CONVOLUTION_LENGTHS, time=(0.15, 0.02), energy=(0.1, 0.03))
            convolution[element] = fits.add(f"convolution.{element}", some, law, learning)
        some = [row for row in rows if wide_heads(row) and (row.get("dtype") or "bf16") == element]
        if some:
            attention = Law(
                start=wide.get("bf16", WIDE_START),
                free=("efficiency", "flop_energy_j"),
                terms_of=lambda c, row: wide_attention_base_terms(c, gpu, wide_sizes_of(row)),
                features_of=lambda row: wide_attention_features(row["seq_len"], row["kv_len"]),
            )
            learning = Learning(lengths=WIDE_LENGTHS, time=(0.2, 0.02), energy=(0.2, 0.03))
            wide[element] = fits.add(f"wide.{element}", some, attention, learning)
    return convolution, wide


def group_norm(row: Row) -> bool:
    """Whether a row is of a group norm, which has a law of its own."""
    return bool(row["kind"] == "diffusers_image" and row["how"] == "group_norm")


def group_norm_law(rows: Sequence[Row], fits: EngineFamilies, gpu: GpuSpec) -> GroupNormCoefficients | None:
    """The law of a VAE decoder's group norms; None without rows of one."""
    norms = [row for row in rows if group_norm(row)]
    if not norms:
        return None
    law = Law(
        start=NORM_START,
        free=(
            "floor_s",
            "block_bytes_per_s",
            "block_l2_bytes_per_s",
            "pass_bytes_per_s",
            "core_byte_energy_j",
            "hbm_byte_energy_j",
        ),
        terms_of=lambda c, row: group_norm_base_terms(c, gpu, moved_of(row)),
        features_of=lambda row: group_norm_features(moved_of(row)),
    )
    learning = Learning(lengths=NORM_LENGTHS, time=(0.15, 0.02), energy=(0.1, 0.03))
    found: GroupNormCoefficients = fits.add("norm", norms, law, learning)
    return found


def wide_sizes_of(row: Row) -> WideAttentionSizes:
    """Sizes of a row of attention over wide heads."""
    return WideAttentionSizes(
        batch=row["batch"] * row["heads"],
        tokens=row["seq_len"],
        keys=row["kv_len"],
        head_dim=row["head_dim"],
        element=row.get("dtype") or "bf16",
    )


def _bias_rate(rows: Sequence[Row], element: str) -> float | None:
    """Bytes a second of the largest sum with a bias that was measured by itself."""
    sums = [
        row for row in rows if row["kind"] == "diffusers_image" and row["how"] == "bias" and row["dtype"] == element
    ]
    rates = [(moved_of(row).bytes_moved, moved_of(row).bytes_moved / row["latency_s"]) for row in sums]
    return max(rates)[1] if rates else None


def wide_heads(row: Row) -> bool:
    """Attention of a VAE's decoder, of one head over all channels: more than FlashAttention takes."""
    return bool(row["kind"] == "diffusers_attention" and row["head_dim"] > MOST_FLASH_HEAD_DIM)
