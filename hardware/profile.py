"""A GPU's profile: every fitted coefficient with where it came from, and what its predictions are worth."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from hardware.catalog import load_gpu, shipped_ids
from hardware.clock import ClockLimits
from hardware.engine_laws import EngineLaws, shipped_engines
from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients
from hardware.laws.collective import Sharing
from hardware.laws.collective_time import CollectiveCoefficients
from hardware.laws.correction import Correction
from hardware.laws.elementwise import ElementwiseCoefficients
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.grouped import GroupedCoefficients
from hardware.power import PowerCurve
from hardware.scheduling import Scheduling, scheduling
from inputs.files import read_text

Status = Literal["calibrated", "forecast", "uncalibrated"]
Matrix = tuple[tuple[float, ...], ...]
# Laws of kernels that read memory.
Streaming = TypeVar("Streaming", GemmCoefficients, DecodeCoefficients, ElementwiseCoefficients, GroupedCoefficients)
BASE_GPU = "h100-sxm-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Learnt factors of one family: on time and on energy above idle."""

    time: Correction
    energy: Correction

    @classmethod
    def none(cls) -> Corrections:
        """Both factors are one everywhere."""
        return cls(time=Correction.none(), energy=Correction.none())


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCosts:
    """Pauses between kernels: replaying a graph, launched one by one, and the host's time per launch (s)."""

    graph_gap_s: float
    eager_gap_s: float
    host_issue_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipSpread:
    """How chips of one type differ: standard deviations, and the mean chip over the calibrated one."""

    throttled_time: float
    power: float
    mean_power_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a profile was fitted on and by which command.

    ``standard_errors`` are of coefficients (of logs where the name says ``log``); ``correlations`` of those of one
    family, in the order of their names.
    """

    command: str
    date: str
    files: Mapping[str, str]
    row_digests: tuple[str, ...]
    standard_errors: Mapping[str, float]
    correlations: Mapping[str, Matrix] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """All coefficients of one GPU type; each object is a profile of its own, by which prices are remembered.

    See the field types for units and meaning.

    ``engines``: laws of kernels that serving engines bring along, by engine; shipped ones lie in files of their own.
    """

    gpu: str
    status: Status
    basis: str
    provenance: Provenance
    curve: PowerCurve
    limits: ClockLimits
    launch: LaunchCosts
    spread: ChipSpread
    gemm: Mapping[str, GemmCoefficients]
    gemm_corrections: Mapping[str, Corrections]
    prefill: PrefillCoefficients
    prefill_corrections: Corrections
    decode: DecodeCoefficients
    decode_corrections: Corrections
    elementwise: Mapping[str, ElementwiseCoefficients]
    elementwise_corrections: Mapping[str, Corrections]
    grouped: GroupedCoefficients
    grouped_corrections: Corrections
    collective: CollectiveCoefficients
    sharing: Sharing
    peak_hbm_bytes_per_s: float
    engines: Mapping[str, EngineLaws] = field(default_factory=dict)

    def expected_error(self) -> str:
        """What to expect of predictions, in words with figures; empty where nothing is known."""
        known = _accuracy().get(self.gpu)
        if known is not None or self.status == "calibrated":
            return str((known or {}).get("summary", ""))
        if self.status == "forecast":
            return f"scaled from {self.basis}; expect 5-15 % in latency and energy"
        return f"datasheet rates with efficiencies of {self.basis}; expect 20-40 %, never checked on this GPU"

    @property
    def scheduling(self) -> Scheduling:
        """How the libraries' kernels come to SMs."""
        return scheduling()

    def power_curve(self, gpu: GpuSpec) -> PowerCurve:
        """Idle power and voltage over the clock of ``gpu``."""
        del gpu
        return self.curve

    def clock_limits(self, gpu: GpuSpec, *, power_cap_w: float | None) -> ClockLimits:
        """The limiters under a user's cap: each limit keeps its ratio to the cap it was measured at."""
        cap_w = gpu.tdp_w if power_cap_w is None else power_cap_w
        return self.limits.under(cap_w)

    def hbm_bytes_per_s(self, gpu: GpuSpec) -> float:
        """What kernels together get out of HBM."""
        del gpu
        return self.peak_hbm_bytes_per_s


@lru_cache(maxsize=1)
def _accuracy() -> dict[str, dict[str, str]]:
    """Measured accuracy by GPU: a statement about predictions, so it lives beside the profiles, not in them."""
    return tomllib.loads((files("hardware") / "data" / "accuracy.toml").read_text(encoding="utf-8"))


_ADAPTER = TypeAdapter(Profile)


