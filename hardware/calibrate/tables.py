"""A profile of a GPU that we never had, from public tables: kernel times, and voltage and idle power by clock.

``python -m hardware.calibrate.tables TIMES_FOLDER VF_CSV`` writes the shipped profiles of the A100s. The times are
the kernel tables of the package aiconfigurator-core (extra ``[aiconfigurator]``); without TIMES_FOLDER they are
read from the installed package. No energy was published with them: energies stay those of the H100, scaled by
what the datasheets allow a FLOP on the 250 W card, the thriftiest of the same chip.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hardware.calibrate.fit_gemm import START
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients, decode_base_terms, prefill_base_terms
from hardware.laws.gemm import GemmCoefficients, gemm_base_terms
from hardware.laws.terms import KernelTerms, time_s
from hardware.power import PowerCurve
from hardware.profile import Profile, Provenance, dump_profile, forecast_profile, load_profile

Floats = NDArray[np.float64]
Coefficients = TypeVar("Coefficients", GemmCoefficients, PrefillCoefficients, DecodeCoefficients)
PACKAGE, VERSION = "aiconfigurator_core", "0.12.0"
TABLES = {
    "gemm": "gemm/vllm/0.14.0/gemm_perf.parquet",
    "context_attention": "attention/vllm/0.14.0/context_attention_perf.parquet",
    "generation_attention": "attention/vllm/0.14.0/generation_attention_perf.parquet",
}
# Rows that a fit reads, and as many others that it is judged on; drawn once, with this seed.
ROWS, SEED = 600, 20260427
FREE: Mapping[str, tuple[str, ...]] = {
    "gemm": ("efficiency", "epilogue_cycles", "hbm_bytes_per_s", "hbm_bytes_per_s_per_sm", "l2_bytes_per_s", "floor_s",
             "split_reduce_s"),
    "context_attention": ("efficiency", "tile_overhead", "floor_s"),
    "generation_attention": ("hbm_bytes_per_s", "hbm_bytes_per_s_per_sm", "floor_s", "split_s", "merge_s"),
}  # fmt: skip
# Shorter attention is a launch and little else, and would weigh as much as the rest.
LEAST_TOKENS = 255
# Cards idle at about this temperature (degrees C) while a table of idle power is taken.
IDLE_C = 35.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFit:
    """Errors of one family's times, on the rows fitted and on as many others (mean absolute, fraction)."""

    rows: int
    fitted: float
    held_out: float


def read_table(name: str, system: str, folder: Path | None = None) -> pd.DataFrame:
    """Rows of one kernel table of ``system``: from a folder of parquet files, or from the installed package."""
    if folder is not None:
        table = pd.read_parquet(folder / f"{name}.parquet")
        return table[table.gpu == system]
    try:
        root = importlib.resources.files(PACKAGE)
    except ModuleNotFoundError:
        raise HardwareError("kernel tables: install the extra wattline[aiconfigurator], or give their folder") from None
    with importlib.resources.as_file(root / "systems" / "data" / system / TABLES[name]) as path:
        return pd.read_parquet(path)


def fit_times(
    table: pd.DataFrame, name: str, start: Coefficients, gpu: GpuSpec, terms_of: Callable[..., KernelTerms]
) -> tuple[Coefficients, TableFit]:
    """``start`` with its times fitted to latencies (ms) at the maximum clock, on ``ROWS`` rows drawn at random."""
    drawn = table.sample(min(2 * ROWS, len(table)), random_state=SEED)
    rows: Sequence[Mapping[str, Any]] = drawn.to_dict("records")  # type: ignore[assignment]
    half = len(rows) // 2
    names = FREE[name]

    def coefficients(x: Floats) -> Coefficients:
        return replace(start, **{n: getattr(start, n) * float(np.exp(v)) for n, v in zip(names, x, strict=True)})

    def errors(x: Floats, some: Sequence[Mapping[str, Any]]) -> Floats:
        found = coefficients(x)
        times = [time_s(terms_of(found, row), sms=gpu.sms, sm_clock_hz=gpu.max_clock_hz) for row in some]
        return np.asarray(np.log(np.array(times) / np.array([row["latency"] * 1e-3 for row in some])))

    fit = least_squares(
        errors,
        np.zeros(len(names)),
        args=(rows[:half],),
        diff_step=0.02,
        loss="soft_l1",
        f_scale=0.1,
        bounds=(-1.6, 1.6),
    )
    fitted, held_out = (float(np.mean(np.abs(np.expm1(errors(fit.x, some))))) for some in (rows[:half], rows[half:]))
    return coefficients(fit.x), TableFit(rows=half, fitted=fitted, held_out=held_out)


