"""One power budget over all replicas: what caps add up to, who gets the watts, and what that is good for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sim.errors import ScenarioError
from sim.serving import serve
from sim.serving.fleet import divided
from sim.serving.result import ServeResult

LOAD: dict[str, Any] = {
    "model": "llama3-8b", "prefill_replicas": 2, "replicas": 2, "rate_per_s": 40.0, "requests": 240,
    "input_tokens": 2000, "output_tokens": 30,
}  # fmt: skip


def served(**fields: Any) -> ServeResult:
    return serve(**(LOAD | fields))


@pytest.mark.parametrize("seed", range(40))
def test_caps_are_a_max_min_division_of_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    gpus = [rng.choice([1, 2, 4, 8]) for _ in range(rng.randint(1, 6))]
    wanted = [rng.uniform(210.0, 700.0) for _ in gpus]
    budget = rng.uniform(0.3, 1.2) * 700.0 * sum(gpus)
    caps = divided(budget, gpus, wanted, 700.0)
    spent = sum(count * cap for count, cap in zip(gpus, caps, strict=True))
    assert spent == pytest.approx(min(budget, 700.0 * sum(gpus)), rel=1e-9)
    short = [cap for cap, want in zip(caps, wanted, strict=True) if cap < want - 1e-6]
    for cap, want in zip(caps, wanted, strict=True):
        assert cap <= 700.0 + 1e-9
        if short:  # nobody gets more than one who wants more, but by wanting less than that
            assert cap <= min(want, max(short)) + 1e-6
    assert max(short, default=0.0) - min(short, default=0.0) < 1e-6


def test_a_budget_of_all_tdps_changes_nothing() -> None:
    free, wide = served(), served(fleet_power_w=2800.0)
    for name in ("ttft_s", "tpot_s", "done_s"):
        assert free.requests[name].tolist() == pytest.approx(wide.requests[name].tolist(), rel=1e-9)
    assert free.energy_j == pytest.approx(wide.energy_j, rel=1e-9)


def test_watts_that_decoding_leaves_make_prompts_quicker() -> None:
    even, shift = (served(fleet_power_w=2200.0, fleet_policy=policy) for policy in ("even", "shift"))
    assert {caps for _, _, caps in even.log.fleet_looks} == {(550.0,) * 4}
    for _, all_w, caps in shift.log.fleet_looks:
        assert sum(caps) <= 2200.0 + 1e-6
        assert all_w <= 1.05 * 2200.0  # limiters take their time
    later = [caps for _, _, caps in shift.log.fleet_looks[1:]]
    assert any(min(caps[:2]) > max(caps[2:]) for caps in later)
    assert shift.requests["ttft_s"].mean() < 0.95 * even.requests["ttft_s"].mean()
    assert shift.requests["tpot_s"].mean() < 1.05 * even.requests["tpot_s"].mean()


def test_looks_see_pauses_as_they_pass() -> None:
    """Replicas that mostly idle: each look has its own seconds, and all of them together what was burnt until then."""
    run = serve(model="llama3-8b", replicas=2, rate_per_s=0.2, requests=8, output_tokens=60, fleet_power_w=1000.0)
    looks, idle_w = run.log.fleet_looks, 2 * run.machine.model.idle_w(run.machine.model.max_clock_hz)
    assert min(watts for _, watts, _ in looks) == pytest.approx(idle_w, rel=0.01)  # but for the step at hand
    assert max(watts for _, watts, _ in looks) < 1000.0
    assert sum(watts for _, watts, _ in looks) == pytest.approx(run.energy_j, rel=0.03)


def test_stages_of_a_pipeline_have_caps_of_their_own() -> None:
    load = {"model": "llama3-8b", "pp": 2, "rate_per_s": 6.0, "requests": 60, "input_tokens": 2000, "output_tokens": 60}
    free, wide, even, shift = (
        serve(**load, **more)
        for more in (
            {},
            {"fleet_power_w": 1400.0},
            {"fleet_power_w": 700.0, "fleet_policy": "even"},
            {"fleet_power_w": 700.0},
        )
    )
    assert wide.requests["ttft_s"].mean() == pytest.approx(free.requests["ttft_s"].mean(), rel=1e-6)
    assert {caps for _, _, caps in even.log.fleet_looks} == {(350.0, 350.0)}
    for run in (even, shift):
        for _, watts, caps in run.log.fleet_looks:
            assert sum(caps) <= 700.0 * (1 + 1e-9) and watts < 1.05 * 700.0
        assert run.requests["e2e_s"].mean() > free.requests["e2e_s"].mean()
        assert run.stretches["energy_j"].sum() == pytest.approx(run.energy_j, rel=1e-9)
    assert free.energy_j / free.end_s > 700.0


def test_a_smaller_budget_draws_less_and_takes_longer() -> None:
    runs = [served(fleet_power_w=watts) for watts in (2800.0, 2000.0, 1400.0)]
    power = [run.summary["fleet_power_w_most"] for run in runs]
    assert power == sorted(power, reverse=True)
    ttft = [run.requests["ttft_s"].mean() for run in runs]
    assert ttft == sorted(ttft)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fleet_power_w": 500.0}, "fleet_power_w = 500: 4 GPUs take at least 840 W, 210 each"),
        ({"fleet_policy": "even"}, "fleet_policy = even: is of a budget: give fleet_power_w"),
        ({"fleet_power_w": 2000.0, "power_cap_w": 500.0}, "power_cap_w = 500.0 is not known beside fleet_power_w"),
        (
            {"fleet_power_w": 2000.0, "clock_policy": "slo", "slo_tpot_s": 0.05},
            "clock_policy = slo is not known beside fleet_power_w",
        ),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        served(**fields)