def dump_profile(profile: Profile) -> str:
    """The profile as JSON text, stable to the byte."""
    data = _ADAPTER.dump_python(profile, mode="json")
    if not data["engines"]:
        del data["engines"]
    return json.dumps(data, indent=1, allow_nan=False, sort_keys=True) + "\n"


def read_profile(path: Path) -> Profile:
    """A profile from a file that :func:`dump_profile` wrote."""
    try:
        return _ADAPTER.validate_json(read_text(path, "profile", HardwareError))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise HardwareError(f"profile '{path}': {field}: {first['msg']}") from None


@lru_cache(maxsize=32)
def load_profile(gpu_id: str) -> Profile | None:
    """The shipped profile of ``gpu_id``, None where it was never measured."""
    path = files("hardware") / "data" / "profiles" / f"{gpu_id}.json"
    if not path.is_file():
        return None
    profile = _ADAPTER.validate_json(path.read_text(encoding="utf-8"))
    return replace(profile, engines=shipped_engines(gpu_id))


@lru_cache(maxsize=32)
def profile_for(gpu: GpuSpec) -> Profile:
    """The measured profile of ``gpu``, else a forecast scaled from one of the same chip, or from the H100."""
    own = load_profile(gpu.id)
    if own is not None:
        return own
    base_gpu = load_gpu(next((name for name in _shipped() if _same_chip(load_gpu(name), gpu)), BASE_GPU))
    base = load_profile(base_gpu.id)
    if base is None:
        raise HardwareError(f"no profile of {BASE_GPU} is installed: run wattline calibrate first")
    forecast = with_own_figures(forecast_profile(gpu, base, base_gpu))
    engines = shipped_engines(gpu.id)
    return replace(forecast, engines={**forecast.engines, **engines}) if engines else forecast


@lru_cache(maxsize=1)
def _shipped() -> tuple[str, ...]:
    """GPUs that have profiles, by id."""
    return shipped_ids("profiles", ".json")


def _same_chip(gpu: GpuSpec, other: GpuSpec) -> bool:
    return (gpu.architecture, gpu.sms) == (other.architecture, other.sms)


def own_profile(gpu: GpuSpec, path: Path) -> Profile:
    """A user's profile of ``gpu``."""
    profile = read_profile(path)
    if profile.gpu != gpu.id:
        raise HardwareError(
            f"profile '{path}' is of {profile.gpu}, the scenario's GPU is {gpu.id}: give --gpu {profile.gpu}"
        )
    return replace(profile, engines={**profile_for(gpu).engines, **profile.engines})


@lru_cache(maxsize=1)
def fitted_row_digests() -> frozenset[str]:
    """Digests of every record that any shipped profile was fitted on."""
    folder = files("hardware") / "data" / "profiles"
    found: set[str] = set()
    for name in _shipped():
        profile = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        found.update(profile["provenance"]["row_digests"], profile["sharing"]["row_digests"])
    for gpu_id in shipped_ids("gpus", ".toml"):
        for laws in shipped_engines(gpu_id).values():
            found.update(laws.row_digests)
    return frozenset(found)


@lru_cache(maxsize=1)
def _own_figures() -> dict[str, dict[str, float]]:
    return tomllib.loads((files("hardware") / "data" / "own_figures.toml").read_text(encoding="utf-8"))


def with_own_figures(forecast: Profile) -> Profile:
    """``forecast`` with what was measured on its card: joules of a byte from memory, and how far chips differ."""
    own = _own_figures().get(forecast.gpu)
    if own is None:
        return forecast
    ratio = own["hbm_byte_energy_ratio"]

    def cooler(c: Streaming) -> Streaming:
        return replace(c, hbm_byte_energy_j=c.hbm_byte_energy_j * ratio)

    return replace(
        forecast,
        gemm={name: cooler(c) for name, c in forecast.gemm.items()},
        decode=cooler(forecast.decode),
        elementwise={name: cooler(c) for name, c in forecast.elementwise.items()},
        grouped=cooler(forecast.grouped),
        spread=replace(forecast.spread, power=own["chip_power_spread"]),
    )


