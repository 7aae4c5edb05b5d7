"""Readings of formats of quantised checkpoints: a table of each becomes a scheme."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.precision import Product
from workloads.quantised_fields import (
    BITS,
    CACHE,
    ELEMENTS,
    Table,
    bits_of,
    block_of,
    cached_type,
    flag,
    flattened,
    group_of,
    grouped,
    left_out,
    names_of,
)
from workloads.quantised_modules import ModuleRule, Scheme
from workloads.storage import Storage
from workloads.work import DType

_SIXTEEN = Storage(element="bf16")
_FP8 = Storage(element="fp8_e4m3")
_FP8_ROWS = Storage(element="fp8_e4m3", rows=1)
_FP8_GROUPS = Storage(element="fp8_e4m3", rows=1, depth=128)
_NVFP4 = Storage(element="fp4_e2m1", rows=1, depth=16)
_MXFP4 = Storage(element="fp4_e2m1", rows=1, depth=32)


def _fp8(table: Table, where: str) -> Scheme:
    if table.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise WorkloadError(f"{where}: fmt = {shown(table['fmt'])}: FP8 weights are read as e4m3 only")
    scheme = table.get("activation_scheme") or "dynamic"
    if scheme not in ("dynamic", "static"):
        raise WorkloadError(f"{where}: activation_scheme = {shown(scheme)}: known are dynamic, static")
    block = table.get("weight_block_size")
    if block is not None:
        rows, depth = block_of(block, f"{where}: weight_block_size")
        product = Product(
            weights=Storage(element="fp8_e4m3", rows=rows, depth=depth),
            activations=Storage(element="fp8_e4m3", rows=1, depth=depth),
        )
    else:
        product = Product(weights=_FP8, activations=_FP8 if scheme == "static" else _FP8_ROWS)
    return Scheme(product=product, rules=left_out(table, where))


def _fbgemm_fp8(table: Table, where: str) -> Scheme:
    return Scheme(product=Product(weights=_FP8_ROWS, activations=_FP8_ROWS), rules=left_out(table, where))


def _gptq(table: Table, where: str) -> Scheme:
    kept = table.get("checkpoint_format")
    if kept not in (None, "gptq", "gptq_v2", "marlin"):
        raise WorkloadError(f"{where}: checkpoint_format = {shown(kept)}: known are gptq, gptq_v2, marlin")
    if not any(key in table for key in BITS):
        raise WorkloadError(f"{where}: bits is missing: GPTQ says there what weights are stored in")
    bits = bits_of(table, where, (2, 3, 4, 8))
    product = Product(weights=grouped(bits, table, where, zero=True), activations=_SIXTEEN)
    rules: list[ModuleRule] = []
    dynamic = table.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise WorkloadError(f"{where}: dynamic = {shown(dynamic)}: give a table of patterns")
    for pattern, change in dynamic.items():
        if pattern.startswith("-:"):
            rules.append(ModuleRule(pattern=f"re:{pattern[2:]}", product=None))
        elif isinstance(change, dict):
            own = {**table, **change}
            weights = grouped(bits_of(own, where, (2, 3, 4, 8)), own, where, zero=True)
            own_product = Product(weights=weights, activations=_SIXTEEN)
            rules.append(ModuleRule(pattern=f"re:{pattern.removeprefix('+:')}", product=own_product))
        else:
            raise WorkloadError(f"{where}: dynamic: {shown(pattern)} = {shown(change)}: give a table")
    inside = table.get("modules_in_block_to_quantize")
    only = tuple(names_of(flattened(inside), f"{where}: modules_in_block_to_quantize")) if inside else ()
    return Scheme(
        product=product, rules=(*left_out(table, where), *rules), only=only, head=flag(table, "lm_head", where)
    )


def _awq(table: Table, where: str) -> Scheme:
    bits = bits_of(table, where, (4, 8))
    weights = grouped(bits, table, where, zero=flag(table, "zero_point", where, default=True))
    return Scheme(product=Product(weights=weights, activations=_SIXTEEN), rules=left_out(table, where))


_COMPUTES = ("bfloat16", "float16", "float32")


def _bitsandbytes(table: Table, where: str) -> Scheme:
    rules = left_out(table, where)
    four, eight = (flag(table, name, where) for name in ("load_in_4bit", "load_in_8bit"))
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
    if table.get("bnb_4bit_compute_dtype") not in (None, *_COMPUTES):
        compute = shown(table["bnb_4bit_compute_dtype"])
        raise WorkloadError(f"{where}: bnb_4bit_compute_dtype = {compute}: known are {', '.join(_COMPUTES)}")
    double = flag(table, "bnb_4bit_use_double_quant", where)
    weights = Storage(element=kind, rows=1, depth=64, double=double)
    return Scheme(product=Product(weights=weights, activations=_SIXTEEN), rules=rules)


def _mxfp4(table: Table, where: str) -> Scheme:
    """Experts alone, whatever the list of what is left out says besides."""
    product = Product(weights=_MXFP4, activations=_SIXTEEN)
    return Scheme(product=product, rules=left_out(table, where), only=("experts",))


def _modelopt(table: Table, where: str) -> Scheme:
    nested = table.get("quantization")
    if isinstance(nested, dict):
        table = {**table, **nested}
    method = str(table.get("quant_method") or "").lower()
    algo = table.get("quant_algo") or {"nvfp4": "NVFP4", "modelopt_fp4": "NVFP4", "fp4": "NVFP4"}.get(method)
    if algo is None and "config_groups" in table:
        return _compressed_tensors(table, where)
    rules = left_out(table, where)
    if isinstance(algo, str) and algo.upper() == "MIXED_PRECISION":
        return Scheme(product=None, rules=(*rules, *_mixed(table, where)), kv=_cache_beside(table, where))
    kv = _cache_beside(table, where)
    if algo is None and kv is not DType.BF16:  # a cache alone
        return Scheme(kv=kv)
    return Scheme(product=_of_algorithm(algo, table, where), rules=rules, kv=kv)


def _cache_beside(table: Table, where: str) -> DType:
    found = [cached_type(table.get(key), f"{where}: {key}") for key in CACHE]
    return next((kv for kv in found if kv is not None), DType.BF16)


def _mixed(table: Table, where: str) -> list[ModuleRule]:
    layers = table.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise WorkloadError(f"{where}: quantized_layers is missing: MIXED_PRECISION says there what each module is")
    rules = []
    for name, own in layers.items():
        if not isinstance(own, dict):
            raise WorkloadError(f"{where}: quantized_layers: {shown(name)} = {shown(own)}: give a table")
        rules.append(ModuleRule(pattern=name, product=_of_algorithm(own.get("quant_algo"), own, where)))
    return rules


def _of_algorithm(algo: Any, table: Table, where: str) -> Product:
    """One of ModelOpt's algorithms."""
    name = algo.upper() if isinstance(algo, str) else None
    depth = group_of(table, where, default=128)
    grouped = Storage(element="int4", rows=1, depth=depth, zero=flag(table, "has_zero_point", where))
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
        "W4A16_NVFP4": Product(weights=_NVFP4, activations=_SIXTEEN),
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
    rules = [ModuleRule(pattern=name, product=None) for name in names_of(table.get("ignore"), f"{where}: ignore")]
    whole: Product | None = None
    for name, group in groups.items():
        inside = f"{where}: config_groups.{name}"
        if not isinstance(group, dict):
            raise WorkloadError(f"{inside} = {shown(group)}: give a table")
        product = _ct_group(group, inside)
        for target in names_of(group.get("targets"), f"{inside}: targets"):
            if target in _LINEAR:
                whole = product
            elif target in _MIXTURES:
                rules.append(ModuleRule(pattern="experts", product=product))
            else:
                rules.append(ModuleRule(pattern=target, product=product))
    return Scheme(product=whole, rules=tuple(rules), head=True)


