"""Chips differ in power: what a factor does to a run, and that the records of a chip give it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hardware.calibrate.fit import _spread, read_fit_records, record_files
from hardware.catalog import load_gpu
from hardware.profile import load_profile
from sim import simulate
from sim.cli import main
from sim.cli.calibrate import command
from sim.cli.console import wide_console
from sim.errors import ScenarioError
from sim.explore.uncertainty import intervals
from sim.studies.chips import ChipPower, chip_powers, dump_chips, group_factor, print_chips
from sim.validation.predict import predict
from sim.validation.validate import validate

GPU = load_gpu("h100-sxm-80gb")
PROFILE = load_profile(GPU.id)
assert PROFILE is not None
RECORDS = Path(__file__).parents[1] / "records" / GPU.id / "calibration"
BASE: dict[str, Any] = {"model": "llama3-8b", "gpu": "h100", "layers": 3, "seq_len": 2048}
RUNS: list[dict[str, Any]] = [
    {},
    {"phase": "decode", "batch": 16},
    {"tp": 2, "sequence_parallel": True, "overlap_chunks": 2},
    {"phase": "generate", "output_len": 4},
    {"regime": "cold"},
]


# -- what a factor does ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", RUNS)
def test_a_factor_of_one_changes_no_bit(fields: dict[str, Any]) -> None:
    without, one = (simulate(**BASE, **fields, **more) for more in ({}, {"chip_power_factor": 1.0}))
    assert one.outcome.end_ps == without.outcome.end_ps
    assert one.energy_j_per_gpu == without.energy_j_per_gpu
    assert one.targets == without.targets


def test_a_chip_that_draws_more_settles_at_a_lower_clock_under_the_same_cap() -> None:
    thrifty, mean, hungry = (simulate(**BASE, chip_power_factor=factor) for factor in (0.95, 1.0, 1.05))
    clocks_hz = [run.sm_clock_hz_per_gpu[0] for run in (thrifty, mean, hungry)]
    assert clocks_hz == sorted(clocks_hz, reverse=True) and clocks_hz[0] > 1.03 * clocks_hz[2]
    assert 1.005 < hungry.latency_s / mean.latency_s < 1.05
    limit_w = mean.machine.limits.slow_limit_w
    assert [run.power_w_per_gpu[0] for run in (thrifty, mean, hungry)] == pytest.approx([limit_w] * 3, rel=3e-3)


@pytest.mark.parametrize("fields", RUNS[:4])
def test_without_a_cap_all_but_idle_power_is_scaled(fields: dict[str, Any]) -> None:
    mean, hungry = (simulate(**BASE, **fields, uncapped=True, chip_power_factor=f) for f in (1.0, 1.2))
    assert hungry.outcome.end_ps == mean.outcome.end_ps
    idle_j = mean.gpus * mean.machine.curve.idle_w(GPU.max_clock_hz) * mean.latency_s
    assert hungry.energy_j - idle_j == pytest.approx(1.2 * (mean.energy_j - idle_j), rel=1e-6)
    assert mean.energy_j < hungry.energy_j < 1.2 * mean.energy_j


@pytest.mark.parametrize("factor", [0.69, 1.31])
def test_what_no_chip_is_like_is_refused(factor: float, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ScenarioError, match=f"chip_power_factor = {factor}: input should be "):
        simulate(**BASE, chip_power_factor=factor)
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", "--model", "llama3-8b", "--chip-power-factor", str(factor)])
    assert exit_.value.code == 2
    assert f"chip_power_factor = {factor}" in capsys.readouterr().err


def test_a_chip_that_was_measured_narrows_the_interval_of_energy() -> None:
    fields = BASE | {"phase": "decode", "batch": 16}
    widths = []
    for more in ({}, {"chip_power_factor": 1.0}):
        low_j, high_j = intervals(simulate(**fields, **more), draws=32).energy_j
        widths.append(high_j / low_j)
    assert 1.0 < widths[1] < widths[0]


# -- what the records of a chip say ------------------------------------------------------------------------------


def chips_of(path: Path) -> list[ChipPower]:
    return chip_powers(validate([path]), PROFILE, GPU)


def made(factor: float, noise: float) -> list[dict[str, Any]]:
    """Records of a chip that draws ``factor`` times the profile's power, as the model has it."""
    asked: list[dict[str, Any]] = [
        {"kind": "gemm", "m": m, "n": n, "k": k, "dtype": "bf16"}
        for m in (1, 16, 64)
        for n, k in ((6144, 4096), (28672, 4096), (8192, 8192), (28672, 8192))
    ]
    asked += [{"kind": "copy", "bytes_moved": mib * 2**20} for mib in (256, 512, 1024)]
    asked.append({"kind": "gemm", "m": 8192, "n": 8192, "k": 8192, "dtype": "bf16"})  # at the cap: tells nothing
    scatter = np.random.default_rng(5).normal(1.0, noise, len(asked))
    rows = []
    for row, error in zip(asked, scatter, strict=True):
        inputs = row | {"gpu": GPU.id, "world": 1}
        told = predict(row["kind"], inputs | {"chip_power_factor": factor, "chip_temperature_c": 60.0})
        assert told.power_w is not None and told.energy_j is not None
        outputs = {"latency_s": told.latency_s, "power_w": [told.power_w[0] * error], "energy_j": told.energy_j}
        rows.append(inputs | outputs | {"sm_clock_mhz": told.sm_clock_mhz, "temperature_c": [60]})
    return rows


