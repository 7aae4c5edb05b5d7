"""Laws of a serving engine's kernels from rows of them: ``wattline calibrate --from RECORDS --gpu ID``.

Machine, power curve and limit are those of the GPU's profile; nothing of it changes. Whole steps never enter.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hardware.calibrate.engine_families import EngineFamilies
from hardware.calibrate.engine_rows import as_served, moved_of, prefill_of, read_engine_records
from hardware.calibrate.fit_adapters import adapter_laws
from hardware.calibrate.fit_clocks import clock_pairs, follow_the_clock
from hardware.calibrate.fit_decoder import decoder_laws, group_norm, group_norm_law
from hardware.calibrate.fit_families import (
    ELEMENTWISE_START,
    FOLLOWS_BELOW,
    FREE_DECODE,
    FREE_ELEMENTWISE,
    decode_row_law,
    prefill_row_law,
)
from hardware.calibrate.fit_gemm import PRIORS
from hardware.calibrate.fit_kit import FitSetting, Law, Learning, Row, digest
from hardware.catalog import load_gpu
from hardware.engine_laws import AllReduceRow, EngineLaws, decoder, dump_laws
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients
from hardware.laws.elementwise import (
    MEMORY_BOUND_SHARE,
    ElementwiseCoefficients,
    memory_bound,
)
from hardware.laws.engine_price import moved_base_terms, moved_features
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.routed import RoutedCoefficients, routed_base_terms, routed_features
from hardware.laws.scaled import scaled_base_terms, scaled_features
from hardware.laws.sizes import RoutedSizes
from hardware.profile import Profile, profile_for

# Length scales of the corrections (octaves) in the coordinates of each family.
ROUTED_LENGTHS = (1.5, 1.5, 1.0, 1.0)
SCALED_LENGTHS = (1.5, 1.0, 1.0)
PREFILL_LENGTHS = (1.5, 1.5, 1.0, 3.0)
DECODE_LENGTHS = (1.5, 1.5, 1.0)
ELEMENTWISE_LENGTHS = (1.5, 1.5)
# Distinct bytes over bytes moved: norms read twice.
FOOTPRINT = {"image_normalize_f32": 2 / 3}
# Watts of the SMs of a kernel that memory does not bind, where the search begins.
SLOW_W = 100.0
NOT_ELEMENTWISE = (
    "vllm_experts", "vllm_attention", "vllm_scaled_gemm", "diffusers_attention", "diffusers_linear", "diffusers_conv",
    "vllm_adapter", "at_clock",
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


def routed_sizes(row: Row) -> RoutedSizes:
    """Sizes of a row of one expert product."""
    n, k = (2 * row["ff"], row["hidden"]) if row["part"] == "gate_up" else (row["hidden"], row["ff"])
    tile = row["config"]
    return RoutedSizes(
        rows=row["rows"], distinct=row["distinct"], tiles=row["tiles"], block_m=tile["BLOCK_SIZE_M"],
        block_n=tile["BLOCK_SIZE_N"], n=n, k=k, weight_type=weights_of(row),
    )  # fmt: skip


def scaled_sizes(row: Row) -> dict[str, Any]:
    """Sizes and scales of a row of an 8-bit product."""
    return {name: row[name] for name in ("m", "n", "k", "scales")}


def weights_of(row: Row) -> str:
    """The name of the law of a row's weights."""
    return f"{row['dtype']}_block" if row.get("block") else str(row["dtype"])


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
    fits = EngineFamilies(setting)
    single = [row for row in rows if row["world"] == 1]
    hbm = gpu.hbm_bytes_per_s / load_gpu("h100-sxm-80gb").hbm_bytes_per_s
    bf16 = base.gemm["bf16"]

    decodes: dict[str, DecodeCoefficients] = {}
    attention = [row for row in single if row["kind"] == "vllm_attention"]
    for cache in ("bf16", "fp8_e4m3"):
        some = [row for row in attention if row["phase"] == "decode" and row["kv_dtype"] == cache]
        if some:
            start = decodes.get("bf16", base.decode)
            decode = decode_row_law(setting, start, (*FREE_DECODE, "hbm_byte_energy_j"))
            priors = {"hbm_byte_energy_j": 0.1, "sm_power_w": 0.5}
            decodes[cache] = fits.add(f"decode.{cache}", some, decode, Learning(lengths=DECODE_LENGTHS), priors)
    hbm_j = decodes["bf16"].hbm_byte_energy_j if decodes else bf16.hbm_byte_energy_j
    prefills: dict[str, list[Row]] = {}
    for row in single:
        if (prompt := prefill_of(row)) is not None:
            prefills.setdefault("masked" if row.get("masked") else "prefill", []).append(prompt)
    prefill: dict[str, PrefillCoefficients] = {}
    for name, some in prefills.items():
        prompts = replace(prefill_row_law(setting, replace(bf16, hbm_byte_energy_j=hbm_j)), start=base.prefill)
        prefill[name] = fits.add(name, some, prompts, Learning(lengths=PREFILL_LENGTHS))

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
        sorted_rows = Law(
            start=tile_start,
            free=FREE_ROUTED,
            terms_of=lambda c, row: routed_base_terms(c, routed_sizes(row), gpu),
            features_of=lambda row: routed_features(routed_sizes(row)),
        )
        some = [row for row in experts if weights_of(row) == name]
        priors = {"sm_power_w": 0.5, "core_byte_energy_j": 0.5}
        routed[name] = fits.add(f"routed.{name}", some, sorted_rows, Learning(lengths=ROUTED_LENGTHS), priors)

    scaled: dict[str, GemmCoefficients] = {}
    for scales in ("token", "block"):
        some = [row for row in single if row["kind"] == "vllm_scaled_gemm" and row["scales"] == scales]
        if not some:
            continue
        name = "fp8_e4m3" if scales == "token" else "fp8_e4m3_block"
        product_start = scaled.get("fp8_e4m3", base.gemm["fp8_e4m3"])
        product = Law(
            start=product_start,
            free=FREE_SCALED,
            terms_of=lambda c, row: scaled_base_terms(c, gpu, **scaled_sizes(row)),
            features_of=lambda row: scaled_features(**scaled_sizes(row)),
        )
        learning = Learning(lengths=SCALED_LENGTHS, time=(0.1, 0.02))
        scaled[name] = fits.add(f"scaled.{name}", some, product, learning, {**PRIORS, "hbm_byte_energy_j": 0.1})

    adapters = adapter_laws(single, fits, base)
    convolution, wide = decoder_laws(single, fits, gpu)
    norm = group_norm_law(single, fits, gpu)
    pairs = clock_pairs(
        rows, l2_bytes=gpu.l2_bytes, moved=lambda row: moved_of(row).bytes_moved, law=lambda row: moved_of(row).op
    )
    elementwise: dict[str, ElementwiseCoefficients] = dict(near.elementwise) if near else {}
    for op, some in sorted(rows_by_law(single).items()):
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
            pass_start = replace(pass_start, hbm_bytes_per_s=pass_start.hbm_bytes_per_s * hbm / _hbm_of(near))
        pass_start = replace(pass_start, footprint=FOOTPRINT.get(op, pass_start.footprint))
        free: tuple[str, ...] = FREE_ELEMENTWISE
        fastest = max(moved_of(row).bytes_moved / row["latency_s"] for row in some)
        if fastest < MEMORY_BOUND_SHARE * gpu.hbm_bytes_per_s:
            pass_start = replace(pass_start, hbm_bytes_per_s=fastest, l2_bytes_per_s=2.0 * fastest, sm_power_w=SLOW_W)
            free = (*FREE_ELEMENTWISE, "sm_power_w")
        moved_law = Law(
            start=pass_start,
            free=free,
            terms_of=lambda c, row: moved_base_terms(c, gpu, moved_of(row)),
            features_of=lambda row: moved_features(moved_of(row)),
        )
        at_clocks = pairs.get(op, [])
        if follow_the_clock(at_clocks):
            pass_start = replace(pass_start, follows_below=FOLLOWS_BELOW)
            moved_law = replace(moved_law, start=pass_start, free=(*free, "follows_below"))
        learning = Learning(lengths=ELEMENTWISE_LENGTHS, time=(0.08, 0.02))
        near_start = dict.fromkeys(FREE_ELEMENTWISE, 0.15) if near else None
        elementwise[op] = fits.add(f"elementwise.{op}", some, moved_law, learning, near_start, at_clocks)
    return EngineLaws(
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        files=files,
        row_digests=tuple(sorted(digest(row) for row in rows)),
        routed=routed,
        scaled=scaled,
        prefill=prefill.get("prefill", base.prefill),
        masked=prefill.get("masked"),
        adapters={**(near.adapters if near else {}), **adapters},
        decode=decodes or {"bf16": base.decode},
        convolution=convolution,
        wide=wide,
        norm=norm,
        elementwise=elementwise,
        corrections={**(near.corrections if near else {}), **fits.corrections},
        all_reduce=_all_reduce(rows, setting) or (near.all_reduce if near else ()),
        left_out=fits.left_out,
        standard_errors=fits.errors,
    )


