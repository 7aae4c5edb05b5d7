"""Fields of files that describe a model: each is checked, and a problem is a line with field, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inputs import suggest
from inputs.texts import shown
from workloads.errors import WorkloadError


def flag(data: Mapping[str, Any], name: str, where: str, *, default: bool = False) -> bool:
    """``data[name]`` as a truth value, or an error that names it."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give true or false")
    return value


def name_of(data: Mapping[str, Any], where: str) -> str:
    """What a configuration calls its model; its place where it does not."""
    name = data.get("_name_or_path")
    return name if isinstance(name, str) and name and len(name) < 100 and name.isprintable() else where


def positive(value: Any, name: str, where: str, *, most: int = 10**9) -> int:
    """``value`` as a positive whole number of at most ``most``, or an error that names it."""
    if value is None:
        raise WorkloadError(f"{where}: {name} is missing: give a positive whole number")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value > most:
        beyond = f" of at most {most}" if isinstance(value, int) and value > most else ""
        raise WorkloadError(f"{where}: {name} = {shown(value)}: give a positive whole number{beyond}")
    return value


def refuse_unknown(table: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    """Unknown keys are errors that suggest the nearest known one."""
    suggest.refuse_unknown(table, known, where, WorkloadError)
