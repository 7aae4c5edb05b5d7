"""How a quantised checkpoint stores its numbers, from Hugging Face's ``quantization_config`` and files beside it.

Every format that is read becomes a :class:`workloads.precision.Precision`; any other is refused by its name, never
read as bf16. Names and modules are data: ``data/huggingface/precision.toml``.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.precision import Precision, Product
from workloads.quantised_modules import Rule, Scheme
from workloads.storage import Storage
from workloads.work import DType

_TABLE = tomllib.loads((files("workloads") / "data" / "huggingface" / "precision.toml").read_text(encoding="utf-8"))
QUANTISED: tuple[str, ...] = tuple(_TABLE["keys"]["config"])
CACHE: tuple[str, ...] = tuple(_TABLE["keys"]["cache"])
SPARSE: tuple[str, ...] = tuple(_TABLE["keys"]["sparse"])
TYPED = ("torch_dtype", "dtype")
KEYS = (*QUANTISED, *CACHE, *SPARSE, *TYPED)
BESIDE: Mapping[str, Mapping[str, str]] = _TABLE["files"]

_SIXTEEN = Storage(element="bf16")
_FP8 = Storage(element="fp8_e4m3")
_FP8_ROWS = Storage(element="fp8_e4m3", rows=1)
_FP8_GROUPS = Storage(element="fp8_e4m3", rows=1, depth=128)
_NVFP4 = Storage(element="fp4_e2m1", rows=1, depth=16)
_MXFP4 = Storage(element="fp4_e2m1", rows=1, depth=32)

Table = Mapping[str, Any]


def precision_of(data: Table, *, where: str) -> str:
    """The type of the stored weights that are not quantised, ``bf16`` where the file does not say.

    >>> precision_of({"torch_dtype": "float16"}, where="config.json")
    'fp16'
    """
    found = {key: data[key] for key in TYPED if data.get(key) is not None}
    types: dict[str, str] = _TABLE["types"]
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
    for key in CACHE:
        kv = cached_type(data.get(key), f"{where}: {key}")
        if kv is not None:
            scheme = Scheme(kv=kv, where=where) if scheme is None else scheme.with_cache(kv)
    return scheme


def quantised_beside(folder: Path, *, layers: int, tied: bool) -> Precision | None:
    """What a file beside a ``config.json`` says of quantised weights (ModelOpt's, AutoGPTQ's, AutoAWQ's)."""
    for name, told in BESIDE.items():
        path = folder / name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError):
            raise WorkloadError(f"{path}: says how the weights are quantised, but cannot be read: mend it") from None
        key = told["key"]
        inside = data.get(key) if key and isinstance(data, dict) and key in data else data
        where = f"{path}: {key}" if key else str(path)
        return read_scheme(inside, where, format_unsaid=told["format"]).over(layers, tied=tied)
    return None


def read_scheme(table: Any, where: str, *, format_unsaid: str | None = None) -> Scheme:
    """The scheme of one table; ``format_unsaid`` is its format where the table names none."""
    if not isinstance(table, dict):
        raise WorkloadError(f"{where}: {_NOT_KNOWN}: {_REMEDY}")
    method = next((table[key] for key in ("quant_method", "method") if table.get(key) is not None), None)
    if method is None:
        method = format_unsaid or _told_otherwise(table)
    if method is None:
        raise WorkloadError(f"{where}: {_NOT_KNOWN}{_details(table)}: {_REMEDY}")
    name = method.lower() if isinstance(method, str) else None
    reading = _TABLE["read"].get(name)
    if reading is None:
        known = _TABLE["formats"].get(name)
        what = f"{known}{_details(table)}: not simulated yet" if known else f"unknown format {shown(method)}"
        raise WorkloadError(f"{where}: {what}: {_REMEDY}")
    _refuse_sparse(table.get("sparsity_config"), f"{where}: sparsity_config")
    scheme = _READINGS[reading](table, where).named(str(name), where)
    for key in CACHE:
        kv = cached_type(table.get(key), f"{where}: {key}")
        scheme = scheme if kv is None else scheme.with_cache(kv)
    return scheme


