"""How well the laws predict rows that they were not fitted on: ``python -m hardware.calibrate.crossval RECORDS...``.

Each group of kernel rows is left out in turn, coefficients and corrections are fitted on the rest, and the group
is predicted from its inputs alone, at the profile's own temperature. Whole-model records are refused, as in a fit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hardware.calibrate.cards import of_one_kind, to_one_card
from hardware.calibrate.fit import ELEMENTWISE, read_fit_records, record_files
from hardware.calibrate.fit_clocks import moved_bytes
from hardware.calibrate.fit_collective import blocks_of, fit_collectives
from hardware.calibrate.fit_families import (
    fit_decode,
    fit_elementwise,
    fit_grouped,
    fit_prefill,
    prefill_row_law,
    rows_of,
)
from hardware.calibrate.fit_gemm import duty_anchors, fit_bf16, fit_fp8
from hardware.calibrate.fit_kit import FitSetting, FittedFamily, Row, settled_half
from hardware.calibrate.fit_power import chip_of, fit_power, setting_of, work_hbm_bytes
from hardware.catalog import load_gpu
from hardware.laws.collective import UNFITTED, collective_base_terms
from hardware.laws.correction import LawCurve
from hardware.laws.elementwise import elementwise_course
from hardware.laws.gemm import gemm_base_terms
from hardware.laws.sizes import CollectiveSizes, GemmSizes
from hardware.laws.terms import KernelTerms, time_s
from hardware.power import point_at


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutErrors:
    """Errors of one family on rows left out: predicted over measured less one, NaN where nothing was metered."""

    family: str
    left_out: str
    latency: tuple[float, ...]
    energy: tuple[float, ...]

    def line(self) -> str:
        """One row of the table, in %."""
        latency, energy = np.abs(self.latency) * 100, np.abs(self.energy) * 100
        shown = [
            f"{np.nanmean(e):8.2f}{np.nanmedian(e):8.2f}{np.nanmax(e):8.1f}" if np.isfinite(e).any() else " " * 24
            for e in (latency, energy)
        ]
        return f"{self.family:<14}{self.left_out:<18}{len(latency):>5}{shown[0]}{shown[1]}"

    def spread(self) -> dict[str, float | int]:
        """How far 68 of 100 rows lie off, as logs: of the time, and of the mean power (``energy`` over time).

        The collective's and the duty rows' ``energy`` is their mean power already.
        """
        time, energy = np.log1p(self.latency), np.log1p(self.energy)
        power = energy if self.family.endswith("*") else energy - time
        return {
            "n": len(time),
            "time": round(float(np.nanquantile(np.abs(time), ONE_SIGMA)), 4),
            "power": round(float(np.nanquantile(np.abs(power), ONE_SIGMA)), 4),
        }


# Share of a normal variable within one standard deviation.
ONE_SIGMA = 0.6827
# Families whose name in profiles is another.
PROFILE_NAMES = {"gemm bf16": "gemm.bf16", "gemm fp8": "gemm.fp8_e4m3", "grouped gemm": "grouped"}
HEADER = (
    f"{'family':<14}{'left out':<18}{'n':>5}{'lat.mean':>8}{'median':>8}{'worst':>8}{'en.mean':>8}{'median':>8}"
    f"{'worst':>8}   (absolute error, %)"
)

Fold = tuple[list[Row], list[Row]]
Errors = list[tuple[float, float]]


def folds(rows: Sequence[Row], key: Callable[[Row], Any]) -> Iterator[Fold]:
    """(rest, group) for each value of ``key``, sorted."""
    for value in sorted({key(row) for row in rows}):
        yield [row for row in rows if key(row) != value], [row for row in rows if key(row) == value]


def errors_of(row: Row, terms: KernelTerms, setting: FitSetting) -> tuple[float, float]:
    """Latency and energy error of ``row`` settled under the limit, at the profile's temperature."""
    point = setting.point(terms, {})
    energy_j = row["energy_j"]
    energy = point.latency_s * point.power_w / energy_j - 1.0 if energy_j else float("nan")
    return point.latency_s / row["latency_s"] - 1.0, energy


def _of_family(
    family: FittedFamily[Any], test: Sequence[Row], setting: FitSetting, course: LawCurve | None = None
) -> Errors:
    return [errors_of(row, family.terms(row, course), setting) for row in test]


def _bf16(setting: FitSetting, hbm_j: float, anchors: list[tuple[Row, Row]], fold: Fold) -> Errors:
    return _of_family(fit_bf16(fold[0], setting, hbm_j, anchors), fold[1], setting)


def _fp8(setting: FitSetting, bf16: Any, bf16_rows: list[Row], fold: Fold) -> Errors:
    out = {(row["n"], row["k"]) for row in fold[1]}
    family = fit_fp8(fold[0], [row for row in bf16_rows if (row["n"], row["k"]) not in out], setting, bf16)
    return _of_family(family, fold[1], setting)


