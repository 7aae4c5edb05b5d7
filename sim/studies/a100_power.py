"""Power of eager models on an A100: public runs, their kernel lists, and what each kernel family draws."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

import workloads
from hardware.catalog import load_gpu
from hardware.laws.terms import KernelTerms, dynamic_power_w, time_s, wanted_sms
from hardware.profile import Profile, profile_for
from sim.build.cost import Pricer
from workloads.work import ElementwiseWork

Floats = NDArray[np.float64]
GPU = "a100-pcie-40gb"
MODELS = {
    "bertmodel_large": "bert-large",
    "gpt2model_gpt2": "gpt2",
    "optmodel_opt-1p3b": "opt-1.3b",
    "qwen2model_qwen2-1p5b": "qwen2-1.5b",
    "vitmodel_large": "vit-large",
}
_NAME = re.compile(r"(\w+?model_[\w-]+?)_p(bf16|fp32)_b(\d+)(?:_s(\d+))?(?:_modeprefill)?(?:_attneager)?_freq")
IMAGE_TOKENS = 197  # 14 x 14 patches and the class token
# What draws power: products in 16 bit and in fp32, bytes through the cores, HBM, and SMs that are at it.
PARTS = ("bf16 products", "fp32 products", "elementwise", "HBM", "active SMs")
_HBM, _ACTIVE = PARTS.index("HBM"), PARTS.index("active SMs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model in one precision and size."""

    model: str
    dtype: str
    batch: int
    seq_len: int

    def __str__(self) -> str:
        """As the tables name it."""
        return f"{self.model} {self.dtype} b{self.batch} s{self.seq_len}"

    @property
    def failed(self) -> bool:
        """The public runs of this job broke off: 57-78 W, and faster than half the work."""
        return (self.model, self.batch, self.seq_len) == ("qwen2-1.5b", 8, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicMeasurement:
    """One public measurement: mean clock, time of a pass, mean power."""

    job: Job
    clock_hz: float
    time_s: float
    power_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A run as predicted: seconds, idle watts, and watts above idle by part at the profile's coefficients."""

    time_s: float
    idle_w: float
    parts_w: Floats

    def power_w(self, scales: Floats | None = None) -> float:
        """Mean power; ``scales`` multiply the coefficients of the parts."""
        return self.idle_w + float(self.parts_w.sum() if scales is None else self.parts_w @ scales)


def read_runs(path: Path) -> list[PublicMeasurement]:
    """Runs of the models that we have; convolutional ones and failed jobs are left out.

    Columns: workload (its name tells model, precision, batch, length), energy (J), time (ms), avg_freq (MHz).
    """
    runs = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name = _NAME.match(row["workload"])
            if name is None or name[1] not in MODELS:
                continue
            job = Job(model=MODELS[name[1]], dtype=name[2], batch=int(name[3]), seq_len=int(name[4] or IMAGE_TOKENS))
            seconds = float(row["time"]) * 1e-3
            if not job.failed:
                clock_hz = float(row["avg_freq"]) * 1e6
                runs.append(
                    PublicMeasurement(
                        job=job, clock_hz=clock_hz, time_s=seconds, power_w=float(row["energy"]) / seconds
                    )
                )
    return runs


@lru_cache(maxsize=1)
def shipped() -> Profile:
    """The A100's profile: nothing of it was fitted on whole models."""
    return profile_for(load_gpu(GPU))


@lru_cache(maxsize=256)
def _kernels(job: Job) -> tuple[tuple[KernelTerms, int, int], ...]:
    """Terms, part and repetitions of every kernel of one pass without a head."""
    pricer = Pricer(profile=shipped(), gpu=load_gpu(GPU), gap_s=0.0)
    program = workloads.build_program(
        workloads.load_model(job.model),
        workloads.Layout(),
        phase="prefill",
        batch=job.batch,
        seq_len=job.seq_len,
        options=workloads.Options(stack="eager-torch", dtype=workloads.DType(job.dtype), lm_head=False),
    )
    products = PARTS.index(f"{job.dtype} products")
    return tuple(
        (
            pricer.terms(kernel.work),
            PARTS.index("elementwise") if isinstance(kernel.work, ElementwiseWork) else products,
            segment.repeat,
        )
        for segment in program.ranks[0].phases[0].segments
        for kernel in segment.kernels
    )


def estimate(job: Job, clock_hz: float) -> Estimate:
    """One pass at a clock: kernels one after another, or as fast as the host launches them."""
    profile, gpu = shipped(), load_gpu(GPU)
    curve, launch = profile.curve, profile.launch
    joules, busy_s, count = np.zeros(len(PARTS)), 0.0, 0
    scale, fraction = curve.voltage_scale(clock_hz), clock_hz / curve.reference_clock_hz
    for terms, core, times in _kernels(job):
        seconds = time_s(terms, sms=gpu.sms, sm_clock_hz=clock_hz)

        def watts(terms: KernelTerms, seconds: float = seconds) -> float:
            sms = wanted_sms(terms, gpu.sms)
            return dynamic_power_w(
                terms,
                sms=sms,
                gpu_sms=gpu.sms,
                progress_per_s=1 / seconds,
                voltage_scale=scale,
                clock_fraction=fraction,
            )

        nothing = replace(terms, core_energy_j=0.0, hbm_energy_j=0.0, sm_power_w=0.0)
        joules[core] += times * seconds * watts(replace(nothing, core_energy_j=terms.core_energy_j))
        joules[_HBM] += times * seconds * watts(replace(nothing, hbm_energy_j=terms.hbm_energy_j))
        joules[_ACTIVE] += times * seconds * watts(replace(nothing, sm_power_w=terms.sm_power_w))
        busy_s += times * (seconds + launch.eager_gap_s)
        count += times
    total_s = max(busy_s, count * launch.host_issue_s)
    return Estimate(time_s=total_s, idle_w=curve.idle_w(clock_hz), parts_w=joules / total_s)


def fit_scales(runs: Sequence[PublicMeasurement]) -> Floats:
    """Factors on the parts' coefficients that explain the power of ``runs`` (non-negative, relative errors).

    For studies only: whole-model runs never enter a profile.
    """
    found = [estimate(run.job, run.clock_hz) for run in runs]
    weight = np.array([1.0 / run.power_w for run in runs])
    above_w = np.array([run.power_w - one.idle_w for run, one in zip(runs, found, strict=True)])
    scales, _ = nnls(np.array([work.parts_w for work in found]) * weight[:, None], above_w * weight)
    return np.asarray(scales)


def refit(runs: Sequence[PublicMeasurement]) -> tuple[float, float, list[float]]:
    """k and d of P = idle(f) + k (V/V0)^2 f/f0 + d for the clocks of one job, and the power it gives each run."""
    curve = shipped().curve
    weight = np.array([1.0 / run.power_w for run in runs])
    idle = np.array([curve.idle_w(run.clock_hz) for run in runs])
    switched = np.array([curve.voltage_scale(r.clock_hz) * r.clock_hz / curve.reference_clock_hz for r in runs])
    columns = np.stack([switched, np.ones_like(switched)], axis=1)
    above = np.array([run.power_w for run in runs]) - idle
    k, d = np.linalg.lstsq(columns * weight[:, None], above * weight, rcond=None)[0]
    return float(k), float(d), list(idle + columns @ np.array([k, d]))
