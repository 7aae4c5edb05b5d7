"""The GPU catalog: one TOML file a GPU, every number with its source and confidence, loaded strictly."""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from hardware.errors import HardwareError
from hardware.gpu import GpuSpec
from hardware.mig import mig_slice
from inputs import suggest
from inputs.files import contents, read_text
from inputs.texts import parse_toml, shown, toml_list

TEXT = ("id", "name", "architecture", "link")
TEXT_LIMIT = 200
NUMBERS = (
    "sms", "reference_clock_hz", "max_clock_hz", "min_clock_hz", "clock_step_hz", "memory_bytes",
    "hbm_bytes_per_s", "l2_bytes", "link_bytes_per_s", "pcie_bytes_per_s", "tdp_w", "idle_w",
)  # fmt: skip
MAY_BE_ZERO = frozenset({"link_bytes_per_s"})  # no direct link: traffic goes over PCIe
CONFIDENCES = ("high", "medium", "low")


@lru_cache(maxsize=1)
def list_gpus() -> tuple[str, ...]:
    """Ids of all GPUs in the catalog, sorted."""
    return shipped_ids("gpus")


@lru_cache(maxsize=1)
def list_accelerators() -> tuple[str, ...]:
    """Ids of chips that are no GPUs: their public figures alone are known here, no law of their kernels."""
    return shipped_ids("accelerators")


@lru_cache(maxsize=16)
def shipped_ids(folder: str, ending: str = ".toml") -> tuple[str, ...]:
    """Names of the files in one folder of the package's data, without their ending, sorted."""
    found = (files("hardware") / "data" / folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(ending) for entry in found if entry.name.endswith(ending)))


def text_of(name: str, folder: str, noun: str) -> tuple[str, str]:
    """The TOML text of an entry of ``data/folder``, or of a .toml file of one's own, and where it is from."""
    if name.endswith(".toml"):
        return read_text(Path(name), f"{noun} file", HardwareError), name
    known = shipped_ids(folder)
    if name not in known:
        raise HardwareError(f"unknown {noun} '{name}': {suggest.nearest(name, known)}")
    return _shipped_text(folder, name), f"{name}.toml"


@lru_cache(maxsize=256)
def _shipped_text(folder: str, name: str) -> str:
    return (files("hardware") / "data" / folder / f"{name}.toml").read_text(encoding="utf-8")


def load_figures(name: str) -> GpuSpec:
    """The public figures of a GPU or of another accelerator.

    >>> load_figures("tpu-v4-32gb").tensor_flops_per_s["bf16"]
    275000000000000.0
    """
    if name not in list_accelerators():
        return load_gpu(name)
    return parse_gpu(_shipped_text("accelerators", name), where=f"{name}.toml")


def load_gpu(name: str) -> GpuSpec:
    """A GPU by any spelling that :func:`gpu_id` knows, or from a .toml file of one's own.

    One object for equal names, of a file as long as it stays as it is. A MIG slice is named by its card and profile.

    >>> load_gpu("h100").id, load_gpu("h100:3g.40gb").sms
    ('h100-sxm-80gb', 60)
    """
    return _load(name, contents(name) if name.endswith(".toml") else ())


@lru_cache(maxsize=64)
def _load(name: str, _: tuple[object, ...]) -> GpuSpec:
    if name.endswith(".toml"):
        return parse_gpu(read_text(Path(name), "GPU file", HardwareError), where=name)
    if name in list_accelerators():
        raise HardwareError(
            f"gpu = '{name}': no kernel law holds for it: its figures serve 'wattline ring --published'"
        )
    found, sliced, profile = gpu_id(name).partition(":")
    if sliced:
        return mig_slice(load_gpu(found), profile)
    return parse_gpu(_shipped_text("gpus", found), where=f"{found}.toml")


@lru_cache(maxsize=256)
def gpu_id(name: str) -> str:
    """The id of the catalog that ``name`` means: an id, an alias that its file declares, or a beginning of one id.

    A beginning ends where a part of the id ends, at a ``-``, and fits one id only: ``h200`` is ``h200-sxm-141gb``,
    but ``h20`` is another product.

    >>> gpu_id("H100"), gpu_id("h100-pcie"), gpu_id("h100:1g.10gb")
    ('h100-sxm-80gb', 'h100-pcie-80gb', 'h100-sxm-80gb:1g.10gb')
    """
    if ":" in name:
        card, _, profile = name.partition(":")
        return f"{gpu_id(card)}:{profile.lower()}"
    known = list_gpus()
    if name.lower() in known:
        return name.lower()
    wanted = gpu_aliases().get(name.lower(), name.lower())
    if wanted in known:
        return wanted
    starts = [gpu for gpu in known if gpu.startswith(wanted)] if wanted else []
    whole = [gpu for gpu in starts if gpu.startswith(f"{wanted}-")]
    if len(whole) == 1:
        return whole[0]
    if len(starts) > 1:
        raise HardwareError(f"gpu = '{name}' fits several GPUs: {', '.join(whole or starts)}: name one")
    count, times, one = wanted.partition("x")
    if count.isdigit() and times and (one in known or any(gpu.startswith(f"{one}-") for gpu in known)):
        raise HardwareError(f"unknown gpu '{name}': give '{one}', and how many by the layout (tp {count}), or as gpus")
    if alike := [gpu for gpu in known if load_gpu(gpu).architecture.lower() == wanted]:
        raise HardwareError(f"gpu = '{name}' fits several GPUs: {', '.join(alike)}: name one")
    inside = [gpu for gpu in known if len(wanted) > 1 and wanted in gpu]
    if near := starts or inside:
        raise HardwareError(f"unknown gpu '{name}': did you mean '{near[0]}'?")
    hint = suggest.nearest(wanted, known, "see 'wattline gpus'", cutoff=0.5)
    raise HardwareError(f"unknown gpu '{name}': {hint}")


