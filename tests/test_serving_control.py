"""Policies that act while serving: each against the plain server on the same traffic."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from sim.cli import main
from sim.errors import ScenarioError
from sim.serving import serve

LOAD = {"model": "llama3-8b", "requests": 40, "rate_per_s": 9.0, "output_tokens": 60, "seed": 5}


def test_an_objective_that_nothing_keeps_leaves_the_clock_at_its_highest() -> None:
    plain = serve(**LOAD)
    vain = serve(clock_policy="slo", slo_tpot_s=0.001, slo_ttft_s=0.001, **LOAD)
    pd.testing.assert_frame_equal(vain.requests, plain.requests, rtol=1e-5)
    assert vain.energy_j == pytest.approx(plain.energy_j, rel=1e-5)


def test_an_objective_that_everything_keeps_takes_the_lowest_clock() -> None:
    slow = serve(sm_clock_mhz=990, **LOAD)
    easy = serve(clock_policy="slo", slo_tpot_s=1.0, slo_ttft_s=60.0, **LOAD)
    pd.testing.assert_frame_equal(easy.requests, slow.requests, rtol=1e-5)
    steps = easy.stretches[easy.stretches["steps"] > 0]
    assert steps["clock_hz"].max() == pytest.approx(990e6)


def test_the_tighter_the_objective_the_higher_the_clock_and_the_bill() -> None:
    runs = [serve(clock_policy="slo", slo_tpot_s=tpot_s, slo_ttft_s=1.0, **LOAD) for tpot_s in (0.0105, 0.0125, 0.02)]
    energy_j = [run.energy_j for run in runs]
    assert energy_j == sorted(energy_j, reverse=True)
    assert energy_j[0] > 1.05 * energy_j[-1]
    for run in runs:
        assert run.summary["slo_share"] >= 0.99
        assert run.summary["tpot_s"]["p99"] < run.spec.slo_tpot_s


def test_a_clock_policy_without_an_objective_is_refused() -> None:
    with pytest.raises(ScenarioError, match="clock_policy = slo: needs the objective to keep, slo_tpot_s"):
        serve(clock_policy="slo", **LOAD)
    with pytest.raises(ScenarioError, match="sm_clock_mhz = 1200 contradicts clock_policy = slo"):
        serve(clock_policy="slo", slo_tpot_s=0.01, sm_clock_mhz=1200, **LOAD)


def test_policies_are_compared_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LOAD.items()]
    main(["serve", *flags, "--slo-tpot-s=0.015", "--slo-ttft-s=1", "--json", "--compare", "slo_clock"])
    plain, slow = json.loads(capsys.readouterr().out)["servers"]
    assert slow["energy_j_per_output_token"] < 0.8 * plain["energy_j_per_output_token"]
    with pytest.raises(SystemExit):
        main(["serve", *flags, "--compare", "slo_clocks"])
    assert "'slo_clocks' is neither KEY=VALUE nor a policy (slo_clock" in capsys.readouterr().err


def test_a_cap_for_decoding_alone_slows_tokens_and_not_prompts() -> None:
    load = LOAD | {"rate_per_s": 4.0, "input_tokens": 6000}
    plain, both = serve(**load), serve(power_cap_w=400, **load)
    tokens = serve(power_cap_w=400, prefill_power_cap_w=700, **load)
    equal = serve(power_cap_w=400, prefill_power_cap_w=400, **load)
    pd.testing.assert_frame_equal(equal.requests, both.requests, rtol=1e-9)
    assert tokens.summary["ttft_s"]["mean"] < 0.8 * both.summary["ttft_s"]["mean"]
    assert tokens.energy_j < plain.energy_j
    steps = tokens.stretches[(tokens.stretches["steps"] > 0) & (tokens.stretches["prompt_tokens"] == 0)]
    decode_w = steps["energy_j"].sum() / (steps["end_s"] - steps["start_s"]).sum()
    fast_w = tokens.machine.limits.under(400).fast_limit_w
    assert steps["power_w_per_gpu"].max() <= fast_w
    assert decode_w < 420