def with_times(profile: Profile, gpu: GpuSpec, system: str, folder: Path | None) -> tuple[Profile, dict[str, TableFit]]:
    """``profile`` with the times of products and attention from the tables of ``system``, corrections dropped."""
    rate = gpu.tensor_flops_per_cycle_per_sm("bf16")
    fits: dict[str, TableFit] = {}

    def gemm(c: GemmCoefficients, row: Mapping[str, Any]) -> KernelTerms:
        return gemm_base_terms(
            c, m=row["m"], n=row["n"], k=row["k"], element_bytes=2, out_bytes=2, flops_per_cycle_per_sm=rate,
            sms=gpu.sms, max_clock_hz=gpu.max_clock_hz, cache_bytes=0.5 * gpu.l2_bytes,
        )  # fmt: skip

    def prefill(c: PrefillCoefficients, row: Mapping[str, Any]) -> KernelTerms:
        return prefill_base_terms(
            c, batch=row["batch_size"], q_len=row["isl"], kv_len=row["isl"], q_heads=row["num_heads"],
            kv_heads=row["num_key_value_heads"], head_dim=row["head_dim"], causal=True, element_bytes=2,
            flops_per_cycle_per_sm=rate, hbm_bytes_per_s=products.hbm_bytes_per_s, hbm_byte_energy_j=0.0, sms=gpu.sms,
        )  # fmt: skip

    def decode(c: DecodeCoefficients, row: Mapping[str, Any]) -> KernelTerms:
        return decode_base_terms(
            c, batch=row["batch_size"], kv_len=row["step"] + row["isl"], kv_heads=row["num_key_value_heads"],
            head_dim=row["head_dim"], kv_bytes=2, sms=gpu.sms,
        )  # fmt: skip

    def table(name: str, **columns: str) -> pd.DataFrame:
        found = read_table(name, system, folder)
        for column, value in columns.items():
            found = found[found[column] == value]
        return found

    energies = profile.gemm["bf16"]
    start = replace(
        START, **{n: getattr(energies, n) for n in ("flop_energy_j", "padded_flop_energy_j", "sm_power_w",
                                                    "hbm_byte_energy_j")},
        hbm_bytes_per_s=0.85 * gpu.hbm_bytes_per_s, hbm_bytes_per_s_per_sm=1.5 * gpu.hbm_bytes_per_s / gpu.sms,
        l2_bytes_per_s=4.0 * gpu.hbm_bytes_per_s, efficiency=0.9,
    )  # fmt: skip
    products, fits["gemm"] = fit_times(table("gemm", gemm_dtype="bfloat16"), "gemm", start, gpu, gemm)
    prefills, fits["context_attention"] = fit_times(
        table("context_attention", kv_cache_dtype="bfloat16").query("head_dim == 128 and isl >= @LEAST_TOKENS"),
        "context_attention", profile.prefill, gpu, prefill,
    )  # fmt: skip
    decodes, fits["generation_attention"] = fit_times(
        table("generation_attention", kv_cache_dtype="bfloat16").query("head_dim == 128 and step >= @LEAST_TOKENS"),
        "generation_attention", profile.decode, gpu, decode,
    )  # fmt: skip
    # No table of fp32: the same loop at the rate of the fp32 units, each FLOP dearer by as much as it is slower.
    dearer = gpu.tensor_flops_per_s["bf16"] / gpu.tensor_flops_per_s["fp32"]
    single = replace(
        products,
        flop_energy_j=dearer * products.flop_energy_j,
        padded_flop_energy_j=dearer * products.padded_flop_energy_j,
    )
    nothing = profile.prefill_corrections
    return replace(
        profile,
        gemm={"bf16": products, "fp32": single},
        gemm_corrections={"bf16": nothing, "fp32": nothing},
        prefill=prefills,
        decode=decodes,
        peak_hbm_bytes_per_s=max(products.hbm_bytes_per_s, decodes.hbm_bytes_per_s),
    ), fits


