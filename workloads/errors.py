"""Everything ``workloads`` refuses to do, as one exception with one-line messages."""

from __future__ import annotations

from typing import Any

WIDEST = 90  # characters of a value in a message


class WorkloadError(Exception):
    """Bad einsum, model or layout; the message names the field, the value and the remedy."""


def shown(value: Any) -> str:
    """A value of a file as it stands in a message: whole where it is short.

    >>> shown("gelu"), shown([3]), shown("a" * 500)
    ("'gelu'", '[3]', "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaaaaaaaaaaaa'")
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, tables in tables
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= WIDEST else f"{text[: WIDEST // 2]}...{text[-WIDEST // 3 :]}"