@lru_cache(maxsize=1)
def gpu_aliases() -> dict[str, str]:
    """Ids by the short names that the catalog's files declare (``aliases``)."""
    found: dict[str, str] = {}
    for gpu in list_gpus():
        found |= dict.fromkeys(toml_list(_shipped_text("gpus", gpu), "aliases"), gpu)
    return found


def parse_gpu(text: str, *, where: str) -> GpuSpec:
    """A GPU from TOML text; every problem is one line that names file, field, value and remedy."""
    data = parse_toml(text, where, HardwareError)
    refuse_unknown(data, (*TEXT, *NUMBERS, "tensor_flops_per_s", "aliases"), where)
    aliases = data.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise HardwareError(f"{where}: aliases = {shown(aliases)}: give a list of texts")
    sources: dict[str, str] = {}
    confidence: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for field in TEXT:
        value = data.get(field)
        if not isinstance(value, str) or not value:
            raise HardwareError(f"{where}: {field} = {value!r}: give a text")
        if len(value) > TEXT_LIMIT or not value.isprintable():  # an id names the file of a profile
            raise HardwareError(f"{where}: {field} = {shown(value)}: give at most {TEXT_LIMIT} printable characters")
        fields[field] = value
    for field in NUMBERS:
        fields[field] = figure(data, field, where, sources, confidence)
        least = LEAST_RATE if field.endswith("_per_s") else LEAST_HZ if field.endswith("_hz") else 0.0
        _check_least(fields[field], least, f"{where}: {field}")
    rates = data.get("tensor_flops_per_s")
    if not isinstance(rates, dict) or not rates:
        raise HardwareError(f"{where}: tensor_flops_per_s is missing: give a table of dense FLOP/s by dtype")
    if not {"bf16", "fp16"} & rates.keys():
        raise HardwareError(f"{where}: tensor_flops_per_s has no bf16 and no fp16: give the rate of 16-bit products")
    fields["tensor_flops_per_s"] = {
        dtype: figure(rates, dtype, f"{where}: tensor_flops_per_s", sources, confidence) for dtype in rates
    }
    for dtype, rate in fields["tensor_flops_per_s"].items():
        _check_least(rate, LEAST_RATE, f"{where}: tensor_flops_per_s: {dtype}")
    fields["sms"] = whole(fields["sms"], "sms", where)
    if fields["min_clock_hz"] > fields["max_clock_hz"]:
        raise HardwareError(
            f"{where}: min_clock_hz = {fields['min_clock_hz']:g} is above max_clock_hz = {fields['max_clock_hz']:g}"
        )
    if fields["idle_w"] >= fields["tdp_w"]:
        raise HardwareError(f"{where}: idle_w = {fields['idle_w']:g} is not below tdp_w = {fields['tdp_w']:g}")
    return GpuSpec(sources=sources, confidence=confidence, **fields)


# No GPU computes or moves less a second, or has a coarser clock: a run of hours of simulated time would never end.
LEAST_RATE, LEAST_HZ = 1e9, 1e5


MOST_PARTS = 4096


def _check_least(value: float, least: float, where: str) -> None:
    if 0 < value < least:
        raise HardwareError(f"{where} = {value:g}: give at least {least:g}, in SI units")


def figure(table: dict[str, Any], field: str, where: str, sources: dict[str, str], confidence: dict[str, Any]) -> float:
    entry = table.get(field)
    if entry is None:
        raise HardwareError(f"{where}: {field} is missing: give {{ value, source, confidence }}")
    if not isinstance(entry, dict):
        raise HardwareError(f"{where}: {field} = {entry!r} has no source: give {{ value, source, confidence }}")
    refuse_unknown(entry, ("value", "source", "confidence"), f"{where}: {field}")
    value, source = entry.get("value"), entry.get("source")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise HardwareError(f"{where}: {field} = {value!r}: give a finite number")
    if value < 0 or (value == 0 and field not in MAY_BE_ZERO):
        raise HardwareError(f"{where}: {field} = {value:g}: must be positive")
    if not isinstance(source, str) or not source.strip():
        raise HardwareError(f"{where}: {field} = {value:g} has no source: say where it is from")
    if entry.get("confidence") not in CONFIDENCES:
        raise HardwareError(
            f"{where}: {field}: confidence = {entry.get('confidence')!r}: give one of {', '.join(CONFIDENCES)}"
        )
    sources[field] = source
    confidence[field] = entry["confidence"]
    return float(value)


def whole(value: float, field: str, where: str) -> int:
    """A number of parts, each of which a graph of ports holds: not broken, and no more than any machine has."""
    if value != int(value):
        raise HardwareError(f"{where}: {field} = {value:g}: give a whole number")
    if value > MOST_PARTS:
        raise HardwareError(f"{where}: {field} = {value:g}: give at most {MOST_PARTS:,}")
    return int(value)


def refuse_unknown(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    suggest.refuse_unknown(table, known, where, HardwareError)
