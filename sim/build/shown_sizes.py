"""The sizes of a kernel's work as traces and tables show them."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from functools import cache

from workloads.storage import Storage
from workloads.work import ExchangeSizes, Work


def shown_sizes(work: Work | ExchangeSizes) -> dict[str, object]:
    """A work's sizes by name, for traces; those of an exchange beside those of its collective."""
    found: dict[str, object] = {}
    for name, off in _shown_fields(type(work)):  # type: ignore[arg-type]  # mypy: a type is not hashable
        value = getattr(work, name)
        if value is None or (off and value is False):
            continue
        if isinstance(value, ExchangeSizes):
            found |= shown_sizes(value)
        else:
            found[name] = _shown(value)
    return found


@cache
def _shown_fields(cls: type[Work | ExchangeSizes]) -> tuple[tuple[str, bool], ...]:
    """Names of a work's fields that are shown, and whether each is a switch that is off by itself."""
    return tuple((field.name, field.default is False) for field in fields(cls) if field.name not in ("rival", "turn"))


def _shown(value: object) -> object:
    match value:
        case Enum():
            return value.value
        case tuple():
            return list(value)
        case Storage():
            return str(value)
    return value
