"""Measured records: JSON lines in the schema of ``docs/records.md``, read strictly and split in two.

What was measured never reaches a prediction: :func:`read_records` separates a row's inputs from its
measured fields, and predictors only ever see the inputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sim.errors import SimError

# Everything a measurement produced, by kind of field; all other fields are inputs.
MEASURED_FIELDS = frozenset(
    {
        "latency_s", "power_w", "energy_j", "sm_clock_mhz", "temperature_c", "a_alone_s", "b_alone_s",
        "a_together_s", "b_together_s", "gemm_s", "collective_s", "gemm_clock_mhz", "a_clock_mhz",
        "iter_s", "clock_mhz", "log", "marks", "ttft_s", "tpot_s", "sm", "start_us", "resident", "missing", "end_ms",
        "held_ms", "products", "latency_us", "kcycles",
    }
)  # fmt: skip


class RecordError(SimError):
    """A record file that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row: where it stands, what was asked, what was measured."""

    path: Path
    line: int
    kind: str
    inputs: Mapping[str, Any]
    measured: Mapping[str, Any]
    digest: str


def row_digest(row: Mapping[str, Any]) -> str:
    """A row's identity, whatever the order of its keys: used to tell fitted rows from unseen ones."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def read_records(path: Path) -> Iterator[Record]:
    """The rows of a JSON-lines file in order; blank lines are passed over, bad ones are errors."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"cannot read records '{path}': {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"cannot read records '{path}': not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}, line {number}: not valid JSON: {error.msg}") from None
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise RecordError(f"{path}, line {number}: a record is an object with a text field 'kind'")
        for name in ("latency_s", "energy_j"):
            value = row.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise RecordError(f"{path}, line {number}: {name} = {value!r}: give a number or null")
        yield Record(
            path=path,
            line=number,
            kind=row["kind"],
            inputs={k: v for k, v in row.items() if k not in MEASURED_FIELDS} | _schedule(row),
            measured={k: v for k, v in row.items() if k in MEASURED_FIELDS},
            digest=row_digest(row),
        )


def _schedule(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a transient row's host did and when: inputs that stand among measured times in ``marks`` and ``log``.

    ``schedule`` lists (work, start in s, steps), ``duration_s`` is how long the log is. Step times stay behind.
    """
    if row["kind"] != "transient":
        return {}
    try:
        return {
            "schedule": [(str(m["work"]), float(m["start_s"]), len(m["step_ms"])) for m in row["marks"]],
            "duration_s": float(row["log"][-1][0]) - float(row["log"][0][0]),
        }
    except (KeyError, IndexError, TypeError, ValueError):
        return {}  # the predictor says what is missing
