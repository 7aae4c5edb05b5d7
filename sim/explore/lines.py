"""A row of a sweep as one line of JSON, on its way from a worker to the journal and the table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder()


def line_of(row: Mapping[str, Any]) -> str:
    r"""``row`` as one line; msgspec writes it in a tenth of the time of ``json``, but no NaN and no infinity.

    >>> line_of({"error": None, "energy_j": 0.1}), line_of({"error": "energy_j = inf", "energy_j": math.inf})
    ('{"error":null,"energy_j":0.1}\n', '{"error": "energy_j = inf", "energy_j": Infinity}\n')
    """
    # A row that failed holds what the grid said, whatever it is.
    if row.get("error") is None and all(map(math.isfinite, [v for v in row.values() if isinstance(v, float)])):
        with suppress(UnicodeEncodeError, TypeError):  # half of a surrogate pair; a float of numpy
            return _ENCODER.encode(row).decode() + "\n"
    return json.dumps(row) + "\n"


def row_of(line: str) -> dict[str, Any]:
    """The row of a line that :func:`line_of` wrote.

    >>> row_of('{"error":null,"energy_j":0.1}'), row_of('{"energy_j": Infinity}')
    ({'error': None, 'energy_j': 0.1}, {'energy_j': inf})
    """
    try:
        row: dict[str, Any] = _DECODER.decode(line)
    except msgspec.DecodeError:
        row = json.loads(line)
    return row