_NOT_KNOWN = "a quantised format that is not known"
_REMEDY = "take it out to run the unquantised model, or give --weight-dtype"


def _told_otherwise(table: Table) -> str | None:
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


# -- readings of the formats ------------------------------------------------------------------------------------


def _fp8(table: Table, where: str) -> Scheme:
    if table.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise WorkloadError(f"{where}: fmt = {shown(table['fmt'])}: FP8 weights are read as e4m3 only")
    scheme = table.get("activation_scheme") or "dynamic"
    if scheme not in ("dynamic", "static"):
        raise WorkloadError(f"{where}: activation_scheme = {shown(scheme)}: known are dynamic, static")
    block = table.get("weight_block_size")
    if block is not None:
        rows, depth = _block(block, f"{where}: weight_block_size")
        product = Product(
            weights=Storage(element="fp8_e4m3", rows=rows, depth=depth),
            activations=Storage(element="fp8_e4m3", rows=1, depth=depth),
        )
    else:
        product = Product(weights=_FP8, activations=_FP8 if scheme == "static" else _FP8_ROWS)
    return Scheme(product=product, rules=_left_out(table, where))


def _fbgemm_fp8(table: Table, where: str) -> Scheme:
    return Scheme(product=Product(weights=_FP8_ROWS, activations=_FP8_ROWS), rules=_left_out(table, where))


def _gptq(table: Table, where: str) -> Scheme:
    bits = _bits(table, where, (2, 3, 4, 8))
    product = Product(weights=_grouped(bits, table, where, zero=True), activations=_SIXTEEN)
    rules: list[Rule] = []
    dynamic = table.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise WorkloadError(f"{where}: dynamic = {shown(dynamic)}: give a table of patterns")
    for pattern, change in dynamic.items():
        if pattern.startswith("-:"):
            rules.append(Rule(pattern=f"re:{pattern[2:]}", product=None))
        elif isinstance(change, dict):
            own = {**table, **change}
            weights = _grouped(_bits(own, where, (2, 3, 4, 8)), own, where, zero=True)
            own_product = Product(weights=weights, activations=_SIXTEEN)
            rules.append(Rule(pattern=f"re:{pattern.removeprefix('+:')}", product=own_product))
        else:
            raise WorkloadError(f"{where}: dynamic: {shown(pattern)} = {shown(change)}: give a table")
    inside = table.get("modules_in_block_to_quantize")
    only = tuple(_names(_flat(inside), f"{where}: modules_in_block_to_quantize")) if inside else ()
    return Scheme(
        product=product, rules=(*_left_out(table, where), *rules), only=only, head=_flag(table, "lm_head", where)
    )


def _awq(table: Table, where: str) -> Scheme:
    bits = _bits(table, where, (4, 8))
    weights = _grouped(bits, table, where, zero=_flag(table, "zero_point", where, default=True))
    return Scheme(product=Product(weights=weights, activations=_SIXTEEN), rules=_left_out(table, where))


def _bitsandbytes(table: Table, where: str) -> Scheme:
    rules = _left_out(table, where)
    four, eight = (_flag(table, name, where) for name in ("load_in_4bit", "load_in_8bit"))
    method = str(table.get("quant_method")).lower()
    four |= method.endswith("4bit")
    eight |= method.endswith("8bit")
    if four == eight:
        raise WorkloadError(f"{where}: load_in_4bit and load_in_8bit: one of them must be true")
    if eight:  # rows and tokens with a scale each; outliers of the activations beside them in 16 bit
        rows = Storage(element="int8", rows=1)
        return Scheme(product=Product(weights=rows, activations=rows), rules=rules)
    kind = table.get("bnb_4bit_quant_type") or "fp4"
    if kind not in ("nf4", "fp4"):
        raise WorkloadError(f"{where}: bnb_4bit_quant_type = {shown(kind)}: known are nf4, fp4")
    double = _flag(table, "bnb_4bit_use_double_quant", where)
    weights = Storage(element=kind, rows=1, depth=64, double=double)
    return Scheme(product=Product(weights=weights, activations=_SIXTEEN), rules=rules)


