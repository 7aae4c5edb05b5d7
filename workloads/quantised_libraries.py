"""Readings of the formats that libraries of quantisation write: Quark, torchao, AutoRound, HQQ, EETQ, Quanto, BitNet.

Each returns None for a variant that is not simulated: the caller refuses it by the format's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.precision import Product
from workloads.quantised_fields import Table, bits_of, cached_type, flag, group_of, grouped, left_out, names_of
from workloads.quantised_modules import ModuleRule, Scheme
from workloads.storage import Storage
from workloads.work import DType

Reading = Callable[[Table, str], Scheme | None]
_SIXTEEN = Storage(element="bf16")
_FP8, _FP8_ROWS = Storage(element="fp8_e4m3"), Storage(element="fp8_e4m3", rows=1)
_INT8_ROWS = Storage(element="int8", rows=1)


def _tables(table: Table, key: str, where: str, *, of_any: bool = False) -> dict[str, Any]:
    """A table of tables (or ``of_any`` values) inside ``table``; none where it is left out."""
    said = table.get(key) or {}
    if not isinstance(said, dict) or not (of_any or all(isinstance(own, dict) for own in said.values())):
        raise WorkloadError(f"{where}: {key} = {shown(said)}: give a table{'' if of_any else ' of tables'}")
    return said


# -- Quark (AMD) ------------------------------------------------------------------------------------------------

_QUARK = {"fp8_e4m3": "fp8_e4m3", "int8": "int8", "int4": "int4", "uint4": "int4", "int3": "int3", "int2": "int2",
          "fp4": "fp4_e2m1", "fp4_e2m1": "fp4_e2m1", "mxfp4": "fp4_e2m1"}  # fmt: skip


def quark(table: Table, where: str) -> Scheme | None:
    """One product of all linear layers, others of modules by pattern, and what keys and values leave as."""
    whole = table.get("global_quant_config")
    if not isinstance(whole, dict):
        return None
    rules = [ModuleRule(pattern=name, product=None) for name in names_of(table.get("exclude"), f"{where}: exclude")]
    kv = DType.BF16
    for key in ("kv_cache_quant_config", "layer_quant_config"):
        for pattern, own in _tables(table, key, where).items():
            made = _quark_cache(own, f"{where}: {key}: {pattern}") if _of_cache(pattern) else None
            kv = made or kv
            if key == "layer_quant_config" and own.get("weight") is not None:
                rules.append(ModuleRule(pattern=pattern, product=_quark_product(own, f"{where}: {key}: {pattern}")))
    if table.get("layer_type_quant_config"):
        return None
    if whole.get("weight") is None and not any(rule.product for rule in rules):
        return None
    product = None if whole.get("weight") is None else _quark_product(whole, f"{where}: global_quant_config")
    return Scheme(product=product, rules=tuple(rules), kv=kv, head=True)


def _of_cache(pattern: str) -> bool:
    return pattern.endswith(("k_proj", "v_proj", "kv_proj"))


def _quark_cache(own: Table, where: str) -> DType | None:
    said = own.get("output_tensors")
    if said is None:
        return None
    if not isinstance(said, dict):
        raise WorkloadError(f"{where}: output_tensors = {shown(said)}: give a table")
    return cached_type(said.get("dtype"), f"{where}: output_tensors")


def _quark_product(table: Table, where: str) -> Product:
    inputs = table.get("input_tensors")
    activations = _SIXTEEN if inputs is None else _quark_operand(inputs, f"{where}: input_tensors")
    return Product(weights=_quark_operand(table["weight"], f"{where}: weight"), activations=activations)


def _quark_operand(said: Any, where: str) -> Storage:
    """The storage of one operand; of a list (one step of quantisation after another) the last is stored."""
    spec = said[-1] if isinstance(said, list) and said else said
    if not isinstance(spec, dict):
        raise WorkloadError(f"{where} = {shown(said)}: give a table with dtype and qscheme")
    element = _QUARK.get(str(spec.get("dtype")).lower())
    if element is None:
        raise WorkloadError(f"{where}: dtype = {shown(spec.get('dtype'))}: known are {', '.join(_QUARK)}")
    zero = element.startswith("int") and spec.get("symmetric") is False and not spec.get("is_dynamic")
    match spec.get("qscheme") or ("per_group" if spec.get("group_size") else "per_tensor"):
        case "per_tensor":
            return Storage(element=element)
        case "per_channel" | "per_token":
            return Storage(element=element, rows=1, zero=zero)
        case "per_group":
            return Storage(element=element, rows=1, depth=group_of(spec, where, default=32), zero=zero)
    raise WorkloadError(f"{where}: qscheme = {shown(spec['qscheme'])}: known are per_tensor, per_channel, per_group")


# -- torchao ----------------------------------------------------------------------------------------------------


def torchao(table: Table, where: str) -> Scheme | None:
    """One configuration for all linear layers, or one for each module by name, by class or by older words."""
    said = table.get("quant_type")
    if isinstance(said, str):
        said = {"_type": said, "_data": table.get("quant_type_kwargs") or {}}
    elif isinstance(said, dict) and "_type" not in said:
        said = said.get("default")
    if not isinstance(said, dict):
        return None
    rules = list(left_out(table, where))
    kind, data = str(said.get("_type")), _tables(said, "_data", where, of_any=True)
    if kind in ("ModuleFqnToConfig", "FqnToConfig"):
        modules = next((one for one in data.values() if isinstance(one, dict)), None)
        if not modules:
            raise WorkloadError(f"{where}: quant_type: _data = {shown(data)}: give a table of modules by name")
        for name, own in modules.items():
            if name != "_default":
                product = None if own is None else _torchao_product(own, where)
                if own is not None and product is None:
                    return None
                rules.append(ModuleRule(pattern=name, product=product))
        said = modules.get("_default")
        if said is None:
            return Scheme(product=None, rules=tuple(rules), head=True)
    whole = _torchao_product(said, where)
    head = flag(table, "include_input_output_embeddings", where)
    return None if whole is None else Scheme(product=whole, rules=tuple(rules), head=head)


def _torchao_product(said: Any, where: str) -> Product | None:
    if not isinstance(said, dict):
        raise WorkloadError(f"{where}: quant_type: {shown(said)}: give a table with _type and _data")
    kind = str(said.get("_type")).replace("_", "").lower().removesuffix("config")
    data = _tables(said, "_data", where, of_any=True)
    whole_tensor = "PerRow" not in str(data.get("granularity"))
    scaled = _FP8 if whole_tensor else _FP8_ROWS
    depth = group_of(data, where, default=32 if kind.startswith("int8dyn") else 128)
    four = Storage(element="int4", rows=1, depth=depth)
    return {
        # A scale and a zero point of 16 bits for each group, as tinygemm reads them.
        "int4weightonly": Product(weights=replace(four, zero=True, wide_zero=True), activations=_SIXTEEN),
        "int8weightonly": Product(weights=_INT8_ROWS, activations=_SIXTEEN),
        "int8dynamicactivationint8weight": Product(weights=_INT8_ROWS, activations=_INT8_ROWS),
        "int8dynamicactivationint4weight": Product(weights=four, activations=_INT8_ROWS),
        "float8weightonly": Product(weights=_FP8_ROWS, activations=_SIXTEEN),
        "float8dynamicactivationfloat8weight": Product(weights=scaled, activations=scaled),
    }.get(kind)


# -- AutoRound, HQQ, EETQ, Quanto, BitNet -----------------------------------------------------------------------


def auto_round(table: Table, where: str) -> Scheme | None:
    """Integers in groups, packed as GPTQ or AWQ pack them: scales of 16 bits and packed zero points."""
    packing = str(table.get("packing_format") or "auto_round:auto_gptq").lower()
    if table.get("data_type") not in (None, "int") or not packing.endswith(("gptq", "awq")) or "bits" not in table:
        return None
    rules = list(left_out(table, where))
    for pattern, own in _tables(table, "extra_config", where).items():
        bits = own.get("bits", 0)
        product = (
            None
            if isinstance(bits, int) and bits >= DType.BF16.bits
            else _auto_round_product({**table, **own}, f"{where}: extra_config: {pattern}")
        )
        rules.append(ModuleRule(pattern=pattern, product=product))
    return Scheme(product=_auto_round_product(table, where), rules=tuple(rules))


def _auto_round_product(table: Table, where: str) -> Product:
    weights = grouped(bits_of(table, where, (2, 3, 4, 8)), table, where, zero=True)
    return Product(weights=weights, activations=_SIXTEEN)


def hqq(table: Table, where: str) -> Scheme | None:
    """Integers in groups with scales and zero points of 16 bits, all modules alike or each by name."""
    said = table.get("quant_config")
    if not isinstance(said, dict) or not said:
        return None
    skipped = names_of(table.get("skip_modules"), f"{where}: skip_modules")
    rules = [*left_out(table, where), *(ModuleRule(pattern=name, product=None) for name in skipped)]
    if "weight_quant_params" in said:
        product = _hqq_product(said, where)
        return None if product is None else Scheme(product=product, rules=tuple(rules))
    for name, own in said.items():
        made = _hqq_product(own, f"{where}: {name}") if isinstance(own, dict) else None
        if made is None:
            return None
        rules.append(ModuleRule(pattern=name, product=made))
    return Scheme(product=None, rules=tuple(rules))


def _hqq_product(said: Table, where: str) -> Product | None:
    weights = said.get("weight_quant_params", said)
    if not isinstance(weights, dict) or said.get("scale_quant_params") or said.get("zero_quant_params"):
        return None
    bits = bits_of({"bits": weights.get("nbits")}, where, (2, 3, 4, 8))
    depth = 0 if weights.get("group_size") is None else group_of(weights, where, default=64)
    stored = Storage(element=f"int{bits}", rows=1, depth=depth, zero=True, wide_zero=True)
    return Product(weights=stored, activations=_SIXTEEN)


def eetq(table: Table, where: str) -> Scheme | None:
    """8-bit integers with a scale a row, turned into 16 bit on the way."""
    if table.get("weights") != "int8":
        return None
    return Scheme(product=Product(weights=_INT8_ROWS, activations=_SIXTEEN), rules=left_out(table, where))


def quanto(table: Table, where: str) -> Scheme | None:
    """Weights by name, activations by name or in 16 bit."""
    four = Storage(element="int4", rows=1, depth=128, zero=True, wide_zero=True)
    weights = {"int8": _INT8_ROWS, "int4": four, "int2": replace(four, element="int2"), "float8": _FP8_ROWS}
    activations = {None: _SIXTEEN, "int8": Storage(element="int8"), "float8": _FP8}
    said, read = table.get("weights"), table.get("activations")
    if not isinstance(said, str) or said not in weights or not (read is None or isinstance(read, str)):
        return None
    if read not in activations:
        return None
    return Scheme(product=Product(weights=weights[said], activations=activations[read]), rules=left_out(table, where))


def bitnet(table: Table, where: str) -> Scheme | None:
    """Ternary weights, four to a byte, with one scale; activations of 8 bits with a scale a token."""
    if table.get("quantization_mode", "offline") != "offline":
        return None
    product = Product(weights=Storage(element="int2"), activations=_INT8_ROWS)
    return Scheme(product=product, rules=left_out(table, where))


LIBRARIES: Mapping[str, Reading] = {
    "quark": quark, "torchao": torchao, "auto_round": auto_round, "hqq": hqq, "eetq": eetq, "quanto": quanto,
    "bitnet": bitnet,
}  # fmt: skip
