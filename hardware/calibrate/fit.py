"""Rebuild a GPU's profile from kernel records: ``python -m hardware.calibrate.fit RECORDS... --gpu ID --out FILE``.

Whole-model records (model_step, ring_attention, dit_step) check predictions; this module refuses them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hardware.calibrate.cards import mean_chip, of_one_kind, to_one_card
from hardware.calibrate.engine_rows import ENGINE_KINDS, read_engine_records
from hardware.calibrate.fit_clocks import clock_pairs
from hardware.calibrate.fit_collective import fit_collectives
from hardware.calibrate.fit_engine import fit_engine
from hardware.calibrate.fit_families import fit_decode, fit_elementwise, fit_grouped, fit_prefill, grouped_row_law
from hardware.calibrate.fit_gemm import duty_anchors, fit_bf16, fit_fp8
from hardware.calibrate.fit_kit import FittedFamily, Row, digest
from hardware.calibrate.fit_limits import fit_limits
from hardware.calibrate.fit_power import fit_power, setting_of
from hardware.calibrate.suite.host_issue import LAUNCHES
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.elementwise import ElementwiseCoefficients
from hardware.power import PowerCurve
from hardware.profile import ChipSpread, LaunchCosts, Profile, Provenance, profile_for

FIT_KINDS = frozenset(
    {
        "idle", "gemm", "attention", "collective", "contention", "alone", "together", "duty", "grouped_gemm",
        "in_context", "small_kernels", "transient", "host", "host_issue", "copy", "add_rmsnorm", "silu_mul", "rope",
        "cast_fp8", "gather", "index_add", "topk_sum", "gelu", "permute_copy", "cat", "kv_write", "waiting",
        "at_clock",
    }
)  # fmt: skip
# Without rows of these nothing can be fitted.
NEEDED = ("gemm", "attention", "copy", "add_rmsnorm", "silu_mul", "rope", "duty", "idle", "small_kernels")
CHECK_KINDS = frozenset({"model_step", "ring_attention", "dit_step", "generate"})
ELEMENTWISE = ("copy", "add_rmsnorm", "silu_mul", "gelu", "rope", "cast_fp8", "gather", "index_add", "topk_sum")
# Power above which a one-GPU kernel row sits at the cap.
CAPPED_W = 680.0


def read_fit_records(paths: Sequence[Path]) -> list[Row]:
    """Kernel records of ``paths``; a whole-model row anywhere is an error, before anything is fitted.

    Files of one folder are one session, that is, one card: its name goes into each row as ``session``.
    """
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
            rows.append({**row, "session": path.resolve().parent.name})
    return rows


def record_files(paths: Sequence[Path]) -> list[Path]:
    """The record files among ``paths``, of which folders stand for all .jsonl files below them, by name."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise HardwareError(f"no .jsonl records in {', '.join(map(str, paths))}")
    return files