def _mxfp4(table: Table, where: str) -> Scheme:
    """Experts alone, whatever the list of what is left out says besides."""
    product = Product(weights=_MXFP4, activations=_SIXTEEN)
    return Scheme(product=product, rules=_left_out(table, where), only=("experts",))


def _modelopt(table: Table, where: str) -> Scheme:
    nested = table.get("quantization")
    if isinstance(nested, dict):
        table = {**table, **nested}
    method = str(table.get("quant_method") or "").lower()
    algo = table.get("quant_algo") or {"nvfp4": "NVFP4", "modelopt_fp4": "NVFP4", "fp4": "NVFP4"}.get(method)
    if algo is None and "config_groups" in table:
        return _compressed_tensors(table, where)
    rules = _left_out(table, where)
    if isinstance(algo, str) and algo.upper() == "MIXED_PRECISION":
        return Scheme(product=None, rules=(*rules, *_mixed(table, where)), kv=_cache_beside(table, where))
    kv = _cache_beside(table, where)
    if algo is None and kv is not DType.BF16:  # a cache alone
        return Scheme(kv=kv)
    return Scheme(product=_of_algorithm(algo, table, where), rules=rules, kv=kv)


def _cache_beside(table: Table, where: str) -> DType:
    found = [cached_type(table.get(key), f"{where}: {key}") for key in CACHE]
    return next((kv for kv in found if kv is not None), DType.BF16)


def _mixed(table: Table, where: str) -> list[Rule]:
    layers = table.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise WorkloadError(f"{where}: quantized_layers is missing: MIXED_PRECISION says there what each module is")
    rules = []
    for name, own in layers.items():
        if not isinstance(own, dict):
            raise WorkloadError(f"{where}: quantized_layers: {shown(name)} = {shown(own)}: give a table")
        rules.append(Rule(pattern=name, product=_of_algorithm(own.get("quant_algo"), own, where)))
    return rules


def _of_algorithm(algo: Any, table: Table, where: str) -> Product:
    """One of ModelOpt's algorithms."""
    name = algo.upper() if isinstance(algo, str) else None
    depth = _group(table, where, default=128)
    grouped = Storage(element="int4", rows=1, depth=depth, zero=_flag(table, "has_zero_point", where))
    blocks = Storage(element="fp8_e4m3", rows=128, depth=128)
    rows = Storage(element="int8", rows=1)
    known = {
        "FP8": Product(weights=_FP8, activations=_FP8),
        "FP8_PER_CHANNEL_PER_TOKEN": Product(weights=_FP8_ROWS, activations=_FP8_ROWS),
        "FP8_PB_REAL": Product(weights=blocks, activations=_FP8_GROUPS),
        "FP8_BLOCK_SCALES": Product(weights=blocks, activations=_FP8_GROUPS),
        "FP8_PB_WO": Product(weights=blocks, activations=_SIXTEEN),
        "NVFP4": Product(weights=_NVFP4, activations=_NVFP4),
        "NVFP4_AWQ": Product(weights=_NVFP4, activations=_NVFP4),
        "W4A8_NVFP4_FP8": Product(weights=_NVFP4, activations=_FP8),
        "W4A8_MXFP4_FP8": Product(weights=_MXFP4, activations=_FP8),
        "MXFP4": Product(weights=_MXFP4, activations=_SIXTEEN),
        "W4A16": Product(weights=grouped, activations=_SIXTEEN),
        "W4A16_AWQ": Product(weights=grouped, activations=_SIXTEEN),
        "W4A16_GPTQ": Product(weights=grouped, activations=_SIXTEEN),
        "INT4_AWQ": Product(weights=grouped, activations=_SIXTEEN),
        "W4A8_AWQ": Product(weights=grouped, activations=_FP8),
        "W8A16": Product(weights=rows, activations=_SIXTEEN),
        "INT8_SQ": Product(weights=rows, activations=rows),
        "INT8": Product(weights=rows, activations=rows),
        "W8A8_SQ_PER_CHANNEL": Product(weights=rows, activations=Storage(element="int8")),
        "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": Product(weights=rows, activations=rows),
    }
    product = known.get(name) if name is not None else None
    if product is None:
        near = difflib.get_close_matches(name or "", known, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "known are FP8, NVFP4, W4A16_AWQ, W4A8_AWQ, INT8_SQ and their like"
        )
        raise WorkloadError(f"{where}: quant_algo = {shown(algo)}: not simulated: {hint}")
    return product


