"""Rebuild a GPU's profile from kernel records: ``python -m hardware.calibrate.fit RECORDS... --gpu ID --out FILE``.

Whole-model records (model_step, ring_attention, dit_step) check predictions; this module refuses them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hardware.calibrate.fit_collective import fit_collectives
from hardware.calibrate.fit_families import (
    DECODE_START,
    FREE_DECODE,
    FREE_GROUPED,
    FREE_PREFILL,
    GROUPED_START,
    PREFILL_START,
    decode_terms_of,
    fit_elementwise,
    grouped_terms_of,
    prefill_terms_of,
)
from hardware.calibrate.fit_gemm import (
    FREE_BF16,
    FREE_FP8,
    LENGTHS,
    START,
    base_terms,
    duty_anchors,
    features_of,
)
from hardware.calibrate.fit_kit import Row, Setting, fit_coefficients, learn_correction
from hardware.calibrate.fit_power import fit_power
from hardware.catalog import load_gpu
from hardware.clock import ClockLimits
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.attention import decode_features, prefill_features
from hardware.laws.elementwise import ElementwiseCoefficients
from hardware.laws.grouped import grouped_features
from hardware.profile import ChipSpread, Corrections, LaunchCosts, Profile, Provenance, dump_profile

FIT_KINDS = frozenset(
    {
        "idle", "gemm", "attention", "collective", "contention", "alone", "together", "duty", "grouped_gemm",
        "in_context", "small_kernels", "transient", "host", "copy", "add_rmsnorm", "silu_mul", "rope", "cast_fp8",
        "gather", "index_add", "topk_sum", "gelu",
    }
)  # fmt: skip
CHECK_KINDS = frozenset({"model_step", "ring_attention", "dit_step", "generate"})
ELEMENTWISE = ("copy", "add_rmsnorm", "silu_mul", "rope", "cast_fp8", "gather", "index_add", "topk_sum")
PREFILL_LENGTHS = (1.5, 1.5, 1.0, 3.0)
DECODE_LENGTHS = (1.5, 1.5, 1.0)
GROUPED_LENGTHS = (1.0, 1.5, 1.0)
# Power above which a one-GPU kernel row sits at the cap.
CAPPED_W = 680.0


def read_fit_records(paths: Sequence[Path]) -> list[Row]:
    """Kernel records of ``paths``; a whole-model row anywhere is an error, before anything is fitted."""
    rows: list[Row] = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            row = json.loads(line)
            if row["kind"] in CHECK_KINDS:
                raise HardwareError(
                    f"{path}, line {number}: kind '{row['kind']}' is for checking predictions and never enters a "
                    "fit: leave the file out"
                )
            if row["kind"] not in FIT_KINDS:
                raise HardwareError(f"{path}, line {number}: unknown kind '{row['kind']}': leave the file out")
            rows.append(row)
    return rows


def fit_profile(rows: Sequence[Row], gpu: GpuSpec, *, files: Mapping[str, str], command: str, date: str) -> Profile:
    """All coefficients of ``gpu`` from kernel rows of that GPU."""
    rows = [row for row in rows if row["gpu"] == gpu.id]
    if not any(row["kind"] == "gemm" for row in rows):
        raise HardwareError(f"no gemm rows of {gpu.id} among the records: nothing to fit")
    power = fit_power(rows, gpu)
    single = [row for row in rows if row["world"] == 1 and "gpu_index" not in row]
    gemm_rows = [row for row in single if row["kind"] == "gemm" and row["dtype"] == "bf16"]
    capped = [row["power_w"][0] for row in gemm_rows if row["m"] >= 512 and row["power_w"][0]]
    setting = Setting(gpu=gpu, curve=power.curve, limit_w=float(np.median(capped)))
    errors: dict[str, float] = {f"power.{name}": value for name, value in power.errors.items()}

    def note(family: str, found: Mapping[str, float]) -> None:
        errors.update({f"{family}.log.{name}": round(value, 4) for name, value in found.items()})

    hbm_j = power.hbm_byte_energy_j
    gemm, found = fit_coefficients(
        gemm_rows, setting, replace(START, hbm_byte_energy_j=hbm_j), FREE_BF16,
        lambda c, row: base_terms(c, row, gpu), anchors=duty_anchors(rows),
    )  # fmt: skip
    note("gemm.bf16", found)
    families = {"bf16": gemm}
    corrections = {"bf16": _learn_gemm(gemm_rows, gemm, setting)}
    fp8_rows = [row for row in single if row["kind"] == "gemm" and row["dtype"] == "fp8_e4m3"]
    if fp8_rows:
        families["fp8_e4m3"], found = fit_coefficients(
            fp8_rows, setting, gemm, FREE_FP8, lambda c, row: base_terms(c, row, gpu)
        )
        note("gemm.fp8_e4m3", found)
        corrections["fp8_e4m3"] = _learn_gemm(fp8_rows, families["fp8_e4m3"], setting)

    attention = [row for row in single if row["kind"] == "attention"]
    prefill_rows = [row for row in attention if row["phase"] == "prefill"]
    prefill, found = fit_coefficients(
        prefill_rows,
        setting,
        PREFILL_START,
        FREE_PREFILL,
        lambda c, row: prefill_terms_of(c, row, gemm, setting),
    )
    note("prefill", found)
    prefill_time, prefill_energy = learn_correction(
        prefill_rows,
        [prefill_terms_of(prefill, row, gemm, setting) for row in prefill_rows],
        [
            prefill_features(
                row["batch"], row["seq_len"], row.get("kv_len") or row["seq_len"], row["q_heads"],
                bool(row.get("causal", True)),
            )
            for row in prefill_rows
        ],
        setting,
        lengths=PREFILL_LENGTHS,
    )  # fmt: skip
    decode_rows = [row for row in attention if row["phase"] == "decode"]
    decode, found = fit_coefficients(
        decode_rows, setting, replace(DECODE_START, hbm_byte_energy_j=hbm_j), FREE_DECODE,
        lambda c, row: decode_terms_of(c, row, setting),
    )  # fmt: skip
    note("decode", found)
    decode_time, decode_energy = learn_correction(
        decode_rows,
        [decode_terms_of(decode, row, setting) for row in decode_rows],
        [decode_features(row["batch"], row["seq_len"], row["q_heads"], row["kv_heads"]) for row in decode_rows],
        setting,
        lengths=DECODE_LENGTHS,
    )
    grouped_rows = [row for row in single if row["kind"] == "grouped_gemm"]
    grouped, found = fit_coefficients(
        grouped_rows, setting, replace(GROUPED_START, hbm_byte_energy_j=hbm_j), FREE_GROUPED,
        lambda c, row: grouped_terms_of(c, row, setting),
    )  # fmt: skip
    note("grouped", found)
    grouped_time, grouped_energy = learn_correction(
        grouped_rows,
        [grouped_terms_of(grouped, row, setting) for row in grouped_rows],
        [grouped_features(row["rows"], row["distinct"], row["k"]) for row in grouped_rows],
        setting,
        lengths=GROUPED_LENGTHS,
    )
    elementwise: dict[str, ElementwiseCoefficients] = {}
    for kind, (coefficients, found) in fit_elementwise(
        [row for row in single if row["kind"] in ELEMENTWISE], setting, hbm_j
    ).items():
        elementwise[kind] = coefficients
        note(kind, found)
    gap_s = _graph_gap_s(rows)
    return Profile(
        gpu=gpu.id,
        status="calibrated",
        basis=gpu.id,
        provenance=Provenance(
            command=command,
            date=date,
            files=files,
            row_digests=tuple(sorted(_digest(row) for row in rows)),
            standard_errors=errors,
        ),
        curve=power.curve,
        limits=_limits(rows, gpu, setting.limit_w, power.fast_limit_w),
        launch=LaunchCosts(graph_gap_s=gap_s, eager_gap_s=EAGER_GAP_S, host_issue_s=HOST_ISSUE_S),
        spread=_spread(rows, power.curve.idle_w(gpu.max_clock_hz)),
        gemm=families,
        gemm_corrections=corrections,
        prefill=prefill,
        prefill_corrections=Corrections(time=prefill_time, energy=prefill_energy),
        decode=decode,
        decode_corrections=Corrections(time=decode_time, energy=decode_energy),
        elementwise=elementwise,
        grouped=grouped,
        grouped_corrections=Corrections(time=grouped_time, energy=grouped_energy),
        collective=fit_collectives(rows, setting, gap_s),
        peak_hbm_bytes_per_s=max(gemm.hbm_bytes_per_s, decode.hbm_bytes_per_s),
    )


# Kernels launched one by one from Python while the host is ahead: mean pause from one kernel's end to the next
# one's start, cuBLAS's memsets between them counted in (second layer of our one-GPU prefill profiler trace).
EAGER_GAP_S = 2.7e-6
# The host's own pace per launch where it is behind: the shortest kernel-to-kernel distance of that trace's
# launches; most real steps are slower (a Python layer costs 10 to 100 us under the profiler).
HOST_ISSUE_S = 5.0e-6


def _learn_gemm(rows: Sequence[Row], coefficients: Any, setting: Setting) -> Corrections:
    time, energy = learn_correction(
        rows,
        [base_terms(coefficients, row, setting.gpu) for row in rows],
        [features_of(row) for row in rows],
        setting,
        lengths=LENGTHS,
    )
    return Corrections(time=time, energy=energy)


def _graph_gap_s(rows: Sequence[Row]) -> float:
    """Pause between kernels in a graph: a chain of five less its parts, from small_kernels rows."""
    small = {row["work"]: row["latency_s"] for row in rows if row["kind"] == "small_kernels"}
    gemm, norm, silu = (small[name] for name in ("gemm64x4096x4096", "add_rms64x4096", "silu64x14336"))
    return float((small["mix: rms gemm silu rms gemm"] - 2 * norm - 2 * gemm - silu) / 5)


def _spread(rows: Sequence[Row], idle_w: float) -> ChipSpread:
    """Chip-to-chip deviations from the same kernels on several GPUs, and the mean chip's power.

    The one-GPU rows that the laws are fitted on come from one card. Copies of 256 MiB were run on that card,
    on each of four others and on the GPUs of two more hosts: the ratio of watts above idle, averaged over
    cards, says how the mean chip differs from it.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "gpu_index" in row and row["kind"] in ("gemm", "copy"):
            key = (row["kind"], row.get("m"), row.get("n"), row.get("k"), row.get("bytes_moved"))
            groups.setdefault(key, []).append(row)
    throttled, power = [], []
    for same in groups.values():
        watts = np.array([row["power_w"][0] for row in same])
        seconds = np.array([row["latency_s"] for row in same])
        if watts.mean() > CAPPED_W:
            throttled.append(seconds.std(ddof=1) / seconds.mean())
        else:
            power.append(watts.std(ddof=1) / watts.mean())
    size = 256 * 2**20
    reference = [r for r in rows if r["kind"] == "copy" and r.get("bytes_moved") == size and "gpu_index" not in r]
    others = [
        watts
        for r in rows
        if (r["kind"] == "alone" and r.get("copy_bytes_moved") == size)
        or (r["kind"] == "copy" and r.get("bytes_moved") == size and "gpu_index" in r)
        for watts in r["power_w"]
    ]
    factor = 1.0
    if reference and others:
        factor = (float(np.mean(others)) - idle_w) / (float(reference[0]["power_w"][0]) - idle_w)
    return ChipSpread(throttled_time=float(np.mean(throttled)), power=float(np.mean(power)), mean_power_factor=factor)


