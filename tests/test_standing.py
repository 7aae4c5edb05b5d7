"""Status and expected error follow what was held against measurements; everything else says what it lacks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hardware.catalog import list_gpus
from sim.result.checked import checked_runs
from sim.result.status import STATUSES, standing_of_kind, standing_of_laws
from sim.run.runner import simulate
from sim.scenario.kind import KEY, kind_of, ring_kind
from sim.scenario.machine import Policy, machine
from sim.scenario.spec import Scenario
from sim.studies.checked_runs import grouped, rows_of, spanned
from sim.studies.fidelity import record_files
from tests.status_kit import fuzzed, measured
from tests.test_cli import run as cli
from workloads.families.ring import RingAttention

ROOT = Path(__file__).parents[1]
SHARED = os.environ.get("WATTLINE_SHARED")
LLAMA: dict[str, Any] = {"model": "llama3-8b", "layers": 2}


def test_scenarios_at_random_are_refused_or_no_better_than_what_was_measured() -> None:
    found = fuzzed(150, seed=20261128)
    assert [(one.fault, one.fields) for one in found if one.fault is not None] == []
    assert {one.status for one in found} >= {None, "calibrated", "extrapolated", "unchecked", "uncalibrated"}


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({}, "calibrated", ""),
        ({"phase": "decode", "batch": 8}, "calibrated", ""),
        ({"power_cap_w": 700}, "calibrated", ""),
        ({"sm_clock_mhz": 1980}, "calibrated", ""),
        ({"phase": "train"}, "unchecked", "no whole run with phase = train was measured"),
        ({"phase": "generate", "output_len": 2}, "extrapolated", "output_len = 2 (measured: 64 alone)"),
        ({"batch": 9, "seq_len": 512}, "extrapolated", "batch = 9 (measured: 1 to 8)"),
        ({"batch": 8, "seq_len": 8192}, "extrapolated", "tokens = 65536 (measured: 512 to 16384)"),
        ({"seq_len": 511}, "extrapolated", "seq_len = 511 (measured: 512 to 8192)"),
        ({"tp": 8}, "unchecked", "no whole run with layout = tp 8 was measured"),
        ({"dp": 2, "batch": 2}, "unchecked", "no whole run with layout = dp 2 was measured"),
        ({"dtype": "fp16"}, "unchecked", "no whole run with dtype = fp16 was measured"),
        ({"stack": "paged-kv"}, "unchecked", "no whole run with stack = paged-kv was measured"),
        ({"regime": "cold"}, "unchecked", "no whole run with regime = cold was measured"),
        ({"power_cap_w": 500}, "extrapolated", "no measurement was taken under this power limit"),
        ({"uncapped": True}, "extrapolated", "no measurement was taken under this power limit"),
        ({"sm_clock_mhz": 1410}, "extrapolated", "no whole run was measured at a locked clock"),
        ({"chip_temperature_c": 20}, "extrapolated", "chip_temperature_c = 20"),
        ({"chip_power_factor": 1.1}, "extrapolated", "no whole run was held against a chip_power_factor"),
        ({"tp": 2, "all_reduce": "one_shot"}, "unchecked", "all_reduce = one_shot was never measured"),
        ({"tp": 2, "node": "mesh-4"}, "unchecked", "node = mesh-4 was never measured with h100-sxm-80gb"),
        ({"gpu": "h200"}, "forecast", ""),
        ({"tp": 2, "overlap_ops": "o_gemm=2x8"}, "unchecked", "layout = tp 2, overlap by operator was measured"),
        ({"tp": 2, "overlap_ops": "gate_up_gemm=2x8@1,down_gemm=2x8@1"}, "unchecked", "operator in stages was"),
        ({"gpu": "h200", "phase": "train"}, "unchecked", "no whole run with phase = train was measured"),
        ({"gpu": "h100-pcie"}, "unchecked", "no whole run on h100-pcie-80gb was measured"),
        ({"gpu": "a100-sxm-80gb"}, "unchecked", "no whole run on a100-sxm-80gb was measured"),
        ({"gpu": "b200"}, "uncalibrated", "no whole run on b200-sxm-180gb was measured"),
        ({"model": "llama-1b"}, "extrapolated", "d_model = 2048 (measured: 4096 to 8192)"),
        ({"model": "mixtral-8x7b"}, "extrapolated", "experts = 8 (measured: 128 alone)"),
        ({"model": "deepseek-v3", "layers": 4, "ep": 8, "ep_mode": "all_to_all"}, "unchecked", "family = latent"),
        ({"model": "nemotron-h-8b"}, "unchecked", "no whole run with family = hybrid was measured"),
        ({"model": "bert-large", "seq_len": 512}, "unchecked", "no whole run with family = encoder was measured"),
        ({"model": "gpt2", "seq_len": 512}, "unchecked", "no whole run with family = other layers was measured"),
    ],
)  # fmt: skip
def test_a_status_names_what_lies_outside(fields: dict[str, Any], status: str, reason: str) -> None:
    found = simulate(**LLAMA | fields).standing
    assert found.status == status, found.words()
    assert any(reason in one for one in found.reasons) if reason else found.reasons == ()
    assert found.as_json()["status"] == status and all(one in found.words() for one in (status, *found.reasons))
    assert found.expected_error


def test_overlap_by_operator_is_known_where_it_was_measured() -> None:
    """Eleven rows of two H200s; more blocks than any of them had are beyond."""
    known = {"gpu": "h200", "model": "llama3-70b", "tp": 2, "layers": 4, "lm_head": False, "sequence_parallel": True,
             "batch": 2, "seq_len": 4096, "detail": "folded"}  # fmt: skip
    within = simulate(**known, overlap_ops="o_gemm=2x16,down_gemm=4x16").standing
    assert within.status == "forecast" and within.expected_error.endswith("on 11 unseen runs of this kind")
    beyond = simulate(**known, overlap_ops="o_gemm=2x64").standing
    assert beyond.status == "extrapolated" and "comm_ctas = 64 (measured: 4 to 32)" in beyond.words()


def test_expected_errors_are_those_of_the_kind() -> None:
    """Two kinds, two errors; no error of another kind is claimed for one that was not measured."""
    prompt, step = (simulate(**LLAMA, phase=phase).standing.expected_error for phase in ("prefill", "decode"))
    assert prompt != step and all("unseen runs of this kind" in one for one in (prompt, step))
    assert simulate(**LLAMA, phase="train").standing.expected_error == "expected error unknown"
    assert simulate(**LLAMA, power_cap_w=400).standing.expected_error.endswith("unknown outside it")


def test_a_card_under_a_known_name_with_other_figures_is_not_that_card(tmp_path: Path) -> None:
    text = (ROOT / "hardware" / "data" / "gpus" / "h100-sxm-80gb.toml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(text, encoding="utf-8")
    assert simulate(**LLAMA, gpu=str(mine)).standing.status == "calibrated"
    mine = tmp_path / "other.toml"
    mine.write_text(text.replace("sms = { value = 132", "sms = { value = 160"), encoding="utf-8")
    found = simulate(**LLAMA, gpu=str(mine)).standing
    assert (found.status, found.reasons) == ("unchecked", ("the figures of h100-sxm-80gb are not the catalog's",))


@pytest.mark.parametrize("field", ["detail", "ignore_memory", "lm_head"])
def test_fields_that_change_no_kernel_change_no_status(field: str) -> None:
    value = {"detail": "full", "ignore_memory": True, "lm_head": False}[field]
    assert simulate(**LLAMA, **{field: value}).standing.status == "calibrated"


def test_ranges_of_the_data_are_those_of_the_rows() -> None:
    """Rebuilt from the records in this repository, and from the first measurements where they are at hand."""
    folders = [ROOT / "records"] + ([Path(SHARED) / "measurements"] if SHARED else [])
    rows = list(rows_of([path for folder in folders for path in record_files(folder)]))
    data = {tuple(one.kind.key[name] for name in KEY): one for one in checked_runs()}
    found = grouped(rows)
    assert set(found) <= set(data) and len(rows) > 50
    for key, group in found.items():
        kind, stored = spanned([row.kind for row in group]), data[key].kind
        for name, (low, high) in kind.sizes.items():
            assert stored.sizes[name][0] <= low * (1 + 1e-5) and high <= stored.sizes[name][1] * (1 + 1e-5), (key, name)
        if SHARED:
            assert stored.sizes == {n: pytest.approx(span, rel=1e-5) for n, span in kind.sizes.items()}
            assert len(group) == data[key].rows
    if SHARED:
        assert set(found) == set(data)


def test_every_card_of_the_data_is_in_the_catalog_and_every_kind_once() -> None:
    keys = [tuple(one.kind.key[name] for name in KEY) for one in checked_runs()]
    assert len(keys) == len(set(keys)) and {key[0] for key in keys} <= set(list_gpus())
    assert all(one.rows > 0 and one.files and "power_cap_w" in one.kind.sizes for one in checked_runs())


def test_a_measured_row_is_inside_its_own_range() -> None:
    scenario = Scenario.of(model="llama3-8b", phase="generate", batch=4, seq_len=512, output_len=64)
    assert simulate(scenario).standing.status == "calibrated"
    assert measured(scenario.model_dump(exclude_none=True) | {"output_len": 64})
    assert kind_of(scenario, "h100-sxm-80gb").key["layout"] == "one GPU"


def test_rings_follow_their_arrangement_and_direction() -> None:
    def status(layout: str = "striped", *, world: int = 2, seq_len: int = 65536, **changes: int) -> str:
        attention = RingAttention(**{"q_heads": 32, "kv_heads": 8, "head_dim": 128} | changes)  # type: ignore[arg-type]
        asked = ring_kind("h100-sxm-80gb", layout, attention, world=world, seq_len=seq_len)
        return standing_of_kind(asked, machine("h100-sxm-80gb", world)).status

    assert status() == "calibrated"
    assert status("zigzag") == status(backward=True) == status(causal=False) == status(world=8) == "unchecked"
    assert status(seq_len=1024) == status(q_heads=64) == "extrapolated"


def test_kernels_rest_on_their_laws_limit_and_clock() -> None:
    def status(gpu: str = "h100-sxm-80gb", **policy: Any) -> str:
        return standing_of_laws(machine(gpu, 1, Policy(**policy))).status

    assert status() == "calibrated" and status("h200-sxm-141gb") == "forecast" and status("v100") == "uncalibrated"
    assert status(power_cap_w=400.0) == status(sm_clock_mhz=990.0) == "extrapolated"
    assert standing_of_laws(machine("h100-sxm-80gb"), outside=True).status == "extrapolated"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["simulate", "--model", "llama3-8b", "--layers", "2", "--phase", "train"], "unchecked"),
        (["kernel", "gemm", "--m", "4096", "--n", "4096", "--k", "4096"], "calibrated"),
        (["kernel", "gemm", "--m", "4096", "--n", "4096", "--k", "4096", "--dtype", "fp16"], "unchecked"),
        (["ring", "--world", "2", "--seq-lens", "16384"], "calibrated"),
        (["ring", "--world", "2", "--seq-lens", "4096", "--model", "llama3-8b", "--phase", "train"], "unchecked"),
        (["dit", "--video", "832x480", "--steps", "1", "--cp", "1"], "unchecked"),
        (
            ["overlap", "--model", "llama3-70b", "--layers", "1", "--tp", "2", "--chunks", "1", "--ctas", "8"],
            "calibrated",
        ),
        (["serve", "--model", "llama3-8b", "--requests", "3"], "calibrated"),  # servers of this kind were measured
        (["serve", "--model", "llama3-8b", "--requests", "3", "--tp", "2"], "unchecked"),
    ],
)
def test_every_command_says_its_status(arguments: list[str], status: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli([*arguments, "--json"], capsys)
    document = json.loads(out)
    row = document["points"][0] if "points" in document else document
    assert (code, row["status"]) == (0, status)
    assert bool(row["status_reasons"]) == (status != "calibrated")
    code, out, _ = cli(arguments, capsys)
    assert code == 0 and status in out


def test_points_of_a_kernel_beyond_the_limit_or_the_card_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kernel", "gemm", "--m", "8192", "--n", "8192", "--k", "8192", "--json"]
    for gpu in ("h100-sxm-80gb", "b200"):
        _, out, _ = cli([*arguments, "--gpu", gpu], capsys)
        document, own = json.loads(out), machine(gpu)
        assert document["settled"]["beyond"] == document["best"]["beyond"] == ""
        for point in document["sweep"]:
            assert (point["beyond"] != "") == (point["power_w"] > 1.001 * own.limits.slow_limit_w)
            assert (point["beyond"] == "the card") == (point["power_w"] > own.limits.fast_limit_w)
        assert document["sweep"][-1]["beyond"] != ""


@pytest.mark.parametrize(
    "command", [["simulate", "--model", "llama3-8b"], ["kernel", "gemm", "--m", "8", "--n", "8", "--k", "8"]]
)
def test_a_cap_beyond_the_card_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = (
        "power_cap_w = 5000 is beyond h100-sxm-80gb, which takes at most 700 W: give at most that, or leave it out"
    )
    assert cli([*command, "--power-cap-w", "5000"], capsys) == (2, "", f"wattline: {message}\n")


def test_resolved_names_stand_in_headers_json_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--gpu", "H200", "--model", "qwen3-30b", "--layers", "1", "--seq-len", "128"]
    _, out, _ = cli(["simulate", *short], capsys)
    assert "qwen3-30b-a3b" in out and "h200-sxm-141gb" in out
    trace = tmp_path / "t.json"
    _, out, _ = cli(["simulate", *short, "--json", "--trace", str(trace)], capsys)
    written = json.loads(trace.read_text(encoding="utf-8"))["wattline"]
    for scenario in (json.loads(out)["scenario"], written["scenario"]):
        assert (scenario["gpu"], scenario["model"]) == ("h200-sxm-141gb", "qwen3-30b-a3b")
    assert written["status"] == json.loads(out)["status"] != "calibrated" and written["status_reasons"]


def test_the_weaker_of_card_and_run_is_the_status() -> None:
    assert STATUSES == ("calibrated", "forecast", "extrapolated", "unchecked", "uncalibrated")
    assert simulate(**LLAMA, gpu="h200", power_cap_w=500).standing.status == "extrapolated"
    assert simulate(**LLAMA, gpu="l4", phase="train", ignore_memory=True).standing.status == "uncalibrated"