def forecast_profile(gpu: GpuSpec, base: Profile, base_gpu: GpuSpec) -> Profile:
    """``base`` carried over to ``gpu`` by SMs, clocks, peak rates, bandwidths and power.

    Same architecture: a forecast (the same kernels run). Another one: uncalibrated, and the learnt
    corrections, which belong to the base's kernels, are dropped. Energies per operation scale with the power
    that the datasheets allow per unit of rate.
    """
    hbm = gpu.hbm_bytes_per_s / base_gpu.hbm_bytes_per_s
    cache = gpu.sms * gpu.max_clock_hz / (base_gpu.sms * base_gpu.max_clock_hz)
    same = gpu.architecture == base_gpu.architecture
    flop_rate = gpu.tensor_flops_per_s.get("bf16", gpu.tensor_flops_per_s.get("fp16", 0.0))
    joules_per_flop = 1.0 if same else (gpu.tdp_w / flop_rate) / (base_gpu.tdp_w / base_gpu.tensor_flops_per_s["bf16"])
    power = gpu.tdp_w / base_gpu.tdp_w
    idle = 1.0 if same and gpu.tdp_w == base_gpu.tdp_w else gpu.idle_w / base_gpu.idle_w
    per_sm = hbm * base_gpu.sms / gpu.sms
    link = gpu.link_bytes_per_s or gpu.pcie_bytes_per_s
    slower_link = base_gpu.link_bytes_per_s / link
    links = gpu.link_bytes_per_s / base_gpu.link_bytes_per_s  # none where ranks meet over PCIe

    def gemm(c: GemmCoefficients) -> GemmCoefficients:
        return replace(
            c,
            hbm_bytes_per_s=c.hbm_bytes_per_s * hbm,
            hbm_bytes_per_s_per_sm=c.hbm_bytes_per_s_per_sm * per_sm,
            l2_bytes_per_s=c.l2_bytes_per_s * cache,
            flop_energy_j=c.flop_energy_j * joules_per_flop,
            padded_flop_energy_j=c.padded_flop_energy_j * joules_per_flop,
            sm_power_w=c.sm_power_w * power,
        )

    def own(corrections: Corrections) -> Corrections:
        return corrections if same else Corrections.none()

    return replace(
        base,
        gpu=gpu.id,
        status="forecast" if same else "uncalibrated",
        basis=base.gpu,
        curve=replace(
            base.curve,
            reference_clock_hz=gpu.max_clock_hz,
            knee_hz=base.curve.knee_hz * gpu.max_clock_hz / base_gpu.max_clock_hz,
            floor_hz=base.curve.floor_hz * gpu.max_clock_hz / base_gpu.max_clock_hz,
            static_w=base.curve.static_w * idle,
            clocked_w=base.curve.clocked_w * idle,
            leakage_w_per_c=base.curve.leakage_w_per_c * idle,
        ),
        limits=base.limits.under(gpu.tdp_w),
        gemm={name: gemm(c) for name, c in base.gemm.items()},
        gemm_corrections={name: own(c) for name, c in base.gemm_corrections.items()},
        prefill=replace(base.prefill, flop_energy_j=base.prefill.flop_energy_j * joules_per_flop),
        prefill_corrections=own(base.prefill_corrections),
        decode=replace(
            base.decode,
            hbm_bytes_per_s=base.decode.hbm_bytes_per_s * hbm,
            hbm_bytes_per_s_per_sm=base.decode.hbm_bytes_per_s_per_sm * per_sm,
            sm_power_w=base.decode.sm_power_w * power,
        ),
        # Its coordinates are lengths in HBM-bound kernels: with another bandwidth they would mislead.
        decode_corrections=own(base.decode_corrections) if hbm == 1.0 else Corrections.none(),
        elementwise={
            name: replace(
                c,
                l2_bytes_per_s=c.l2_bytes_per_s * cache,
                hbm_bytes_per_s=c.hbm_bytes_per_s * hbm,
                blocks_per_s=None if c.blocks_per_s is None else c.blocks_per_s * cache,
                # The SMs' own work goes with their cycles, what it is held against with HBM.
                follows_below=c.follows_below and c.follows_below * (hbm / cache if c.blocks_per_s is None else 1.0),
                sm_power_w=c.sm_power_w * power,
            )
            for name, c in base.elementwise.items()
        },
        elementwise_corrections={name: own(c) for name, c in base.elementwise_corrections.items()},
        grouped=replace(
            base.grouped,
            hbm_bytes_per_s=base.grouped.hbm_bytes_per_s * hbm,
            hbm_bytes_per_s_per_sm=base.grouped.hbm_bytes_per_s_per_sm * per_sm,
            flop_energy_j=base.grouped.flop_energy_j * joules_per_flop,
            padded_flop_energy_j=base.grouped.padded_flop_energy_j * joules_per_flop,
            sm_power_w=base.grouped.sm_power_w * power,
        ),
        grouped_corrections=own(base.grouped_corrections),
        collective=replace(
            base.collective,
            tables=tuple(
                replace(t, rows=tuple((c, b, s * slower_link, w) for c, b, s, w in t.rows))
                for t in base.collective.tables
            )
            if not math.isclose(slower_link, 1.0)
            else base.collective.tables,
            step_power_w=base.collective.step_power_w * power,
            waiting_power_w=base.collective.waiting_power_w * power,
            links_power_w=base.collective.links_power_w * links,
        ),
        peak_hbm_bytes_per_s=base.peak_hbm_bytes_per_s * hbm,
    )
