"""Predictions that are written down before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardware.calibrate.suite.plans import planned
from sim.studies.predictions import Errors, judge, main, predict_plan, read, write
from sim.validation.records import read_records

EIGHT = Path(__file__).parents[1] / "docs/predictions/eight.jsonl"

ONE_GPU = str(Path(__file__).parents[1] / "records" / "h100-sxm-80gb" / "validation" / "one_gpu.jsonl")


def test_every_row_of_the_eight_gpu_plan_was_predicted_before_any_was_measured() -> None:
    predicted = read(EIGHT)
    assert [{k: v for k, v in row.inputs.items() if k != "gpu"} for row in predicted] == [
        {**row, "world": row.get("world", 8)} for row in planned("eight", world=8)
    ]
    silent = {str(row.inputs["kind"]) for row in predicted if row.skipped}
    assert silent == {"host", "idle"}
    assert all(row.latency_s and row.latency_s > 0.0 for row in predicted if not row.skipped)


def test_what_was_predicted_is_judged_by_rows_measured_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(ONE_GPU, 1, "h100", tmp_path / "said.jsonl") == 12  # of 14, two in a mode of FP8 that has no law
    said = [row for row in predict_plan(ONE_GPU, 1, "h100-sxm-80gb") if row.inputs["kind"] == "model_step"]
    assert said[0].latency_s is not None and said[0].energy_j is not None
    measured = dict(said[0].inputs) | {"latency_s": said[0].latency_s / 1.1, "energy_j": said[0].energy_j * 2.0}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(measured) + "\n" + json.dumps({**measured, "batch": 1000}) + "\n", encoding="utf-8")
    errors = judge(read(tmp_path / "said.jsonl"), list(read_records(rows)))
    assert errors == {"model_step": [Errors(pytest.approx(0.1), pytest.approx(-0.5))]}
    assert main(["--judge", str(tmp_path / "said.jsonl"), str(rows)]) == 0
    assert "10.0" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n{}\n", encoding="utf-8")
    assert main(["--judge", str(bad)]) == 2
    assert capsys.readouterr().err.endswith("not a file of predictions; sim.studies.predictions --plan writes one\n")
    assert main(["--plan", "nine", "--out", str(bad)]) == 2
    assert "unknown plan 'nine'" in capsys.readouterr().err
    assert main([]) == 2
    assert "give --plan and --out" in capsys.readouterr().err
