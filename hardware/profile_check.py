"""Refuse a profile whose coefficients no GPU has: signs, sizes or shapes that would be priced without a word."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from hardware.catalog import shipped_ids
from hardware.errors import HardwareError

# How far a coefficient may lie from those of the shipped profiles, which span a 250 W and a 700 W card: a factor.
FAR = 100.0
AT_MOST_ONE = frozenset(
    {"efficiency", "footprint", "dip_ratio", "recovery_ratio", "empty_saves", "mixed_hbm_share",
     "bound", "throttled_time", "power"}
)  # fmt: skip
# Rates, clocks and limits: none of them is nothing. Times, joules and watts may be.
DIVISORS = (
    "_per_s", "_per_sm", "_hz", "efficiency", "sharpness", "_limit_w", "cap_w", "_time_s", "tick_s", "footprint",
    "sms_per_cta",
)  # fmt: skip
# Few rows part idle power into shares of either sign; it is their sum that must be above 0.
OF_IDLE = frozenset({"static_w", "clocked_w", "leakage_w_per_c"})
DEGREES = (-273.0, 200.0)  # leaves named *_c
# Kernels that others without rows are priced like.
PRICED_LIKE = frozenset({"add_rmsnorm", "silu_mul", "copy", "gelu", "rope"})
APART = frozenset({"provenance", "standard_errors", "left_out"})  # said of coefficients, not priced with


def check_profile(data: Mapping[str, Any], where: str) -> None:
    """Raise :class:`HardwareError` on the first coefficient of ``data`` that cannot be one."""
    for name, value in numbers(data):
        leaf = name.rsplit(".", 1)[-1]
        low, high = _allowed(leaf)
        if not low <= value <= high:
            raise HardwareError(
                f"{where}: {name} = {value:g}: outside {low:.3g} to {high:.3g}, what a GPU can have: fit it again "
                "(wattline calibrate)"
            )
    for kind, needed in (("gemm", {"bf16"}), ("elementwise", PRICED_LIKE)):
        for name in (kind, f"{kind}_corrections"):
            if missing := needed - data[name].keys():
                raise HardwareError(f"{where}: {name}: {min(missing)} is missing: fit it again (wattline calibrate)")
    for table in data["collective"]["tables"]:
        if not all(min(size, time_s) > 0 and math.isfinite(time_s + watts) for _, size, time_s, watts in table["rows"]):
            raise HardwareError(f"{where}: collective.tables: {table['op']}: bytes and seconds are above 0")
    for name, one in corrections(data):
        points, lengths = one["points"], one["lengths"]
        if len(one["weights"]) != len(points) or any(len(point) != len(lengths) for point in points):
            raise HardwareError(f"{where}: {name}: weights, lengths and points do not fit one another")
        if not all(0.0 < length < math.inf for length in lengths):
            raise HardwareError(f"{where}: {name}.lengths: give positive numbers")
        if not all(math.isfinite(x) for x in (*one["weights"], *(x for point in points for x in point))):
            raise HardwareError(f"{where}: {name}: weights and points are finite numbers")


def numbers(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, float]]:
    """Every coefficient with its place, tables of rows left out."""
    for name, value in data.items():
        if isinstance(value, Mapping) and name not in APART:
            yield from numbers(value, f"{place}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{place}{name}", float(value)


def corrections(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every learnt correction with its place."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            if value.keys() >= {"points", "weights", "lengths"}:
                yield f"{place}{name}", value
            else:
                yield from corrections(value, f"{place}{name}.")


def _allowed(leaf: str) -> tuple[float, float]:
    if leaf.endswith("_c") and not leaf.endswith("_per_c"):
        return DEGREES
    low, high = _shipped().get(leaf, (0.0, math.inf))
    if leaf in OF_IDLE:
        return -FAR * high, FAR * high
    return low / FAR if leaf.endswith(DIVISORS) else min(low, 0.0), min(
        high * FAR if high else math.inf, 1.0 if leaf in AT_MOST_ONE else math.inf
    )


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, tuple[float, float]]:
    """Least and greatest value of each coefficient's name in the shipped profiles."""
    found: dict[str, tuple[float, float]] = {}
    for name in shipped_ids("profiles", ".json"):
        text = (files("hardware") / "data" / "profiles" / f"{name}.json").read_text(encoding="utf-8")
        for place, value in numbers(json.loads(text)):
            leaf = place.rsplit(".", 1)[-1]
            low, high = found.get(leaf, (value, value))
            found[leaf] = min(low, value), max(high, value)
    return found