def _prefill(setting: FitSetting, gemm: Any, duty: Sequence[Row], fold: Fold) -> Errors:
    return _of_family(fit_prefill(fold[0], setting, gemm, duty), fold[1], setting)


def _decode(setting: FitSetting, hbm_j: float, fold: Fold) -> Errors:
    return _of_family(fit_decode(fold[0], setting, hbm_j), fold[1], setting)


def _grouped(setting: FitSetting, decode: Any, fold: Fold) -> Errors:
    return _of_family(fit_grouped(fold[0], setting, decode), fold[1], setting)


def _elementwise(setting: FitSetting, hbm_j: float, fold: Fold) -> Errors:
    family = fit_elementwise(fold[0], setting, hbm_j)[fold[1][0]["kind"]]
    first = fold[1][0]
    bytes_a_block = moved_bytes(first) / (rows_of(first) * first["heads"]) if "heads" in first else 1.0
    course = elementwise_course(family.coefficients, setting.gpu, bytes_a_block=bytes_a_block)
    return _of_family(family, fold[1], setting, course)


def collective_errors(rows: Sequence[Row], setting: FitSetting) -> HeldOutErrors:
    """Each number of blocks between the least and the most of its operation and world, left out in turn."""
    loops = [row for row in rows if row["kind"] == "collective" and "launch" not in row]
    latency, power = [], []
    for op, world in sorted({(row["op"], row["world"]) for row in loops}):
        own = [row for row in loops if (row["op"], row["world"]) == (op, world)]
        counts = sorted({blocks_of(row) for row in own})
        for count in counts[1:-1]:
            rest = [row for row in rows if row["kind"] != "collective" or row not in own or blocks_of(row) != count]
            fitted = fit_collectives(rest, setting, 1e-6)
            for row in (row for row in own if blocks_of(row) == count):
                sizes = CollectiveSizes(op=op, world=world, buffer_bytes=row["bytes"], ctas=count, in_graph=False)
                terms = collective_base_terms(fitted, UNFITTED, sizes, setting.gpu)
                seconds = time_s(terms, sms=setting.gpu.sms, sm_clock_hz=setting.gpu.max_clock_hz)
                latency.append(seconds / row["latency_s"] - 1.0)
                watts = [w for w in row["power_w"] if w is not None]
                predicted_w = setting.idle_w(row) + fitted.links_power_w + terms.link_energy_j / seconds
                power.append(predicted_w / float(np.mean(watts)) - 1.0 if watts else float("nan"))
    return HeldOutErrors(family="collective*", left_out="block count", latency=tuple(latency), energy=tuple(power))


def duty_errors(rows: Sequence[Row], setting: FitSetting, bf16: Any, prefill: Any) -> HeldOutErrors:
    """Slow over fast iteration time of each work and GPU at the true clocks, and the mean power of held-out rows.

    Time errors are of the ratio (without pauses over with pauses of 60 ms); power errors of each row when the
    rows with its burst and pause were left out of the power fit.
    """
    duty = [row for row in rows if row["kind"] == "duty" and "kernel" not in row]
    ratios = []
    for work, chip in sorted({(row["work"], chip_of(row)) for row in duty}):
        own = [row for row in duty if (row["work"], chip_of(row)) == (work, chip)]
        slow, fast = ([row for row in own if row["idle_s"] == pause] for pause in (0, 0.06))
        if not slow or not fast:
            continue
        terms = _terms_of_work(work, setting, bf16, prefill)
        measured, predicted = [], []
        for group in (slow, fast):
            times = np.concatenate([settled_half(row, "iter_s") for row in group])
            clocks = np.concatenate([settled_half(row, "clock_mhz") for row in group]) * 1e6
            measured.append(float(np.median(times)))
            point = point_at(
                terms, setting.curve, sms=setting.gpu.sms, gpu_sms=setting.gpu.sms, sm_clock_hz=float(np.median(clocks))
            )
            predicted.append(point.latency_s)
        ratios.append((predicted[0] / predicted[1]) / (measured[0] / measured[1]) - 1.0)
    power: list[float] = []
    others = [row for row in rows if row["kind"] != "duty"]
    for rest, out in folds(duty, lambda row: (row["idle_s"], row["burst_s"])):
        fit = fit_power([*others, *rest], setting.gpu)
        power.extend(fit.mean_power_w(row) / row["power_w"][0] - 1.0 for row in out)
    return HeldOutErrors(family="duty*", left_out="burst, pause", latency=tuple(ratios), energy=tuple(power))