def rows_by_law(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of memory-bound kernels by law.

    A server's kernels are compiled for any number of tokens: where a law has such rows, those compiled for their own
    number do not count.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] not in NOT_ELEMENTWISE and not group_norm(row):
            found.setdefault(moved_of(row).op, []).append(as_served(row))
    return {op: [row for row in some if "sizes" in row] or some for op, some in found.items()}


def carried(laws: EngineLaws, of: GpuSpec, to: GpuSpec, *, command: str) -> EngineLaws:
    """Laws of the same kernels on ``to``, a GPU of the same SMs and another memory, of which no row was taken.

    Memory-bound kernels and the copies of convolutions move bytes as much faster as the memory is, for as many more
    joules a byte as products do; what the SMs bind stays.
    """
    faster = to.hbm_bytes_per_s / of.hbm_bytes_per_s
    dearer = profile_for(to).gemm["bf16"].hbm_byte_energy_j / profile_for(of).gemm["bf16"].hbm_byte_energy_j
    return replace(
        laws,
        command=command,
        elementwise={
            op: replace(
                one,
                hbm_bytes_per_s=one.hbm_bytes_per_s * (faster if memory_bound(one, of) else 1.0),
                hbm_byte_energy_j=one.hbm_byte_energy_j * dearer,
            )
            for op, one in laws.elementwise.items()
        },
        convolution={
            name: replace(
                one,
                copy_bytes_per_s=one.copy_bytes_per_s * faster,
                hbm_byte_energy_j=one.hbm_byte_energy_j * dearer,
            )
            for name, one in laws.convolution.items()
        },
        norm=laws.norm and replace(laws.norm, hbm_byte_energy_j=laws.norm.hbm_byte_energy_j * dearer),
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
    near = decoder().decode(given.near.read_bytes()) if given.near else None
    laws = fit_engine(
        read_engine_records(given.records), profile_for(gpu), gpu, near=near,
        files={f"{gpu.id}/{p.name}": hashlib.sha256(p.read_bytes()).hexdigest() for p in given.records},
        command=f"python -m hardware.calibrate.fit_engine {' '.join(p.name for p in given.records)} --gpu {gpu.id}",
    )  # fmt: skip
    if given.carry_to:
        laws = carried(laws, gpu, load_gpu(given.carry_to), command=f"{laws.command} --carry-to {given.carry_to}")
    given.out.write_text(dump_laws(laws), encoding="utf-8")
    for name, one in laws.left_out.items():
        off = f"time {100 * one.time:.1f} %, energy {100 * one.energy:.1f} %"
        print(f"{name:34} {one.rows:4} rows left out in turn: {off}")


if __name__ == "__main__":
    main()
