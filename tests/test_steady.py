"""The steady state of uneven repetitions: prefill and decode steps, stages of a pipeline. It holds the cap."""

from __future__ import annotations

import importlib.util
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hardware.clock import ClockLimits
from sim import simulate
from sim.engine.repeating import SteadyLimiter
from sim.engine.running import HeldClock
from sim.result.report import status_text
from sim.result.timeline import Timeline

_SPEC = importlib.util.spec_from_file_location("steady", Path(__file__).parents[1] / "benchmarks" / "steady.py")
assert _SPEC is not None and _SPEC.loader is not None
steady = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(steady)

LIMITS = ClockLimits(
    cap_w=700.0, fast_limit_w=1000.0, middle_limit_w=740.0, slow_limit_w=700.0, middle_time_s=0.03, slow_time_s=0.9,
    middle_gain_per_s=28.0, dip_ratio=0.8, recovery_ratio=0.95, recovery_s=0.15, tick_s=0.005,
)  # fmt: skip
SHORT: dict[str, Any] = {"model": "llama3-8b", "gpu": "h100-sxm-80gb", "phase": "generate", "batch": 8, "seq_len": 128}


def test_a_short_generation_holds_the_cap() -> None:
    fields = SHORT | {"model": "qwen3-8b", "batch": 2, "seq_len": 512, "output_len": 2}
    run = simulate(**fields)
    assert run.power_w_per_gpu[0] == pytest.approx(699.0, abs=2.0)
    assert "cannot be held" not in status_text(run)


def test_a_token_more_takes_about_as_long_whatever_limiter_acts() -> None:
    """With the fifth token the middle limiter begins to act."""
    runs = [simulate(**SHORT, output_len=n, power_cap_w=500.0) for n in range(2, 8)]
    assert all(495.0 < run.power_w_per_gpu[0] < 501.0 for run in runs)
    more_s = [b.latency_s - a.latency_s for a, b in pairwise(runs)]
    assert all(0.0055 < step < 0.0063 for step in more_s)


def test_a_watt_of_cap_moves_the_mean_by_a_watt() -> None:
    runs = [simulate(**SHORT, output_len=4, power_cap_w=cap) for cap in (460.0, 470.0, 480.0)]
    assert [run.power_w_per_gpu[0] for run in runs] == pytest.approx([460.0, 470.0, 480.0], abs=1.5)
    assert runs[0].latency_s > runs[1].latency_s > runs[2].latency_s


def test_the_limiters_of_a_long_generation_act_in_time() -> None:
    """Prefill of about half a second meets the middle limit, decode runs as fast as its own power lets it."""
    fields = SHORT | {"layers": 16, "batch": 16, "seq_len": 2048, "output_len": 200, "power_cap_w": 700.0}
    run = simulate(**fields)
    assert run.latency_s > run.machine.limits.slow_time_s
    assert run.power_w_per_gpu[0] <= 700.0 * 1.002
    steps = run.power
    assert steps["sm_clock_hz"].nunique() > 5
    assert steps["sm_clock_hz"].min() < 0.9 * steps["sm_clock_hz"].max()


def test_pipelines_hold_the_cap_and_take_longer_for_more_layers() -> None:
    fields = {"model": "llama3-8b", "gpu": "b200-sxm-180gb", "batch": 16, "seq_len": 1024, "pp": 2}
    runs = [simulate(**fields, layers=layers, power_cap_w=400.0) for layers in (4, 6, 8)]
    assert all(max(run.power_w_per_gpu) <= 400.0 * 1.002 for run in runs)
    assert runs[0].latency_s < runs[1].latency_s < runs[2].latency_s
    assert runs[0].energy_j < runs[1].energy_j < runs[2].energy_j