def _limits(rows: Sequence[Row], gpu: GpuSpec, slow_w: float, _: float) -> ClockLimits:
    """Middle limit from the plateau of the transient log; time constants from when it bends."""
    log = next((row["log"] for row in rows if row["kind"] == "transient"), None)
    middle_w = slow_w
    if log is not None:
        marks = next(row["marks"] for row in rows if row["kind"] == "transient")
        start = marks[0]["start_s"]
        middle_w = _mean_power(log, start + 0.2, start + 0.8)
    return ClockLimits(
        cap_w=gpu.tdp_w,
        fast_limit_w=FAST_LIMIT_W,
        middle_limit_w=middle_w,
        slow_limit_w=slow_w,
        middle_time_s=0.02,
        slow_time_s=1.0,
        middle_gain_per_s=20.0,
        slow_gain_per_s=3.0,
        tick_s=0.005,
    )


# Instantaneous power at which mixed kernels were held in the first 90 ms of transient.jsonl (W of a 700 W cap;
# duty.jsonl: 1016 to 1071 W for lone kernels).
FAST_LIMIT_W = 950.0


def _mean_power(log: Sequence[Sequence[float]], start_s: float, end_s: float) -> float:
    """Mean watts between two times from the energy counter, which moves in steps."""
    steps = [(t, e) for i, (t, e, *_rest) in enumerate(log) if i and e != log[i - 1][1] and start_s <= t <= end_s]
    return (steps[-1][1] - steps[0][1]) * 1e-3 / (steps[-1][0] - steps[0][0])


def _digest(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--date", default="", help="date to record (default: none, so that a rebuild is identical)")
    arguments = parser.parse_args()
    paths: list[Path] = arguments.records
    profile = fit_profile(
        read_fit_records(paths),
        load_gpu(arguments.gpu),
        files={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths},
        command=f"python -m hardware.calibrate.fit {' '.join(sorted(p.name for p in paths))} --gpu {arguments.gpu}",
        date=arguments.date,
    )
    arguments.out.write_text(dump_profile(profile), encoding="utf-8")
    assert math.isfinite(profile.launch.graph_gap_s)


if __name__ == "__main__":
    main()
