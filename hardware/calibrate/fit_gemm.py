"""GEMM law from gemm rows: coefficients by least squares on log time and log energy, then the correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from hardware.calibrate.fit_kit import Row
from hardware.gpu import GpuSpec
from hardware.laws.gemm import GemmCoefficients, gemm_base_terms, gemm_features
from hardware.laws.terms import KernelTerms

# Starting points; their units are those of the fields. Bounds are a factor of five either way.
START = GemmCoefficients(
    efficiency=0.95,
    epilogue_cycles=3000.0,
    hbm_bytes_per_s=2.9e12,
    hbm_bytes_per_s_per_sm=28e9,
    l2_bytes_per_s=15e12,
    floor_s=2.3e-6,
    split_reduce_s=2.5e-6,
    sharpness=6.0,
    flop_energy_j=0.4e-12,
    padded_flop_energy_j=0.1e-12,
    sm_power_w=30.0,
    hbm_byte_energy_j=100e-12,
)
FREE_BF16 = tuple(f.name for f in fields(GemmCoefficients) if f.name != "hbm_byte_energy_j")
FREE_FP8 = ("efficiency", "epilogue_cycles", "floor_s", "flop_energy_j", "padded_flop_energy_j", "sm_power_w")
# Correction: length scales in octaves of (m, n, k), amplitude and noise of log residuals. Chosen by leaving
# one (n, k) out on the gemm rows alone.
LENGTHS = (1.5, 1.0, 1.0)


def base_terms(coefficients: GemmCoefficients, row: Row, gpu: GpuSpec) -> KernelTerms:
    """Uncorrected terms of a gemm row."""
    return gemm_base_terms(
        coefficients,
        m=row["m"],
        n=row["n"],
        k=row["k"],
        element_bytes=1 if row["dtype"].startswith("fp8") else 2,
        out_bytes=2,
        flops_per_cycle_per_sm=gpu.tensor_flops_per_cycle_per_sm(row["dtype"]),
        sms=gpu.sms,
        max_clock_hz=gpu.max_clock_hz,
    )


def features_of(row: Row) -> tuple[float, float, float]:
    """Correction coordinates of a gemm row."""
    return gemm_features(row["m"], row["n"], row["k"])


def duty_anchors(rows: Sequence[Row]) -> list[Row]:
    """GEMM duty rows as (shape, true clock, time): one a work and pause length, mean of the four GPUs."""
    groups: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for row in rows:
        if row["kind"] == "duty" and row["work"].startswith("gemm_") and row["idle_s"] in (0, 0.06):
            half = len(row["iter_s"]) // 2 if row["idle_s"] == 0 else 0
            groups.setdefault((row["work"], row["idle_s"] == 0), []).append(
                (float(np.median(row["iter_s"][half:])), float(np.median(row["clock_mhz"][half:])) * 1e6)
            )
    anchors: list[Row] = []
    for (work, _), values in sorted(groups.items()):
        m, n, k = (int(part) for part in work.removeprefix("gemm_").split("x"))
        time, clock = np.mean(values, axis=0)
        anchors.append({"m": m, "n": n, "k": k, "dtype": "bf16", "latency_s": float(time), "clock_hz": float(clock)})
    return anchors