def fit_curve(points: Sequence[tuple[float, float, float]], *, leakage_w_per_c: float) -> PowerCurve:
    """Voltage and idle power over the clock from a table of (Hz, V, W), taken idle.

    >>> flat = [(f, 0.7 if f <= 1e9 else 0.7 * f / 1e9, 40.0 + f / 1e8) for f in (5e8, 1e9, 1.2e9, 1.4e9)]
    >>> curve = fit_curve(flat, leakage_w_per_c=0.4)
    >>> round(curve.floor_hz / 1e6), round(curve.voltage_scale(5e8), 2), round(curve.idle_w(5e8))
    (1000, 0.51, 45)
    """
    clock, volt, idle = np.array(sorted(points)).T
    top, scale = float(clock[-1]), (volt / volt[-1]) ** 2
    floor = float(clock[volt <= volt[0]][-1])

    def curve(x: Floats, static: float = 0.0, clocked: float = 0.0, leaked: float = 0.0) -> PowerCurve:
        lower, knee = float(x[0]), floor + float(x[1]) * (top - floor)
        # The curve meets the table at its flat end and at the top.
        upper = float((np.log(scale[0]) - lower * np.log(floor / knee)) / np.log(knee / top))
        return PowerCurve(
            reference_clock_hz=top, knee_hz=knee, floor_hz=floor, lower_exponent=lower, upper_exponent=upper,
            static_w=static, clocked_w=clocked, leakage_w_per_c=leakage_w_per_c,
            leakage_free_c=IDLE_C - leaked / leakage_w_per_c, temperature_c=IDLE_C,
        )  # fmt: skip

    def errors(x: Floats) -> Floats:
        at = curve(x)
        return np.asarray(np.array([at.voltage_scale(f) for f in clock]) / scale - 1.0)

    shape = least_squares(errors, [1.3, 0.5], bounds=([0.1, 0.05], [4.0, 0.95])).x
    scales = np.array([curve(shape).voltage_scale(f) for f in clock])
    columns = np.stack([np.ones_like(clock), scales * clock / top, scales], axis=1)
    parts = np.linalg.lstsq(columns, idle, rcond=None)[0]
    return curve(shape, *(float(part) for part in parts))


def read_curve(path: Path, card: str, *, leakage_w_per_c: float) -> PowerCurve:
    """The curve of ``card`` in a CSV of columns gpu, sm_mhz, core_mv, idle_w_at_locked_clock."""
    table = pd.read_csv(path)
    rows = table[table.gpu == card]
    points = list(zip(rows.sm_mhz * 1e6, rows.core_mv * 1e-3, rows.idle_w_at_locked_clock, strict=True))
    return fit_curve(points, leakage_w_per_c=leakage_w_per_c)


def a100_profiles(vf: Path, folder: Path | None) -> tuple[list[Profile], dict[str, TableFit]]:
    """Profiles of the A100s whose curves are public: the 400 W module, then the 250 W card."""
    module, card, h100 = (load_gpu(name) for name in ("a100-sxm-80gb", "a100-pcie-40gb", "h100-sxm-80gb"))
    base = load_profile(h100.id)
    assert base is not None
    thrifty = forecast_profile(card, base, h100)
    timed, fits = with_times(forecast_profile(module, thrifty, card), module, "a100_sxm", folder)
    provenance = Provenance(
        command="python -m hardware.calibrate.tables",
        date=datetime.now(UTC).date().isoformat(),
        files={vf.name: hashlib.sha256(vf.read_bytes()).hexdigest()},
        row_digests=(),
        standard_errors={},
    )
    basis = f"{h100.id} (energies) and kernel times of aiconfigurator-core {VERSION}"
    profiles = []
    for gpu, name in ((module, "A100-SXM4-80GB"), (card, "A100-PCIe-40GB")):
        own = timed if gpu is module else forecast_profile(gpu, timed, module)
        curve = read_curve(vf, name, leakage_w_per_c=base.curve.leakage_w_per_c * gpu.tdp_w / h100.tdp_w)
        profiles.append(replace(own, curve=curve, status="forecast", basis=basis, provenance=provenance))
    return profiles, fits


def main() -> None:
    """Write the shipped profiles of the A100s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vf", type=Path, help="CSV of voltage and idle power by clock")
    parser.add_argument("--times", type=Path, help="folder of kernel tables [default: the installed package]")
    parser.add_argument("--out", type=Path, default=Path("hardware/data/profiles"))
    given = parser.parse_args()
    profiles, fits = a100_profiles(given.vf, given.times)
    for profile in profiles:
        (given.out / f"{profile.gpu}.json").write_text(dump_profile(profile), encoding="utf-8")
    for name, fit in fits.items():
        print(f"{name}: {fit.rows} rows, {100 * fit.fitted:.1f} % fitted, {100 * fit.held_out:.1f} % held out")


if __name__ == "__main__":
    main()
