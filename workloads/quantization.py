"""How a quantised checkpoint stores its numbers, from Hugging Face's ``quantization_config`` and files beside it.

Every format that is read becomes a :class:`workloads.precision.Precision`; any other is refused by its name, never
read as bf16. Names and modules are data: ``data/huggingface/precision.toml``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.precision import Precision
from workloads.quantised_fields import CACHE, Table, cached_type
from workloads.quantised_formats import READINGS
from workloads.quantised_libraries import LIBRARIES
from workloads.quantised_modules import TABLE, Modules, Scheme

QUANTISED: tuple[str, ...] = tuple(TABLE["keys"]["config"])
SPARSE: tuple[str, ...] = tuple(TABLE["keys"]["sparse"])
TYPED = ("torch_dtype", "dtype")
KEYS = (*QUANTISED, *CACHE, *SPARSE, *TYPED)
BESIDE: Mapping[str, Mapping[str, str]] = TABLE["files"]


def precision_of(data: Table, *, where: str) -> str:
    """The type of the stored weights that are not quantised, ``bf16`` where the file does not say.

    >>> precision_of({"torch_dtype": "float16"}, where="config.json")
    'fp16'
    """
    found = {key: data[key] for key in TYPED if data.get(key) is not None}
    types: dict[str, str] = TABLE["types"]
    for key, value in found.items():
        name = value.removeprefix("torch.") if isinstance(value, str) else None
        if name not in types:
            raise WorkloadError(f"{where}: {key} = {shown(value)}: weights are read in {', '.join(types)} only")
    return next((types[value.removeprefix("torch.")] for value in found.values()), "bf16")


def scheme_of(data: Table, *, where: str) -> Scheme | None:
    """What a configuration says of quantised weights or a quantised cache; None: nothing is quantised.

    >>> awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    >>> str(scheme_of({"quantization_config": awq}, where="config.json").product.weights)
    'int4_g128_zero'
    """
    for key in SPARSE:
        _refuse_sparse(data.get(key), f"{where}: {key}")
    found = [key for key in QUANTISED if data.get(key) is not None]
    if len(found) > 1:
        raise WorkloadError(f"{where}: {found[0]} and {found[1]}: both say how weights are stored: keep one of them")
    scheme = read_scheme(data[found[0]], f"{where}: {found[0]}") if found else None
    # bitsandbytes multiplies activations of bf16 in bf16 whatever is said, those of fp16 in what is said.
    if (
        found
        and data[found[0]].get("bnb_4bit_compute_dtype") == "float32"
        and precision_of(data, where=where) == "fp16"
    ):
        raise WorkloadError(
            f"{where}: {found[0]}: bnb_4bit_compute_dtype = 'float32' with weights of fp16: products in fp32 of "
            "weights of 4 bits are not simulated: give 'float16'"
        )
    for key in CACHE:
        kv = cached_type(data.get(key), f"{where}: {key}")
        if kv is not None:
            scheme = Scheme(kv=kv, where=where) if scheme is None else scheme.with_cache(kv)
    return scheme


def quantised_beside(folder: Path, *, layers: int, tied: bool, modules: Modules = ()) -> Precision | None:
    """What a file beside a ``config.json`` says of quantised weights (ModelOpt's, AutoGPTQ's, AutoAWQ's)."""
    for name, elsewhere in BESIDE.items():
        path = folder / name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            raise WorkloadError(f"{path}: says how the weights are quantised, but cannot be read: mend it") from None
        key = elsewhere["key"]
        inside = data.get(key) if key and isinstance(data, dict) and key in data else data
        where = f"{path}: {key}" if key else str(path)
        scheme = read_scheme(inside, where, format_unsaid=elsewhere["format"])
        return scheme.over(layers, tied=tied, modules=modules)
    return None


def read_scheme(table: Any, where: str, *, format_unsaid: str | None = None) -> Scheme:
    """The scheme of one table; ``format_unsaid`` is its format where the table names none."""
    if not isinstance(table, dict):
        raise WorkloadError(f"{where}: {_NOT_KNOWN}: {_REMEDY}")
    method = next((table[key] for key in ("quant_method", "method") if table.get(key) is not None), None)
    if method is None:
        method = format_unsaid or _stated_elsewhere(table)
    if method is None:
        raise WorkloadError(f"{where}: {_NOT_KNOWN}{_details(table)}: {_REMEDY}")
    name = method.lower() if isinstance(method, str) else None
    reading = TABLE["read"].get(name)
    if reading is None:
        raise _not_simulated(table, method, where)
    _refuse_sparse(table.get("sparsity_config"), f"{where}: sparsity_config")
    for key, value in table.items():
        if key != "sparsity_config" and value and any(word in key.lower() for word in TABLE["other_work"]["words"]):
            raise WorkloadError(f"{where}: {shown(key)} = {shown(value)}: other work than is simulated: {_REMEDY}")
    read = (READINGS.get(reading) or LIBRARIES[reading])(table, where)
    if read is None:
        raise _not_simulated(table, method, where)
    scheme = read.named(str(name), where)
    for key in CACHE:
        kv = cached_type(table.get(key), f"{where}: {key}")
        scheme = scheme if kv is None else scheme.with_cache(kv)
    return scheme


def _not_simulated(table: Table, method: Any, where: str) -> WorkloadError:
    known = TABLE["formats"].get(method.lower()) if isinstance(method, str) else None
    what = f"{known}{_details(table)}: not simulated yet" if known else f"unknown format {shown(method)}"
    return WorkloadError(f"{where}: {what}: {_REMEDY}")


_NOT_KNOWN = "a quantised format that is not known"
_REMEDY = "take it out to run the unquantised model, or give --weight-dtype"


def _stated_elsewhere(table: Table) -> str | None:
    """The format of files that are older than ``quant_method``."""
    if "load_in_4bit" in table or "load_in_8bit" in table:
        return "bitsandbytes"
    if "quant_algo" in table:
        return "modelopt"
    return "compressed-tensors" if "config_groups" in table else None


def _details(table: Table) -> str:
    said = [f"{key} {shown(table[key])}" for key in ("quant_method", "format", "bits") if _short(table.get(key))]
    return f" ({', '.join(said)})" if said else ""


def _short(value: Any) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def _refuse_sparse(table: Any, where: str) -> None:
    kept = table.get("format") if isinstance(table, dict) else table
    if kept not in (None, "dense", {}) or (isinstance(table, dict) and table.get("sparsity_structure") not in _DENSE):
        raise WorkloadError(f"{where}: sparse weights (format {shown(kept)}) are not simulated: {_REMEDY}")


_DENSE = (None, "unstructured", "0:0")