def _terms_of_work(work: str, setting: FitSetting, bf16: Any, prefill: Any) -> KernelTerms:
    """Terms of a duty row's work; a copy is HBM transfer alone."""
    if work.startswith("gemm_"):
        m, n, k = (int(part) for part in work.removeprefix("gemm_").split("x"))
        return gemm_base_terms(bf16, GemmSizes(m=m, n=n, k=k), setting.gpu)
    if work.startswith("attention_"):
        sizes = {"batch": 2, "seq_len": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True}
        return prefill_row_law(setting, bf16).terms_of(prefill, sizes)
    moved = work_hbm_bytes({"work": work})
    rate = bf16.hbm_bytes_per_s
    return KernelTerms(floor_s=0.0, blocks=setting.gpu.sms, cycles_per_block=0.0, hbm_bytes=moved, hbm_bytes_per_s=rate)


def cross_validate(rows: Sequence[Row], gpu_id: str, *, workers: int) -> Iterator[HeldOutErrors]:
    """All families, one after the other; folds run on ``workers`` processes."""
    gpu = load_gpu(gpu_id)
    rows = [row for row in rows if row["gpu"] == gpu.id]
    power = fit_power(rows, gpu)
    rows, _ = to_one_card(of_one_kind(rows), gpu, power.curve)
    setting, hbm_j = setting_of(rows, gpu, power), power.hbm_byte_energy_j
    single = [row for row in rows if row["world"] == 1 and "gpu_index" not in row]
    of_kind = {kind: [row for row in single if row["kind"] == kind] for kind in (*ELEMENTWISE, "grouped_gemm")}
    gemm = [row for row in single if row["kind"] == "gemm"]
    bf16_rows = [row for row in gemm if row["dtype"] == "bf16"]
    fp8_rows = [row for row in gemm if row["dtype"] == "fp8_e4m3"]
    attention = {
        phase: [row for row in single if row["kind"] == "attention" and row["phase"] == phase]
        for phase in ("prefill", "decode")
    }
    anchors, duty = duty_anchors(rows), [row for row in rows if row["kind"] == "duty"]
    bf16 = fit_bf16(bf16_rows, setting, hbm_j, anchors).coefficients
    decode = fit_decode(attention["decode"], setting, hbm_j).coefficients
    prefill = fit_prefill(attention["prefill"], setting, bf16, duty).coefficients

    def shape(row: Row) -> tuple[int, int]:
        return row["n"], row["k"]

    def whole(row: Row) -> str:
        return repr([(name, value) for name, value in sorted(row.items()) if name not in MEASURED])

    plans: list[tuple[str, str, Callable[[Fold], Errors], list[Row], Callable[[Row], Any]]] = [
        ("gemm bf16", "(n, k)", partial(_bf16, setting, hbm_j, anchors), bf16_rows, shape),
        ("gemm fp8", "(n, k)", partial(_fp8, setting, bf16, bf16_rows), fp8_rows, shape),
        ("prefill", "shape", partial(_prefill, setting, bf16, duty), attention["prefill"], whole),
        ("decode", "shape", partial(_decode, setting, hbm_j), attention["decode"], whole),
        ("grouped gemm", "routing", partial(_grouped, setting, decode), of_kind["grouped_gemm"], whole),
    ]
    plans += [
        (kind, "size", partial(_elementwise, setting, hbm_j), of_kind[kind], whole)
        for kind in ELEMENTWISE
        if len(of_kind[kind]) > 3
    ]
    with ProcessPoolExecutor(workers) as pool:
        for name, left_out, run, of, key in plans:
            errors = [error for fold in pool.map(run, folds(of, key)) for error in fold]
            if errors:
                latency, energy = zip(*errors, strict=True)
                yield HeldOutErrors(family=name, left_out=left_out, latency=latency, energy=energy)
    yield collective_errors(rows, setting)
    yield duty_errors(rows, setting, bf16, prefill)


MEASURED = frozenset({"latency_s", "power_w", "energy_j", "sm_clock_mhz", "temperature_c"})


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--spread", type=Path, help="write what 68 of 100 rows of each family lie within (TOML)")
    arguments = parser.parse_args()
    print(HEADER)
    spreads = []
    for held in cross_validate(
        read_fit_records(record_files(arguments.records)), arguments.gpu, workers=arguments.workers
    ):
        print(held.line(), flush=True)
        inside = ", ".join(f"{name} = {value}" for name, value in held.spread().items())
        name = held.family.rstrip("*")
        spreads.append(f'"{PROFILE_NAMES.get(name, name)}" = {{ {inside} }}\n')
    if arguments.spread is not None:
        arguments.spread.write_text(f"[{arguments.gpu}]\n" + "".join(spreads), encoding="utf-8")
    print("* collective, duty: mean power in place of energy; duty: slow over fast iteration time at true clocks")


if __name__ == "__main__":
    main()