_CT_FORMATS = (
    "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
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
    element = ELEMENTS.get(f"{kind} {bits}")
    if element is None:
        raise WorkloadError(f"{where}: num_bits = {shown(bits)}, type = {shown(kind)}: known are {', '.join(ELEMENTS)}")
    zero = element.startswith("int") and not flag(table, "symmetric", where, default=True) and not token
    group = table.get("group_size")
    strategy = table.get("strategy") or ("tensor" if group is None else "group")
    if element == "fp4_e2m1":
        return Storage(element=element, rows=1, depth=group_of(table, where, default=16))
    match strategy:
        case "tensor":
            return Storage(element=element)
        case "channel" | "token":
            return Storage(element=element, rows=1, zero=zero)
        case "group" | "tensor_group":
            if group in (-1, None):
                return Storage(element=element, rows=1, zero=zero)
            return Storage(element=element, rows=1, depth=group_of(table, where, default=128), zero=zero)
        case "block":
            rows, depth = block_of(table.get("block_structure"), f"{where}: block_structure")
            return Storage(element=element, rows=rows, depth=depth)
    raise WorkloadError(
        f"{where}: strategy = {shown(strategy)}: known are tensor, channel, token, group, tensor_group, block"
    )


READINGS: Mapping[str, Callable[[Table, str], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed_tensors": _compressed_tensors,
}
