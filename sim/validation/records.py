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

from inputs.files import read_lines
from inputs.texts import parse_json, shown
from sim.errors import SimError
from sim.validation.engine_rows import EngineRows

# Everything a measurement produced, by kind of field; all other fields are inputs.
MEASURED_FIELDS = frozenset(
    {
        "latency_s", "power_w", "energy_j", "sm_clock_mhz", "temperature_c", "a_alone_s", "b_alone_s",
        "a_together_s", "b_together_s", "gemm_s", "collective_s", "gemm_clock_mhz", "a_clock_mhz",
        "iter_s", "clock_mhz", "log", "marks", "ttft_s", "tpot_s", "sm", "start_us", "resident", "missing", "end_ms",
        "held_ms", "products", "latency_us", "kcycles", "span_s", "e2e_s",
    }
)  # fmt: skip


def _is_number(value: Any) -> bool:
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < NUMBER_LIMIT
    )


def _are_numbers(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(_is_number(item) for item in value))


NUMBER_LIMIT = 1e15
# What an evaluation reckons with must be what it takes it for.
MEASURED_SHAPES = (
    (frozenset({"latency_s", "energy_j", "a_alone_s", "b_alone_s", "gemm_s", "collective_s"}), _is_number,
     "a number or null"),
    (frozenset({"power_w", "sm_clock_mhz", "temperature_c", "iter_s", "a_together_s", "b_together_s", "a_clock_mhz",
                "gemm_clock_mhz"}), _are_numbers, "a list of numbers"),
    (frozenset({"clock_mhz"}), lambda value: _is_number(value) or _are_numbers(value), "a number or a list of numbers"),
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
    engine = EngineRows()
    for number, line in read_lines(path, "records", RecordError):
        row = parse_json(line, f"{path}, line {number}", RecordError, one_line=True)
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise RecordError(f"{path}, line {number}: a record is an object with a text field 'kind'")
        digest = row_digest(row)
        row = engine.read(row)
        for names, is_right, right in MEASURED_SHAPES:
            for name in names & row.keys():
                if not is_right(row[name]):
                    raise RecordError(f"{path}, line {number}: {name} = {shown(row[name])}: give {right}")
        yield Record(
            path=path,
            line=number,
            kind=row["kind"],
            inputs={k: v for k, v in row.items() if k not in MEASURED_FIELDS} | _schedule(row) | _own_model(row, path),
            measured={k: v for k, v in row.items() if k in MEASURED_FIELDS},
            digest=digest,
        )


def _own_model(row: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config.json of a row's own model, which lies beside the file of the row."""
    model = row.get("model")
    return {"model": str(path.parent / model)} if isinstance(model, str) and model.endswith(".json") else {}


def _schedule(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a transient row's host did and when: inputs that stand among measured times in ``marks`` and ``log``.

    ``schedule`` lists (work, start in s, steps), ``duration_s`` is how long the log is. Step times stay behind.
    """
    if row["kind"] != "transient":
        return {}
    try:
        schedule = [(str(m["work"]), m["start_s"] + 0.0, len(m["step_ms"])) for m in row["marks"]]
        return {"schedule": schedule, "duration_s": row["log"][-1][0] - row["log"][0][0] + 0.0}
    except (KeyError, IndexError, TypeError, ValueError):
        return {}  # the predictor says what is missing
