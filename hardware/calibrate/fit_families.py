"""Attention, elementwise and grouped-GEMM laws from their kernel rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hardware.calibrate.fit_clocks import BETWEEN_SIGMA, Pair, follow_the_clock, moved_bytes
from hardware.calibrate.fit_gemm import STEEPEST_FALL
from hardware.calibrate.fit_kit import (
    Constraints,
    FitSetting,
    FittedFamily,
    Law,
    Learning,
    Row,
    fit_family,
    settled_limit,
)
from hardware.calibrate.suite.routing import rows_beyond128_of, tiles256_of
from hardware.laws.attention import (
    DecodeCoefficients,
    PrefillCoefficients,
    decode_base_terms,
    decode_features,
    prefill_base_terms,
    prefill_features,
)
from hardware.laws.elementwise import ElementwiseCoefficients, blocks_for, elementwise_base_terms, elementwise_features
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.grouped import GroupedCoefficients, grouped_base_terms, grouped_features
from hardware.laws.sizes import DecodeSizes, GroupedSizes, PrefillSizes
from hardware.laws.terms import KernelTerms

PREFILL_START = PrefillCoefficients(
    efficiency=0.66, tile_overhead=1.3, imbalance=4.0, floor_s=3.5e-6, flop_energy_j=1.6e-12
)
DECODE_START = DecodeCoefficients(
    floor_s=4.5e-6,
    split_s=1e-6,
    merge_s=30e-9,
    split_slowdown=0.03,
    hbm_bytes_per_s=3.1e12,
    hbm_bytes_per_s_per_sm=60e9,
    core_byte_energy_j=45e-12,
    hbm_byte_energy_j=100e-12,
    sm_power_w=20.0,
)
GROUPED_START = GroupedCoefficients(
    floor_s=6e-6,
    switch_cycles=1500.0,
    small_tile_cycles_per_k=10.0,
    empty_saves=0.4,
    large_tile_cycles=3600.0,
    large_tile_cycles_per_k=19.0,
    hbm_bytes_per_s=3.05e12,
    hbm_bytes_per_s_per_sm=89e9,
    sharpness=4.0,
    flop_energy_j=1.4e-12,
    padded_flop_energy_j=0.4e-12,
    sm_power_w=40.0,
    hbm_byte_energy_j=100e-12,
)
ELEMENTWISE_START = ElementwiseCoefficients(
    footprint=1.0,
    floor_s=1.5e-6,
    l2_bytes_per_s=7e12,
    hbm_bytes_per_s=2.9e12,
    blocks_per_s=None,
    l2_byte_energy_j=30e-12,
    hbm_byte_energy_j=70e-12,
    sm_power_w=10.0,
)
# One block a (token, head) in rope: the rate at which the GPU launches blocks bounds it.
ROPE_BLOCKS_PER_S = 1.7e9
# Distinct bytes over bytes moved: rope works in place; add + norm writes its sum back where it read the residual.
FOOTPRINT = {"rope": 0.5, "add_rmsnorm": 0.75}
# Where the search begins for kernels that follow the clock: all of them do below this share of its maximum.
FOLLOWS_BELOW = 0.95
# Length scales of the corrections in the units of each family's coordinates (octaves).
PREFILL_LENGTHS = (1.5, 1.5, 1.0, 3.0)
DECODE_LENGTHS = (1.5, 1.5, 1.0)
GROUPED_LENGTHS = (1.0, 1.5, 1.0)
ELEMENTWISE_LENGTHS = (1.5, 1.5)
FREE_PREFILL = ("efficiency", "tile_overhead", "imbalance", "floor_s", "flop_energy_j")
FREE_DECODE = ("floor_s", "split_s", "merge_s", "split_slowdown", "hbm_bytes_per_s", "core_byte_energy_j", "sm_power_w")
# HBM rate (that of decode attention) and sharpness are held: free, they leave what the memory can do. So is the rate
# of one SM, which no row meets.
FREE_GROUPED = (
    "floor_s", "switch_cycles", "small_tile_cycles_per_k", "empty_saves", "large_tile_cycles",
    "large_tile_cycles_per_k", "flop_energy_j", "padded_flop_energy_j", "sm_power_w",
)  # fmt: skip
# Watts of busy SMs are held: the rows tell them from energy per byte in no kernel.
FREE_ELEMENTWISE = ("floor_s", "l2_bytes_per_s", "hbm_bytes_per_s", "l2_byte_energy_j", "hbm_byte_energy_j")
# Block launches bound rope at every size measured: its memory rates never show.
FREE_ROPE = ("floor_s", "blocks_per_s", "l2_byte_energy_j", "hbm_byte_energy_j")


def prefill_sizes(row: Row) -> PrefillSizes:
    """Sizes of a prefill attention row."""
    return PrefillSizes(
        batch=row["batch"],
        q_len=row["seq_len"],
        kv_len=row.get("kv_len") or row["seq_len"],
        q_heads=row["q_heads"],
        kv_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        causal=bool(row.get("causal", True)),
    )


def decode_sizes(row: Row) -> DecodeSizes:
    """Sizes of a decode attention row."""
    return DecodeSizes(
        batch=row["batch"],
        kv_len=row["seq_len"],
        q_heads=row["q_heads"],
        kv_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        kv_bytes=1 if row.get("kv_dtype") == "fp8_e4m3" else 2,
    )


def grouped_sizes(row: Row) -> GroupedSizes:
    """Sizes of a grouped GEMM row."""
    return GroupedSizes(
        experts=row["experts"],
        rows=row["rows"],
        distinct=row["distinct"],
        tiles128=row["tiles128"],
        tiles256=tiles256_of(row),
        rows_beyond128=rows_beyond128_of(row),
        n=row["n"],
        k=row["k"],
    )


def prefill_row_law(setting: FitSetting, gemm: GemmCoefficients) -> Law[PrefillCoefficients]:
    """The law of prefill attention rows; ``gemm`` gives the HBM rate and energy."""
    memory = {"hbm_bytes_per_s": gemm.hbm_bytes_per_s, "hbm_byte_energy_j": gemm.hbm_byte_energy_j}
    return Law(
        start=PREFILL_START,
        free=FREE_PREFILL,
        terms_of=lambda c, row: prefill_base_terms(c, prefill_sizes(row), setting.gpu, **memory),
        features_of=lambda row: prefill_features(prefill_sizes(row)),
    )


def decode_row_law(
    setting: FitSetting, start: DecodeCoefficients, free: Sequence[str] = FREE_DECODE
) -> Law[DecodeCoefficients]:
    """The law of decode attention rows."""
    return Law(
        start=start,
        free=free,
        terms_of=lambda c, row: decode_base_terms(c, decode_sizes(row), setting.gpu.sms),
        features_of=lambda row: decode_features(decode_sizes(row)),
    )


def grouped_row_law(setting: FitSetting, start: GroupedCoefficients) -> Law[GroupedCoefficients]:
    """The law of grouped GEMM rows; ``resident`` weights come from L2."""

    def terms_of(c: GroupedCoefficients, row: Row) -> KernelTerms:
        terms = grouped_base_terms(c, grouped_sizes(row), setting.gpu)
        return replace(terms, hbm_bytes=0.0, hbm_energy_j=0.0) if row.get("resident") else terms

    return Law(
        start=start,
        free=FREE_GROUPED,
        terms_of=terms_of,
        features_of=lambda row: grouped_features(grouped_sizes(row)),
    )


def elementwise_row_law(
    setting: FitSetting, start: ElementwiseCoefficients, free: Sequence[str]
) -> Law[ElementwiseCoefficients]:
    """The law of elementwise rows."""

    def terms_of(c: ElementwiseCoefficients, row: Row) -> KernelTerms:
        tokens, moved = rows_of(row), moved_bytes(row)
        blocks = tokens * row["heads"] if "heads" in row else blocks_for(moved)
        return elementwise_base_terms(c, setting.gpu, rows=tokens, bytes_moved=moved, launched_blocks=blocks)

    return Law(
        start=start,
        free=free,
        terms_of=terms_of,
        features_of=lambda row: elementwise_features(row["kind"], moved_bytes(row), rows_of(row)),
    )


def rows_of(row: Row) -> int:
    """Rows of an elementwise row; a copy is one."""
    return int(row.get("tokens") or row.get("rows") or 1)


def on_chip_clocks(rows: Sequence[Row], duty: Sequence[Row], setting: FitSetting) -> list[Row]:
    """Capped prefill rows with their clocks brought from the driver's to the chip's own.

    The driver says 1725 MHz of a shape that stamps on the SMs see at 1574 MHz (four cards), under the cap like it:
    its samples of a clock that moves in steps do not say the mean. The ratio of the shapes that both saw holds for all.
    Medians are of whole bursts (40 iterations, 21 ms): there an iteration takes 532 us, in their second halves 522, and
    539 in the row.
    """
    ratios = []
    for burst in duty:
        found = re.fullmatch(r"attention_causal_b(\d+)_s(\d+)_h(\d+)_kv(\d+)", str(burst.get("work")))
        if found is None or burst["idle_s"]:
            continue
        sizes = dict(zip(("batch", "seq_len", "q_heads", "kv_heads"), map(int, found.groups()), strict=True))
        ratios += [
            float(np.median(burst["clock_mhz"])) / row["sm_clock_mhz"][0]
            for row in rows
            if setting.capped(row) and row.get("causal", True) and all(row[k] == v for k, v in sizes.items())
        ]
    if not ratios:
        return list(rows)
    ratio = float(np.mean(ratios))
    return [{**row, "sm_clock_mhz": [row["sm_clock_mhz"][0] * ratio]} if setting.capped(row) else row for row in rows]


def fit_prefill(
    rows: Sequence[Row], setting: FitSetting, gemm: GemmCoefficients, duty: Sequence[Row] = ()
) -> FittedFamily[PrefillCoefficients]:
    """Prefill attention; ``gemm`` gives the HBM rate and energy, which these rows hardly touch."""
    setting = settled_limit(setting, rows)
    rows = on_chip_clocks(rows, duty, setting)
    law = prefill_row_law(setting, gemm)
    return fit_family(rows, setting, law, Learning(lengths=PREFILL_LENGTHS, steepest_fall=STEEPEST_FALL))


def fit_decode(rows: Sequence[Row], setting: FitSetting, hbm_byte_energy_j: float) -> FittedFamily[DecodeCoefficients]:
    """Decode attention."""
    law = decode_row_law(setting, replace(DECODE_START, hbm_byte_energy_j=hbm_byte_energy_j))
    return fit_family(rows, setting, law, Learning(lengths=DECODE_LENGTHS))


def fit_grouped(
    rows: Sequence[Row], setting: FitSetting, decode: DecodeCoefficients
) -> FittedFamily[GroupedCoefficients]:
    """Grouped GEMM; ``decode`` gives the HBM rate and energy."""
    setting = settled_limit(setting, rows)
    start = replace(GROUPED_START, hbm_bytes_per_s=decode.hbm_bytes_per_s, hbm_byte_energy_j=decode.hbm_byte_energy_j)
    law = grouped_row_law(setting, start)
    return fit_family(rows, setting, law, Learning(lengths=GROUPED_LENGTHS))


def fit_elementwise(
    rows: Sequence[Row],
    setting: FitSetting,
    hbm_byte_energy_j: float,
    pairs: Mapping[str, Sequence[Pair]] | None = None,
) -> dict[str, FittedFamily[ElementwiseCoefficients]]:
    """One set of coefficients a kernel name; ``pairs`` of rows at two clocks say which of them follow the clock."""
    fitted = {}
    pairs = pairs or {}
    for kind in sorted({row["kind"] for row in rows}):
        start = replace(
            ELEMENTWISE_START, footprint=FOOTPRINT.get(kind, 1.0), hbm_byte_energy_j=0.7 * hbm_byte_energy_j
        )
        free: tuple[str, ...] = FREE_ELEMENTWISE
        if kind == "rope":
            start = replace(start, blocks_per_s=ROPE_BLOCKS_PER_S)
            free = FREE_ROPE
        if kind == "index_add":
            start = replace(start, l2_bytes_per_s=1e12, hbm_bytes_per_s=1e12)
        anchors = pairs.get(kind, ())
        if follow_the_clock(anchors):
            start, free = replace(start, follows_below=FOLLOWS_BELOW), (*free, "follows_below")
        elif anchors:
            start, anchors = replace(start, follows_below=0.0), ()
        law = elementwise_row_law(setting, start, free)
        fitted[kind] = fit_family(
            [row for row in rows if row["kind"] == kind],
            setting,
            law,
            Learning(lengths=ELEMENTWISE_LENGTHS, time=(0.08, 0.02)),
            Constraints(anchors=anchors, ratio_sigma=BETWEEN_SIGMA),
        )
    return fitted
