"""How a checkpoint stores its numbers: 16 or 32 bit are read, quantised formats refused by name, never read as bf16."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError

_TABLE = tomllib.loads((files("workloads") / "data" / "huggingface" / "precision.toml").read_text(encoding="utf-8"))
QUANTISED: tuple[str, ...] = tuple(_TABLE["keys"]["config"])
TYPED = ("torch_dtype", "dtype")
KEYS = (*QUANTISED, *TYPED)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
BESIDE: Mapping[str, str] = _TABLE["files"]


def precision_of(data: Mapping[str, Any], *, where: str) -> str:
    """The type of the stored weights, ``bf16`` where the file does not say; a quantised checkpoint is refused.

    >>> precision_of({"torch_dtype": "float16"}, where="config.json")
    'fp16'
    """
    for key in QUANTISED:
        if data.get(key) is not None:
            experts = any(data.get(name) for name in _EXPERTS)
            raise WorkloadError(f"{where}: {key}: {_format(data[key], key, experts=experts)}")
    found = {key: data[key] for key in TYPED if data.get(key) is not None}
    types: dict[str, str] = _TABLE["types"]
    for key, value in found.items():
        name = value.removeprefix("torch.") if isinstance(value, str) else None
        if name not in types:
            raise WorkloadError(f"{where}: {key} = {shown(value)}: weights are read in {', '.join(types)} only")
    return next((types[value.removeprefix("torch.")] for value in found.values()), "bf16")


def check_neighbours(folder: Path, *, experts: bool) -> None:
    """Refuse a checkpoint whose quantisation stands in a file beside its ``config.json``."""
    for name, key in BESIDE.items():
        path = folder / name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            raise WorkloadError(f"{path}: says how the weights are quantised, but cannot be read: mend it") from None
        inside = data.get(key) if key and isinstance(data, dict) else data
        raise WorkloadError(f"{path}: {key + ': ' if key else ''}{_format(inside, key or name, experts=experts)}")


def _format(table: Any, key: str, *, experts: bool) -> str:
    """What a table of quantisation says, and what can be run instead."""
    fields: dict[str, Any] = table if isinstance(table, dict) else {}
    method = next((fields[k] for k in ("quant_method", "quant_algo", "method") if fields.get(k) is not None), None)
    if method is None and ("load_in_4bit" in fields or "load_in_8bit" in fields):
        method = "bitsandbytes"  # as files older than quant_method say it
    known = _TABLE["formats"].get(method.lower()) if isinstance(method, str) else None
    name = known["name"] if known else _unknown(key, method)
    details = {k: fields[k] for k in ("quant_method", "quant_algo", "format", "fmt", "bits") if _short(fields.get(k))}
    said = ", ".join(f"{k} {shown(value)}" for k, value in details.items())
    cache = any(fields.get(k) for k in ("kv_cache_scheme", "kv_cache_quant_algo"))
    return (
        f"{name}{f' ({said})' if said else ''}{' and a quantised KV cache' if cache else ''}: not simulated yet: take "
        f"it out to run the {_instead(known, fields, experts=experts)}"
    )


def _unknown(key: str, method: Any) -> str:
    if key.startswith("kv_cache"):
        return "a quantised KV cache"
    return "a quantised format that is not known" if method is None else f"unknown format {shown(method)}"


def _short(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _instead(known: Mapping[str, Any] | None, fields: Mapping[str, Any], *, experts: bool) -> str:
    """``--dtype fp8_e4m3`` is right where weights and activations are FP8; experts have 16-bit kernels only."""
    eight = bool(known and known.get("eight_bit")) or fields.get("format") == "float-quantized"
    eight = eight or str(fields.get("quant_algo")).lower().startswith("fp8")
    return "model in FP8 (--dtype fp8_e4m3) or in bf16" if eight and not experts else "unquantised model in bf16"
