"""TOML of one's own, read so that every fault of the text is one line."""

from __future__ import annotations

import tomllib
from typing import Any

from workloads.errors import WorkloadError


def read_toml(text: str, *, where: str) -> dict[str, Any]:
    """The table of a TOML file.

    >>> read_toml("x = " + "[" * 5000, where="m.toml")
    Traceback (most recent call last):
        ...
    workloads.errors.WorkloadError: m.toml: not valid TOML: lists or tables nest too deeply
    """
    try:
        table = tomllib.loads(text)
        repr(table)  # so that no later message fails on a number that cannot be printed
    except RecursionError:
        raise WorkloadError(f"{where}: not valid TOML: lists or tables nest too deeply") from None
    except ValueError as error:  # a fault of the text, or a number of thousands of digits
        raise WorkloadError(f"{where}: not valid TOML: {error}") from None
    return table
