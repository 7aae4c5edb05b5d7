"""Fields of tables of quantisation: checked, and named in what refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inputs.texts import shown
from workloads.errors import WorkloadError
from workloads.quantised_modules import ModuleRule
from workloads.storage import Storage
from workloads.work import DType

Table = Mapping[str, Any]

CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")  # keys that say how the KV cache is stored
# Elements by kind and number of bits, as compressed-tensors writes them.
ELEMENTS = {f"int {bits}": f"int{bits}" for bits in (2, 3, 4, 5, 6, 8)}
ELEMENTS |= {"float 8": "fp8_e4m3", "float 4": "fp4_e2m1"}


def cached_type(value: Any, where: str) -> DType | None:
    """The type of a quantised KV cache; None: 16 bit.

    >>> cached_type({"num_bits": 8, "type": "float"}, "x").value, cached_type("FP8", "x").value
    ('fp8_e4m3', 'fp8_e4m3')
    """
    if value is None or (isinstance(value, str) and value.lower() in ("none", "auto", "bf16", "fp16")):
        return None
    name = value
    if isinstance(value, dict):
        name = ELEMENTS.get(f"{value.get('type', 'int')} {value.get('num_bits')}")
    found = _CACHED.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise WorkloadError(f"{where} = {shown(value)}: a cache of this type is not simulated: known are FP8 and INT8")
    return found


_CACHED = {
    "fp8": DType.FP8, "fp8_e4m3": DType.FP8, "fp8_e5m2": DType.FP8, "int8": DType.INT8,
}  # fmt: skip


def grouped(bits: int, table: Table, where: str, *, zero: bool) -> Storage:
    """Integers with a scale a group along the axis summed over; -1: a whole row."""
    if table.get("group_size") == -1:
        return Storage(element=f"int{bits}", rows=1, zero=zero)
    return Storage(element=f"int{bits}", rows=1, depth=group_of(table, where, default=128), zero=zero)


def flag(table: Table, name: str, where: str, *, default: bool = False) -> bool:
    """``table[name]`` as a truth value."""
    value = table.get(name)
    if not isinstance(value, bool | None):
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give true or false")
    return default if value is None else value


BITS = ("bits", "w_bit", "wbits")


def bits_of(table: Table, where: str, known: tuple[int, ...]) -> int:
    """Bits of an integer, by any of its names."""
    bits = next((table[key] for key in BITS if key in table), 4)
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in known:
        raise WorkloadError(f"{where}: bits = {shown(bits)}: known are {', '.join(map(str, known))}")
    return bits


def group_of(table: Table, where: str, *, default: int) -> int:
    """Elements that share a scale."""
    size = table.get("group_size", table.get("q_group_size"))
    if size is None:
        return default
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= 65536:
        raise WorkloadError(f"{where}: group_size = {shown(size)}: give a positive whole number")
    return size


def block_of(value: Any, where: str) -> tuple[int, int]:
    """Rows and depth of a block of weights that share a scale."""
    if isinstance(value, str):
        value = [int(part) for part in value.lower().split("x") if part.isdigit()]
    whole = (
        isinstance(value, list) and len(value) == 2 and all(type(item) is int and 0 < item <= 65536 for item in value)
    )
    if not whole:
        raise WorkloadError(f"{where} = {shown(value)}: give two positive whole numbers, rows and depth")
    return value[0], value[1]


_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "llm_int8_skip_modules")


def left_out(table: Table, where: str) -> tuple[ModuleRule, ...]:
    """Modules that stay in 16 bit."""
    names = [name for key in _LEFT_OUT for name in names_of(table.get(key), f"{where}: {key}")]
    return tuple(ModuleRule(pattern=name, product=None) for name in names)


def names_of(value: Any, where: str) -> list[str]:
    """Names of modules: a list, one of them, or none."""
    value = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise WorkloadError(f"{where} = {shown(value)}: give a list of names")
    return list(value)


def flattened(value: Any) -> Any:
    """A list of lists as one list."""
    if isinstance(value, list) and any(isinstance(item, list) for item in value):
        return [name for item in value for name in (item if isinstance(item, list) else [item])]
    return value
