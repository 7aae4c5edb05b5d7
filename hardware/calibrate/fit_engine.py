"""Laws of a serving engine's kernels from rows of them: ``wattline calibrate --from RECORDS --gpu ID``.

Machine, power curve and limit are those of the GPU's profile; nothing of it changes. Whole steps never enter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hardware.calibrate.engine_rows import Moved, moved_of, prefill_of, read_engine_records
from hardware.calibrate.fit_families import (
    ELEMENTWISE_START,
    FREE_DECODE,
    FREE_ELEMENTWISE,
    FREE_PREFILL,
    decode_features_of,
    decode_terms_of,
    prefill_features_of,
    prefill_sizes,
)
from hardware.calibrate.fit_gemm import PRIORS
from hardware.calibrate.fit_kit import FitSetting, FittedFamily, Row, fit_family, settled_limit
from hardware.catalog import load_gpu
from hardware.engine_laws import ADAPTER, AllReduceRow, EngineLaws, Learnt, LeftOutErrors
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.attention import DecodeCoefficients, prefill_base_terms
from hardware.laws.correction import corrected
from hardware.laws.elementwise import ElementwiseCoefficients, elementwise_base_terms
from hardware.laws.engine_price import elementwise_features, scaled_base_terms, scaled_features
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.routed import RoutedCoefficients, routed_base_terms, routed_features
from hardware.laws.sizes import RoutedSizes
from hardware.laws.terms import KernelTerms
from hardware.profile import Profile, profile_for

# Rows left out at a time where errors are reported: a fifth, drawn by their digests.
FOLDS = 5
# Length scales of the corrections (octaves) in the coordinates of each family.
ROUTED_LENGTHS = (1.5, 1.5, 1.0, 1.0)
SCALED_LENGTHS = (1.5, 1.0, 1.0)
PREFILL_LENGTHS = (1.5, 1.5, 1.0, 3.0)
DECODE_LENGTHS = (1.5, 1.5, 1.0)
ELEMENTWISE_LENGTHS = (1.5, 1.5)
NOT_ELEMENTWISE = (
    "vllm_experts", "vllm_attention", "vllm_scaled_gemm", "diffusers_attention", "diffusers_linear", "diffusers_conv",
)  # fmt: skip
FREE_ROUTED = (
    "floor_s", "tile_cycles", "tile_cycles_per_k", "hbm_bytes_per_s", "hbm_bytes_per_s_per_sm", "l2_bytes_per_s",
    "flop_energy_j", "padded_flop_energy_j", "core_byte_energy_j", "sm_power_w",
)  # fmt: skip
FREE_SCALED = (
    "efficiency", "epilogue_cycles", "hbm_bytes_per_s", "hbm_bytes_per_s_per_sm", "floor_s", "flop_energy_j",
    "padded_flop_energy_j", "hbm_byte_energy_j",
)  # fmt: skip
# HBM3e's joules a byte come out of these rows: held at the base's where a family cannot tell them from its cores'.
ROUTED_START = RoutedCoefficients(
    floor_s=4e-6,
    tile_cycles=1500.0,
    tile_cycles_per_k=7.0,
    hbm_bytes_per_s=2.9e12,
    hbm_bytes_per_s_per_sm=60e9,
    l2_bytes_per_s=9e12,
    sharpness=6.0,
    flop_energy_j=0.9e-12,
    padded_flop_energy_j=0.2e-12,
    core_byte_energy_j=20e-12,
    hbm_byte_energy_j=107e-12,
    sm_power_w=50.0,
)


def moved_terms(c: ElementwiseCoefficients, moved: Moved, gpu: GpuSpec) -> KernelTerms:
    """Uncorrected terms of a memory-bound kernel of the engine."""
    return elementwise_base_terms(
        c, rows=moved.rows, bytes_moved=moved.bytes_moved, launched_blocks=max(1, int(moved.bytes_moved // 8192)),
        l2_bytes=gpu.l2_bytes, max_clock_hz=gpu.max_clock_hz, sms=gpu.sms,
    )  # fmt: skip


def routed_sizes(row: Row) -> RoutedSizes:
    """Sizes of a row of one expert product."""
    n, k = (2 * row["ff"], row["hidden"]) if row["part"] == "gate_up" else (row["hidden"], row["ff"])
    tile = row["config"]
    return RoutedSizes(
        rows=row["rows"], distinct=row["distinct"], tiles=row["tiles"], block_m=tile["BLOCK_SIZE_M"],
        block_n=tile["BLOCK_SIZE_N"], n=n, k=k, weight_type=weights_of(row),
    )  # fmt: skip


def weights_of(row: Row) -> str:
    """The name of the law of a row's weights."""
    return f"{row['dtype']}_block" if row.get("block") else str(row["dtype"])


