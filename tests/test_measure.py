"""``wattline measure`` and ``calibrate`` without a GPU: what they would run, and what they refuse."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from hardware.calibrate.suite.plan import done_already
from hardware.errors import HardwareError
from hardware.profile import dump_profile, load_profile
from sim import simulate
from sim.cli import main
from sim.errors import ScenarioError
from sim.scenario.spec import Scenario
from sim.validation.measure import planned_row

ONE_GPU = Path(__file__).parents[1] / "records/h100-sxm-80gb/validation/one_gpu.jsonl"


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err.strip()


def test_a_scenario_becomes_the_row_that_its_record_answers() -> None:
    records = [json.loads(line) for line in ONE_GPU.read_text(encoding="utf-8").splitlines()]
    row, shapes = planned_row(Scenario.of(model="llama3-8b", phase="decode", batch=12, seq_len=3000))
    assert done_already(row, records)
    assert (shapes["llama3-8b"].ff, shapes["llama3-8b"].vocabulary) == (14336, 128256)
    row, _ = planned_row(Scenario.of(model="llama3-8b", phase="generate", batch=4, seq_len=512, output_len=64))
    assert done_already(row, records)
    row, _ = planned_row(Scenario.of(model="llama3-8b", phase="decode", batch=13, seq_len=3000))
    assert not done_already(row, records)
    cut = {"tp": 2, "sequence_parallel": True, "lm_head": False, "overlap_ops": "o_gemm=4x8,qkv_gemm=2"}
    row, _ = planned_row(Scenario.of(model="llama3-8b", **cut))
    assert row["overlap_ops"] == {
        "o_gemm": {"chunks": 4, "comm_ctas": 8}, "qkv_gemm": {"chunks": 2, "comm_ctas": None},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tp": 2, "sequence_parallel": True, "overlap": "ring_exchange"},
            "overlap = 'ring_exchange': the suite measures with overlap = 'chunks' only",
        ),
        (
            {"tp": 2, "overlap_chunks": 4},
            "overlap_chunks = 4: the suite cuts sequence_parallel collectives only",
        ),
        (
            {"model": "qwen3-30b-a3b", "tp": 2},
            "tp = 2 without ep: the suite holds whole experts: give ep = 2",
        ),
        ({"tp": 2, "comm_ctas": 8}, "comm_ctas = 8: the suite cuts sequence_parallel collectives only"),
        (
            {"tp": 2, "sequence_parallel": True, "overlap_ops": "gate_up_gemm=2@1,down_gemm=2@1"},
            "overlap_ops.gate_up_gemm: stage 1: the suite measures single products only",
        ),
        (
            {"sm_partitions": "compute=100,comm=32"},
            "sm_partitions = (('compute', 100), ('comm', 32)): the suite measures with sm_partitions = None only",
        ),
        ({"power_cap_w": 500}, "power_cap_w = 500.0: the suite measures with power_cap_w = None only"),
        ({"sm_clock_mhz": 1410}, "sm_clock_mhz = 1410.0: the suite measures with sm_clock_mhz = None only"),
        ({"regime": "cold"}, "regime = 'cold': the suite measures with regime = 'steady' only"),
        ({"dtype": "fp16"}, "dtype = 'fp16': the suite measures bf16 and fp8_e4m3"),
        ({"phase": "train"}, "phase = 'train': the suite measures prefill, decode, generate"),
        ({"model": "llava-1.5-7b", "images": 1}, "images = 1: the suite measures with images = 0 only"),
        ({"cp": 2, "tp": 2}, "cp = 2 with tp = 2: the suite measures it with tp = 1 only"),
        ({"cp": 2}, "cp = 2 with lm_head = True: the suite measures it with lm_head = False only"),
        ({"dp": 2, "batch": 2}, "dp = 2: the suite measures with dp = 1 only"),
    ],
)
def test_what_the_suite_cannot_run_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as problem:
        planned_row(Scenario.of(**({"model": "llama3-8b"} | fields)))
    assert str(problem.value) == message


def test_measuring_needs_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed here")
    out = tmp_path / "measured.jsonl"
    message = refused(["measure", "--model", "llama3-8b", "--layers", "1", "--out", str(out)], capsys)
    assert message == "wattline: measuring needs PyTorch: pip install 'wattline[measure]'"
    assert not out.exists()


def test_calibrate_refuses_whole_models_and_unknown_origins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "profile.json"
    message = refused(["calibrate", "--from", str(ONE_GPU), "--gpu", "h100", "--out", str(out)], capsys)
    assert "kind 'model_step' is for checking predictions and never enters a fit" in message
    assert refused(["calibrate", "--from", str(ONE_GPU)], capsys) == (
        "wattline: --gpu is missing: say which GPU the records of --from are of"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(["calibrate", "--from", str(empty), "--gpu", "h100"], capsys) == (
        f"wattline: no .jsonl records in {empty}"
    )
    assert not out.exists()


def test_a_profile_of_ones_own_is_used_and_must_be_of_the_gpu(tmp_path: Path) -> None:
    shipped = load_profile("h100-sxm-80gb")
    assert shipped is not None
    text = dump_profile(shipped)
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    scenario = Scenario.of(model="llama3-8b", layers=1, phase="decode", seq_len=128)
    assert simulate(scenario, profile=str(path)).latency_s == simulate(scenario).latency_s
    data = json.loads(text)
    data["launch"]["graph_gap_s"] *= 3
    path.write_text(json.dumps(data), encoding="utf-8")
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(data), encoding="utf-8")
    assert simulate(scenario, profile=str(slower)).latency_s > simulate(scenario).latency_s
    with pytest.raises(
        HardwareError, match=r"is of h100-sxm-80gb, the scenario's GPU is h200-sxm-141gb: give --gpu h100"
    ):
        simulate(scenario, gpu="h200", profile=str(path))
