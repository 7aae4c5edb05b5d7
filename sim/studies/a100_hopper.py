"""Power of H100 kernels from A100 data alone: the way that a forecast of an unmeasured generation takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from hardware.catalog import load_gpu
from hardware.forecast import forecast_profile
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients
from hardware.laws.gemm import GemmCoefficients
from hardware.power import PowerCurve, steady_point
from hardware.profile import Profile
from sim.build.cost import Pricer
from sim.studies.a100_power import GPU, Floats, shipped
from sim.validation.kernel_work import attention_work
from sim.validation.records import Record, read_records
from workloads.work import DType, GemmWork, Work

H100, IDLE = "h100-sxm-80gb", "H100-SXM5-80GB"
Coefficients = TypeVar("Coefficients", GemmCoefficients, PrefillCoefficients, DecodeCoefficients)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelError:
    """One kernel row: which file, whether its power was the cap's, and the relative error of predicted power."""

    file: str
    capped: bool
    power: float


def scaled(profile: Profile, scales: Floats) -> Profile:
    """``profile`` with the energies that whole A100 runs suggest: a study's object, never shipped."""
    products, _, elementwise, hbm, active = (float(scale) for scale in scales)

    def own(c: Coefficients, core: float) -> Coefficients:
        factors = {
            "flop_energy_j": core, "padded_flop_energy_j": core, "core_byte_energy_j": elementwise,
            "hbm_byte_energy_j": hbm, "sm_power_w": active,
        }  # fmt: skip
        return replace(c, **{n: factor * getattr(c, n) for n, factor in factors.items() if hasattr(c, n)})

    return replace(
        profile,
        gemm=dict(profile.gemm) | {"bf16": own(profile.gemm["bf16"], products)},
        prefill=own(profile.prefill, products),
        decode=own(profile.decode, products),
    )


def hopper_profile(scales: Floats, vf: Path) -> Profile:
    """The H100 as the A100 predicts it: rates and energies by architecture, idle power from the public table.

    The voltage of an H100 was never published: its curve has the A100's shape over the H100's clocks.
    """
    gpu, a100 = load_gpu(H100), load_gpu(GPU)
    forecast = forecast_profile(gpu, scaled(shipped(), scales), a100)
    table = pd.read_csv(vf)
    rows = table[(table.gpu == IDLE) & (table.sm_mhz > 345)]  # its lowest clock was read with the GPU still busy
    return replace(
        forecast, curve=_idling(forecast.curve, rows.sm_mhz.to_numpy() * 1e6, rows.idle_w_at_locked_clock.to_numpy())
    )


def _idling(curve: PowerCurve, clock: Floats, watts: Floats) -> PowerCurve:
    """``curve`` with the idle power of a table: the part that no clock changes, and the one that follows it."""
    scale = np.array([curve.voltage_scale(f) for f in clock]) * clock / curve.reference_clock_hz
    static, clocked = np.linalg.lstsq(np.stack([np.ones_like(scale), scale], axis=1), watts, rcond=None)[0]
    return replace(curve, static_w=float(static), clocked_w=float(clocked), leakage_w_per_c=0.0)


def kernel_errors(profile: Profile, files: Sequence[Path]) -> list[KernelError]:
    """Errors of the power of GEMM and attention rows in 16 bit, each repeated back to back under the 700 W cap."""
    gpu = load_gpu(H100)
    pricer = Pricer(profile=profile, gpu=gpu, gap_s=0.0)
    errors = []
    for path in files:
        for record in read_records(path):
            work, watts = _work(record), record.measured.get("power_w")
            if work is None or not watts or not watts[0]:
                continue
            point = steady_point(
                pricer.terms(work),
                profile.curve,
                gpu_sms=gpu.sms,
                limit_w=gpu.tdp_w,
                min_clock_hz=gpu.min_clock_hz,
                max_clock_hz=gpu.max_clock_hz,
            )
            capped = watts[0] > 0.97 * gpu.tdp_w
            errors.append(KernelError(file=path.name, capped=capped, power=point.power_w / watts[0] - 1.0))
    return errors


def _work(record: Record) -> Work | None:
    given = record.inputs
    if given.get("dtype", "bf16") != "bf16":
        return None
    match record.kind:
        case "gemm":
            return GemmWork(m=given["m"], n=given["n"], k=given["k"], dtype=DType.BF16)
        case "attention":
            return attention_work(given)
    return None