class _Fits:
    """Families one after the other, each with its errors on rows left out."""

    def __init__(self, gpu: GpuSpec, setting: FitSetting) -> None:
        self.gpu, self.setting = gpu, setting
        self.coefficients: dict[str, Any] = {}
        self.corrections: dict[str, Learnt] = {}
        self.left_out: dict[str, LeftOutErrors] = {}
        self.errors: dict[str, float] = {}

    def add(
        self,
        name: str,
        rows: Sequence[Row],
        start: Any,
        free: Sequence[str],
        terms_of: Callable[[Any, Row], KernelTerms],
        features_of: Callable[[Row], tuple[float, ...]],
        lengths: tuple[float, ...],
        **more: Any,
    ) -> Any:
        """Fit ``name`` on ``rows`` and keep it."""
        setting = settled_limit(self.setting, rows)

        def fit(some: Sequence[Row]) -> FittedFamily[Any]:
            return fit_family(some, setting, start, free, terms_of, features_of, lengths=lengths, **more)

        family = fit(rows)
        self.coefficients[name] = family.coefficients
        learnt = family.corrections
        self.corrections[name] = Learnt(time=learnt.time, energy=learnt.energy)
        self.errors |= {f"{name}.log.{key}": round(value, 4) for key, value in family.errors.items()}
        time, energy = [], []
        folds = [[row for row in rows if int(_digest(row), 16) % FOLDS == i] for i in range(FOLDS)]
        for fold in folds:
            rest = [row for row in rows if row not in fold]
            if len(rest) < 2 or not fold:
                continue
            other = fit(rest)
            for row in fold:
                factors = other.corrections
                terms = corrected(terms_of(other.coefficients, row), factors.time, factors.energy, features_of(row))
                point = setting.point(terms, {"temperature_c": row.get("temperature_c"), "sm_clock_mhz": None})
                time.append(abs(point.latency_s / row["latency_s"] - 1.0))
                energy.append(abs(point.latency_s * point.power_w / row["energy_j"] - 1.0))
        if time:
            self.left_out[name] = LeftOutErrors(
                rows=len(time), time=round(float(np.mean(time)), 4), energy=round(float(np.mean(energy)), 4)
            )
        return family.coefficients


