"""JSON text, as the parts of the Chrome writer put it together."""

from __future__ import annotations

import json
from typing import Any

from traces.errors import TraceError


def json_text(value: Any, what: str) -> str:
    """``value`` without spaces; ``what`` it is stands in the error where it is no JSON."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TraceError(f"{what} cannot be written as JSON: {error}") from None


def us_text(ns: int, *, whole: bool = False) -> str:
    """Whole nanoseconds as microseconds, or as the ``whole`` microsecond that they lie in.

    >>> us_text(12_345_067), us_text(12_345_067, whole=True)
    ('12345.067', '12345')
    """
    if whole:
        return str(ns // 1000)
    return f"{ns // 1000}.{ns % 1000:03d}"
