"""``wattline validate``: predict every record, compare, and say how large the errors are."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from hardware.profile import fitted_row_digests, read_profile
from sim.errors import SimError
from sim.run.repetition import Prediction
from sim.validation.engine_rows import served_latencies
from sim.validation.inputs import NotPredicted
from sim.validation.predict import predict
from sim.validation.records import Record, RecordError, read_records

OUTPUTS = ("latency_s", "energy_j", "power_w", "sm_clock_mhz")
# Kinds whose clock the records resolve (a mixed step's NVML median is no measure of any kernel's clock).
CLOCK_KINDS = frozenset({"gemm", "attention", "grouped_gemm", "duty"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record beside its prediction; ``skipped`` is the reason where there is none."""

    record: Record
    predicted: Prediction | None
    fitted: bool
    skipped: str | None

    @property
    def measured(self) -> Mapping[str, Any]:
        """The outputs that were measured, derived from a burst's iterations or a log where a kind has these."""
        return measured_outputs(self.record)

    def as_json(self) -> dict[str, Any]:
        """The row in the fixed JSON contract."""
        return {
            "file": str(self.record.path),
            "line": self.record.line,
            "kind": self.record.kind,
            "measured": dict(self.measured),
            "predicted": {name: getattr(self.predicted, name, None) for name in OUTPUTS}
            | ({"served": self.predicted.served} if self.predicted and self.predicted.served else {}),
            "fitted": self.fitted,
            "skipped": self.skipped,
        }

    def error(self, output: str) -> float | None:
        """Signed relative error of ``latency_s`` or ``energy_j``; None where either side is missing."""
        measured = self.measured.get(output)
        predicted = getattr(self.predicted, output, None)
        return float(predicted / measured - 1.0) if measured and predicted is not None else None

    def clock_error_mhz(self) -> float | None:
        """Mean clock error over GPUs, for kinds whose clock was measured."""
        measured = self.measured.get("sm_clock_mhz")
        if self.record.kind not in CLOCK_KINDS or not measured or not self.predicted or not self.predicted.sm_clock_mhz:
            return None
        predicted = self.predicted.sm_clock_mhz
        return float(sum(predicted) / len(predicted) - sum(measured) / len(measured))


def measured_outputs(record: Record) -> dict[str, Any]:
    """Measured latency (s), energy (J), power (W) and clock (MHz); None for what a row does not hold.

    A duty row's latency is its mean iteration, its energy that of a burst and its pause. A transient row's
    latency is the sum of its steps, its energy that of the whole log.
    """
    measured = record.measured
    outputs: dict[str, Any] = {name: measured.get(name) for name in OUTPUTS}
    try:
        match record.kind:
            case "duty":
                outputs["latency_s"] = statistics.fmean(measured["iter_s"])
                outputs["sm_clock_mhz"] = [statistics.fmean(measured["clock_mhz"])]
                outputs["energy_j"] = measured["power_w"][0] * record.inputs["period_s"]
            case "together" | "partitions":
                outputs["latency_s"] = statistics.fmean(measured["a_together_s"])
                outputs["beside_s"] = statistics.fmean(measured["b_together_s"])
                if record.kind == "together":
                    outputs["power_w"] = None  # of both; neither side's own
            case "engine_serve":
                outputs["served"] = served_latencies(measured, record.inputs["requests"])
                outputs["latency_s"] = outputs["served"]["itl_p50_s"]
            case "transient":
                first, last = measured["log"][0], measured["log"][-1]
                outputs["latency_s"] = sum(ms * 1e-3 for mark in measured["marks"] for ms in mark["step_ms"])
                outputs["energy_j"] = (last[1] - first[1]) * 1e-3
                outputs["power_w"] = [outputs["energy_j"] / (last[0] - first[0])]
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        pass  # an incomplete row measures less
    return outputs


def validate(
    paths: Sequence[Path],
    *,
    profile: Path | None = None,
    typical_temperature: bool = False,
    step: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Predict the records of ``paths`` in file order, with a user's ``profile`` where one is given.

    Chips are as warm as the record says, a condition of its room that nothing here predicts; with
    ``typical_temperature`` as warm as the profile's. ``step`` is called after each row.
    """
    fitted_rows = fitted_row_digests() if profile is None else frozenset(read_profile(profile).provenance.row_digests)
    own = {} if profile is None else {"profile": str(profile)}
    rows = []
    for path in paths:
        for record in read_records(path):
            predicted, skipped = None, None
            try:
                predicted = predict(record.kind, {**record.inputs, **own, **_warmth(record, typical_temperature)})
            except NotPredicted as reason:
                skipped = str(reason)
            except Exception as error:
                if not _is_input_error(error):
                    raise
                skipped = str(error)
            rows.append(Row(record=record, predicted=predicted, fitted=record.digest in fitted_rows, skipped=skipped))
            step()
    if not rows:
        raise RecordError(f"no records in {', '.join(map(str, paths))}: a record is one JSON object a line")
    return rows


def _warmth(record: Record, typical: bool) -> dict[str, float]:
    """Mean temperature of the record's GPUs where it has one."""
    read = [] if typical else record.measured.get("temperature_c") or []
    known = [value for value in read if value is not None]
    return {"chip_temperature_c": statistics.fmean(known)} if known else {}


def error_table(rows: Sequence[Row], by: Sequence[str] = ()) -> pd.DataFrame:
    """One line a (file, kind, by...): n and absolute percentage errors as fractions."""
    table = pd.DataFrame(
        [
            {
                "file": row.record.path.name,
                "path": str(row.record.path),
                "kind": row.record.kind,
                "by": json.dumps({field: row.record.inputs.get(field) for field in by}),
                "latency": row.error("latency_s"),
                "energy": row.error("energy_j"),
                "clock": row.clock_error_mhz(),
                "skipped": row.skipped is not None,
            }
            for row in rows
        ]
    )
    lines = []
    for (path, kind, group), part in table.groupby(["path", "kind", "by"], sort=False):
        latency, energy = part["latency"].dropna().abs(), part["energy"].dropna().abs()
        lines.append(
            {
                "file": path,
                "kind": kind,
                "by": json.loads(str(group)),
                "n": int((~part["skipped"]).sum()),
                "latency_mape": _of(latency, "mean"),
                "latency_median_ape": _of(latency, "median"),
                "latency_max_ape": _of(latency, "max"),
                "latency_bias": _of(part["latency"].dropna(), "mean"),
                "energy_mape": _of(energy, "mean"),
                "energy_median_ape": _of(energy, "median"),
                "energy_max_ape": _of(energy, "max"),
                "energy_bias": _of(part["energy"].dropna(), "mean"),
                "clock_mae_mhz": _of(part["clock"].dropna().abs(), "mean"),
            }
        )
    return pd.DataFrame(lines)


def _of(values: pd.Series[float], statistic: str) -> float | None:
    """``mean``, ``median`` or ``max``; None of no values."""
    return float(values.agg(statistic)) if len(values) else None


def _is_input_error(error: Exception) -> bool:
    from hardware.errors import HardwareError
    from workloads.errors import WorkloadError

    return isinstance(error, SimError | HardwareError | WorkloadError)