@pytest.mark.parametrize("factor", [0.93, 1.0, 1.05])
def test_records_of_a_chip_give_its_factor_back(factor: float, tmp_path: Path) -> None:
    for noise, within in ((0.0, 1e-6), (0.02, None)):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made(factor, noise)))
        (chip,) = chips_of(path)
        assert 10 <= chip.rows < 16
        assert chip.power_factor == pytest.approx(factor, abs=within or chip.standard_error)
        assert 0.008 < chip.standard_error < 0.02


def test_the_first_four_cards_and_another_one_as_recorded() -> None:
    """The profile's card, its three neighbours, and a card elsewhere that draws 5 % less than them, over the mean."""
    first = chips_of(RECORDS / "first" / "per_gpu.jsonl")
    assert [(chip.session, chip.gpu_index, chip.rows) for chip in first] == [("first", i, 3) for i in range(4)]
    factors = [chip.power_factor for chip in first]
    assert factors == pytest.approx([1.031, 1.006, 1.031, 1.051], abs=0.001)
    # The same kernels on all: they lie apart as the profile's spread says.
    assert np.std(factors, ddof=1) / np.mean(factors) == pytest.approx(PROFILE.spread.power, rel=0.05)
    (other,) = chips_of(RECORDS / "suite" / "one_gpu.jsonl")
    assert other.power_factor == pytest.approx(0.973, abs=0.005)
    assert other.power_factor + 1.5 * other.standard_error < 1.0


def test_a_factor_from_products_and_copies_holds_for_kernels_that_it_was_not_taken_from() -> None:
    """The card that draws 5 % less: joules of its other kernels, those below the cap."""
    path = RECORDS / "suite" / "one_gpu.jsonl"
    (chip,) = chips_of(path)
    errors: dict[float, list[float]] = {1.0: [], chip.power_factor: []}
    for row in validate([path]):
        kind, clocks_mhz = row.record.kind, row.measured.get("sm_clock_mhz")
        if kind not in ("attention", "add_rmsnorm", "silu_mul", "rope", "grouped_gemm") or clocks_mhz[0] < 1920:
            continue
        warmth = {"chip_temperature_c": row.record.measured["temperature_c"][0]}
        for factor, own in errors.items():
            told = predict(kind, {**row.record.inputs, **warmth, "chip_power_factor": factor})
            own.append(abs(told.energy_j / row.measured["energy_j"] - 1.0))
    without, known = (float(np.mean(own)) for own in errors.values())
    assert len(errors[1.0]) >= 20
    assert (round(100 * without, 1), round(100 * known, 1)) == (3.9, 3.2)


def test_cards_that_ran_together_are_told_apart_and_named_by_their_uuids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {"kind": "host", "gpu": GPU.id, "world": 2, "uuids": ["GPU-a", "GPU-b"]}
    row = {"kind": "alone", "gpu": GPU.id, "world": 2, "what": "copy", "copy_bytes_moved": 2**28}
    told = predict("alone", row | {"chip_temperature_c": 55.0})
    assert told.power_w is not None and told.latency_s is not None
    idle_w = PROFILE.curve.at(55.0).idle_w(GPU.max_clock_hz)
    power_w = [idle_w + factor * (told.power_w[0] - idle_w) for factor in (0.96, 1.04)]
    seen = {"latency_s": told.latency_s, "power_w": power_w, "energy_j": sum(power_w) * told.latency_s}
    seen |= {"sm_clock_mhz": [1980, 1980], "temperature_c": [55, 55]}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(host)}\n{json.dumps(row | seen)}\n")
    chips = chips_of(path)
    assert [(chip.uuid, chip.gpu_index) for chip in chips] == [("GPU-a", 0), ("GPU-b", 1)]
    assert [chip.power_factor for chip in chips] == pytest.approx([0.96, 1.04])
    assert group_factor(chips) == pytest.approx(1.0)
    print_chips(chips, "the shipped profile", wide_console())
    assert f"runs on the 2 GPUs of {tmp_path.name}: --chip-power-factor 1.000" in capsys.readouterr().out
    told_again = json.loads(dump_chips(GPU.id, {"the shipped profile": chips}))
    assert told_again["over"]["the_shipped_profile"][1]["uuid"] == "GPU-b"


def test_calibrate_says_what_each_chip_draws(tmp_path: Path) -> None:
    words = ["--from", str(RECORDS / "suite"), "--gpu", "h100", "--out", str(tmp_path / "mine.json")]
    said = CliRunner().invoke(command, words, catch_exceptions=False).stdout
    assert f"chips: {tmp_path / 'mine.chips.json'}" in said
    over = json.loads((tmp_path / "mine.chips.json").read_text())["over"]
    (own,), (shipped,) = over["this_profile"], over["the_shipped_profile"]
    assert abs(own["power_factor"] - 1.0) < own["standard_error"]  # the one card that the profile is fitted on
    assert shipped["power_factor"] == pytest.approx(0.973, abs=0.005)


def test_chips_at_the_cap_lie_apart_as_all_their_records_say() -> None:
    """Times of one kernel on four chips at the cap: two products in per_gpu rows, four kernels that never pause."""
    rows = read_fit_records(record_files([RECORDS]))
    spread = _spread(rows, PROFILE.curve, GPU)
    assert spread.throttled_time == pytest.approx(0.0115, abs=0.0002)  # the mean of the first two: 0.0097
    assert spread.power == pytest.approx(PROFILE.spread.power, rel=1e-6)
