"""Intervals: where they come from, that they repeat, and that they widen with what is not known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hardware.profile import Profile, load_profile
from hardware.uncertainty import drawn_profiles, left_out, scaled
from sim.cli.simulate import command
from sim.explore.grid import parse_grid
from sim.explore.row import INTERVALS
from sim.explore.sweep import sweep
from sim.explore.table import read_rows
from sim.explore.uncertainty import intervals
from sim.explore.workers import Pool
from sim.run.runner import simulate
from sim.scenario.machine import machine_with
from sim.scenario.spec import Scenario
from sim.studies.coverage import IntervalCheck, coverage_table, main

SMALL = {"model": "llama3-8b", "layers": 2, "seq_len": 512}


@pytest.fixture(scope="module")
def h100() -> Profile:
    profile = load_profile("h100-sxm-80gb")
    assert profile is not None
    return profile


def test_draws_are_repeated_by_their_seed_and_spread_as_the_left_out_rows_say(h100: Profile) -> None:
    one = drawn_profiles(h100, gpus=1, count=64, seed=3)
    assert one is drawn_profiles(h100, gpus=1, count=64, seed=3)
    assert one[0] != drawn_profiles(h100, gpus=1, count=64, seed=4)[0]
    alone = replace(h100, provenance=replace(h100.provenance, correlations={}))
    floors = np.log([p.decode.floor_s / h100.decode.floor_s for p in drawn_profiles(alone, gpus=1, count=64, seed=3)])
    assert floors.std() == pytest.approx(left_out(h100.gpu)["decode"].time, rel=0.1)
    assert abs(floors.mean()) < 0.2 * floors.std()


def test_coefficients_that_rows_leave_open_stay_and_others_move_together(h100: Profile) -> None:
    """Two coefficients of one sum, known only together: their draws must cancel."""
    names = ("decode.log.floor_s", "decode.log.split_s")
    provenance = replace(
        h100.provenance,
        standard_errors=dict.fromkeys(names, 0.2),
        correlations={"decode": ((1.0, -1.0), (-1.0, 1.0))},
    )
    draws = drawn_profiles(replace(h100, provenance=provenance), gpus=1, count=16, seed=1)
    family = [one.decode.merge_s / h100.decode.merge_s for one in draws]  # moves with the family alone
    floor, split = (
        np.log([getattr(one.decode, n) / getattr(h100.decode, n) / f for one, f in zip(draws, family, strict=True)])
        for n in ("floor_s", "split_s")
    )
    assert floor == pytest.approx(-split) and floor.std() == pytest.approx(0.2, rel=0.15)
    open_one = replace(provenance, standard_errors={names[0]: 0.2, names[1]: 0.9})
    draws = drawn_profiles(replace(h100, provenance=open_one), gpus=1, count=16, seed=1)
    # Given the one that stays, the other is known.
    assert [one.decode.floor_s / one.decode.merge_s for one in draws] == pytest.approx(
        [h100.decode.floor_s / h100.decode.merge_s] * 16
    )


def test_shipped_correlations_keep_what_rows_know_only_together(h100: Profile) -> None:
    """Energy of a FLOP is known to per cents, that of one in padded rows, few in every product, hardly at all."""
    stored = h100.provenance.standard_errors
    assert stored["gemm.bf16.log.flop_energy_j"] < 0.1 and stored["gemm.bf16.log.padded_flop_energy_j"] > 0.5
    energies = np.log([one.gemm["bf16"].flop_energy_j for one in drawn_profiles(h100, gpus=1, count=32, seed=1)])
    assert energies.std() < 0.1


def test_scaled_laws_take_longer_and_draw_more_as_told(h100: Profile) -> None:
    slower = replace(
        h100,
        decode=scaled(h100.decode, time=1.1, power=1.0),
        gemm={name: scaled(c, time=1.1, power=1.0) for name, c in h100.gemm.items()},
        elementwise={name: scaled(c, time=1.1, power=1.0) for name, c in h100.elementwise.items()},
        launch=replace(h100.launch, graph_gap_s=1.1 * h100.launch.graph_gap_s),
    )
    scenario = Scenario.of(**SMALL, phase="decode")
    run, longer = simulate(scenario), simulate(scenario, target=machine_with(scenario, slower))
    # Energy per bit stays with its bytes: below the cap a kernel that takes longer at the same power needs more.
    assert longer.latency_s == pytest.approx(1.1 * run.latency_s, rel=1e-3)
    assert longer.energy_j == pytest.approx(1.1 * run.energy_j, rel=0.01)


def test_links_are_as_uncertain_as_other_powers(h100: Profile) -> None:
    links_w = h100.collective.links_power_w
    assert scaled(h100.collective, time=1.0, power=1.5).links_power_w == pytest.approx(1.5 * links_w)
    assert len({one.collective.links_power_w for one in drawn_profiles(h100, gpus=8, count=16, seed=1)}) > 1


def test_intervals_repeat_hold_the_prediction_and_widen_where_nothing_was_measured() -> None:
    run = simulate(**SMALL)
    found = intervals(run, draws=16)
    assert found == intervals(run, draws=16) != intervals(run, draws=16, seed=2)
    assert found.holds(latency_s=run.latency_s, energy_j=run.energy_j) == (True, True)
    assert found.holds(latency_s=2 * run.latency_s, energy_j=0.0) == (False, False)

    def width(gpu: str) -> float:
        low, high = intervals(simulate(**SMALL, gpu=gpu), draws=16).latency_s
        return high / low

    assert width("h100-sxm-80gb") < width("h200-sxm-141gb") < width("b200-sxm-180gb")
    assert width("h100-sxm-80gb") < 1.2


def test_a_generation_is_as_uncertain_as_its_parts() -> None:
    fields = SMALL | {"phase": "generate", "output_len": 8}
    ratio = [high / low for low, high in (intervals(simulate(**fields), draws=16).latency_s,)]
    parts = [intervals(simulate(**SMALL, phase=phase), draws=16).latency_s for phase in ("prefill", "decode")]
    assert 1.0 < ratio[0] < max(high / low for low, high in parts) * 1.01


def test_intervals_are_asked_for_on_the_command_line() -> None:
    words = ["--model", "llama3-8b", "--layers", "2", "--seq-len", "512", "--uncertainty", "--quiet"]
    told = json.loads(CliRunner().invoke(command, [*words, "--json"]).stdout)
    assert told["uncertainty"]["latency_s"][0] < told["latency_s"] < told["uncertainty"]["latency_s"][1]
    assert told["uncertainty"]["level"] == 0.9
    assert "90 % of such runs should lie within " in CliRunner().invoke(command, words).stdout


def test_a_sweep_adds_the_ends_as_columns_and_runs_again_what_lacks_them(tmp_path: Path) -> None:
    data = {"base": SMALL, "grid": {"batch": [1, 2]}, "where": ["latency_s_high < 1.0"]}
    grid, out = parse_grid(data, where="test"), tmp_path / "rows.csv"
    assert sweep(grid, out, pool=Pool(jobs=1)).resumed == 0
    assert not any(row["feasible"] for row in read_rows(out))  # a column that is not there meets no condition
    done = sweep(grid, out, pool=Pool(jobs=1), uncertainty=True)
    assert (done.rows, done.resumed) == (2, 0)
    for row in read_rows(out):
        low_s, high_s, low_j, high_j = (row[name] for name in INTERVALS)
        assert low_s < row["latency_s"] < high_s and low_j < row["energy_j"] < high_j and row["feasible"]
    assert sweep(grid, out, pool=Pool(jobs=1), uncertainty=True).resumed == 2


def test_coverage_counts_what_lies_within() -> None:
    rows = [
        IntervalCheck(status="calibrated", gpus=1, phase="decode", latency=(hit, 0.04), energy=energy)
        for hit, energy in ((True, (True, 0.05)), (True, (False, 0.05)), (False, None))
    ]
    assert coverage_table(rows).splitlines()[2:] == [
        "| calibrated | all | all | 3 | 2 of 3 | 66.7 | 4.0 | 1 of 2 | 50.0 | 5.0 |",
        "| calibrated | 1 | decode | 3 | 2 of 3 | 66.7 | 4.0 | 1 of 2 | 50.0 | 5.0 |",
    ]


def test_a_record_that_is_no_scenario_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"kind": "model_step", "gpu": "h101", "world": 1, "model": "llama3-8b", "layers": 2, "phase": "prefill"}
    row |= {"batch": 1, "seq_len": 512, "tp": 1, "dtype": "bf16", "launch": "graph", "latency_s": 0.01}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main([str(tmp_path), "--out", str(tmp_path / "page.md")]) == 2
    assert capsys.readouterr().err == "coverage: unknown gpu 'h101': see 'wattline gpus'\n"
    assert not (tmp_path / "page.md").exists()
