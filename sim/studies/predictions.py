"""Predictions written down before a run, and held against it afterwards.

``python -m sim.studies.predictions --plan eight --world 8 --gpu h100 --out eight.jsonl`` predicts every row of a
measuring plan; ``... --judge eight.jsonl RECORDS...`` compares what was measured since, without predicting anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from hardware.calibrate.suite.plans import planned
from hardware.catalog import load_gpu
from hardware.errors import HardwareError
from hardware.profile import dump_profile, profile_for
from sim.output.files import write_atomically
from sim.studies.command import exit_code
from sim.validation.inputs import NotPredicted
from sim.validation.predict import predict
from sim.validation.records import Record, RecordError, read_records

Inputs = Mapping[str, Any]
PROGRAM = "sim.studies.predictions"
# What a run adds to a planned row beside what it measures: the draw of experts.
DRAWN = frozenset({"tokens_per_ep_rank"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRow:
    """One planned row and what was said of it; ``skipped`` says why nothing was."""

    inputs: Inputs
    latency_s: float | None = None
    energy_j: float | None = None
    skipped: str | None = None


class Errors(NamedTuple):
    """Signed relative errors of one row; None where either side says nothing."""

    latency: float | None
    energy: float | None


def predict_plan(plan: str, world: int, gpu_id: str) -> Iterator[PredictedRow]:
    """Predictions of a plan's rows on ``world`` GPUs of a type, from their inputs alone."""
    for row in planned(plan, world=world):
        inputs = {**row, "gpu": gpu_id, "world": row.get("world", world)}
        try:
            predicted = predict(str(row["kind"]), {name: value for name, value in inputs.items() if name != "kind"})
        except (NotPredicted, HardwareError) as reason:
            yield PredictedRow(inputs=inputs, skipped=str(reason))
        else:
            yield PredictedRow(inputs=inputs, latency_s=predicted.latency_s, energy_j=predicted.energy_j)


def write(plan: str, world: int, gpu: str, out: Path) -> int:
    """Write a plan's predictions, first the profile they rest on; returns how many rows have one."""
    spec = load_gpu(gpu)
    profile = hashlib.sha256(dump_profile(profile_for(spec)).encode()).hexdigest()[:16]
    date = datetime.now(UTC).date().isoformat()
    rows = list(predict_plan(plan, world, spec.id))
    head = {"plan": plan, "world": world, "gpu": spec.id, "profile_sha256": profile, "date": date}
    lines = [json.dumps(head), *(json.dumps(asdict(row)) for row in rows)]
    write_atomically(out, "".join(f"{line}\n" for line in lines).encode())
    return sum(row.skipped is None for row in rows)


def read(path: Path) -> list[PredictedRow]:
    """The rows of a file that :func:`write` made."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [PredictedRow(**json.loads(line)) for line in lines[1:]]
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"cannot read predictions '{path}': {error}") from None
    except (ValueError, TypeError):
        raise RecordError(f"{path}: not a file of predictions; {PROGRAM} --plan writes one") from None


def judge(predicted: Sequence[PredictedRow], records: Sequence[Record]) -> dict[str, list[Errors]]:
    """Signed relative errors by kind, of the rows that were predicted and measured since."""
    known = {_key(row.inputs): row for row in predicted if row.skipped is None}
    errors: dict[str, list[Errors]] = {}
    for record in records:
        row = known.get(_key({**record.inputs, "kind": record.kind}))
        if row is not None:
            found = (_error(getattr(row, name), record.measured.get(name)) for name in ("latency_s", "energy_j"))
            errors.setdefault(record.kind, []).append(Errors(*found))
    return errors


def _error(said: float | None, measured: float | None) -> float | None:
    return said / measured - 1.0 if said and measured else None


def _key(inputs: Inputs) -> str:
    kept = {name: value for name, value in inputs.items() if value is not None and name not in DRAWN}
    return json.dumps(kept, sort_keys=True)


def _print(errors: Mapping[str, Sequence[Errors]]) -> None:
    table = Table(title="Predicted over measured, mean absolute error in per cent", title_justify="left")
    for head in ("kind", "rows", "latency", "energy"):
        table.add_column(head, justify="left" if head == "kind" else "right")
    for kind, pairs in sorted(errors.items()):
        means = []
        for column in zip(*pairs, strict=True):
            seen = [abs(error) for error in column if error is not None]
            means.append(f"{100 * float(np.mean(seen)):.1f}" if seen else "-")
        table.add_row(kind, str(len(pairs)), *means)
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict a plan, or judge what was predicted; 2 with a reason where the input is bad."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("records", nargs="*", type=Path, help="measured since (with --judge)")
    parser.add_argument("--plan", help="a measuring plan")
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--out", type=Path, help="where predictions go")
    parser.add_argument("--judge", type=Path, help="predictions of before")
    arguments = parser.parse_args(argv)

    def work() -> None:
        if arguments.judge is not None:
            records = [record for path in arguments.records for record in read_records(path)]
            errors = judge(read(arguments.judge), records)
            if not errors:
                raise RecordError(f"none of {len(records)} rows measured was predicted in {arguments.judge}")
            _print(errors)
        elif arguments.plan is None or arguments.out is None:
            raise RecordError("give --plan and --out to predict, or --judge and records")
        else:
            print(f"{write(arguments.plan, arguments.world, arguments.gpu, arguments.out)} rows predicted")

    return exit_code(PROGRAM, work)


if __name__ == "__main__":
    sys.exit(main())
