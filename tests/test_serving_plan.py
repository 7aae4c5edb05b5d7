"""Capacity questions and comparisons: answers that a user could check by hand."""

from __future__ import annotations

import json

import pytest

from sim.cli import main
from sim.errors import SimError
from sim.explore.capacity import capacity, compare
from sim.explore.workers import Pool
from sim.serving import ServeSpec

LOAD = {"model": "llama3-8b", "requests": 60, "rate_per_s": 30.0, "input_tokens": 2000, "output_tokens": 30}


def test_a_plan_names_the_smallest_server_that_keeps_the_objective() -> None:
    spec = ServeSpec.of(**LOAD, slo_ttft_s=0.25, sm_clock_mhz=1380)
    found = capacity(spec, max_gpus=4)
    assert found.fewest.share >= 0.99
    tp, replicas = found.fewest.changes["tp"], found.fewest.changes["replicas"]
    if replicas > 1:  # one replica fewer is too few
        (_, fewer) = compare(spec, [{"tp": tp, "replicas": replicas - 1}])
        assert fewer.share < 0.99
    assert all(server.summary["gpus"] >= found.fewest.summary["gpus"] for server in found.servers)
    assert all(server.summary["energy_j"] >= found.frugal.summary["energy_j"] for server in found.servers)


def test_a_tighter_objective_never_needs_fewer_gpus() -> None:
    def gpus(ttft_s: float) -> int:
        spec = ServeSpec.of(**LOAD, slo_ttft_s=ttft_s, sm_clock_mhz=1380)
        return int(capacity(spec, max_gpus=8).fewest.summary["gpus"])

    needed = [gpus(ttft_s) for ttft_s in (2.0, 0.3, 0.15)]
    assert needed == sorted(needed)
    assert needed[0] < needed[-1]


def test_workers_side_by_side_find_the_same_plan() -> None:
    spec = ServeSpec.of(**LOAD | {"requests": 20}, slo_ttft_s=0.3, sm_clock_mhz=1380)
    alone, together = capacity(spec, max_gpus=2), capacity(spec, max_gpus=2, pool=Pool(jobs=2))
    assert [server.row for server in alone.servers] == [server.row for server in together.servers]


def test_an_objective_that_nothing_keeps_is_said_in_one_line() -> None:
    with pytest.raises(SimError, match="no server of up to 1 h100-sxm-80gb keeps the objective: tp = 1, replicas = 1"):
        capacity(ServeSpec.of(**LOAD, slo_ttft_s=0.001), max_gpus=1)


def test_policies_are_compared_on_the_same_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in LOAD.items()]
    main(
        [
            "serve",
            *flags,
            "--json",
            "--jobs=1",
            "--compare",
            "power_cap_w=400",
            "--compare",
            "sm_clock_mhz=1200,replicas=2",
        ]
    )
    plain, capped, slow = json.loads(capsys.readouterr().out)["servers"]
    assert capped["power_w_per_gpu"] < plain["power_w_per_gpu"]
    assert capped["ttft_p99_s"] > plain["ttft_p99_s"]
    assert (slow["gpus"], slow["sm_clock_mhz"]) == (2, "1200")


def test_a_comparison_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--model", "llama3-8b", "--compare", "power_cap_w"])
    assert "'power_cap_w' is neither KEY=VALUE nor a policy" in capsys.readouterr().err


def test_replicas_that_are_split_otherwise_too_are_counted_whole() -> None:
    """Stages and ranks that share prompts are GPUs as well."""
    splits: tuple[dict[str, int], ...] = ({"pp": 2}, {"cp": 2})
    for split in splits:
        found = capacity(ServeSpec.of(**LOAD, slo_ttft_s=5.0, sm_clock_mhz=1380, **split), max_gpus=4)
        assert {server.summary["gpus"] for server in found.servers} <= {2, 4} and found.fewest.summary["gpus"] == 2
    with pytest.raises(SimError, match="a replica takes more than max_gpus = 1"):
        capacity(ServeSpec.of(**LOAD, slo_ttft_s=5.0, cp=2), max_gpus=1)
