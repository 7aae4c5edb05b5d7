"""A profile of a GPU that we never had, from public tables: kernel times, and voltage and idle power by clock.

``python -m hardware.calibrate.tables VF_CSV [--times FOLDER]`` writes the shipped profiles of the A100s. The times are
the kernel tables of the package aiconfigurator-core (extra ``[aiconfigurator]``); without FOLDER they are
read from the installed package. No energy was published with them: energies stay those of the H100, scaled by
what the datasheets allow a FLOP on the 250 W card, the thriftiest of the same chip, and those of products lowered to
what the tables leave room for (:func:`room_for_products`). vLLM's experts lie beside the profiles, with its other laws.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from hardware.calibrate.fit_gemm import START
from hardware.calibrate.tables_experts import call_s, engine_of, expert_calls
from hardware.calibrate.vf_table import read_curve
from hardware.catalog import load_gpu
from hardware.engine_laws import dump_laws
from hardware.errors import HardwareError
from hardware.forecast import forecast_profile
from hardware.gpu import GpuSpec
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients, decode_base_terms, prefill_base_terms
from hardware.laws.gemm import GemmCoefficients, gemm_base_terms
from hardware.laws.grouped import GroupedCoefficients
from hardware.laws.price import gemm_terms
from hardware.laws.routed import RoutedCoefficients
from hardware.laws.sizes import DecodeSizes, GemmSizes, PrefillSizes
from hardware.laws.terms import KernelTerms, time_s
from hardware.power import OperatingPoint, point_at
from hardware.profile import Corrections, Profile, Provenance, dump_profile, load_profile

Floats = NDArray[np.float64]
Row = Mapping[Hashable, Any]
Coefficients = TypeVar("Coefficients", GemmCoefficients, PrefillCoefficients, DecodeCoefficients, RoutedCoefficients)
Product = TypeVar("Product", GemmCoefficients, PrefillCoefficients, GroupedCoefficients, RoutedCoefficients)
PACKAGE, VERSION = "aiconfigurator_core", "0.12.0"
# Of each system the newest vLLM's tables, in folders by kind.
KINDS = {"gemm": "gemm", "context_attention": "attention", "generation_attention": "attention", "moe": "moe"}
# Rows that a fit reads, and as many others that it is judged on; drawn once, with this seed.
ROWS, SEED = 600, 20260427
FREE: Mapping[str, tuple[str, ...]] = {
    "gemm": ("efficiency", "epilogue_cycles", "hbm_bytes_per_s", "hbm_bytes_per_s_per_sm", "l2_bytes_per_s", "floor_s",
             "split_reduce_s"),
    "context_attention": ("efficiency", "tile_overhead", "floor_s"),
    "generation_attention": ("hbm_bytes_per_s", "hbm_bytes_per_s_per_sm", "floor_s", "split_s", "merge_s"),
    "moe": ("tile_cycles", "tile_cycles_per_k", "hbm_bytes_per_s", "hbm_bytes_per_s_per_sm", "l2_bytes_per_s"),
}  # fmt: skip
# Shorter attention is a launch and little else, and would weigh as much as the rest.
LEAST_TOKENS = 255


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
    package = importlib.util.find_spec(PACKAGE)  # not imported: only its data is wanted
    if package is None or not package.submodule_search_locations:
        raise HardwareError("kernel tables: install the extra wattline[aiconfigurator], or give their folder")
    versions = Path(package.submodule_search_locations[0]) / "systems" / "data" / system / KINDS[name] / "vllm"
    newest = max(versions.iterdir(), key=lambda entry: [int(part) for part in entry.name.split(".")])
    return pd.read_parquet(newest / f"{name}_perf.parquet")


def fit_times(
    table: pd.DataFrame, name: str, start: Coefficients, seconds_of: Callable[..., float]
) -> tuple[Coefficients, TableFit]:
    """``start`` with its times fitted to latencies (ms) at the maximum clock, on ``ROWS`` rows drawn at random."""
    drawn = table.sample(min(2 * ROWS, len(table)), random_state=SEED)
    rows = drawn.to_dict("records")
    half = len(rows) // 2
    names = FREE[name]

    def coefficients(x: Floats) -> Coefficients:
        return replace(start, **{n: getattr(start, n) * float(np.exp(v)) for n, v in zip(names, x, strict=True)})

    def errors(x: Floats, some: Sequence[Row]) -> Floats:
        found = coefficients(x)
        times = [seconds_of(found, row) for row in some]
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
    fits: dict[str, TableFit] = {}

    def timed(terms_of: Callable[..., KernelTerms]) -> Callable[..., float]:
        return lambda found, row: time_s(terms_of(found, row), sms=gpu.sms, sm_clock_hz=gpu.max_clock_hz)

    def gemm(c: GemmCoefficients, row: Row) -> KernelTerms:
        return gemm_base_terms(c, GemmSizes(m=row["m"], n=row["n"], k=row["k"]), gpu)

    def prefill(c: PrefillCoefficients, row: Row) -> KernelTerms:
        sizes = PrefillSizes(
            batch=row["batch_size"], q_len=row["isl"], kv_len=row["isl"], q_heads=row["num_heads"],
            kv_heads=row["num_key_value_heads"], head_dim=row["head_dim"], causal=True,
        )  # fmt: skip
        return prefill_base_terms(c, sizes, gpu, hbm_bytes_per_s=products.hbm_bytes_per_s, hbm_byte_energy_j=0.0)

    def decode(c: DecodeCoefficients, row: Row) -> KernelTerms:
        sizes = DecodeSizes(
            batch=row["batch_size"], kv_len=row["step"] + row["isl"], q_heads=row["num_heads"],
            kv_heads=row["num_key_value_heads"], head_dim=row["head_dim"],
        )  # fmt: skip
        return decode_base_terms(c, sizes, gpu.sms)

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
    products, fits["gemm"] = fit_times(table("gemm", gemm_dtype="bfloat16"), "gemm", start, timed(gemm))
    prefills, fits["context_attention"] = fit_times(
        table("context_attention", kv_cache_dtype="bfloat16").query("head_dim == 128 and isl >= @LEAST_TOKENS"),
        "context_attention", profile.prefill, timed(prefill),
    )  # fmt: skip
    decodes, fits["generation_attention"] = fit_times(
        table("generation_attention", kv_cache_dtype="bfloat16").query("head_dim == 128 and step >= @LEAST_TOKENS"),
        "generation_attention", profile.decode, timed(decode),
    )  # fmt: skip
    # No table of fp32: the same loop at the rate of the fp32 units, each FLOP dearer by as much as it is slower.
    dearer = gpu.tensor_flops_per_s["bf16"] / gpu.tensor_flops_per_s["fp32"]
    single = replace(
        products,
        flop_energy_j=dearer * products.flop_energy_j,
        padded_flop_energy_j=dearer * products.padded_flop_energy_j,
    )
    return replace(
        profile,
        gemm={"bf16": products, "fp32": single},
        gemm_corrections={"bf16": Corrections.none(), "fp32": Corrections.none()},
        prefill=prefills,
        prefill_corrections=Corrections.none(),
        decode=decodes,
        decode_corrections=Corrections.none(),
        peak_hbm_bytes_per_s=max(products.hbm_bytes_per_s, decodes.hbm_bytes_per_s),
    ), fits


def room_for_products(
    profile: Profile, gpu: GpuSpec, base: Profile, base_gpu: GpuSpec, tables: Mapping[str, pd.DataFrame]
) -> float:
    """The factor on energies of products under which the largest ones of the table keep to their power limit.

    ``tables`` holds both GPUs' rows by id. They were taken in bursts, which a limiter lets pass somewhat above the
    limit: how far, the measured GPU tells by the clock at which its own law takes the time in its own table. The other
    GPU ran the same products at its maximum clock, so they took no larger share of its limit. At most 1.
    """

    def large(of: GpuSpec) -> Sequence[Row]:
        table = tables[of.id].query("gemm_dtype == 'bfloat16' and m == 8192 and n >= 8192 and k >= 8192 and n <= 16384")
        return table.to_dict("records")

    def point(of: GpuSpec, row: Row, own: Profile, clock_hz: float) -> OperatingPoint:
        terms = gemm_terms(own, of, GemmSizes(m=row["m"], n=row["n"], k=row["k"]))
        return point_at(terms, own.curve, sms=of.sms, gpu_sms=of.sms, sm_clock_hz=clock_hz)

    shares = []
    for row in large(base_gpu):
        seconds = row["latency"] * 1e-3
        clock_hz = brentq(
            lambda f, row=row, seconds=seconds: point(base_gpu, row, base, f).latency_s - seconds,
            base_gpu.min_clock_hz,
            base_gpu.max_clock_hz * 1.2,
        )
        shares.append(point(base_gpu, row, base, clock_hz).power_w / base_gpu.tdp_w)
    limit_w, idle_w = float(np.median(shares)) * gpu.tdp_w, profile.curve.idle_w(gpu.max_clock_hz)
    factors = []
    for row in large(gpu):
        at_top = point(gpu, row, profile, gpu.max_clock_hz)
        above_w = (at_top.power_w - idle_w) * at_top.latency_s / (row["latency"] * 1e-3)
        factors.append((limit_w - idle_w) / above_w)
    return min(1.0, float(np.median(factors)))


def _thriftier(profile: Profile, factor: float) -> Profile:
    """``profile`` with ``factor`` on what products and flash attention draw in the cores."""

    def own(c: Product) -> Product:
        names = ("flop_energy_j", "padded_flop_energy_j", "call_energy_j", "sm_power_w")
        return replace(c, **{name: factor * getattr(c, name) for name in names if hasattr(c, name)})

    return replace(
        profile,
        gemm={name: own(c) for name, c in profile.gemm.items()},
        prefill=own(profile.prefill),
        grouped=own(profile.grouped),
        engines={
            name: replace(laws, routed={kind: own(c) for kind, c in laws.routed.items()})
            for name, laws in profile.engines.items()
        },
    )


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
    tables = {gpu.id: read_table("gemm", name, folder) for gpu, name in ((module, "a100_sxm"), (h100, "h100_sxm"))}
    curves = {
        gpu.id: read_curve(vf, name, leakage_w_per_c=base.curve.leakage_w_per_c * gpu.tdp_w / h100.tdp_w)
        for gpu, name in ((module, "A100-SXM4-80GB"), (card, "A100-PCIe-40GB"))
    }
    timed = replace(timed, curve=curves[module.id])
    timed = _thriftier(timed, room_for_products(timed, module, base, h100, tables))
    basis = f"{h100.id} (energies) and kernel times of aiconfigurator-core {VERSION}"
    vllm = timed.engines["vllm"]
    experts, fits["moe"] = fit_times(
        expert_calls(read_table("moe", "a100_sxm", folder)), "moe", vllm.routed["bf16"],
        lambda found, row: call_s(found, vllm, module, row),
    )  # fmt: skip
    timed = replace(timed, engines={"vllm": engine_of(timed, experts, provenance)})
    profiles = []
    for gpu, own in ((module, timed), (card, forecast_profile(card, timed, module))):
        # The power of its own card is what the energies were scaled to.
        spread = replace(own.spread, mean_power_factor=1.0)
        profiles.append(
            replace(own, curve=curves[gpu.id], spread=spread, status="forecast", basis=basis, provenance=provenance)
        )
    return profiles, fits


def main() -> None:
    """Write the shipped profiles of the A100s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vf", type=Path, help="CSV of voltage and idle power by clock")
    parser.add_argument("--times", type=Path, help="folder of kernel tables [default: the installed package]")
    parser.add_argument("--out", type=Path, default=Path("hardware/data/profiles"))
    parser.add_argument("--engines", type=Path, default=Path("hardware/data/engines"))
    given = parser.parse_args()
    profiles, fits = a100_profiles(given.vf, given.times)
    for profile in profiles:
        (given.out / f"{profile.gpu}.json").write_text(dump_profile(replace(profile, engines={})), encoding="utf-8")
        for name, laws in profile.engines.items():
            (given.engines / name / f"{profile.gpu}.json").write_text(dump_laws(laws), encoding="utf-8")
    for name, fit in fits.items():
        print(f"{name}: {fit.rows} rows, {100 * fit.fitted:.1f} % fitted, {100 * fit.held_out:.1f} % held out")


if __name__ == "__main__":
    main()