def _compressed_tensors(table: Table, where: str) -> Scheme:
    packed = table.get("format")
    if packed is not None and (not isinstance(packed, str) or packed not in _CT_FORMATS):
        raise WorkloadError(f"{where}: format = {shown(packed)}: known are {', '.join(_CT_FORMATS)}")
    groups = table.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise WorkloadError(f"{where}: config_groups is missing: says there what weights are stored in")
    rules = [Rule(pattern=name, product=None) for name in _names(table.get("ignore"), f"{where}: ignore")]
    whole: Product | None = None
    for name, group in groups.items():
        inside = f"{where}: config_groups.{name}"
        if not isinstance(group, dict):
            raise WorkloadError(f"{inside} = {shown(group)}: give a table")
        product = _ct_group(group, inside)
        for target in _names(group.get("targets"), f"{inside}: targets"):
            if target in _LINEAR:
                whole = product
            elif target in _MIXTURES:
                rules.append(Rule(pattern="experts", product=product))
            else:
                rules.append(Rule(pattern=target, product=product))
    return Scheme(product=whole, rules=tuple(rules), head=True)


_CT_FORMATS = (
    "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_ELEMENTS = {f"int {bits}": f"int{bits}" for bits in (2, 3, 4, 5, 6, 8)}
_ELEMENTS |= {"float 8": "fp8_e4m3", "float 4": "fp4_e2m1"}
_LINEAR, _MIXTURES = ("Linear", "LinearBase", "Linear4bit"), ("FusedMoE", "MoE")


def _ct_group(group: Table, where: str) -> Product | None:
    if group.get("weights") is None:
        if group.get("input_activations") is not None:
            raise WorkloadError(f"{where}: weights is missing: activations are quantised with weights only")
        return None
    weights = _ct_operand(group["weights"], f"{where}: weights")
    inputs = group.get("input_activations")
    activations = _SIXTEEN if inputs is None else _ct_operand(inputs, f"{where}: input_activations", token=True)
    if activations.element == "fp4_e2m1" and weights.element != "fp4_e2m1":
        raise WorkloadError(
            f"{where}: input_activations of 4 bits with weights in {weights}: no kernel multiplies these"
        )
    return Product(weights=weights, activations=activations)


def _ct_operand(table: Any, where: str, *, token: bool = False) -> Storage:
    """One operand by number, kind and strategy of its scales."""
    if not isinstance(table, dict):
        raise WorkloadError(f"{where} = {shown(table)}: give a table with num_bits and type")
    bits, kind = table.get("num_bits", 8), table.get("type", "int")
    element = _ELEMENTS.get(f"{kind} {bits}")
    if element is None:
        raise WorkloadError(
            f"{where}: num_bits = {shown(bits)}, type = {shown(kind)}: known are {', '.join(_ELEMENTS)}"
        )
    zero = element.startswith("int") and not _flag(table, "symmetric", where, default=True) and not token
    group = table.get("group_size")
    strategy = table.get("strategy") or ("tensor" if group is None else "group")
    if element == "fp4_e2m1":
        return Storage(element=element, rows=1, depth=_group(table, where, default=16))
    match strategy:
        case "tensor":
            return Storage(element=element)
        case "channel" | "token":
            return Storage(element=element, rows=1, zero=zero)
        case "group" | "tensor_group":
            if group in (-1, None):
                return Storage(element=element, rows=1, zero=zero)
            return Storage(element=element, rows=1, depth=_group(table, where, default=128), zero=zero)
        case "block":
            rows, depth = _block(table.get("block_structure"), f"{where}: block_structure")
            return Storage(element=element, rows=rows, depth=depth)
    raise WorkloadError(
        f"{where}: strategy = {shown(strategy)}: known are tensor, channel, token, group, tensor_group, block"
    )


_READINGS: Mapping[str, Callable[[Table, str], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed_tensors": _compressed_tensors,
}


# -- their fields -----------------------------------------------------------------------------------------------


def cached_type(value: Any, where: str) -> DType | None:
    """The type of a quantised KV cache; None: 16 bit.

    >>> cached_type({"num_bits": 8, "type": "float"}, "x").value, cached_type("FP8", "x").value
    ('fp8_e4m3', 'fp8_e4m3')
    """
    if value is None or (isinstance(value, str) and value.lower() in ("none", "auto", "bf16", "fp16")):
        return None
    name = value
    if isinstance(value, dict):
        name = _ELEMENTS.get(f"{value.get('type', 'int')} {value.get('num_bits')}")
    found = _CACHED.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise WorkloadError(f"{where} = {shown(value)}: a cache of this type is not simulated: known are FP8 and INT8")
    return found


_CACHED = {
    "fp8": DType.FP8, "fp8_e4m3": DType.FP8, "fp8_e5m2": DType.FP8, "int8": DType.INT8,
}  # fmt: skip


def _grouped(bits: int, table: Table, where: str, *, zero: bool) -> Storage:
    """Integers with a scale a group along the axis summed over; -1: a whole row."""
    if table.get("group_size") == -1:
        return Storage(element=f"int{bits}", rows=1, zero=zero)
    return Storage(element=f"int{bits}", rows=1, depth=_group(table, where, default=128), zero=zero)


def _flag(table: Table, name: str, where: str, *, default: bool = False) -> bool:
    value = table.get(name)
    if not isinstance(value, bool | None):
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give true or false")
    return default if value is None else value


def _bits(table: Table, where: str, known: tuple[int, ...]) -> int:
    bits = table.get("bits", table.get("w_bit", table.get("wbits", 4)))
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in known:
        raise WorkloadError(f"{where}: bits = {shown(bits)}: known are {', '.join(map(str, known))}")
    return bits


def _group(table: Table, where: str, *, default: int) -> int:
    size = table.get("group_size", table.get("q_group_size"))
    if size is None:
        return default
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= 65536:
        raise WorkloadError(f"{where}: group_size = {shown(size)}: give a positive whole number")
    return size


def _block(value: Any, where: str) -> tuple[int, int]:
    if isinstance(value, str):
        value = [int(part) for part in value.lower().split("x") if part.isdigit()]
    whole = isinstance(value, list) and len(value) == 2 and all(type(one) is int and 0 < one <= 65536 for one in value)
    if not whole:
        raise WorkloadError(f"{where} = {shown(value)}: give two positive whole numbers, rows and depth")
    return value[0], value[1]


_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


def _left_out(table: Table, where: str) -> tuple[Rule, ...]:
    """Modules that stay in 16 bit."""
    names = [name for key in _LEFT_OUT for name in _names(table.get(key), f"{where}: {key}")]
    return tuple(Rule(pattern=name, product=None) for name in names)


def _names(value: Any, where: str) -> list[str]:
    value = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise WorkloadError(f"{where} = {shown(value)}: give a list of names")
    return list(value)


def _flat(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(one, list) for one in value):
        return [name for one in value for name in (one if isinstance(one, list) else [one])]
    return value