def test_a_cap_that_the_lowest_clock_passes_is_named_without_being_asked_for() -> None:
    run = simulate(**SHORT, output_len=3, power_cap_w=100.0)
    assert run.power_w_per_gpu[0] > 100.2
    assert f"power_cap_w = 100 cannot be held: the lowest clock still draws {run.power_w_per_gpu[0]:.0f} W" in (
        status_text(run)
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_caps_hold_and_more_work_is_not_cheaper(seed: int) -> None:
    """A small draw of ``benchmarks/steady.py``; what more of it finds is in benchmarks/results.md."""
    draw = random.Random(seed)
    of = (("h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm-141gb")[seed - 1 : seed], ("llama3-8b",))
    for fields in (steady.generation(draw, *of), steady.pipeline(draw, *of) | {"layers": 4, "pp": 2, "batch": 8}):
        fields.pop("sm_clock_mhz", None)
        assert list(steady.findings(fields)) == []


def test_a_stage_at_its_lowest_clock_is_said_and_not_refused() -> None:
    run = simulate(
        model="llama3-70b", gpu="h200-sxm-141gb", layers=6, power_cap_w=300.0, phase="decode", batch=4, seq_len=2048,
        pp=2, micro_batches=4,
    )  # fmt: skip
    assert "power_cap_w = 300 cannot be held: the lowest clock still draws" in status_text(run)


def test_limiters_at_rest_leave_the_settled_clock_alone() -> None:
    """Power whose 30 ms mean stays under the middle limit; hotter than that, the target falls."""
    limiter = SteadyLimiter(LIMITS, [HeldClock(1.5e9, 1000.0)], [690.0], 0.06)
    limiter.begin(100.0)
    for _ in range(4):
        for power_w in (790.0, 580.0):
            limiter.step([power_w * limiter.tick_ps * 1e-12] * 1)
    assert limiter.targets() == [HeldClock(1.5e9, 1000.0)]
    for _ in range(20):
        limiter.step([900.0 * limiter.tick_ps * 1e-12])
    assert limiter.targets()[0].power_w < 700.0


def test_a_tick_at_the_end_of_a_repetition_is_not_lost() -> None:
    """However the last one falls, every repetition has as many ticks as the first."""
    limiter = SteadyLimiter(LIMITS, [HeldClock(1.5e9, 1000.0)], [690.0], 0.1)
    for length_s in (0.1, 0.1003, 0.0998):
        limiter.begin(100.0)
        ticks, tick_s = divmod(length_s, limiter.tick_ps * 1e-12)
        for _ in range(int(ticks)):
            limiter.step([600.0 * limiter.tick_ps * 1e-12])
        limiter.end([600.0 * tick_s], round(tick_s * 1e12), round(length_s * 1e12))
        assert limiter.ticked in (limiter.ticks, limiter.ticks + 1)
        assert limiter.tick_ps * limiter.ticks == pytest.approx(length_s * 1e12, rel=1e-6)


def test_hot_windows_of_long_repetitions_lower_the_middle_limit() -> None:
    """Windows at 735 W under a slow limit of 700: the level falls until 740 times it is no more than that."""
    limiter = SteadyLimiter(LIMITS, [HeldClock(1.5e9, 1000.0)], [690.0], 5.0)
    limiter.begin(100.0)
    for _ in range(600):
        limiter.step([min(735.0, limiter.loops[0].level * 740.0) * limiter.tick_ps * 1e-12])
    assert limiter.loops[0].level * 740.0 == pytest.approx(700.0, rel=0.01)
    assert math.isclose(limiter.loops[0].mean_w, 700.0, rel_tol=0.01)


def _clocks(run: Timeline) -> set[float]:
    return set(run.power["sm_clock_hz"])


def test_even_power_keeps_one_clock() -> None:
    run = simulate(model="llama3-8b", gpu="h100-sxm-80gb", seq_len=4096, batch=2, layers=8)
    assert len(_clocks(run)) == 1
    assert run.power_w_per_gpu[0] == pytest.approx(698.4, abs=0.8)
