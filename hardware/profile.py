"""A GPU's profile: every fitted coefficient with where it came from, and what its predictions are worth."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec
from pydantic import TypeAdapter, ValidationError

from hardware.catalog import list_gpus, load_gpu, shipped_ids
from hardware.clock import ClockLimits
from hardware.engine_laws import EngineLaws, shipped_engines
from hardware.errors import HardwareError
from hardware.forecast import forecast_profile, same_chip, with_own_figures
from hardware.gpu import GpuSpec
from hardware.laws.attention import DecodeCoefficients, PrefillCoefficients
from hardware.laws.collective import Sharing
from hardware.laws.collective_time import CollectiveCoefficients
from hardware.laws.correction import Correction
from hardware.laws.elementwise import ElementwiseCoefficients
from hardware.laws.gemm import GemmCoefficients
from hardware.laws.grouped import GroupedCoefficients
from hardware.power import PowerCurve
from hardware.profile_check import check_profile
from hardware.scheduling import Scheduling, scheduling
from inputs.files import read_text

Status = Literal["calibrated", "forecast", "uncalibrated"]
Matrix = tuple[tuple[float, ...], ...]
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

    def expected_error(self, *also: str) -> str:
        """What was measured of predictions for this GPU, in words, empty where nothing is known.

        ``also``: what is said of ``experts`` and of ``experts_ep`` (on ranks of their own) besides.
        """
        edited = self.basis == self.gpu and self.status != "calibrated"  # other figures under a catalog's id
        known = None if edited else _accuracy().get(self.gpu)
        if known is not None or self.status == "calibrated":
            return "; ".join(known[kind] for kind in ("summary", *also) if kind in known) if known else ""
        if self.status == "forecast":
            base = load_profile(self.basis)
            if base is not None and base.status == "forecast":
                return f"scaled from {self.basis}, itself no better than: {base.expected_error(*also)}"
            return f"scaled from {self.basis} by datasheets, error unknown"
        return f"datasheet rates with efficiencies of {self.basis}, error unknown"

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


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Profile]:
    """Of users' files, whose errors name the field; made once one is read or written, for 20 ms."""
    return TypeAdapter(Profile)


@lru_cache(maxsize=1)
def _decoder() -> msgspec.json.Decoder[Profile]:
    """Of shipped files: the same objects in a tenth of the time."""
    return msgspec.json.Decoder(Profile)


def dump_profile(profile: Profile) -> str:
    """The profile as JSON text, stable to the byte."""
    data = _adapter().dump_python(profile, mode="json")
    if not data["engines"]:
        del data["engines"]
    return json.dumps(data, indent=1, allow_nan=False, sort_keys=True) + "\n"


def read_profile(path: Path) -> Profile:
    """A profile from a file that :func:`dump_profile` wrote."""
    try:
        profile = _adapter().validate_json(read_text(path, "profile", HardwareError))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise HardwareError(f"profile '{path}': {field}: {first['msg']}") from None
    check_profile(_adapter().dump_python(profile, mode="json"), f"profile '{path}'")
    if not (idle_w := profile.curve.idle_w(profile.curve.reference_clock_hz)) > 0.0:
        raise HardwareError(f"profile '{path}': curve: {idle_w:.3g} W at rest: fit it again (wattline calibrate)")
    return profile


@lru_cache(maxsize=32)
def load_profile(gpu_id: str) -> Profile | None:
    """The shipped profile of ``gpu_id``, None where it was never measured."""
    path = files("hardware") / "data" / "profiles" / f"{gpu_id}.json"
    if not path.is_file():
        return None
    profile = _decoder().decode(path.read_bytes())
    return replace(profile, engines=shipped_engines(gpu_id))


@lru_cache(maxsize=32)
def profile_for(gpu: GpuSpec) -> Profile:
    """The measured profile of ``gpu``, else a forecast scaled from its card's, from the same chip's or the H100's.

    A file under a catalog's id with other figures is another card: its forecast is scaled from the catalog's.
    """
    if gpu.id in list_gpus() and not gpu.same_figures(known := load_gpu(gpu.id)):
        return forecast_profile(gpu, profile_for(known), known)
    own = load_profile(gpu.id)
    if own is not None:
        return own if gpu.id == BASE_GPU else _with_engines(own, gpu)
    if gpu.card is not None:
        return forecast_profile(gpu, profile_for(gpu.card), gpu.card)
    base_gpu = load_gpu(next((name for name in _shipped() if same_chip(load_gpu(name), gpu)), BASE_GPU))
    base = load_profile(base_gpu.id)
    if base is None:
        raise HardwareError(f"no profile of {BASE_GPU} is installed: run wattline calibrate first")
    forecast = with_own_figures(forecast_profile(gpu, base, base_gpu))
    engines = shipped_engines(gpu.id)
    return replace(forecast, engines={**forecast.engines, **engines}) if engines else forecast


def _with_engines(own: Profile, gpu: GpuSpec) -> Profile:
    """``own`` with the laws of engines of which it has none carried over from the H100's."""
    base, base_gpu = load_profile(BASE_GPU), load_gpu(BASE_GPU)
    if base is None or not base.engines.keys() - own.engines.keys():
        return own
    return replace(own, engines={**forecast_profile(gpu, base, base_gpu).engines, **own.engines})


@lru_cache(maxsize=1)
def _shipped() -> tuple[str, ...]:
    """GPUs that have profiles, by id."""
    return shipped_ids("profiles", ".json")


def own_profile(gpu: GpuSpec, path: Path) -> Profile:
    """A user's profile of ``gpu``."""
    profile = read_profile(path)
    if profile.gpu != gpu.id:
        raise HardwareError(
            f"profile '{path}' is of {profile.gpu}, the scenario's GPU is {gpu.id}: give --gpu {profile.gpu}"
        )
    known = profile_for(gpu).engines
    own = {name: laws.with_adapters(known.get(name, laws)) for name, laws in profile.engines.items()}
    return replace(profile, engines={**known, **own})


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