def fit_engine(
    rows: Sequence[Row], base: Profile, gpu: GpuSpec, *, near: EngineLaws | None, files: Mapping[str, str], command: str
) -> EngineLaws:
    """Laws of the engine's kernels from ``rows`` of ``gpu``.

    ``near``: laws of the same kernels on a like GPU, from which fits start and where families without rows stay.
    """
    rows = [row for row in rows if row["gpu"] == gpu.id]
    if not rows:
        raise HardwareError(f"no rows of an engine's kernels on {gpu.id} among the records: nothing to fit")
    setting = FitSetting(gpu=gpu, curve=base.curve, limit_w=base.limits.slow_limit_w)
    fits = _Fits(gpu, setting)
    single = [row for row in rows if row["world"] == 1]
    hbm = gpu.hbm_bytes_per_s / load_gpu("h100-sxm-80gb").hbm_bytes_per_s
    bf16 = base.gemm["bf16"]

    decodes: dict[str, DecodeCoefficients] = {}
    prefill = base.prefill
    attention = [row for row in single if row["kind"] == "vllm_attention"]
    for cache in ("bf16", "fp8_e4m3"):
        some = [row for row in attention if row["phase"] == "decode" and row["kv_dtype"] == cache]
        if some:
            start = decodes.get("bf16", base.decode)
            decodes[cache] = fits.add(
                f"decode.{cache}", some, start, (*FREE_DECODE, "hbm_byte_energy_j"),
                lambda c, row: decode_terms_of(c, row, setting), decode_features_of, DECODE_LENGTHS,
                priors={"hbm_byte_energy_j": 0.1, "sm_power_w": 0.5},
            )  # fmt: skip
    hbm_j = decodes["bf16"].hbm_byte_energy_j if decodes else bf16.hbm_byte_energy_j
    some = [flash for row in single if (flash := prefill_of(row)) is not None]
    if some:
        prefill = fits.add(
            "prefill", some, base.prefill, FREE_PREFILL,
            lambda c, row: prefill_base_terms(
                c, prefill_sizes(row), gpu, hbm_bytes_per_s=bf16.hbm_bytes_per_s, hbm_byte_energy_j=hbm_j
            ),
            prefill_features_of, PREFILL_LENGTHS,
        )  # fmt: skip

    routed: dict[str, RoutedCoefficients] = {}
    experts = [row for row in single if row["kind"] == "vllm_experts" and row["part"] != "all"]
    for name in sorted({weights_of(row) for row in experts}):
        tile_start = replace(ROUTED_START, hbm_bytes_per_s=ROUTED_START.hbm_bytes_per_s * hbm, hbm_byte_energy_j=hbm_j)
        if name != "bf16":
            tile_start = replace(
                routed["bf16"],
                tile_cycles_per_k=0.6 * routed["bf16"].tile_cycles_per_k,
                flop_energy_j=0.6 * routed["bf16"].flop_energy_j,
            )
        routed[name] = fits.add(
            f"routed.{name}", [row for row in experts if weights_of(row) == name], tile_start, FREE_ROUTED,
            lambda c, row: routed_base_terms(c, routed_sizes(row), gpu),
            lambda row: routed_features(routed_sizes(row)), ROUTED_LENGTHS,
            priors={"sm_power_w": 0.5, "core_byte_energy_j": 0.5},
        )  # fmt: skip

    scaled: dict[str, GemmCoefficients] = {}
    for scales in ("token", "block"):
        some = [row for row in single if row["kind"] == "vllm_scaled_gemm" and row["scales"] == scales]
        if not some:
            continue
        name = "fp8_e4m3" if scales == "token" else "fp8_e4m3_block"
        product_start = scaled.get("fp8_e4m3", base.gemm["fp8_e4m3"])
        scaled[name] = fits.add(
            f"scaled.{name}", some, product_start, FREE_SCALED,
            lambda c, row: scaled_base_terms(c, gpu, m=row["m"], n=row["n"], k=row["k"]),
            lambda row: scaled_features(row["m"], row["n"], row["k"]), SCALED_LENGTHS, time=(0.1, 0.02),
            priors={**PRIORS, "hbm_byte_energy_j": 0.1},
        )  # fmt: skip

    elementwise: dict[str, ElementwiseCoefficients] = dict(near.elementwise) if near else {}
    by_op: dict[str, list[Row]] = {}
    for row in single:
        if row["kind"] not in NOT_ELEMENTWISE:
            by_op.setdefault(moved_of(row).op, []).append(row)
    for op, some in sorted(by_op.items()):
        pass_start = (
            near.elementwise[op]
            if near and op in near.elementwise
            else replace(
                ELEMENTWISE_START,
                hbm_bytes_per_s=ELEMENTWISE_START.hbm_bytes_per_s * hbm,
                hbm_byte_energy_j=0.7 * hbm_j,
            )
        )
        if near and op in near.elementwise:
            pass_start = replace(pass_start, hbm_bytes_per_s=start.hbm_bytes_per_s * hbm / _hbm_of(near))
        elementwise[op] = fits.add(
            f"elementwise.{op}", some, pass_start, FREE_ELEMENTWISE,
            lambda c, row: moved_terms(c, moved_of(row), gpu),
            lambda row: elementwise_features(moved_of(row).bytes_moved, moved_of(row).rows),
            ELEMENTWISE_LENGTHS, time=(0.08, 0.02), energy=(0.08, 0.03),
            priors=dict.fromkeys(FREE_ELEMENTWISE, 0.15) if near else None,
        )  # fmt: skip
    return EngineLaws(
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        files=files,
        row_digests=tuple(sorted(_digest(row) for row in rows)),
        routed=routed,
        scaled=scaled,
        prefill=prefill,
        decode=decodes or {"bf16": base.decode},
        elementwise=elementwise,
        corrections={**(near.corrections if near else {}), **fits.corrections},
        all_reduce=_all_reduce(rows, setting) or (near.all_reduce if near else ()),
        left_out=fits.left_out,
        standard_errors=fits.errors,
    )


