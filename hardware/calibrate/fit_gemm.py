"""GEMM law from gemm rows: coefficients by least squares on log time and log energy, then the correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from hardware.calibrate.fit_kit import (
    Constraints,
    FitSetting,
    FittedFamily,
    Law,
    Learning,
    Row,
    fit_coefficients,
    fit_family,
    learn_corrections,
    settled_half,
)
from hardware.gpu import GpuSpec
from hardware.laws.gemm import GemmCoefficients, gemm_base_terms, gemm_features
from hardware.laws.sizes import GemmSizes

# Starting points; their units are those of the fields. Bounds are a factor of five either way.
START = GemmCoefficients(
    efficiency=0.96,
    epilogue_cycles=3000.0,
    hbm_bytes_per_s=2.9e12,
    hbm_bytes_per_s_per_sm=28e9,
    l2_bytes_per_s=20e12,
    floor_s=2.3e-6,
    split_reduce_s=2.5e-6,
    sharpness=8.0,
    flop_energy_j=0.4e-12,
    padded_flop_energy_j=0.1e-12,
    sm_power_w=15.0,
    hbm_byte_energy_j=100e-12,
)
# Sharpness is held: free, it trades against the L2 rate and leaves neither known. So are the rate of one SM, which no
# row meets, and what splits of k cost, for which narrower tiles can stand in.
HELD = ("hbm_byte_energy_j", "sharpness", "hbm_bytes_per_s_per_sm", "split_reduce_s")
FREE_BF16 = tuple(f.name for f in fields(GemmCoefficients) if f.name not in HELD)
# 8-bit rows do not tell energies of useful and padded FLOPs apart.
FREE_FP8 = ("efficiency", "epilogue_cycles", "hbm_bytes_per_s", "floor_s", "flop_energy_j", "sm_power_w")
# Standard deviations of logs about the start: what the main loop reaches of the peak is known well, what L2 gives
# (with tiles shared between neighbouring SMs) only roughly.
PRIORS = {"efficiency": 0.02, "l2_bytes_per_s": 0.2, "floor_s": 0.3, "sm_power_w": 0.3}
# A share of the peak is at most all of it: beyond that, L2 alone would bound large products.
MOST = {"efficiency": 1.0}
# Correction: length scales in octaves of (m, n, k) and of the type. Chosen by leaving one (n, k) out on the gemm
# rows alone.
LENGTHS = (1.5, 1.0, 1.0, 1.0)
# A row more costs no less: what is left for it is less than meters tell apart.
STEEPEST_FALL = 0.004
LEARNING = Learning(lengths=LENGTHS, steepest_fall=STEEPEST_FALL)


def gemm_sizes(row: Row) -> GemmSizes:
    """Sizes of a gemm row."""
    return GemmSizes(m=row["m"], n=row["n"], k=row["k"], dtype=row["dtype"])


def gemm_row_law(gpu: GpuSpec, start: GemmCoefficients, free: Sequence[str]) -> Law[GemmCoefficients]:
    """The law of gemm rows."""
    return Law(
        start=start,
        free=free,
        terms_of=lambda c, row: gemm_base_terms(c, gemm_sizes(row), gpu),
        features_of=lambda row: gemm_features(gemm_sizes(row)),
    )


def fit_bf16(
    rows: Sequence[Row], setting: FitSetting, hbm_byte_energy_j: float, anchors: Sequence[tuple[Row, Row]]
) -> FittedFamily[GemmCoefficients]:
    """The law of 16-bit GEMMs; ``anchors`` are duty rows with true clocks."""
    start = replace(START, hbm_byte_energy_j=hbm_byte_energy_j)
    law = gemm_row_law(setting.gpu, start, FREE_BF16)
    return fit_family(rows, setting, law, LEARNING, Constraints(anchors=anchors, priors=PRIORS, most=MOST))


def fit_fp8(
    rows: Sequence[Row], bf16_rows: Sequence[Row], setting: FitSetting, bf16: GemmCoefficients
) -> FittedFamily[GemmCoefficients]:
    """The law of 8-bit GEMMs from that of 16-bit ones; what is left is learnt from both types' rows."""
    law = gemm_row_law(setting.gpu, bf16, FREE_FP8)
    fp8, errors, correlation = fit_coefficients(rows, setting, law, Constraints(priors=PRIORS, most=MOST))
    both = [*rows, *bf16_rows]
    terms = [law.terms_of(c, row) for c, of in ((fp8, rows), (bf16, bf16_rows)) for row in of]
    corrections = learn_corrections(both, terms, [law.features_of(row) for row in both], setting, LEARNING)
    return FittedFamily(law=law, coefficients=fp8, corrections=corrections, errors=errors, correlation=correlation)


def duty_anchors(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """GEMM duty rows at two true clocks: each shape without pauses (slow) and with long ones (fast).

    Times and clocks are means over the GPUs of each GPU's median.
    """
    groups: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for row in rows:
        if row["kind"] == "duty" and row["work"].startswith("gemm_") and row["idle_s"] in (0, 0.06):
            seconds, mhz = (float(np.median(settled_half(row, column))) for column in ("iter_s", "clock_mhz"))
            groups.setdefault((row["work"], row["idle_s"] == 0), []).append((seconds, mhz * 1e6))

    def anchor(work: str, slow: bool) -> Row:
        m, n, k = (int(part) for part in work.removeprefix("gemm_").split("x"))
        time_s, clock_hz = np.mean(groups[work, slow], axis=0).tolist()
        return {"m": m, "n": n, "k": k, "dtype": "bf16", "latency_s": time_s, "clock_hz": clock_hz}

    works = sorted({work for work, _ in groups if (work, True) in groups and (work, False) in groups})
    return [(anchor(work, True), anchor(work, False)) for work in works]
