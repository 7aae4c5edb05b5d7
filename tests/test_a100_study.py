"""The A100 study: its bars, its laws, and that nothing of it reaches a profile."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from hardware.profile import Profile, load_profile
from sim import Scenario, simulate
from sim.studies.a100 import LARGE, STEP_HZ, best_clocks, by_job, left_out, main, mean_error
from sim.studies.a100_hopper import scaled
from sim.studies.a100_power import GPU, PARTS, Job, PublicMeasurement, estimate, fit_scales, read_runs, refit, shipped

JOB = Job(model="gpt2", dtype="bf16", batch=8, seq_len=512)
NAME = "gpt2model_gpt2_pbf16_b8_s512_modeprefill_attneager_freq870_iter9.csv"


@pytest.fixture(scope="module")
def sweep(shared: Path) -> list[PublicMeasurement]:
    return read_runs(shared / "public" / "energaizer" / "dvfs.csv")


@pytest.fixture(scope="module")
def fixed(shared: Path) -> list[PublicMeasurement]:
    return read_runs(shared / "public" / "energaizer" / "a100.csv")


def test_power_of_models_left_out_meets_the_bars(
    sweep: list[PublicMeasurement], fixed: list[PublicMeasurement]
) -> None:
    scales = left_out(fixed)
    for runs, bar in ((sweep, 0.08), (fixed, 0.10)):
        assert mean_error(runs, lambda r: estimate(r.job, r.clock_hz).power_w(scales[r.job.model])) < bar
    jobs = by_job(sweep)
    for job in LARGE:
        measured, predicted = best_clocks(jobs[job], lambda r: estimate(r.job, r.clock_hz).power_w(scales[r.job.model]))
        assert abs(measured - predicted) <= STEP_HZ


def test_two_constants_a_job_carry_its_clocks(sweep: list[PublicMeasurement]) -> None:
    errors = [
        abs(watts / run.power_w - 1)
        for runs in by_job(sweep).values()
        for run, watts in zip(runs, refit(runs)[2], strict=True)
    ]
    assert np.mean(errors) < 0.035


def test_runs_are_read_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "workload,energy,time,avg_freq,temp\n"
        f"{NAME},3.0,20.0,870,60\n"
        "resnet101__pbf16_b16_freq900_iter2.csv,1,1,900,60\n"
        "qwen2model_qwen2-1p5b_pbf16_b8_s4096_modeprefill_attneager_freq870_iter9.csv,1,1,870,60\n"
        "vitmodel_large_pfp32_b64_freq900_iter254.csv,21.6,125.0,900,67\n"
    )
    first, second = read_runs(path)
    assert first == PublicMeasurement(job=JOB, clock_hz=870e6, time_s=0.02, power_w=150.0)
    assert second.job == Job(model="vit-large", dtype="fp32", batch=64, seq_len=197)


def test_the_estimate_is_what_the_engine_says() -> None:
    found = estimate(JOB, 900e6)
    run = simulate(
        Scenario.of(
            model="gpt2", gpu=GPU, batch=8, seq_len=512, stack="eager-torch", launch="eager", lm_head=False,
            sm_clock_mhz=900, uncapped=True,
        )
    )  # fmt: skip
    assert found.time_s == pytest.approx(run.latency_s, rel=0.01)
    assert found.power_w() == pytest.approx(run.power_w_per_gpu[0], rel=0.01)


def test_factors_are_found_again() -> None:
    truth = np.array([0.5, 0.4, 1.5, 0.7, 0.9])
    jobs = [
        Job(model=model, dtype=dtype, batch=batch, seq_len=length)
        for model, dtype, batch, length in (
            ("gpt2", "bf16", 8, 512), ("gpt2", "fp32", 8, 512), ("bert-large", "bf16", 32, 128),
            ("opt-1.3b", "bf16", 2, 1024), ("vit-large", "fp32", 16, 197), ("qwen2-1.5b", "bf16", 8, 256),
        )
    ]  # fmt: skip
    runs = [
        PublicMeasurement(job=job, clock_hz=clock, time_s=1.0, power_w=estimate(job, clock).power_w(truth))
        for job in jobs
        for clock in (600e6, 900e6, 1300e6)
    ]
    assert fit_scales(runs) == pytest.approx(truth, rel=1e-6)


def test_the_sum_of_parts_is_the_power() -> None:
    found = estimate(JOB, 1.2e9)
    assert len(found.parts_w) == len(PARTS)
    assert found.power_w() == found.idle_w + found.parts_w.sum() == pytest.approx(found.power_w(np.ones(len(PARTS))))


def told(profile: Profile | None) -> dict[str, object]:
    """All that a profile says but for the laws of engines, some of which are other cards'."""
    assert profile is not None
    return {field.name: getattr(profile, field.name) for field in fields(profile) if field.name != "engines"}


def test_no_factor_reaches_the_shipped_profile() -> None:
    before = deepcopy(told(load_profile(GPU)))
    assert told(scaled(shipped(), np.full(len(PARTS), 2.0))) != before
    assert told(load_profile(GPU)) == before == told(shipped())
    assert not shipped().provenance.row_digests


def test_the_page_in_the_docs_is_the_commands(shared: Path, tmp_path: Path) -> None:
    out = tmp_path / "a100.md"
    assert main([str(shared / "public"), "--measurements", str(shared / "measurements"), "--out", str(out)]) == 0
    assert out.read_text() == (Path(__file__).parents[1] / "docs" / "studies" / "a100.md").read_text()


def test_a_missing_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "page.md")]) == 2
    assert capsys.readouterr().err.startswith(f"a100: cannot read '{tmp_path}/energaizer/dvfs.csv': No such file")
    assert not (tmp_path / "page.md").exists()
