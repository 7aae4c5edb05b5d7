"""Experts on several ranks: the busiest one sets the pace, each burns its own work, the others wait."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from sim import simulate
from sim.errors import ScenarioError
from sim.result.report import summary, summary_text
from sim.result.timeline import Timeline
from sim.scenario.spec import Scenario


@cache
def run(**fields: Any) -> Timeline:
    base = {"model": "qwen3-30b-a3b", "layers": 1, "lm_head": False, "seq_len": 1024, "ep": 4, "ep_mode": "all_to_all"}
    return simulate(**(base | fields))


def grouped_rows(timeline: Timeline) -> list[int]:
    """Rows of each rank's experts, from the kernels that ran."""
    graph = timeline.graph
    by_gpu = {
        graph.op_gpu[op]: graph.classes[cls].describe["rows"]
        for op, cls in enumerate(graph.op_class)
        if graph.classes[cls].name == "gate_up_grouped"
    }
    return [int(str(by_gpu[gpu])) for gpu in range(graph.gpus)]


def test_latency_is_that_of_ranks_all_as_loaded_as_the_busiest() -> None:
    skewed = run(expert_skew=1.0, uncapped=True)
    rows = grouped_rows(skewed)
    assert max(rows) > 1.3 * sum(rows) / 4
    all_busiest = run(tokens_per_ep_rank=(max(rows),) * 4, expert_skew=1.0, uncapped=True)
    assert skewed.latency_s == pytest.approx(all_busiest.latency_s, rel=0.02)
    assert skewed.energy_j < all_busiest.energy_j


def test_each_rank_burns_its_own_work_and_the_early_ones_wait() -> None:
    timeline = run(expert_skew=1.0, uncapped=True)
    rows = grouped_rows(timeline)
    light, heavy = rows.index(min(rows)), rows.index(max(rows))
    spans = timeline.kernels
    experts = spans[spans["kernel"].str.contains("grouped")].groupby("gpu")["energy_j"].sum()
    assert experts[light] < 0.6 * experts[heavy]
    combine = spans[spans["kernel"] == "all_to_all_combine"].set_index("gpu")
    assert combine.loc[light, "duration_s"] > 1.5 * combine.loc[heavy, "duration_s"]
    # Watts while it waits: those of a waiting rank (idle and the spinning blocks), far below a working one's. Then it
    # moves its own rows.
    waited = combine.loc[light, "energy_j"] / combine.loc[light, "duration_s"]
    graph = timeline.graph
    terms = graph.classes[graph.op_class[int(combine.loc[light, "op"])]].terms
    idle_w = timeline.machine.model.idle_w(timeline.machine.model.max_clock_hz)
    active_w = terms.sm_power_w * terms.blocks * terms.sms_per_block / timeline.machine.gpu.sms
    spun_s = combine.loc[light, "moving_s"] - combine.loc[light, "start_s"]
    moved_s = combine.loc[light, "end_s"] - combine.loc[light, "moving_s"]
    assert combine.loc[light, "energy_j"] == pytest.approx(
        spun_s * (idle_w + terms.waiting_power_w) + moved_s * (idle_w + active_w) + terms.link_energy_j, rel=0.01
    )
    assert waited < 0.75 * timeline.power_w_per_gpu[heavy]


def test_replicas_win_back_what_skew_cost() -> None:
    even, skewed, copied = run(), run(expert_skew=1.0), run(expert_skew=1.0, expert_replicas=8)
    assert skewed.latency_s > 1.1 * even.latency_s
    assert even.latency_s < copied.latency_s < 1.03 * even.latency_s


def test_the_report_states_the_draw_and_its_spread() -> None:
    balance = summary(run(routing="busiest:0.043,65"))["expert_balance"]
    rows = grouped_rows(run(routing="busiest:0.043,65"))
    assert balance["busiest_over_mean"] == pytest.approx(max(rows) * 4 / sum(rows))
    assert 1.0 < balance["least_of_seeds"] < balance["mean_of_seeds"] < balance["most_of_seeds"] < 2.0
    assert "x the mean rank's in this draw; other seeds" in " ".join(summary_text(run(expert_skew=1.0)).split())
    assert "expert_balance" not in summary(simulate(model="llama3-8b", layers=1))
    fixed = summary(run(tokens_per_ep_rank=(3, 1, 1, 1)))["expert_balance"]
    assert fixed == {"busiest_over_mean": 2.0}


def test_deepseek_runs_on_64_ranks() -> None:
    timeline = simulate(
        model="deepseek-v3", layers=4, phase="decode", batch=8, seq_len=4096, ep=64, ep_mode="all_to_all",
        expert_replicas=64,
    )  # fmt: skip
    assert timeline.graph.gpus == 64
    assert {"dense layer 0", "layer 3"} <= set(timeline.kernels["segment"])


def test_routing_and_skew_contradict() -> None:
    with pytest.raises(ScenarioError) as error:
        Scenario.of(model="qwen3-30b-a3b", routing="gini:0.3", expert_skew=1.0)
    assert str(error.value) == "scenario: routing = 'gini:0.3' contradicts expert_skew = 1: give one"