def fit_records(paths: Sequence[Path], gpu: GpuSpec, *, date: str = "") -> Profile:
    """A profile of ``gpu`` from record files or folders of them; whole-model rows are refused."""
    files = record_files(paths)
    try:
        if of_engine(files):
            return with_engine(profile_for(gpu), files, gpu)
        return fit_profile(
            read_fit_records(files),
            gpu,
            files={_name(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
            command=f"wattline calibrate --from {' '.join(path.name for path in paths)} --gpu {gpu.id}",
            date=date,
        )
    except KeyError as error:
        named = ", ".join(map(str, paths))
        raise HardwareError(f"{named}: some row lacks the field {error}, which a fit of its kind needs") from error


def of_engine(files: Sequence[Path]) -> bool:
    """True where the records are of a serving engine's kernels."""
    with files[0].open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "{}")
    return json.loads(first).get("kind") in ENGINE_KINDS


def with_engine(base: Profile, files: Sequence[Path], gpu: GpuSpec) -> Profile:
    """``base`` with the laws of vLLM's kernels from rows of them; fits start from what it has, nothing else changes."""
    laws = fit_engine(
        read_engine_records(files),
        base,
        gpu,
        near=base.engines.get("vllm"),
        files={_name(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        command=f"wattline calibrate --from {' '.join(path.name for path in files)} --gpu {gpu.id}",
    )
    return replace(base, engines={**base.engines, "vllm": laws})


def _name(path: Path) -> str:
    """A file with its session's folder, as provenance names it."""
    return f"{path.resolve().parent.name}/{path.name}"


def fit_profile(rows: Sequence[Row], gpu: GpuSpec, *, files: Mapping[str, str], command: str, date: str) -> Profile:
    """All coefficients of ``gpu`` from kernel rows of that GPU.

    What the records do not show (collectives and chip spread on one GPU, experts, 8-bit types) stays as in the
    shipped or forecast profile. So does what kernels take from one another: ``sim.validation.contention`` fits it.
    """
    rows = [row for row in rows if row["gpu"] == gpu.id]
    kinds = {row["kind"] for row in rows}
    for kind in NEEDED:
        if kind not in kinds:
            raise HardwareError(f"no {kind} rows of {gpu.id} among the records: nothing to fit")
    digests = tuple(sorted(digest(row) for row in rows))
    base = profile_for(gpu)  # for what these records do not show
    power = fit_power(rows, gpu)
    spread = (
        _spread(rows, power.curve, gpu)
        if any("gpu_index" in row and row["kind"] == "gemm" for row in rows)
        else replace(base.spread, mean_power_factor=1.0)  # of one's own card, not of the mean one
    )
    rows, _ = to_one_card(of_one_kind(rows), gpu, power.curve)
    single = [row for row in rows if row["world"] == 1 and "gpu_index" not in row]
    gemm_rows = [row for row in single if row["kind"] == "gemm" and row["dtype"] == "bf16"]
    setting = setting_of(rows, gpu, power)
    errors: dict[str, float] = {f"power.{name}": value for name, value in power.errors.items()}
    hbm_j = power.hbm_byte_energy_j
    fp8_rows = [row for row in single if row["kind"] == "gemm" and row["dtype"] == "fp8_e4m3"]
    attention = [row for row in single if row["kind"] == "attention"]
    gemm = {"bf16": fit_bf16(gemm_rows, setting, hbm_j, duty_anchors(rows))}
    bf16 = gemm["bf16"].coefficients
    if fp8_rows:
        gemm["fp8_e4m3"] = fit_fp8(fp8_rows, gemm_rows, setting, bf16)
    duty = [row for row in rows if row["kind"] == "duty"]
    prefill = fit_prefill([row for row in attention if row["phase"] == "prefill"], setting, bf16, duty)
    decode = fit_decode([row for row in attention if row["phase"] == "decode"], setting, hbm_j)
    grouped_rows = [row for row in single if row["kind"] == "grouped_gemm"]
    grouped = (
        fit_grouped(grouped_rows, setting, decode.coefficients)
        if grouped_rows
        else FittedFamily(
            law=grouped_row_law(setting, base.grouped),
            coefficients=base.grouped,
            corrections=base.grouped_corrections,
            errors={},
        )
    )
    pairs = clock_pairs(single, l2_bytes=gpu.l2_bytes)
    elementwise = fit_elementwise([row for row in single if row["kind"] in ELEMENTWISE], setting, hbm_j, pairs)
    families: dict[str, FittedFamily[Any]] = {
        **{f"gemm.{dtype}": family for dtype, family in gemm.items()},
        "prefill": prefill,
        "decode": decode,
        "grouped": grouped,
        **elementwise,
    }
    for name, family in families.items():
        errors.update({f"{name}.log.{coefficient}": round(e, 4) for coefficient, e in family.errors.items()})
    limits = fit_limits(rows, gpu, power.curve, setting.limit_w)
    errors.update({f"limits.{name}": error for name, error in limits.errors.items()})
    gap_s = _graph_gap_s(rows)
    return Profile(
        gpu=gpu.id,
        status="calibrated",
        basis=gpu.id,
        provenance=Provenance(
            command=command,
            date=date,
            files=files,
            row_digests=digests,
            standard_errors=errors,
            correlations={"power": power.correlation}
            | {name: family.correlation for name, family in families.items() if family.correlation},
        ),
        curve=power.curve,
        limits=limits.limits,
        launch=LaunchCosts(
            graph_gap_s=gap_s, eager_gap_s=EAGER_GAP_S, host_issue_s=_host_issue_s(rows, base.launch.host_issue_s)
        ),
        spread=spread,
        gemm={**base.gemm, **{dtype: family.coefficients for dtype, family in gemm.items()}},
        gemm_corrections={**base.gemm_corrections, **{dtype: family.corrections for dtype, family in gemm.items()}},
        prefill=prefill.coefficients,
        prefill_corrections=prefill.corrections,
        decode=decode.coefficients,
        decode_corrections=decode.corrections,
        elementwise={
            **base.elementwise,
            **{
                kind: family.coefficients
                if kind in pairs
                else _with_clock(family.coefficients, base.elementwise.get(kind))
                for kind, family in elementwise.items()
            },
        },
        elementwise_corrections={
            **base.elementwise_corrections,
            **{kind: family.corrections for kind, family in elementwise.items()},
        },
        grouped=grouped.coefficients,
        grouped_corrections=grouped.corrections,
        collective=fit_collectives(rows, setting, gap_s) if "collective" in kinds else base.collective,
        sharing=base.sharing,
        peak_hbm_bytes_per_s=max(bf16.hbm_bytes_per_s, decode.coefficients.hbm_bytes_per_s),
    )


# Kernels launched one by one while the host is ahead: mean pause from one kernel's end to the next one's start in the
# second half of our one-GPU prefill profiler trace (18 pauses, cuBLAS's memsets between them counted in: 2.62 us).
EAGER_GAP_S = 2.6e-6
# Launches of a dense decode layer by operation, where no row times the whole layer.
DECODE_LAYER = {"add_rmsnorm": 2, "linear": 4, "rope": 1, "attend_token": 1, "silu_mul": 1}


def _with_clock(c: ElementwiseCoefficients, base: ElementwiseCoefficients | None) -> ElementwiseCoefficients:
    """``c`` with what the base knows of the clock, for records without rows at two clocks."""
    return c if base is None else replace(c, follows_below=base.follows_below)


def _host_issue_s(rows: Sequence[Row], base: float) -> float:
    """The host's seconds per launch in an eager decode layer, else ``base``.

    The least of all runs: other work on a host only adds, and ours are shared (runs differ by 1.7 times).
    """
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "host_issue":
            times.setdefault(row["work"], []).append(row["host_s"])
    if "decode_layer" in times:
        return min(times["decode_layer"]) / LAUNCHES["decode_layer"]
    if not times.keys() >= DECODE_LAYER.keys():
        return base
    return sum(n * min(times[work]) for work, n in DECODE_LAYER.items()) / LAUNCHES["decode_layer"]


def _graph_gap_s(rows: Sequence[Row]) -> float:
    """Pause between kernels in a graph: a chain of five less its parts, from small_kernels rows of 64 tokens."""
    small: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "small_kernels" and row.get("m", 64) == 64:
            small.setdefault(row["work"], []).append(row["latency_s"])
    names = ("mix: rms gemm silu rms gemm", "gemm64x4096x4096", "add_rms64x4096", "silu64x14336")
    mix, gemm, norm, silu = (float(np.mean(small[name])) for name in names)
    return (mix - 2 * norm - 2 * gemm - silu) / 5


def _spread(rows: Sequence[Row], curve: PowerCurve, gpu: GpuSpec) -> ChipSpread:
    """Chip-to-chip deviations from the same kernels on several GPUs, and the mean chip's power."""
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
    throttled += _spread_without_pauses(rows)
    return ChipSpread(
        throttled_time=float(np.sqrt(np.mean(np.square(throttled)))),  # variances are what averages
        power=float(np.mean(power)),
        mean_power_factor=mean_chip(rows, gpu, curve),
    )


def _spread_without_pauses(rows: Sequence[Row]) -> list[float]:
    """How far apart several GPUs are that run one kernel at the cap, from duty rows that never pause."""
    times: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["kind"] == "duty" and "gpu_index" in row and not row["idle_s"] and row["power_w"][0] > CAPPED_W:
            of_chip = times.setdefault(row["work"], {}).setdefault(row["gpu_index"], [])
            of_chip.append(float(np.median(row["iter_s"])))
    chips = [[float(np.mean(own)) for own in each.values()] for each in times.values() if len(each) > 1]
    return [float(np.std(each, ddof=1) / np.mean(each)) for each in chips]
