"""Policies that act while serving: each against the plain server on the same traffic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim.cli import main
from sim.errors import ScenarioError
from sim.serving import serve
from sim.serving.transfers import transfer_cost
from tests.test_serving import conserved

# On the libraries' kernels and without a host, so that what is seen is the clock's doing alone.
LOAD = {"model": "llama3-8b", "requests": 40, "rate_per_s": 9.0, "output_tokens": 60, "seed": 5, "stack": "paged-kv"}


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
    assert steps["clock_mhz"].max() == pytest.approx(990)


def test_the_tighter_the_objective_the_higher_the_clock_and_the_bill() -> None:
    runs = [serve(clock_policy="slo", slo_tpot_s=tpot_s, slo_ttft_s=1.0, **LOAD) for tpot_s in (0.0115, 0.013, 0.02)]
    energy_j = [run.energy_j for run in runs]
    assert energy_j == sorted(energy_j, reverse=True)
    assert energy_j[0] > 1.05 * energy_j[-1]
    for run in runs:
        assert run.summary["slo_share"] >= 0.99
        assert run.summary["tpot_s"]["p99"] < run.spec.slo_tpot_s


def test_warmer_chips_burn_more_in_every_part_but_what_moving_bytes_costs_above_idle() -> None:
    cool, warm = (serve(prefill_replicas=1, chip_temperature_c=celsius, **LOAD) for celsius in (30.0, 80.0))
    for part in ("prefill", "decode", "idle"):
        assert warm.summary["energy_j_by_part"][part] > cool.summary["energy_j_by_part"][part]
    moved_j = [transfer_cost(run.spec, 4096).energy_j for run in (cool, warm)]
    assert moved_j[0] > 0
    assert moved_j[0] == pytest.approx(moved_j[1], rel=1e-9)


def test_a_clock_policy_without_an_objective_is_refused() -> None:
    with pytest.raises(ScenarioError, match="clock_policy = slo: needs the objective to keep, slo_tpot_s"):
        serve(clock_policy="slo", **LOAD)
    with pytest.raises(ScenarioError, match="sm_clock_mhz = 1200 contradicts clock_policy = slo"):
        serve(clock_policy="slo", slo_tpot_s=0.01, sm_clock_mhz=1200, **LOAD)


def test_policies_are_compared_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LOAD.items()]
    main(["serve", *flags, "--slo-tpot-s=0.015", "--slo-ttft-s=1", "--json", "--jobs=1", "--compare", "slo_clock"])
    plain, slow = json.loads(capsys.readouterr().out)["servers"]
    assert slow["energy_j_per_output_token"] < 0.8 * plain["energy_j_per_output_token"]
    with pytest.raises(SystemExit):
        main(["serve", *flags, "--compare", "slo_clocks"])
    assert "'slo_clocks' is neither KEY=VALUE nor a policy (slo_clock" in capsys.readouterr().err


def test_a_cap_for_decoding_alone_slows_tokens_and_not_prompts() -> None:
    load = LOAD | {"rate_per_s": 4.0, "input_tokens": 4096, "requests": 12, "output_tokens": 40}
    both, tokens = serve(power_cap_w=400, **load), serve(power_cap_w=400, prefill_power_cap_w=700, **load)
    equal = serve(power_cap_w=400, prefill_power_cap_w=400, **load)
    pd.testing.assert_frame_equal(equal.requests, both.requests, rtol=1e-9)
    assert tokens.summary["ttft_s"]["mean"] < 0.8 * both.summary["ttft_s"]["mean"]
    steps = tokens.stretches[(tokens.stretches["steps"] > 0) & (tokens.stretches["prompt_tokens"] == 0)]
    decode_w = steps["energy_j"].sum() / (steps["end_s"] - steps["start_s"]).sum()
    assert steps["power_w_per_gpu"].max() <= tokens.machine.limits.under(400).fast_limit_w
    assert decode_w < 420


def test_requests_that_come_while_the_router_is_down_start_when_it_is_back() -> None:
    run = serve(outages=[(1.0, 2.5)], **LOAD)
    came = run.requests[(run.requests["arrival_s"] > 1.0) & (run.requests["arrival_s"] < 2.5)]
    assert len(came) > 5
    assert came["started_s"].min() >= 2.5


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ({"outages": [(2.0, 1.0)]}, "outages: from 2 s to 1 s: give two times, the earlier first"),
        ({"outages": [(1.0, math.inf)]}, "outages: from 1 s to inf s"),
        ({"window": (2.0, 1.0)}, "window: from 2 s to 1 s: give two times, the earlier first"),
        ({"window": (math.nan, 1.0)}, "window: from nan s to 1 s"),
        ({"kills": [(-1.0, 0)]}, "kills: replica 0 at -1 s: give a time of 0 s or later"),
        ({"kills": [(math.nan, 0)]}, "kills: replica 0 at nan s"),
        ({"kills": [(1.0, 1)]}, "kills: there is no replica 1, the last is 0"),
    ],
)
def test_events_at_impossible_times_are_refused(events: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=says):
        serve(**events, **LOAD)


def test_replicas_come_with_a_wave_of_requests_and_go_after_it(tmp_path: Path) -> None:
    """Looks every second: a wave of 30 a second from second 5 to 15, one a second before and after."""
    file = tmp_path / "wave.csv"
    at = [*range(5), *(5 + i / 30 for i in range(300)), *range(15, 60)]
    pd.DataFrame({"arrival_s": at, "input_tokens": 1000, "output_tokens": 100}).to_csv(file, index=False)
    server = {"model": "llama3-8b", "trace": file, "replicas": 4, "max_num_seqs": 16, "start_up_s": 2.0}
    plain = serve(**server)
    rule = {"autoscale": "requests", "autoscale_target": 0.8, "autoscale_look_s": 1.0, "autoscale_calm_s": 10.0}
    scaled = serve(**rule, **server)
    conserved(scaled)
    on = [len(scaled.stretches.query(f"start_s <= {at_s} < end_s")) for at_s in (4.0, 12.0, 59.0)]
    assert on == [1, 4, 1]
    assert scaled.summary["replica_starts"] == 3
    assert scaled.summary["gpu_hours"] < 0.6 * plain.summary["gpu_hours"]
    assert scaled.energy_j < 0.9 * plain.energy_j
    assert scaled.summary["ttft_s"]["p99"] > plain.summary["ttft_s"]["p99"]
    start = scaled.stretches.query("replica == 3").iloc[0]
    assert (start["steps"], start["power_w_per_gpu"]) == (0, pytest.approx(scaled.machine.model.idle_w(1980e6)))
    assert start["end_s"] - start["start_s"] >= 2.0


def test_a_replica_that_never_starts_changes_nothing() -> None:
    one = serve(**LOAD)
    calm = serve(replicas=4, autoscale="requests", autoscale_target=10.0, autoscale_look_s=0.1, **LOAD)
    assert calm.requests.equals(one.requests)
    assert (calm.energy_j, calm.summary["replica_starts"]) == (one.energy_j, 0)


def test_wrong_bounds_of_autoscaling_are_refused() -> None:
    with pytest.raises(ScenarioError, match="min_replicas = 3 is more than replicas = 2"):
        serve(autoscale="kv", min_replicas=3, replicas=2, **LOAD)
    with pytest.raises(ScenarioError, match="prefill_replicas = 1: autoscale knows replicas of one kind only"):
        serve(autoscale="kv", prefill_replicas=1, **LOAD)


def test_clocks_by_phase_slow_their_own_steps() -> None:
    """Alone on a server: a prompt takes what it takes at its clock, tokens theirs.

    Limiters remember: longer prompts, which they bind, cost 0.6 % more joules after tokens at a low clock.
    """
    load = {"model": "llama3-8b", "requests": 3, "concurrency": 1, "input_tokens": 2000, "output_tokens": 40}
    high, low, prompts, tokens = (
        serve(**load, **more)
        for more in (
            {},
            {"sm_clock_mhz": 1200.0},
            {"prefill_sm_clock_mhz": 1200.0},
            {"sm_clock_mhz": 1200.0, "prefill_sm_clock_mhz": 1980.0},
        )
    )
    mean = {
        name: [run.requests[name].mean() for run in (high, low, prompts, tokens)]
        for name in ("ttft_s", "tpot_s", "prefill_j", "decode_j")
    }
    for name, other in (("ttft_s", "tpot_s"), ("prefill_j", "decode_j")):
        assert mean[name][2] == pytest.approx(mean[name][1], rel=5e-3) != pytest.approx(mean[name][0], rel=0.05)
        assert mean[other][2] == pytest.approx(mean[other][0], rel=5e-3)
        assert mean[name][3] == pytest.approx(mean[name][0], rel=5e-3)
        assert mean[other][3] == pytest.approx(mean[other][1], rel=5e-3)
    apart = serve(**load, prefill_replicas=1, prefill_sm_clock_mhz=1200.0).requests
    assert apart["ttft_s"].mean() == pytest.approx(mean["ttft_s"][1], rel=0.01)
    assert apart["decode_j"].mean() == pytest.approx(mean["decode_j"][0], rel=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefill_sm_clock_mhz": 5000.0}, "prefill_sm_clock_mhz = 5000 is outside what h100-sxm-80gb runs"),
        ({"prefill_sm_clock_mhz": 900.0, "pp": 2}, "prefill_sm_clock_mhz = 900 is not known beside pp without"),
        ({"prefill_sm_clock_mhz": 900.0, "fleet_power_w": 900.0}, "is not known beside fleet_power_w without"),
        (
            {"prefill_sm_clock_mhz": 900.0, "clock_policy": "slo", "slo_tpot_s": 0.05},
            "prefill_sm_clock_mhz = 900 contradicts clock_policy = slo",
        ),
    ],
)
def test_clocks_by_phase_refuse_what_they_do_not_know(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        serve(model="llama3-8b", requests=1, **fields)


def test_a_server_of_some_layers_holds_those_alone() -> None:
    whole, some = (serve(model="llama3-8b", requests=2, output_tokens=4, layers=n).summary for n in (None, 8))
    assert some["kv_bytes_per_token_per_gpu"] == whole["kv_bytes_per_token_per_gpu"] / 4
    ends = 2 * 2 * 128256 * 4096  # embedding and head, 16 bit
    held = [data["memory_bytes_per_gpu"]["weights"] - ends for data in (whole, some)]
    assert held[1] == pytest.approx(held[0] / 4, rel=1e-6) and some["kv_blocks"] > 4 * whole["kv_blocks"]