def carried(laws: EngineLaws, of: GpuSpec, to: GpuSpec, *, command: str) -> EngineLaws:
    """Laws of the same kernels on ``to``, a GPU of the same SMs and another memory, of which no row was taken.

    Memory-bound kernels move bytes as much faster as the memory is, for as many more joules a byte as products do;
    attention, bound by the SMs, stays.
    """
    faster = to.hbm_bytes_per_s / of.hbm_bytes_per_s
    dearer = profile_for(to).gemm["bf16"].hbm_byte_energy_j / profile_for(of).gemm["bf16"].hbm_byte_energy_j
    return replace(
        laws,
        command=command,
        elementwise={
            op: replace(
                one, hbm_bytes_per_s=one.hbm_bytes_per_s * faster, hbm_byte_energy_j=one.hbm_byte_energy_j * dearer
            )
            for op, one in laws.elementwise.items()
        },
        left_out={},
    )


def _hbm_of(near: EngineLaws) -> float:
    """How much faster the memory of the GPU behind ``near`` is than an H100's."""
    return load_gpu(next(iter(near.files)).split("/")[0]).hbm_bytes_per_s / load_gpu("h100-sxm-80gb").hbm_bytes_per_s


def links_power_w(gpu: GpuSpec) -> float:
    """Watts of links that are awake, which a GPU of several draws whatever it runs."""
    return profile_for(gpu).collective.links_power_w


def _all_reduce(rows: Sequence[Row], setting: FitSetting) -> tuple[AllReduceRow, ...]:
    links_w = links_power_w(setting.gpu)
    return tuple(
        AllReduceRow(
            world=row["world"],
            buffer_bytes=row["bytes"],
            seconds=row["latency_s"],
            power_w=round(max(0.0, float(np.mean(row["power_w"])) - setting.idle_w(row) - links_w), 2),
        )
        for row in sorted(rows, key=lambda row: (row["world"], row.get("bytes", 0)))
        if row["kind"] == "vllm_all_reduce"
    )


def _digest(row: Row) -> str:
    return hashlib.sha256(
        json.dumps({k: v for k, v in row.items() if k != "session"}, sort_keys=True).encode()
    ).hexdigest()[:16]


def main() -> None:
    """Write the shipped section of an engine's laws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--near", type=Path, help="laws of a like GPU where a family has few rows")
    parser.add_argument("--carry-to", help="a GPU of the same SMs and another memory, for which the laws are written")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    gpu = load_gpu(given.gpu)
    near = ADAPTER.validate_json(given.near.read_text(encoding="utf-8")) if given.near else None
    laws = fit_engine(
        read_engine_records(given.records), profile_for(gpu), gpu, near=near,
        files={f"{gpu.id}/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for p in given.records},
        command=f"python -m hardware.calibrate.fit_engine {' '.join(p.name for p in given.records)} --gpu {gpu.id}",
    )  # fmt: skip
    if given.carry_to:
        laws = carried(laws, gpu, load_gpu(given.carry_to), command=f"{laws.command} --carry-to {given.carry_to}")
    given.out.write_text(
        json.dumps(ADAPTER.dump_python(laws, mode="json"), indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    for name, one in laws.left_out.items():
        off = f"time {100 * one.time:.1f} %, energy {100 * one.energy:.1f} %"
        print(f"{name:34} {one.rows:4} rows left out in turn: {off}")


if __name__ == "__main__":
    main()
